"""Rules that see rows and columns: Adafactor, Muon, Shampoo and ScaledGD.

Constants are Singh's (2026). `saggs.reference_rules` has each as its formula says it, in float64; the products here are
taken in the dtype of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from saggs.rules.rule import FRACTION, MatrixRule, Range, Settings, State, Within, entry_norm

_NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315


class Adafactor(MatrixRule):
    """V_ij = r_i c_j / mean(r); w <- w - lr g / (sqrt(V) + eps): no clipping, and no step relative to the weight.

    r and c are averages of the row and column means of g^2 with decay rho, from zero and not corrected for it.
    Source: Shazeer and Stern (2018).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"rho": 0.999, "eps": 1e-8}
    RANGES: ClassVar[Mapping[str, Range]] = {"rho": FRACTION, "eps": Within()}

    def __init__(
        self, params: ParamsT, lr: float | Tensor, weight_decay: float = 0.0, *, rho: float = 0.999, eps: float = 1e-8
    ) -> None:
        super().__init__(params, lr, weight_decay, rho=rho, eps=eps)

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        members, rows, columns = weight.shape
        return {"rows": weight.new_zeros(members, rows), "columns": weight.new_zeros(members, columns)}

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
            square = g.square()
            rows = state["rows"].lerp_(square.mean(2), 1 - c["rho"])
            columns = state["columns"].lerp_(square.mean(1), 1 - c["rho"])
            # A gradient of zeros alone would be 0 / 0 here.
            mean = rows.mean(1, keepdim=True).clamp_min_(torch.finfo(g.dtype).tiny)
            root = torch.mul((rows / mean).sqrt_().unsqueeze(2), columns.sqrt().unsqueeze(1), out=square)
            directions.append(torch.div(g, root.add_(c["eps"]), out=root))
        return directions


class Muon(MatrixRule):
    """m <- momentum m + g; w <- w - lr O, with O some Newton-Schulz steps from m towards its polar factor.

    X = m / (|m| + eps), then `ns_steps` times X <- a X + (b X X^T + c (X X^T)^2) X with Muon's three coefficients. No
    Nesterov, no factor for the shape, and the weight's own dtype. Source: Jordan et al. (2024).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"momentum": 0.9, "ns_steps": 5, "eps": 1e-7}
    RANGES: ClassVar[Mapping[str, Range]] = {
        "momentum": FRACTION,
        "ns_steps": Within(1, whole=True),
        "eps": Within(),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        weight_decay: float = 0.0,
        *,
        momentum: float = 0.9,
        ns_steps: int = 5,
        eps: float = 1e-7,
    ) -> None:
        super().__init__(params, lr, weight_decay, momentum=momentum, ns_steps=ns_steps, eps=eps)

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        return {"momentum_buffer": torch.zeros_like(weight)}

    @classmethod
    def advance(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        settings: Sequence[Settings],
    ) -> list[Tensor]:
        return [
            _newton_schulz(state["momentum_buffer"].mul_(c["momentum"]).add_(g), c["ns_steps"], c["eps"])
            for g, state, c in zip(gradients, states, settings, strict=True)
        ]


def _newton_schulz(matrices: Tensor, steps: int, eps: float) -> Tensor:
    """Newton-Schulz on every member: (members, rows, columns)."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices / entry_norm(matrices).add_(eps)[:, None, None]
    tall = x.shape[1] > x.shape[2]
    if tall:  # the same polynomial from the other side, with the smaller Gram matrix
        x = x.mT
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Shampoo(MatrixRule):
    """L <- L + g g^T; R <- R + g^T g; w <- w - lr (L + damping I)^exponent g (R + damping I)^exponent.

    The powers are taken by eigenvectors, of eigenvalues no less than `floor` (with floor = 0 they are pseudo-inverse
    powers), at a weight's first step and then every `every` steps. A member whose sums are no longer finite has roots
    that are not either, and the others do not notice.

    The count of steps lies on the CPU, so that deciding whether powers are due waits for no device.

    Source: Gupta, Koren and Singer (2018); period, damping and floor are Singh's (2026).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"exponent": -0.25, "damping": 1.0, "every": 20, "floor": 1e-6}
    RANGES: ClassVar[Mapping[str, Range]] = {
        "exponent": Within(-1.0, 0.0),
        "damping": Within(),
        "every": Within(1, whole=True),
        "floor": Within(),
    }
    ON_HOST = frozenset({"step"})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        weight_decay: float = 0.0,
        *,
        exponent: float = -0.25,
        damping: float = 1.0,
        every: int = 20,
        floor: float = 1e-6,
    ) -> None:
        super().__init__(params, lr, weight_decay, exponent=exponent, damping=damping, every=every, floor=floor)

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        members, rows, columns = weight.shape
        state = {"step": torch.zeros(members, dtype=torch.float64)}
        for side, size in (("left", rows), ("right", columns)):
            state[side] = weight.new_zeros(members, size, size)
            state[f"{side}_root"] = weight.new_zeros(members, size, size)
        return state

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
            state["left"].baddbmm_(g, g.mT)
            state["right"].baddbmm_(g.mT, g)
            due = [member for member, step in enumerate(state["step"].tolist()) if step % c["every"] == 0]
            if due:
                _take_roots(state, due, c)
            state["step"].add_(1)
            directions.append(torch.bmm(torch.bmm(state["left_root"], g), state["right_root"]))
        return directions


def _take_roots(state: State, due: Sequence[int], settings: Settings) -> None:
    """Roots of both sides anew for the members that are due; for all of them at once where all are."""
    for side in ("left", "right"):
        total, root = state[side], state[f"{side}_root"]
        if len(due) == len(total):
            root.copy_(_power(total, settings))
        else:
            which = torch.tensor(due, device=total.device)
            root.index_copy_(0, which, _power(total.index_select(0, which), settings))


def _power(total: Tensor, settings: Settings) -> Tensor:
    """(S + damping I)^exponent of symmetric matrices (members, size, size)."""
    damped = (total + total.mT) / 2
    damped.diagonal(dim1=1, dim2=2).add_(settings["damping"])
    # One member that has gone to infinity would stop the decomposition of all.
    finite = damped.isfinite().all(2).all(1)[:, None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, damped, torch.eye(damped.shape[1]).to(damped)))
    exponent, floor = settings["exponent"], settings["floor"]
    if floor > 0:
        powers = values.clamp_min_(floor).pow_(exponent)
    else:
        least = values[:, -1:] * 1e-12
        powers = torch.where(values > least, values.clamp_min(least).pow(exponent), 0.0)
    return torch.where(finite, torch.bmm(vectors * powers.unsqueeze(1), vectors.mT), torch.nan)


class ScaledGD(MatrixRule):
    """A <- A - lr G_A (B^T B + damping I)^-1 and B <- B - lr G_B (A^T A + damping I)^-1, both from the old weights.

    For the product A B^T: a parameter group is such a pair, two matrices with equal numbers of columns. With
    damping = 0 the step follows (A M, B M^-T) for every invertible M. Where a Gram matrix has no inverse (a factor of
    zeros, as adapters start with) the step is not finite; give a positive damping there.

    Source: Tong, Ma and Chi (2021); for low-rank adapters Zhang and Pilanci (2024).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"damping": 0.0}
    RANGES: ClassVar[Mapping[str, Range]] = {"damping": Within()}

    def __init__(self, params: ParamsT, lr: float | Tensor, weight_decay: float = 0.0, *, damping: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay, damping=damping)

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        return {}

    @classmethod
    def advance(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        settings: Sequence[Settings],
    ) -> list[Tensor]:
        groups: dict[int, list[int]] = {}
        for index, group in enumerate(settings):
            groups.setdefault(id(group), []).append(index)
        directions = list(gradients)
        for indices in groups.values():
            cls._require_pair([weights[i][0] for i in indices])
            for own, other in (indices, indices[::-1]):
                gram = torch.bmm(weights[other].mT, weights[other])
                gram.diagonal(dim1=1, dim2=2).add_(settings[own]["damping"])
                # Without a check, which would wait for the device, and stop all members for one.
                solved, _ = torch.linalg.solve_ex(gram, gradients[own].mT)
                directions[own] = solved.mT
        return directions

    @classmethod
    def _require_shapes(cls, parameters: Sequence[Tensor]) -> None:
        super()._require_shapes(parameters)
        cls._require_pair(parameters)

    @staticmethod
    def _require_pair(parameters: Sequence[Tensor]) -> None:
        shapes = [tuple(parameter.shape) for parameter in parameters]
        if len(shapes) != 2 or shapes[0][1] != shapes[1][1]:
            raise ValueError(
                "a group of ScaledGD is a pair of matrices with equal numbers of columns, A and B of A B^T, both with "
                f"a gradient; this one has {', '.join(map(str, shapes)) or 'nothing'}. Give each pair a group of its "
                "own: [{'params': [A, B]}, ...]"
            )


__all__ = ["Adafactor", "Muon", "ScaledGD", "Shampoo"]
