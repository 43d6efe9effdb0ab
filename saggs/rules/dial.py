"""Adam, Adam with one shared denominator, and the dial between the two.

With the corrected moments m and v of Kingma and Ba (2015), s_i = sqrt(v_i) for every entry and one number s for *all*
entries of all weights of the optimizer,

    Adam            w <- w - lr m / (s_i + eps)
    scalar Adam     w <- w - lr m / (s + eps),                  s = sqrt(mean of v)
    dial            w <- w - lr m / ( (s_i + eps)^p (s + eps)^(1 - p) + eps ),    p in [0, 1]

The loss of a product U V^T does not see (U, V) -> (U Q, V Q), Q orthogonal. m turns along, and s, a root mean square,
stays as it is; s_i does neither. So scalar Adam and the dial at p = 0 follow a rotation and Adam does not. With the
geometric mean as s even the dial at p = 0 does not follow, for that is no function of the norms.

Where eps counts: as stated, twice, for p < 1; at p = 1 once, which is Adam itself, as in the author's code. The dial at
p = 0 is then scalar Adam with 2 eps in the place of eps, and scalar Adam itself only for eps = 0.

Source: Singh (2026).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from saggs.rules.rule import FRACTION, OneOf, Pair, Range, Rule, Settings, State, Within

Betas = tuple[float, float]
MOMENT_RANGES: Mapping[str, Range] = {"betas": Pair(FRACTION), "eps": Within()}
DIAL_RANGES: Mapping[str, Range] = {
    **MOMENT_RANGES,
    "precond_power": Within(0.0, 1.0),
    "scalar": OneOf(("rms", "geomean")),
}


class Bunch(NamedTuple):
    """Weights of equal settings, dtype and device, in any groups: what is one number a member is computed at once.

    Attributes:
        indices: which of all weights these are.
        settings: of any of them.
        states: what is kept of each.
        first, second: 1 - b1^t and 1 - b2^t, shape (weights, members), in float64.
    """

    indices: list[int]
    settings: Settings
    states: list[State]
    first: Tensor
    second: Tensor

    @property
    def firsts(self) -> list[Tensor]:
        return [state["first"] for state in self.states]

    @property
    def seconds(self) -> list[Tensor]:
        return [state["second"] for state in self.states]


def begin_moments(weight: Tensor) -> State:
    """No step taken, and both averages zero."""
    step = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
    return {"step": step, "first": torch.zeros_like(weight), "second": torch.zeros_like(weight)}


def bunched(names: Sequence[str], states: Sequence[State], settings: Sequence[Settings]) -> list[list[int]]:
    """The indices of weights whose settings of these names, dtype and device are equal."""
    found: dict[Any, list[int]] = {}
    for index, (state, group) in enumerate(zip(states, settings, strict=True)):
        values = tuple(tuple(v) if isinstance(v := group[name], list) else v for name in names)
        found.setdefault((values, state["first"].dtype, state["first"].device), []).append(index)
    return list(found.values())


def corrected(indices: list[int], states: Sequence[State], settings: Settings) -> Bunch:
    """A bunch with the corrections for the zero start of its averages.

    In float64: in float32, 1 - b2^t has four digits at t = 1.
    """
    own = [states[index] for index in indices]
    steps = torch.stack([state["step"] for state in own])
    first, second = (_log_betas(*settings["betas"], steps.device) * steps).expm1_().neg_().unbind()
    return Bunch(indices, settings, own, first, second)


@lru_cache(maxsize=64)
def _log_betas(first: float, second: float, device: torch.device) -> Tensor:
    """log b1 and log b2, (2, 1, 1). Kept, for a tensor made of Python numbers is a copy to the device."""
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in (first, second)]
    return torch.tensor(logs, dtype=torch.float64, device=device).view(2, 1, 1)


class _Moments(Rule):
    """A rule that keeps Adam's state."""

    RANGES: ClassVar[Mapping[str, Range]] = MOMENT_RANGES

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        return begin_moments(weight)

    @classmethod
    def advance(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        settings: Sequence[Settings],
    ) -> list[Tensor]:
        bunches = []
        for indices in bunched(tuple(cls.DEFAULTS), states, settings):
            c, own, found = settings[indices[0]], [states[i] for i in indices], [gradients[i] for i in indices]
            torch._foreach_add_([state["step"] for state in own], 1)
            torch._foreach_lerp_([state["first"] for state in own], found, 1 - c["betas"][0])
            seconds = [state["second"] for state in own]
            torch._foreach_mul_(seconds, c["betas"][1])
            torch._foreach_addcmul_(seconds, found, found, 1 - c["betas"][1])
            bunches.append(corrected(indices, states, c))
        directions = list(gradients)
        for bunch, own_directions in zip(bunches, cls.directions(bunches), strict=True):
            for index, direction in zip(bunch.indices, own_directions, strict=True):
                directions[index] = direction
        return directions

    @classmethod
    def directions(cls, bunches: Sequence[Bunch]) -> list[list[Tensor]]:
        """The directions that the moments, once advanced, give."""
        raise NotImplementedError


class Adam(_Moments):
    """w <- w - lr m / (sqrt(v) + eps), with both moments corrected for their zero start.

    Source: Kingma and Ba (2015).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        weight_decay: float = 0.0,
        *,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr, weight_decay, betas=betas, eps=eps)

    @classmethod
    def directions(cls, bunches: Sequence[Bunch]) -> list[list[Tensor]]:
        return [_adam_directions(bunch) for bunch in bunches]


class ScalarAdam(_Moments):
    """w <- w - lr m / (s + eps), with one s = sqrt(mean of v) over all entries of all weights of the optimizer.

    Groups share s; their betas and eps are their own. Source: Singh (2026).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        weight_decay: float = 0.0,
        *,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr, weight_decay, betas=betas, eps=eps)

    @classmethod
    def directions(cls, bunches: Sequence[Bunch]) -> list[list[Tensor]]:
        scale = _root_mean_square(bunches)
        return [_scalar_directions(bunch, scale, bunch.settings["eps"]) for bunch in bunches]


class Dial(_Moments):
    """w <- w - lr m / ( (s_i + eps)^p (s + eps)^(1 - p) + eps ); at p = 1 it is Adam, bit for bit. See the module.

    Args:
        params, lr, weight_decay: as of every rule.
        precond_power: p in [0, 1]: 0 shares one denominator, 1 gives every entry its own.
        scalar: what s is: "rms", sqrt(mean of v), or "geomean", exp(mean of log(s_i + eps)); of all weights.
        betas, eps: Adam's.

    Source: Singh (2026).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "precond_power": 0.0,
        "scalar": "rms",
        "betas": (0.9, 0.999),
        "eps": 1e-8,
    }
    RANGES: ClassVar[Mapping[str, Range]] = DIAL_RANGES

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        weight_decay: float = 0.0,
        *,
        precond_power: float = 0.0,
        scalar: Literal["rms", "geomean"] = "rms",
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr, weight_decay, precond_power=precond_power, scalar=scalar, betas=betas, eps=eps)

    @classmethod
    def directions(cls, bunches: Sequence[Bunch]) -> list[list[Tensor]]:
        return dial_directions(bunches)


def dial_directions(bunches: Sequence[Bunch]) -> list[list[Tensor]]:
    """The dial's directions, a list a bunch, from moments that have been advanced."""
    shared = {bunch.settings["scalar"] for bunch in bunches if bunch.settings["precond_power"] < 1}
    scales, roots = (
        {},
        [_roots(bunch) if "geomean" in shared or 0 < bunch.settings["precond_power"] < 1 else [] for bunch in bunches],
    )
    if "rms" in shared:
        scales["rms"] = _root_mean_square(bunches)
    if "geomean" in shared:
        scales["geomean"] = _geometric_mean(bunches, roots)
    directions = []
    for bunch, own in zip(bunches, roots, strict=True):
        power, eps = bunch.settings["precond_power"], bunch.settings["eps"]
        if power == 1:
            directions.append(_adam_directions(bunch))
            continue
        scale = scales[bunch.settings["scalar"]]
        if power == 0:
            directions.append(_scalar_directions(bunch, scale, 2 * eps))
            continue
        gain = bunch.first * (scale.to(bunch.first.device) + eps).pow(1 - power) * bunch.second.pow(-power / 2)
        denominators = [_to_power(root, power) for root in own]
        directions.append(_quotients(bunch, denominators, gain))
    return directions


def _adam_directions(bunch: Bunch) -> list[Tensor]:
    """(m / c1) / (sqrt(v / c2) + eps)."""
    return _quotients(bunch, [second.sqrt() for second in bunch.seconds], bunch.first / bunch.second.sqrt())


def _quotients(bunch: Bunch, denominators: Sequence[Tensor], gain: Tensor) -> list[Tensor]:
    """m / (d gain + eps c1), written over d: the correction c1 of m costs no pass over the entries."""
    like, eps = denominators, bunch.settings["eps"]
    for m, d, k, e in zip(
        bunch.firsts, denominators, _spread(gain, like), _spread(bunch.first * eps, like), strict=True
    ):
        torch.div(m, d.mul_(k).add_(e), out=d)
    return list(denominators)


def _scalar_directions(bunch: Bunch, scale: Tensor, eps: float) -> list[Tensor]:
    """(m / c1) / (s + eps)."""
    firsts = bunch.firsts
    gains = _spread(1 / (bunch.first * (scale.to(bunch.first.device) + eps)), firsts)
    return [first * gain for first, gain in zip(firsts, gains, strict=True)]


def _roots(bunch: Bunch) -> list[Tensor]:
    """sqrt(v) + eps sqrt(c2): s_i + eps, but for the correction sqrt(c2), which is one number a member."""
    roots = [second.sqrt() for second in bunch.seconds]
    for root, eps in zip(roots, _spread(bunch.second.sqrt() * bunch.settings["eps"], roots), strict=True):
        root.add_(eps)
    return roots


def _root_mean_square(bunches: Sequence[Bunch]) -> Tensor:
    """sqrt(mean of v / c2) over all entries of all weights, one a member, in float64."""
    return _mean([_entry_sums(bunch.seconds) / bunch.second for bunch in bunches], bunches).sqrt()


def _geometric_mean(bunches: Sequence[Bunch], roots: Sequence[Sequence[Tensor]]) -> Tensor:
    """exp(mean of log(s_i + eps)) over all entries of all weights, given (s_i + eps) sqrt(c2), in float64."""
    sums = []
    for bunch, own in zip(bunches, roots, strict=True):
        halves = torch.tensor([[root[0].numel() / 2] for root in own], dtype=torch.float64)
        sums.append(_entry_sums([root.log() for root in own]) - bunch.second.log() * halves.to(bunch.second.device))
    return _mean(sums, bunches).exp()


def _entry_sums(tensors: Sequence[Tensor]) -> Tensor:
    """The sums of each member's entries, (weights, members), in float64."""
    sums = [each.sum(tuple(range(1, each.dim()))) if each.dim() > 1 else each for each in tensors]
    return torch.stack(sums).double()


def _mean(sums: Sequence[Tensor], bunches: Sequence[Bunch]) -> Tensor:
    """Over all entries of a member, given the sums of each of its weights, a tensor a bunch."""
    total = sums[0].sum(0)
    for each in sums[1:]:
        total = total + each.sum(0).to(total.device)
    return total / sum(second[0].numel() for bunch in bunches for second in bunch.seconds)


def _spread(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """(weights, members) in the dtype and with the dimensions of each weight: (members, 1, ..., 1) each."""
    rows = values.to(like[0].dtype).unbind()
    return [row.view(-1, *(1,) * (each.dim() - 1)) for row, each in zip(rows, like, strict=True)]


def _to_power(tensor: Tensor, power: float) -> Tensor:
    """tensor ** power in place; for quarters by square roots, which take a fraction of the time."""
    if power == 0.5:
        return tensor.sqrt_()
    if power == 0.25:
        return tensor.sqrt_().sqrt_()
    if power == 0.75:
        half = tensor.sqrt()
        return torch.sqrt(half, out=tensor).mul_(half)
    return tensor.pow_(power)


__all__ = ["Adam", "Dial", "ScalarAdam"]
