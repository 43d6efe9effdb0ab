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
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from saggs.rules.rule import FRACTION, OneOf, Pair, Range, Rule, Settings, State, Within, entry_sum

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


def bunched(names: Iterable[str], states: Sequence[State], settings: Sequence[Settings]) -> list[list[int]]:
    """The indices of weights whose settings of these names, dtype and device are equal."""
    found: dict[Any, list[int]] = {}
    for index, (state, group) in enumerate(zip(states, settings, strict=True)):
        values = tuple(tuple(v) if isinstance(v := group[name], list) else v for name in names)
        found.setdefault((values, state["first"].dtype, state["first"].device), []).append(index)
    return list(found.values())


def corrected(indices: list[int], states: list[State], settings: Settings) -> Bunch:
    """A bunch of these states, with the corrections for the zero start of their averages.

    In float64: in float32 the first 1 - b2^t is off by 1e-5.
    """
    steps = torch.stack([state["step"] for state in states])
    first, second = (_log_betas(*settings["betas"], steps.device) * steps).expm1_().neg_().unbind()
    return Bunch(indices, settings, states, first, second)


@lru_cache(maxsize=64)
def _log_betas(first: float, second: float, device: torch.device) -> Tensor:
    """log b1 and log b2, (2, 1, 1). Kept, for a tensor made of Python numbers is a copy to the device."""
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in (first, second)]
    return torch.tensor(logs, dtype=torch.float64, device=device).view(2, 1, 1)


class Denominators(NamedTuple):
    """Of a bunch: the directions are m / (entries gain + offset), or m / offset where no entry has its own.

    Attributes:
        entries: in the weights' shapes, to be written over; None at p = 0.
        gain, offset: shape (weights, members), in float64; the correction of m is in both.
    """

    entries: list[Tensor] | None
    gain: Tensor
    offset: Tensor


class _Moments(Rule):
    """A rule that keeps Adam's state and moves along m over something."""

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
        for indices in bunched(cls.DEFAULTS, states, settings):
            c, own, found = settings[indices[0]], [states[i] for i in indices], [gradients[i] for i in indices]
            torch._foreach_add_([state["step"] for state in own], 1)
            torch._foreach_lerp_([state["first"] for state in own], found, 1 - c["betas"][0])
            seconds = [state["second"] for state in own]
            torch._foreach_mul_(seconds, c["betas"][1])
            torch._foreach_addcmul_(seconds, found, found, 1 - c["betas"][1])
            bunches.append(corrected(indices, own, c))
        directions = list(gradients)
        for bunch, denominators in zip(bunches, cls.denominators(bunches), strict=True):
            for index, direction in zip(bunch.indices, quotients(bunch.firsts, denominators), strict=True):
                directions[index] = direction
        return directions

    @classmethod
    def denominators(cls, bunches: Sequence[Bunch]) -> list[Denominators]:
        """What the first moments, once advanced, are divided by."""
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
    def denominators(cls, bunches: Sequence[Bunch]) -> list[Denominators]:
        return [_of_adam(bunch) for bunch in bunches]


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
    def denominators(cls, bunches: Sequence[Bunch]) -> list[Denominators]:
        scale = _root_mean_square(bunches)
        return [_shared(bunch, scale, bunch.settings["eps"]) for bunch in bunches]


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
    def denominators(cls, bunches: Sequence[Bunch]) -> list[Denominators]:
        return dial_denominators(bunches)


def dial_denominators(bunches: Sequence[Bunch]) -> list[Denominators]:
    """(s_i + eps)^p (s + eps)^(1 - p) + eps for every bunch, from moments that have been advanced."""
    shared = {bunch.settings["scalar"] for bunch in bunches if bunch.settings["precond_power"] < 1}
    roots = [
        _roots(bunch) if "geomean" in shared or 0 < bunch.settings["precond_power"] < 1 else [] for bunch in bunches
    ]
    scales = {}
    if "rms" in shared:
        scales["rms"] = _root_mean_square(bunches)
    if "geomean" in shared:
        scales["geomean"] = _geometric_mean(bunches, roots)
    return [
        _of_adam(bunch) if bunch.settings["precond_power"] == 1
        else _between(bunch, own, scales[bunch.settings["scalar"]])
        for bunch, own in zip(bunches, roots, strict=True)
    ]  # fmt: skip


def quotients(numerators: Sequence[Tensor], denominators: Denominators) -> list[Tensor]:
    """Numerators over denominators, written over the latter's entries where there are some."""
    entries, gain, offset = denominators
    if entries is None:
        return [m * over for m, over in zip(numerators, spread(1 / offset, numerators), strict=True)]
    for m, d, k, e in zip(numerators, entries, spread(gain, entries), spread(offset, entries), strict=True):
        torch.div(m, d.mul_(k).add_(e), out=d)
    return entries


def _of_adam(bunch: Bunch) -> Denominators:
    """c1 (sqrt(v / c2) + eps)."""
    entries = [second.sqrt() for second in bunch.seconds]
    return Denominators(entries, bunch.first / bunch.second.sqrt(), bunch.first * bunch.settings["eps"])


def _shared(bunch: Bunch, scale: Tensor, eps: float) -> Denominators:
    """c1 (s + eps)."""
    return Denominators(None, bunch.first, bunch.first * (scale.to(bunch.first.device) + eps))


def _between(bunch: Bunch, roots: Sequence[Tensor], scale: Tensor) -> Denominators:
    """c1 ((s_i + eps)^p (s + eps)^(1 - p) + eps), given (s_i + eps) sqrt(c2), which is written over."""
    power, eps = bunch.settings["precond_power"], bunch.settings["eps"]
    if power == 0:
        return _shared(bunch, scale, 2 * eps)
    gain = bunch.first * (scale.to(bunch.first.device) + eps).pow(1 - power) * bunch.second.pow(-power / 2)
    return Denominators([_to_power(root, power) for root in roots], gain, bunch.first * eps)


def _roots(bunch: Bunch) -> list[Tensor]:
    """sqrt(v) + eps sqrt(c2): s_i + eps, but for the correction sqrt(c2), which is one number a member."""
    roots = [second.sqrt() for second in bunch.seconds]
    for root, eps in zip(roots, spread(bunch.second.sqrt() * bunch.settings["eps"], roots), strict=True):
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
    return torch.stack([entry_sum(tensor) for tensor in tensors]).double()


def _mean(sums: Sequence[Tensor], bunches: Sequence[Bunch]) -> Tensor:
    """Over all entries of a member, given the sums of each of its weights, a tensor a bunch."""
    total = sums[0].sum(0)
    for each in sums[1:]:
        total = total + each.sum(0).to(total.device)
    return total / sum(second[0].numel() for bunch in bunches for second in bunch.seconds)


def spread(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
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
