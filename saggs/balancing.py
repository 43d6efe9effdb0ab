"""Balancing: move every pair to the point of its orbit where its weights are least, now or every so many steps.

`saggs.objective` says which factor that is. Damped balancing applies c^alpha with 0 < alpha <= 1, so that the
log-imbalance shrinks by (1 - alpha) each time.

Pairs that share no entry have minima of their own, and one pass is exact. Pairs that do (a norm's gain and the columns
of its readers) have a joint one: the squared norm of all their weights is convex in the log-factors, and is minimised
by *sweeps*, each of which balances round after round of disjoint pairs. A sweep works on copies of the weights; the
product of all its factors is then applied once, to weights, gradients and state, so that every entry is rounded once a
round, however many sweeps there were. About ten sweeps reach 1e-10; a canonical form that is equal to the bit exists
for disjoint pairs only.

bfloat16 has eight bits, and a product with an odd factor loses half of one, at every event. Pairs with a slice in
bfloat16 are therefore rescaled by the nearest power of two: exactly, leaving norms equal to within a factor of two.

Source: the SAGGS paper (Kim, 2026) for hard and damped balancing; sweeps and powers of two are ours.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saggs import transport as _transport
from saggs.discovery import find_pairs
from saggs.lines import Powers
from saggs.objective import Norm, Terms, nearest_power_of_two, order_of
from saggs.pairs import BALANCED_KINDS, ScalePair, named_parameters
from saggs.plan import ScalingPlan
from saggs.rescaling import warn_of_float16, warn_of_imprecise_gains, weights_as_moving
from saggs.transport import Optimizers

Rounding = Literal["exact", "power_of_two"]
SWEEPS = 5
"""Sweeps an event of a `Rebalancer` for pairs that share entries. From one event to the next little has moved."""


def balance(
    model: nn.Module,
    pairs: Sequence[ScalePair] | None = None,
    optimizer: Optimizers | None = None,
    damping: float = 1.0,
    *,
    norm: Norm = "l2",
    factors: Rounding | None = None,
    tolerance: float = 1e-6,
    max_sweeps: int = 100,
) -> Tensor:
    """Balance every pair once; returns the factors applied, shape (pairs,).

    Args:
        model: the model, changed in place.
        pairs: from `find_pairs`; found anew where None. Where some share entries, the returned factors are the
            products over all sweeps.
        optimizer: its state is carried along (or those of several: Muon for matrices, AdamW for the rest); None leaves
            optimizer state alone.
        damping: alpha in (0, 1]; 1 equalises the norms, less goes part of the way.
        norm: "l2" minimises the sum of squares, "l1" that of absolute values; with exponents 1 and -1 the two sides'
            norms of that kind become equal.
        factors: "power_of_two" rounds them, and is exact; "exact" does not. None: powers of two for pairs with a slice
            in bfloat16, "exact" for all others.
        tolerance: sweeps end when no factor of a sweep is further than this from 1, in its natural logarithm. Below
            the rounding of norms (4e-6 in float32) it counts as that.
        max_sweeps: or after so many. Pairs that share no entry need one, whatever these two say.

    Raises:
        ValueError: no pairs, a setting out of its range, or an optimizer whose state cannot be carried.

    Warns:
        UserWarning: pairs left alone (a norm is zero or not finite), sweeps that did not reach the tolerance, weights
            in float16, gains 1 + w in a narrow dtype near w = -1.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance > 0:
        raise ValueError(f"tolerance={tolerance!r} must be above 0: the largest |log factor| of the last sweep")
    require_count("max_sweeps", max_sweeps, "sweeps")
    rebalancer = Rebalancer(
        model, optimizer, pairs, every=1, damping=damping, transport=optimizer is not None, norm=norm, factors=factors
    )
    applied, left_over = rebalancer._event(max_sweeps, tolerance)
    if left := int(rebalancer.unbalanced):
        warnings.warn(f"{left} of {len(applied)} pairs were left alone: a norm is zero or not finite", stacklevel=2)
    if left_over:
        warnings.warn(
            f"after {max_sweeps} sweeps factors still change by {left_over:.1e} (tolerance={tolerance:g}); raise "
            "max_sweeps or tolerance",
            stacklevel=2,
        )
    warn_of_imprecise_gains(int(rebalancer.imprecise))
    return applied


def canonicalize(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    pairs: Sequence[ScalePair] | None = None,
    *,
    norm: Norm = "l2",
) -> Tensor:
    """Move a training state to the one representative of its orbit, balanced; returns the factors applied, (pairs,).

    Two states that compute the same function, and differ by rescalings of these pairs with positive factors, become
    one: weights, gradients and optimizer state. Restarted from there, they are one run. By powers of two they were
    apart: every bit is the same; by other factors: to rounding. Biases that have no effect on the outputs (a key's)
    are carried but are no part of the norms.

    Args:
        model: the model, changed in place.
        optimizer: its state is carried along. None where there is none.
        pairs: from `find_pairs`, no two of which share an entry, as fine as the rescaling (pairs of matrices do not
            undo a rescaling of heads); of the kinds that the papers balance, found anew, where None.
        norm: "l2" or "l1".

    Raises:
        ValueError: pairs that share entries (their balance is reached by sweeps, never to the bit), a pair that has no
            balanced point, and all that `balance` refuses. Nothing has been changed then.
    """
    chosen = list(find_pairs(model, BALANCED_KINDS) if pairs is None else pairs)
    parameters = named_parameters(model)
    if ScalingPlan(chosen, parameters).overlapping:
        raise ValueError(
            "some of these pairs share entries: their balance is reached by sweeps, to a tolerance, and is no "
            f"canonical form. Choose kinds that share none ({', '.join(BALANCED_KINDS)}), or use balance"
        )
    for pair, *sides in zip(chosen, *pair_norms(chosen, parameters, norm), strict=True):
        if not all(0 < float(side) < float("inf") for side in sides):
            raise ValueError(
                f"{pair}: its norms are {', '.join(f'{float(s):g}' for s in sides)}; it cannot be balanced"
            )
    return balance(model, chosen, optimizer, norm=norm)


def pair_norms(
    pairs: Sequence[ScalePair], parameters: Mapping[str, nn.Parameter], norm: Norm = "l2"
) -> tuple[Tensor, Tensor]:
    """Norms of the left and right weights, without biases: two tensors of shape (pairs,).

    Frobenius norms, or sums of absolute values for norm="l1". float32 at least, float64 where any of the weights is.
    """
    order = order_of(norm)
    plan = ScalingPlan(pairs, parameters)
    weights = plan.weights(parameters)
    dtype = plan.norm_dtype(weights)
    result: tuple[Tensor, Tensor] | None = None
    for at, one in plan.rounds:
        sides = one.terms.sides(one.norms(weights, order, dtype), order)
        if at is None:
            return sides
        index = at.on(sides[0].device)
        empty = sides[0].new_empty(len(pairs))
        left, right = (
            whole.index_copy(0, index, side) for whole, side in zip(result or (empty, empty), sides, strict=True)
        )
        result = left, right
    assert result is not None
    return result


def log2_norm_ratios(model: nn.Module, pairs: Sequence[ScalePair], norm: Norm = "l2") -> Tensor:
    """log2(|left| / |right|) of every pair, shape (pairs,): 0 is balanced, 2k after (2^k A, B / 2^k)."""
    left, right = pair_norms(pairs, named_parameters(model), norm)
    return torch.log2(left / right)


def balanced_factors(
    pairs: Sequence[ScalePair], left: Tensor, right: Tensor, damping: float = 1.0, norm: Norm = "l2"
) -> tuple[Tensor, Tensor]:
    """The factor of every pair from its two norms, shape (pairs,), and a mask of the pairs that could be balanced.

    A pair with a zero or non-finite norm has no balanced point; its factor is 1 and its mask False. Raises a ValueError
    where a side mixes exponents: two norms do not tell its factor.
    """
    order, terms = order_of(norm), Terms(pairs)
    if terms.mixed:
        raise ValueError(f"{pairs[next(iter(terms.mixed))]}: exponents are mixed in one side; use balance")
    return possible_factors(_damped(terms.factors(torch.cat([left, right]), order), damping))


def _damped(factors: Tensor, damping: float) -> Tensor:
    return factors if damping == 1.0 else factors**damping


def possible_factors(factors: Tensor, highest: int = 1) -> tuple[Tensor, Tensor]:
    """Factors with 1 for those whose `highest` power over- or underflows (0, infinity, NaN too), and a mask of others.

    For a power that is infinite would turn a moment that is zero into NaN.
    """
    reach = 2.0 ** ((1000 if factors.dtype == torch.float64 else 120) / highest)
    possible = (factors > 1 / reach) & (factors < reach)
    return torch.where(possible, factors, torch.ones_like(factors)), possible


def require_count(name: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of {unit}, at least 1")


class Rebalancer:
    """Keeps the exact pairs of a model balanced during training: SAGGS, and Soft SAGGS where damping < 1.

        rebalancer = Rebalancer(model, optimizer, every=10)
        for batch in batches:
            rebalancer.step()
            ...; optimizer.step(); optimizer.zero_grad()

    Call `step` at the top of every training step: the first call balances, and every `every`-th one after it, so that
    no update is made from an unbalanced start.

    Args:
        model: the model in training, wrapped or not.
        optimizer: its state is carried along; a list of several is one too. May be None with transport=False.
        pairs: from `find_pairs`; the kinds that the papers balance, found (and certified) anew, where None. At any
            granularity; pairs that share entries are balanced by sweeps.
        every: calls of `step` from one balancing to the next; 1 balances before every optimizer step.
        damping: alpha in (0, 1]; 1 equalises norms, less closes that share of the log-gap each time.
        transport: carry the optimizer's state. False moves the weights alone (an ablation, rarely what you want).
        norm: "l2" or "l1", what is minimised; see `balance`.
        factors: "exact", "power_of_two" or None, which is chosen by dtype; see `balance`. Damped factors of less than
            half an octave round to 1: damping and powers of two together stop short of balance.
        sweeps: at each event, for pairs that share entries: a fixed number, so that no event waits for the device.
            None is 5. Each needs a pass over copies of these weights.

    Attributes:
        steps: calls of `step` so far.
        unbalanced: 0-dimensional tensor: how many pairs the last event left alone for a zero or non-finite norm.
        imprecise: the same for gains 1 + w in bfloat16 or float16 that it brought near w = -1.

    Raises:
        ValueError: a setting out of its range, no pairs, or an optimizer whose state cannot be carried or that holds
            none of the pairs' parameters.

    Source: the SAGGS paper (Kim, 2026); period and damping are free choices there and here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None,
        pairs: Sequence[ScalePair] | None = None,
        *,
        every: int = 10,
        damping: float = 1.0,
        transport: bool = True,
        norm: Norm = "l2",
        factors: Rounding | None = None,
        sweeps: int | None = None,
    ) -> None:
        require_count("every", every, "steps")
        if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0.0 < damping <= 1.0:
            raise ValueError(f"damping={damping!r} must lie in (0, 1]: 1 is hard balancing")
        self._order = order_of(norm)
        if factors not in (None, "exact", "power_of_two"):
            raise ValueError(f"factors={factors!r}: choose exact, power_of_two, or None to choose by dtype")
        if sweeps is not None:
            require_count("sweeps", sweeps, "sweeps")
        if transport and optimizer is None:
            raise ValueError("transport=True needs the optimizer; pass it, or transport=False")
        self.pairs = list(find_pairs(model, BALANCED_KINDS) if pairs is None else pairs)
        if not self.pairs:
            raise ValueError("the model has no exact pair to balance; train it without a Rebalancer")
        parameters = named_parameters(model)
        self._plan = ScalingPlan(self.pairs, parameters)
        if transport and optimizer is not None:
            _transport.require_transportable(optimizer, self.pairs, parameters)
        warn_of_float16(self._plan, parameters)
        if sweeps not in (None, 1) and not self._plan.overlapping:
            warnings.warn(f"sweeps={sweeps} has no effect: no pairs share an entry, one pass is exact", stacklevel=2)
        self.every = every
        self.damping = float(damping)
        self.transport = transport
        self.norm = norm
        self.factors = factors
        self.sweeps = (sweeps or SWEEPS) if self._plan.overlapping else 1
        self.steps = 0
        self._model = model
        self._optimizer = optimizer if transport else None
        self.unbalanced = torch.zeros((), dtype=torch.int64)
        self.imprecise = torch.zeros((), dtype=torch.int64)

    def step(self) -> bool:
        """Balance if it is due, and count one training step. Returns whether it balanced."""
        due = self.steps % self.every == 0
        if due:
            self.rebalance()
        self.steps += 1
        return due

    def rebalance(self) -> Tensor:
        """Balance every pair now, whatever the period; returns the factors, shape (pairs,). No host sync."""
        return self._event(self.sweeps)[0]

    @torch.no_grad()
    def _event(self, sweeps: int, tolerance: float | None = None) -> tuple[Tensor, float]:
        """One event: the factors; and how far the last sweep was from the tolerance: its largest |log factor|, or 0.

        Without a tolerance all sweeps are made, and nothing waits for the device.
        """
        plan, parameters = self._plan, named_parameters(self._model)  # anew: a parameter may have been replaced
        moving = plan.moving(parameters, self._optimizer)
        weights = {item.name: item.tensor for item in moving if item.is_weight}
        found, left_over = self._by_sweeps(weights, sweeps, tolerance)
        factors, possible = possible_factors(_damped(found, self.damping), plan.highest_power(moving))
        factors = self._rounded(factors, weights)
        counts = [count.to(factors.device) for count in plan.multiply(moving, plan.powers(moving, factors))]
        self.unbalanced = (~possible).sum()
        self.imprecise = torch.stack(counts).sum() if counts else torch.zeros_like(self.unbalanced)
        return factors, left_over

    def _by_sweeps(self, weights: Mapping[str, Tensor], sweeps: int, tolerance: float | None) -> tuple[Tensor, float]:
        """The factors that balance, shape (pairs,), NaN for pairs that have none; and what `_event` returns."""
        plan, order, dtype = self._plan, self._order, self._plan.norm_dtype(weights)
        if not plan.overlapping:
            ((_, one),) = plan.rounds
            return one.terms.factors(one.norms(weights, order, dtype), order), 0.0
        copies = {name: weights[name].to(dtype, copy=True) for name in sorted(plan.weighed)}
        total = next(iter(copies.values())).new_ones(len(self.pairs))
        moving, left_over = weights_as_moving(copies), 0.0
        for _ in range(sweeps):
            largest = []
            for at, one in plan.rounds:
                index = at.on(total.device) if at is not None else ...
                factors, possible = possible_factors(
                    one.terms.factors(one.norms(copies, order, dtype), order), plan.highest
                )
                one.multiply(moving, Powers(factors, plan.highest))
                total[index] *= torch.where(possible, factors, torch.nan)
                largest.append(factors.log().abs().max())
            if tolerance is not None:
                left_over = float(torch.stack(largest).max())
                if left_over <= max(tolerance, 32 * torch.finfo(dtype).eps):
                    return total, 0.0
        return total, left_over

    def _rounded(self, factors: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The factors, to the nearest power of two where the setting, or a pair's dtype, asks for it."""
        if self.factors == "exact":
            return factors
        if self.factors == "power_of_two":
            return nearest_power_of_two(factors)
        coarse = self._plan.in_bfloat16(weights, factors.device)
        return factors if coarse is None else torch.where(coarse, nearest_power_of_two(factors), factors)

    def state_dict(self) -> dict[str, Any]:
        """The counter and the settings it belongs to, as plain values. Settings at their defaults may be left out."""
        chosen = {name: value for name, value in self._settings().items() if value != _DEFAULTS.get(name)}
        return {"steps": self.steps, **chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting where `state` stopped. Raises a ValueError where it belongs to other settings."""
        for name, value in self._settings().items():
            saved = state.get(name, _DEFAULTS.get(name))
            if saved != value:
                raise ValueError(
                    f"the saved Rebalancer has {name}={saved!r}, this one {value!r}; "
                    "build it with the same settings, or start a new one"
                )
        steps = state.get("steps")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"the saved Rebalancer has steps={steps!r}, which counts no steps")
        self.steps = steps

    def _settings(self) -> dict[str, Any]:
        names = ("every", "damping", "transport", "norm", "factors", "sweeps")
        return {**{name: getattr(self, name) for name in names}, "pairs": labels_of(self.pairs)}


# Left out of saved states: those of earlier versions, which had no such settings, hold the defaults.
_DEFAULTS: dict[str, Any] = {"norm": "l2", "factors": None, "sweeps": 1}


def labels_of(pairs: Sequence[ScalePair]) -> list[str]:
    """ "kind:path" of every pair, and its first left slice where a path has several of one kind."""
    names = [f"{pair.kind}:{pair.path}" for pair in pairs]
    several = Counter(names)
    return [f"{name}:{pair.left[0]}" if several[name] > 1 else name for name, pair in zip(names, pairs, strict=True)]
