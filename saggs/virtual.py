"""The balanced point's update, without moving a weight: what hard balancing at every step does, left in place.

The idea
--------
A pair (A, B) and (c A, B / c) compute the same function, and an optimizer treats them differently. `saggs.Rebalancer`
answers by moving the weights to the balanced point of their orbit. One need not move them: it is enough to make *the
step that the optimizer would make there*, and to apply it here. With c = (|A| / |B|)^(1/2), of the weights as they
are, the balanced point is (A / c, c B), and where the optimizer would change A / c by D, A changes by c D:

    balanced = saggs.BalancedUpdate(model, optimizer)
    for batch in batches:
        loss(batch).backward()
        balanced.step(max_norm=1.0)                               # in the place of clipping and optimizer.step()
        optimizer.zero_grad()

The identity
------------
The run is then, step by step, the run of a `Rebalancer` of the same period, damping and norm, seen from another point
of the orbit: the same function, the same losses, the same balanced weights, however unbalanced it began. In terms of
settings it is this recipe (PyTorch multiplies decay by the rate; B has 1 / c in the place of c):

    AdamW                   rate c        eps / c        decay / c                        moments as they are
    Adam with coupled L2    rate c        eps / c        L2 / c^2
    SGD, momentum, L2       rate c^2                     L2 / c^2
    clipping                by the norm of the balanced gradients, (c G_A, G_B / c)

But no rule is written down here. Weights, gradients and state are taken to the balanced point (the group action of
`saggs.plan`), the optimizer steps there, all comes back, and each line of the recipe comes out by itself: also for
optimizers that nobody made a recipe for, and for slices of fused tensors, which no parameter group could express.

How it comes back
-----------------
Going there and back would round every weight twice a step. So its bits stay where they are and the *change* comes back:

    x  <-  x - c (y - y')        y: x at the balanced point, before the step;  y': after it

What the step left alone keeps its bits, and powers of two are exact: runs from (2^k A, B / 2^k) and (A, B) agree in
every bit. Where the change is more than half of y' the difference would cancel, and y' itself comes back.

State comes back by its change where it is a copy of weights, or narrower than float32. What else there is (moments)
goes there and back: an average forgets its roundings. The relative error against float64, after 1000 steps on given
gradients, c wandering by 1 % a step about 27:

                                    plain optimizer    there and back    by the change    left at the balanced point
    float32   first moment          6e-8               1.2e-7            1.0e-7           1.0e-7
    float32   second moment         1.0e-5             1.0e-5            1.0e-5           0.7e-5
    float32   AMSGrad's maximum     1.3e-6             1.5e-6            1.3e-6           2.3e-6
    bfloat16  second moment         1.0                2.2               1.0              3.6
    bfloat16  AMSGrad's maximum     0.08               0.7               0.07             1.4

and of a whole run (a small Llama, AdamW, 1000 steps, float32 against float64, all weights and moments): 3e-2, where a
`Rebalancer`'s is 5e-2. Training amplifies roundings; these are no more.

Conditions
----------
* Pairs share no entry: others have no balanced point in closed form, sweeps only come near it. They are refused.
* The optimizer's state can be carried (`saggs.transport`), and it holds every trainable parameter of the pairs. It may
  be a list of several (Muon for matrices, AdamW for the rest): all of them step at the balanced point.
* Gains used as 1 + w are fine: the change of w' = s (1 + w) - 1 is what comes back.
* Where a pair has a slice in bfloat16 its factor is the nearest power of two, as a `Rebalancer`'s is.
* Gradients are those of the weights as they are: accumulated, unscaled and all-reduced, but not clipped. They keep
  their bits. No closure: it would be called at the balanced point, in the middle of the step.

Cost
----
On one CPU thread, Llamas of 1.5M and 17M parameters, in times of clipping and a fused AdamW step (about 1 % of a
training step): a `Rebalancer` of period 1 makes it 1.4 to 1.8, this 4.5 to 11, the less the more of the freed memory
the allocator keeps; in times of AdamW without fusion 1.1 to 1.8 and 4 to 6. And, while it steps, memory for one more
copy of weights, gradients and state. Where that is too much, a `Rebalancer` makes the same run and moves the weights.

Source: ours. The balanced point is the SAGGS paper's (Kim, 2026).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saggs import transport
from saggs.balancing import labels_of, possible_factors, require_count
from saggs.discovery import find_pairs
from saggs.lines import NARROW, Moving, Powers
from saggs.objective import Norm, nearest_power_of_two, order_of
from saggs.pairs import BALANCED_KINDS, ScalePair, named_parameters, parameter_of
from saggs.plan import ScalingPlan
from saggs.rescaling import warn_of_float16
from saggs.transport import Optimizers

_AT_ONCE = 2**20
"""Entries that come back at once: enough to keep a device busy, and nothing beside a model."""


class BalancedUpdate:
    """Makes the optimizer's step as it would be at the balanced point, and leaves the weights where they are.

    Call `step` where `optimizer.step()` (and `clip_grad_norm_`) would be called; everything else stays as it was.

    Args:
        model: the model in training, wrapped or not.
        optimizer: any whose state can be carried, or several. Schedules work as ever; hooks see the balanced point.
        pairs: from `find_pairs`, none sharing an entry with another; the kinds that the papers balance, found (and
            certified) anew, where None.
        every: steps from one choice of c to the next; in between c is held.
        damping: alpha in (0, 1]; below 1, c goes a part of the way: c <- c ((|A| / |B|) / c^2)^(alpha / 2), from 1.
        norm: "l2" or "l1", what is least at the balanced point; see `balance`.

    Attributes:
        steps: steps made so far.
        factors: shape (pairs,), what takes the weights as they are to where the last step was made: 1 / c.
        unbalanced: 0-dimensional tensor: how many pairs kept their factor at the last choice, since a norm is zero or
            not finite.

    Raises:
        ValueError: a setting out of its range, no pairs, pairs that share entries, an optimizer whose state cannot be
            carried, or that does not hold every trainable parameter of the pairs.

    Source: ours.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        pairs: Sequence[ScalePair] | None = None,
        *,
        every: int = 1,
        damping: float = 1.0,
        norm: Norm = "l2",
    ) -> None:
        require_count("every", every, "steps")
        if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0.0 < damping <= 1.0:
            raise ValueError(f"damping={damping!r} must lie in (0, 1]: 1 is hard balancing")
        self._order = order_of(norm)
        self.pairs = list(find_pairs(model, BALANCED_KINDS) if pairs is None else pairs)
        if not self.pairs:
            raise ValueError("the model has no exact pair to balance; call optimizer.step() itself")
        parameters = named_parameters(model)
        self._plan = ScalingPlan(self.pairs, parameters)
        _require_disjoint(self._plan)
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        transport.require_transportable(self._optimizers, self.pairs, parameters)
        _require_all_owned(self._optimizers, self.pairs, parameters)
        _require_no_closure(self._optimizers)
        warn_of_float16(self._plan, parameters)
        self.every = every
        self.damping = float(damping)
        self.norm = norm
        self.steps = 0
        self.factors = torch.ones(len(self.pairs), dtype=torch.float64)
        self.unbalanced = torch.zeros((), dtype=torch.int64)
        self._model = model

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> Tensor | None:
        """One step of the optimizer, as at the balanced point. Nothing in it waits for the device.

        Args:
            max_norm: clip the balanced gradients of all that the optimizer holds to this norm; infinity only measures
                it. None does neither.

        Returns:
            The norm of the balanced gradients before clipping, 0-dimensional; None without `max_norm`.

        Raises:
            ValueError: `max_norm` is no positive number, or a closure.
            Exception: whatever the optimizer raises. Weights, gradients and state are then as they were, to the bit,
                and the step does not count.
        """
        _require_norm(max_norm)
        before = _Before(self._optimizers)
        try:
            parameters = named_parameters(self._model)
            stepped = before.lend_gradients()
            there = self._moving(parameters, stepped)
            factors, unbalanced = self._chosen(parameters, there)
            self._plan.multiply(there, self._plan.powers(there, factors))
            total = None if max_norm is None else torch.nn.utils.clip_grad_norm_(stepped, max_norm)
            for optimizer in self._optimizers:
                optimizer.step()
            self._come_back(parameters, stepped, factors, before)
        except BaseException:
            before.restore()
            raise
        self.factors, self.unbalanced = factors, unbalanced
        self.steps += 1
        return total

    def _moving(self, parameters: Mapping[str, nn.Parameter], stepped: Sequence[nn.Parameter]) -> list[Moving]:
        """What goes to the balanced point: of every parameter that has a gradient, weight, gradient and state."""
        own = {id(parameter) for parameter in stepped}
        moving = self._plan.moving(parameters, self._optimizers)
        return [item for item in moving if id(parameters[item.name]) in own]

    def _chosen(self, parameters: Mapping[str, nn.Parameter], moving: Sequence[Moving]) -> tuple[Tensor, Tensor]:
        """The factors of this step, and how many pairs have none of their own: where a `Rebalancer` would be by now."""
        plan, weights = self._plan, self._plan.weights(parameters)
        device, dtype = weights[min(plan.weighed)].device, plan.norm_dtype(weights)
        held, hard = self.factors.to(device, dtype), self.damping == 1.0
        if self.steps % self.every:
            return held, self.unbalanced
        ((_, one),) = plan.rounds
        full = one.terms.factors(one.norms(weights, self._order, dtype), self._order)
        found = full if hard else (full / held) ** self.damping
        coarse = plan.in_bfloat16(weights, device)
        if coarse is not None:
            found = torch.where(coarse, nearest_power_of_two(found), found)
        factors, possible = possible_factors(found if hard else held * found, plan.highest_power(moving))
        return torch.where(possible, factors, held), (~possible).sum()

    def _come_back(
        self,
        parameters: Mapping[str, nn.Parameter],
        stepped: Sequence[nn.Parameter],
        factors: Tensor,
        before: _Before,
    ) -> None:
        """Bring weights and state back; the gradients that were lent are done with."""
        lent = {id(parameter.grad) for parameter in stepped}
        stayed = [item for item in self._moving(parameters, stepped) if id(item.tensor) not in lent]
        before.restore_gradients()
        powers = self._plan.powers(stayed, factors)  # anew: a first step makes state, of higher powers
        for chunk in _chunks(stayed):
            copies = [before.copy_of(parameters[i.name] if i.is_weight else i.tensor) for i in chunk]
            _bring_back(self._plan, powers, chunk, copies)

    def state_dict(self) -> dict[str, Any]:
        """The counter, every pair's factor and the settings they belong to, as plain values."""
        named = zip(labels_of(self.pairs), self.factors.tolist(), strict=True)
        return {"steps": self.steps, **self._settings(), "factors": dict(named)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` stopped. Raises a ValueError where it belongs to other settings or other pairs."""
        factors = state.get("factors")
        named = dict(factors) if isinstance(factors, Mapping) else {}
        saved = {**state, "pairs": list(named)}
        for name, value in {**self._settings(), "pairs": labels_of(self.pairs)}.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the saved BalancedUpdate has {name}={saved.get(name)!r}, this one {value!r}; "
                    "build it with the same settings, or start a new one"
                )
        steps = state.get("steps")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"the saved BalancedUpdate has steps={steps!r}, which counts no steps")
        for label, factor in named.items():
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
                raise ValueError(f"the saved factor of {label} is {factor!r}, not positive and finite; start a new one")
        self.steps = steps
        self.factors = torch.tensor(list(named.values()), dtype=torch.float64)

    def _settings(self) -> dict[str, Any]:
        return {"every": self.every, "damping": self.damping, "norm": self.norm}


class _Before:
    """Copies of what a step may change, to bring changes back by, and everything back where the step fails.

    State is kept whole, with its counters and the groups' own numbers: some optimizers have state in their groups.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id; with the original, so that no id is used again
        groups = [group for one in optimizers for group in one.param_groups]
        owned = [parameter for group in groups for parameter in group["params"]]
        self._gradients = [(parameter, parameter.grad) for parameter in owned if parameter.grad is not None]
        self._weights = [(parameter, self._copied(parameter)) for parameter, _ in self._gradients]
        held: list[dict[Any, Any]] = [*(one.state for one in optimizers), *groups]
        self._held = [(each, {k: self._copied(v) for k, v in each.items() if k != "params"}) for each in held]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._copies[id(value)] = value, value.detach().clone()
            return self._copies[id(value)][1]
        if isinstance(value, dict):
            return {key: self._copied(each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(each) for each in value)
        return value

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """What a weight or a tensor of the state was before; None for a tensor that was not there."""
        return self._copies[id(tensor)][1] if id(tensor) in self._copies else None

    def lend_gradients(self) -> list[nn.Parameter]:
        """Give every parameter a copy of its gradient to move and clip; returns those that have one."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.clone()
        return [parameter for parameter, _ in self._gradients]

    def restore_gradients(self) -> None:
        """Put the gradients themselves back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def restore(self) -> None:
        """Put everything back."""
        self.restore_gradients()
        for parameter, copy in self._weights:
            parameter.copy_(copy)
        for each, saved in self._held:
            for key in each.keys() - saved.keys() - {"params"}:
                del each[key]
            each.update(saved)


def _bring_back(
    plan: ScalingPlan, powers: Sequence[Powers], stayed: Sequence[Moving], copies: list[Tensor | None]
) -> None:
    """From the balanced point, where the tensors are now, by the change made there or as they are.

    Every entry of which the change is more than half comes back as it is: y - y' is exact up to that, and beyond it
    would cancel.
    """
    known = [(i, copy) for i, copy in zip(stayed, copies, strict=True) if copy is not None and _by_change(i)]
    changes = [item._replace(tensor=copy.clone()) for item, copy in known]
    plan.multiply(changes, powers)  # the arithmetic that moved the tensors, hence their very bits
    small = []
    for change, (item, _) in zip(changes, known, strict=True):
        change.tensor.sub_(item.tensor)
        small.append(change.tensor.abs().mul_(2) <= item.tensor.abs())
    plan.multiply([change._replace(degree=-change.degree, is_weight=False) for change in changes], powers)
    plan.multiply([item._replace(degree=-item.degree) for item in stayed], powers)
    for (item, copy), change, near in zip(known, changes, small, strict=True):
        # Subtracted, not added: what has not changed keeps the sign of a zero too.
        item.tensor.copy_(torch.where(near, torch.sub(copy, change.tensor, out=change.tensor), item.tensor))


def _by_change(item: Moving) -> bool:
    """Weights, copies of weights, and whatever is so narrow that rounding it twice a step would show."""
    return item.degree > 0 or item.tensor.dtype in NARROW


def _chunks(moving: Sequence[Moving]) -> Iterator[list[Moving]]:
    """The same in lists of about `_AT_ONCE` entries."""
    chunk: list[Moving] = []
    for item in moving:
        chunk.append(item)
        if sum(each.tensor.numel() for each in chunk) >= _AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _require_norm(max_norm: object) -> None:
    if callable(max_norm) and not isinstance(max_norm, Tensor):
        raise ValueError(
            f"max_norm={max_norm!r}: step takes no closure, which the optimizer would call at the balanced point, in "
            "the middle of the step. Call backward first, then step()"
        )
    wrong = isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0
    if max_norm is not None and wrong:
        raise ValueError(f"max_norm={max_norm!r} must be a positive number; None clips nothing, infinity only measures")


def _require_disjoint(plan: ScalingPlan) -> None:
    """Raise a ValueError that names two pairs that share an entry."""
    if not plan.overlapping:
        return
    first, second = plan.rounds[0][1].pairs, plan.rounds[1][1].pairs[0]
    shared = next((a, one) for one in first for a in one.slices for b in second.slices if a.overlaps(b))
    raise ValueError(
        f"{second} and {shared[1]} share entries of {shared[0]}: their balanced point is only approached, by sweeps, "
        "and no step is exactly the one made there. Leave one of the two out, or move the weights, by a Rebalancer"
    )


def _require_all_owned(
    optimizers: Sequence[torch.optim.Optimizer], pairs: Sequence[ScalePair], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Raise a ValueError where something else may step a parameter of the pairs, from another point of the orbit."""
    owned = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    for pair in pairs:
        for part in pair.slices:
            parameter = parameter_of(parameters, part)
            if parameter.requires_grad and id(parameter) not in owned:
                raise ValueError(
                    f"{pair}: no optimizer given here holds {part.name}, which trains; give all optimizers of the "
                    "model as a list, freeze it with requires_grad_(False), or leave the pair out"
                )


def _require_no_closure(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for one in optimizers:
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"{type(one).__name__}.step needs a closure, which it would call at the balanced point, in the middle "
                "of the step; use an optimizer that does without, or a Rebalancer"
            )
