"""How an optimizer's state answers when a weight is multiplied by c: measured on the optimizer, not looked up.

Where w' = c w, the same function has the gradient g' = g / c. So an optimizer is rehearsed on a tiny weight twice, on
(W, g_1, g_2, …) and on (c W, g_1 / c, g_2 / c, …), and each of its states is compared:

    s' = c^k s        k = -1 first moments, -2 second moments, 0 counters and ratios, +1 what moves like weights.

k, measured at c = 2^6 and 2^-6, is the state's *degree*: a state tensor of a real weight is multiplied by c^k when the
weight is multiplied by c. No name of a state is read (`exp_avg` has degree -1 in AdamW, 0 in ADOPT), so that it works
for any `torch.optim.Optimizer`, with its own settings, for a class written an hour ago too.

Weight-like states (the iterates of schedule-free methods, slow weights, moving averages of weights) are built from the
updates. Where a state has no degree at the same learning rate, the companion run is made with lr c^(1 - e), e being the
degree of the update (-1 for SGD, 0 for AdamW, +1 for LARS, measured too): then its weights are c times the first run's
at every step.

Five more things are measured, since a pair may rescale a block of rows of a fused matrix, one matrix and not another,
or by a negative factor:

* a block of rows, of columns: states that see whole tensors (factored second moments, block statistics, trust ratios)
  allow one scalar a tensor only;
* a second weight beside it: states that depend on it (a global norm, an estimated distance) *couple* weights;
* the carried state itself, before one more step: dual averaging makes the weights anew from its state and the
  learning rate, and would throw a rescaled weight back (it *leaps*);
* c = -1: a state that answers |c|^k where c^k has a sign allows positive factors only;
* the settings as they are: eps, clamps and coupled weight decay add terms of another degree. How much of a state they
  are, at gradients of order 1, is its residual.

Source: ours; the degrees of Adam's two moments are the SAGGS paper's (Kim, 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saggs.rehearsal import Build, Rehearsal, RehearsalError, Value, draw, rehearse
from saggs.rehearsal import entries as state_entries

EXACT = 1e-9
"""A state has its degree exactly where it agrees with c^k s to this, relative to its norm."""
TOLERANCE = 1e-6
"""Above this share of another degree, with the settings as they are, a state is carried with a warning."""
REFUSED = 1e-2
"""And above this it is not carried."""
STEPS = 24
FACTORS = (2.0**6, 2.0**-6)
_SINGLE = 1e-5
_LEAP = 1.1
DECAY = re.compile(r"(weight_decay|wd|weight_decay_rate|decay_rate_l2|lambd)$")
EPS = re.compile(r"(.*_)?eps(ilon)?([0-9_].*)?$")


class StateRule(NamedTuple):
    """How one entry of a weight's state answers.

    Attributes:
        degree: k in s' = c^k s; None where there is no such whole number.
        residual: the relative distance from it, eps and weight decay set to 0 where that can be.
        like_weight: has the weight's shape.
        sliced: stays exact where only a block of rows or columns is rescaled.
        signed: "c" where it answers c^k at c = -1 too, "|c|" where it answers |c|^k instead, "" for neither.
        empty: was zero throughout; nothing is known of it.
        moves: is a floating-point tensor. Others are counters, and must not change.
    """

    degree: int | None
    residual: float
    like_weight: bool
    sliced: bool
    signed: str
    empty: bool
    moves: bool


@dataclass(frozen=True)
class StateRules:
    """What has been measured about one optimizer, with one set of settings, on a weight of one shape.

    Attributes:
        entries: state entry -> its rule.
        update_degree: e, how the last update scales at the same learning rate; None where it vanishes.
        inexact: the largest residual with eps, clamps and the like as they are, without weight decay, at gradients of
            order 1 and factors of 2^±6.
        decay_mixes: weight decay is mixed into the states (coupled decay).
        coupled: the shared number, or the state, that couples weights; "" where there is none.
        leaps: the step from a carried state, rescaled by 2 or 1/2, is longer than any degree explains: the weights are
            made anew from the state.
    """

    entries: Mapping[str, StateRule]
    update_degree: float | None
    inexact: float
    decay_mixes: bool
    coupled: str
    leaps: bool

    @property
    def exact(self) -> bool:
        """Whether every state of a whole tensor has a degree to `EXACT`, and none couples weights."""
        entries = self.entries.values()
        return (
            not self.coupled
            and not self.leaps
            and all(r.empty or (r.degree is not None and r.residual <= EXACT) for r in entries)
        )

    @property
    def positive_only(self) -> str:
        """The entry that allows positive factors only; "" where there is none."""
        return next((n for n, r in self.entries.items() if r.moves and not r.empty and r.signed != "c"), "")

    def refusal(self, sliced: bool = False) -> str:
        """Why the state cannot be carried, where a slice or where a whole tensor is rescaled; "" where it can."""
        if self.coupled:
            return f"{self.coupled} depends on several weights at once, which are not all rescaled alike"
        for name, rule in self.entries.items():
            if rule.degree is None and not rule.empty:
                return f"its state {name!r} answers with no whole power of the factor"
            if sliced and not rule.sliced and not rule.empty and rule.degree != 0:
                return f"its state {name!r} sees whole tensors, and cannot follow where only a part of one is rescaled"
        if self.leaps:
            return "its next step would throw rescaled weights back: it makes them from its state and the learning rate"
        if self.inexact > REFUSED:
            return f"with its settings (eps, clamps) its state is {self.inexact:.0e} away from a power of the factor"
        return ""

    def summary(self) -> str:
        """The states that move, with their degrees: `exp_avg^-1 exp_avg_sq^-2`."""
        shown = {n: r.degree for n, r in self.entries.items() if r.moves and not r.empty and r.degree != 0}
        return " ".join(f"{name}^{'?' if degree is None else f'{degree:+d}'}" for name, degree in shown.items())


def measure(build: Build, shape: Sequence[int], steps: int = STEPS) -> StateRules:
    """Measure how the state of an optimizer answers, on one weight of this shape (and on two, for coupling).

    Args:
        build: makes a fresh optimizer from its parameters: `lambda p: cls(p, lr=…)`, or `saggs.rehearsal.copies_of`.
        shape: of the weight; a dozen entries a side are enough.
        steps: of the rehearsals: more than any refresh period, and than what changes its rule after a few steps.

    Raises:
        RehearsalError: the optimizer cannot be built or run.
    """
    try:
        return _Measurement(build, shape, steps, torch.float64).rules()
    except RehearsalError:  # some classes know float32 only; powers of two are exact there, too
        return _Measurement(build, shape, steps, torch.float32).rules()


class _Measurement:
    """The rehearsals of one optimizer, and what they say."""

    def __init__(self, build: Build, shape: Sequence[int], steps: int, dtype: torch.dtype) -> None:
        self._build, self._shape = build, tuple(shape)
        self._weights, self._gradients = draw([shape], steps, dtype)
        self._exact = EXACT if dtype == torch.float64 else _SINGLE
        self._quiet = {DECAY: 0.0}
        self._plain = {DECAY: 0.0, EPS: 0.0}
        self._base = self._run()
        moved = self._base.updates[-1][0].norm() > 0
        if not (self._base.finite and moved):  # 0 / 0, or 0 for ever: then with eps as it is
            self._plain = self._quiet
            self._base = self._run()
        self._degree = update_degree(self._base, self._run(FACTORS[0]), FACTORS[0])
        self._fixed = [self._run(c) for c in FACTORS]
        self._matched = self._at_matched_rates(self._plain)
        self._flipped = self._run(-1.0)
        self._slices = [_Slices(self, dim) for dim in range(len(self._shape))]

    def rules(self) -> StateRules:
        entries = {key: self._rule(key, value) for key, value in self._base.states[0].items()}
        return StateRules(
            entries,
            self._degree,
            self._inexact(entries),
            self._decay_mixes(entries),
            self._coupled(),
            self._leaps(entries),
        )

    def _run(
        self, factor: float | Tensor = 1.0, rate: float = 1.0, settings: Mapping[re.Pattern[str], float] | None = None
    ) -> Rehearsal:
        weights = [w * factor for w in self._weights]
        gradients = [[g / factor for g in each] for each in self._gradients]
        return rehearse(
            self._build, weights, gradients, rate=rate, settings=self._plain if settings is None else settings
        )

    def _at_matched_rates(self, settings: Mapping[re.Pattern[str], float]) -> list[Rehearsal]:
        if self._degree is None:
            return []
        return [self._run(c, c ** (1 - self._degree), settings) for c in FACTORS]

    def _rule(self, key: str, value: Value) -> StateRule:
        moves = isinstance(value, Tensor) and value.is_floating_point()
        like_weight = isinstance(value, Tensor) and tuple(value.shape) == self._shape
        answers = [[run.states[0].get(key) for run in runs] for runs in (self._fixed, self._matched) if runs]
        if moves and not any(_size(v) for v in (value, *answers[0], *answers[-1])):
            return StateRule(None, 0.0, like_weight, False, "", empty=True, moves=True)
        found = [_fitted(value, answer) for answer in answers]
        # At matched rates only what moves like weights; a state built from gradients does not ask for the rate.
        found = [fit for number, fit in enumerate(found) if number == 0 or (fit[0] or 0) > 0]
        degree, residual = next((f for f in found if f[1] <= self._exact), min(found, key=lambda f: f[1]))
        if residual > REFUSED or degree is None or (degree and not moves):
            return StateRule(None, residual, like_weight, False, "", empty=False, moves=moves)
        sliced = all(s.keep(key, degree) for s in self._slices) if like_weight else degree == 0
        signed = _sign(value, self._flipped.states[0].get(key), degree)
        return StateRule(degree, residual, like_weight, sliced, signed, empty=False, moves=moves)

    def _inexact(self, entries: Mapping[str, StateRule]) -> float:
        """The largest residual with the settings as they are, at the better one of the two learning rates."""
        base = self._run(settings=self._quiet)
        runs = [[self._run(c, settings=self._quiet) for c in FACTORS], self._at_matched_rates(self._quiet)]
        largest = 0.0
        for key, rule in entries.items():
            if rule.degree is None or rule.empty or not rule.moves:
                continue
            wanted = [torch.as_tensor(base.states[0].get(key, 0.0)) * c**rule.degree for c in FACTORS]
            found = [
                max(_distance(run.states[0].get(key), w) for run, w in zip(two, wanted, strict=True))
                for two in runs
                if two
            ]
            largest = max(largest, min(found))
        return largest

    def _decay_mixes(self, entries: Mapping[str, StateRule]) -> bool:
        """Whether weight decay, as it is set, is in states that are built from gradients."""
        without, decayed = self._run(settings={}), self._run(settings=self._quiet)
        of_gradients = [
            k for k, r in entries.items() if r.moves and not r.empty and r.degree is not None and r.degree < 0
        ]
        return any(
            _distance(without.states[0].get(k), decayed.states[0].get(k, 0.0)) > self._exact for k in of_gradients
        )

    def _coupled(self) -> str:
        """What couples weights: a shared number that answers to one of them, or a state that does to another."""
        for run in self._fixed:
            for name, value in self._base.shared.items():
                if _distance(run.shared.get(name), value) > self._exact:
                    return f"{name!r}, which all its weights share,"
        weights, gradients = draw([self._shape, self._shape], len(self._gradients), self._weights[0].dtype)
        both = rehearse(self._build, weights, gradients, settings=self._plain)
        first = rehearse(self._build, weights[:1], [g[:1] for g in gradients], settings=self._plain)
        for name, value in first.states[0].items():
            if _distance(both.states[0].get(name), value) > self._exact:
                return f"its state {name!r}"
        return ""

    def _leaps(self, entries: Mapping[str, StateRule]) -> bool:
        """Whether the step after a rescaling by 2 or 1/2, states carried, is far longer than without it.

        With a degree from -1 to +1 it may be twice as long; what makes its weights anew goes a long way back.
        """
        if any(rule.degree is None and not rule.empty for rule in entries.values()):
            return False  # refused anyway
        longest = 0.0
        for c in (2.0, 0.5):
            gradients = [*self._gradients[:-1], [g / c for g in self._gradients[-1]]]
            carry = partial(_carry, entries, c)
            run = rehearse(self._build, self._weights, gradients, settings=self._plain, before_last=carry)
            longest = max(longest, _size(run.updates[-1][0]))
        return longest > _LEAP * 2 ** max(1.0, abs(self._degree or 0.0)) * _size(self._base.updates[-1][0])


def _carry(
    entries: Mapping[str, StateRule], factor: float, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> None:
    """Rescale the only weight of a rehearsal, its state along."""
    with torch.no_grad():
        parameters[0].mul_(factor)
        for name, value in state_entries(optimizer.state.get(parameters[0], {})):
            rule = entries.get(name)
            if isinstance(value, Tensor) and rule is not None and rule.moves and rule.degree:
                value.mul_(factor**rule.degree)


class _Slices:
    """Rehearsals with only the first third of one dimension rescaled; and of that third and the rest, each alone."""

    def __init__(self, of: _Measurement, dim: int) -> None:
        self._of, self._dim = of, dim
        shape = of._shape
        cut = max(1, shape[dim] // 3)
        self._parts = [slice(0, cut), slice(cut, shape[dim])] if cut < shape[dim] else []
        inside = (torch.arange(shape[dim]) < cut).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        one = torch.ones((), dtype=of._weights[0].dtype)
        self._multipliers = [torch.where(inside, c * one, one) for c in FACTORS]
        self._runs: list[Rehearsal] | None = None
        self._alone: list[Rehearsal] | None = None

    def keep(self, key: str, degree: int) -> bool:
        """Whether a state with the weight's shape has its degree, slice by slice.

        What is built from updates has it at rates of their own, which a group cannot give to rows: it is enough that
        the rows go the same ways when each part is optimized by itself.
        """
        value = self._of._base.states[0][key]
        assert isinstance(value, Tensor)
        if self._runs is None:
            self._runs = [self._of._run(m) for m in self._multipliers]
        wanted = [value * m**degree for m in self._multipliers]
        answers = [run.states[0].get(key) for run in self._runs]
        if all(_distance(a, w) <= self._of._exact for a, w in zip(answers, wanted, strict=True)) or not self._parts:
            return True
        if degree <= 0:
            return False
        return _distance(self._together(key), value) <= self._of._exact

    def _together(self, key: str) -> Tensor | None:
        """The state of the parts, each optimized by itself, put together again."""
        if self._alone is None:
            try:
                self._alone = [self._part(part) for part in self._parts]
            except RehearsalError:
                self._alone = []
        found = [run.states[0].get(key) for run in self._alone]
        tensors = [f for f in found if isinstance(f, Tensor) and f.dim() == len(self._of._shape)]
        return torch.cat(tensors, self._dim) if tensors and len(tensors) == len(found) else None

    def _part(self, part: slice) -> Rehearsal:
        of, index = self._of, tuple(part if d == self._dim else slice(None) for d in range(len(self._of._shape)))
        gradients = [[g[index] for g in each] for each in of._gradients]
        return rehearse(of._build, [of._weights[0][index]], gradients, settings=of._plain)


def update_degree(base: Rehearsal, companion: Rehearsal, factor: float) -> float | None:
    """e, where the last update of the companion, on c W at the same learning rate, is c^e times as long as the first's.

    None where one vanishes. It is the last one and not the way from the start, for some change their rule on the way.
    Degrees are whole numbers, halves or thirds; what is within 0.02 of a twelfth is rounded to it.
    """
    sizes = [_size(run.updates[-1][0]) for run in (base, companion)]
    if not all(0 < s < float("inf") for s in sizes):
        return None
    degree = float(torch.tensor(sizes[1] / sizes[0]).log() / torch.tensor(factor).log())
    twelfth = round(degree * 12) / 12
    return twelfth if abs(degree - twelfth) < 0.02 else degree


def _fitted(value: Value, answers: Sequence[Value | None]) -> tuple[int | None, float]:
    """The whole number k with s' = c^k s for all answers, and how far they are from it."""
    size, answered = _size(value), _size(answers[0])
    if size == 0 or not 0 < answered < float("inf"):
        return 0, max(_distance(a, value) for a in answers)
    k = round(float(torch.tensor(answered / size).log() / torch.tensor(FACTORS[0]).log()))
    wanted = [torch.as_tensor(value) * c**k for c in FACTORS] if k else [value, value]
    return k, max(_distance(a, w) for a, w in zip(answers, wanted, strict=True))


def _sign(value: Value, flipped: Value | None, degree: int) -> str:
    """Which sign a state takes at c = -1."""
    if _distance(flipped, torch.as_tensor(value) * (-1) ** (degree % 2)) <= _SINGLE:
        return "c"
    return "|c|" if _distance(flipped, value) <= _SINGLE else ""


def _size(value: Value | None) -> float:
    return 0.0 if value is None else float(torch.as_tensor(value).double().norm())


def _distance(value: Value | None, wanted: Value) -> float:
    """|value - wanted| / |wanted|; infinite where they have no common shape, or are not numbers."""
    if value is None:
        return float("inf")
    a, b = torch.as_tensor(value).double(), torch.as_tensor(wanted).double()
    if a.shape != b.shape:
        return float("inf")
    distance = float((a - b).norm()) / (float(b.norm()) or 1.0)
    return distance if distance == distance else float("inf")


__all__ = ["DECAY", "EPS", "EXACT", "REFUSED", "TOLERANCE", "StateRule", "StateRules", "measure", "update_degree"]
