"""Rules that treat every entry by itself: gradient descent, momentum, RMSProp, signum and Lion.

Constants are Singh's (2026). `saggs.reference_rules` has each as its formula says it, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from saggs.rules.rule import FRACTION, Pair, Range, Rule, Settings, State, Within


class GradientDescent(Rule):
    """w <- w - lr m with m <- momentum m + g, from zero; without momentum, w <- w - lr g.

    Source: Cauchy (1847); with momentum Polyak (1964), in PyTorch's form.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"momentum": 0.0}
    RANGES: ClassVar[Mapping[str, Range]] = {"momentum": FRACTION}

    def __init__(
        self, params: ParamsT, lr: float | Tensor, weight_decay: float = 0.0, *, momentum: float = 0.0
    ) -> None:
        super().__init__(params, lr, weight_decay, momentum=momentum)

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        return {"momentum_buffer": torch.zeros_like(weight)} if settings["momentum"] else {}

    @classmethod
    def advance(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        settings: Sequence[Settings],
    ) -> list[Tensor]:
        return [
            s["momentum_buffer"].mul_(c["momentum"]).add_(g) if c["momentum"] else g
            for g, s, c in zip(gradients, states, settings, strict=True)
        ]


class Momentum(GradientDescent):
    """Gradient descent with momentum 0.9. Source: as above."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"momentum": 0.9}

    def __init__(
        self, params: ParamsT, lr: float | Tensor, weight_decay: float = 0.0, *, momentum: float = 0.9
    ) -> None:
        super().__init__(params, lr, weight_decay, momentum=momentum)


class RMSProp(Rule):
    """v <- rho v + (1 - rho) g^2, from zero and not corrected for it; w <- w - lr g / (sqrt(v) + eps).

    Source: Tieleman and Hinton (2012).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"rho": 0.99, "eps": 1e-8}
    RANGES: ClassVar[Mapping[str, Range]] = {"rho": FRACTION, "eps": Within()}

    def __init__(
        self, params: ParamsT, lr: float | Tensor, weight_decay: float = 0.0, *, rho: float = 0.99, eps: float = 1e-8
    ) -> None:
        super().__init__(params, lr, weight_decay, rho=rho, eps=eps)

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        return {"second": torch.zeros_like(weight)}

    @classmethod
    def advance(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        settings: Sequence[Settings],
    ) -> list[Tensor]:
        directions = []
        for g, state, c in zip(gradients, states, settings, strict=True):
            second = state["second"].mul_(c["rho"]).addcmul_(g, g, value=1 - c["rho"])
            root = second.sqrt().add_(c["eps"])
            directions.append(torch.div(g, root, out=root))
        return directions


class Signum(Rule):
    """m <- beta m + (1 - beta) g, from zero; w <- w - lr sign(m). Source: Bernstein et al. (2018)."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"beta": 0.9}
    RANGES: ClassVar[Mapping[str, Range]] = {"beta": FRACTION}

    def __init__(self, params: ParamsT, lr: float | Tensor, weight_decay: float = 0.0, *, beta: float = 0.9) -> None:
        super().__init__(params, lr, weight_decay, beta=beta)

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        return {"first": torch.zeros_like(weight)}

    @classmethod
    def advance(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        settings: Sequence[Settings],
    ) -> list[Tensor]:
        return [s["first"].lerp_(g, 1 - c["beta"]).sign() for g, s, c in zip(gradients, states, settings, strict=True)]


class Lion(Rule):
    """w <- w - lr sign(b1 m + (1 - b1) g), and only then m <- b2 m + (1 - b2) g. Source: Chen et al. (2023)."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.99)}
    RANGES: ClassVar[Mapping[str, Range]] = {"betas": Pair(FRACTION)}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        weight_decay: float = 0.0,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        super().__init__(params, lr, weight_decay, betas=betas)

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        return {"first": torch.zeros_like(weight)}

    @classmethod
    def advance(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        settings: Sequence[Settings],
    ) -> list[Tensor]:
        directions = []
        for g, state, c in zip(gradients, states, settings, strict=True):
            now, later = c["betas"]
            directions.append(torch.lerp(state["first"], g, 1 - now).sign_())
            state["first"].lerp_(g, 1 - later)
        return directions


__all__ = ["GradientDescent", "Lion", "Momentum", "RMSProp", "Signum"]
