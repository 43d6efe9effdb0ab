"""Carrying an optimizer's state along when a weight is multiplied by c: every state s -> c^k s.

k is measured on a copy of the very optimizer, with its settings (`saggs.state_rules`): once for each param group and
each shape of its weights, all sides above a dozen counting as a dozen, in some hundredths of a second. What cannot be
carried is refused by name before anything changes: an optimizer whose states couple weights, have no degree, or see
whole tensors where a pair rescales a part of one (a head, a channel, the queries in a fused matrix).

Carrying the state makes it what it would have been on the rescaled weights. It does not make the *updates* follow:
AdamW moves c A by as much as A (see `saggs.reference`); that is what balancing is for.

Source: the SAGGS paper (Kim, 2026) for Adam's two moments; all else is ours.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from saggs.pairs import ParameterSlice, ScalePair, parameter_of
from saggs.rehearsal import RehearsalError, copies_of, entries, settings_of
from saggs.state_rules import TOLERANCE, StateRule, StateRules, measure

_SIDE, _LARGER_SIDE = 12, 136  # the larger one lies above the sizes from which some factor their second moments

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer, or several that share a model (Muon for its matrices, AdamW for the rest)."""

_Key = tuple[object, ...]
_of_optimizers: WeakKeyDictionary[torch.optim.Optimizer, dict[_Key, StateRules]] = WeakKeyDictionary()
_of_classes: dict[_Key, StateRules] = {}


class Carried(NamedTuple):
    """A state tensor that moves with its weight: s -> (factor ** exponent) ** degree s.

    `like_weight` where it has the weight's shape, so that slices of the one are slices of the other.
    """

    tensor: Tensor
    degree: int
    like_weight: bool


class Carrier:
    """The state of one or several optimizers, as it can be carried now. Made anew for every event, at little cost."""

    def __init__(self, optimizers: Optimizers) -> None:
        each = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._owners = {id(p): (one, group) for one in each for group in one.param_groups for p in group["params"]}
        self._settings = {id(group): _settings(one, group) for one in each for group in one.param_groups}
        self.parameters = [p for one in each for group in one.param_groups for p in group["params"]]
        self.name = " and ".join(type(one).__name__ for one in each)

    def owner(self, parameter: nn.Parameter) -> tuple[torch.optim.Optimizer, dict[str, Any]] | None:
        """The optimizer that updates this parameter and the param group it is in; None where there is none."""
        return self._owners.get(id(parameter))

    def rules(self, parameter: nn.Parameter, side: int = _SIDE) -> StateRules:
        """What was measured for the parameter's group and shape; now, if it was not yet.

        Raises:
            ValueError: the optimizer cannot be rehearsed.
        """
        optimizer, group = self._owners[id(parameter)]
        shape = tuple(min(size, side) for size in parameter.shape)
        # What PyTorch's own classes are stands in their groups; any other may differ by what it holds besides.
        plain = type(optimizer).__module__.startswith("torch.optim.")
        known = _of_classes if plain else _of_optimizers.setdefault(optimizer, {})
        key = (type(optimizer), shape, self._settings[id(group)])
        if key not in known:
            try:
                known[key] = measure(copies_of(optimizer, group), shape)
            except RehearsalError as error:
                reason = f"a copy of it could not be measured ({error})"
                raise ValueError(_refused(optimizer, reason)) from error
        return known[key]

    def tensors(self, parameter: nn.Parameter, whole: bool = False) -> list[Carried]:
        """The state tensors that move with the parameter; empty before the first step and where it is not owned.

        Args:
            parameter: of the model.
            whole: it is rescaled as a whole, and no part of it by itself.

        Raises:
            ValueError: a state that cannot be carried so.
        """
        owner = self.owner(parameter)
        if owner is None or not owner[0].state.get(parameter):
            return []
        optimizer = owner[0]
        present = dict(entries(optimizer.state[parameter]))
        rules = self.rules(parameter)
        if _undescribed(rules, present, parameter):
            rules = self.rules(parameter, _LARGER_SIDE)
        if reason := rules.refusal(sliced=not whole):
            raise ValueError(_refused(optimizer, reason))
        if name := _undescribed(rules, present, parameter):
            measured = ", ".join(rules.entries) or "none"
            reason = f"its state {name!r} is another one than in a rehearsal (measured: {measured})"
            raise ValueError(_refused(optimizer, reason))
        found = []
        for name, value in present.items():
            degree, like_weight = rules.entries[name].degree, rules.entries[name].like_weight
            if isinstance(value, Tensor) and _moves(optimizer, name, value, rules.entries[name]):
                assert degree is not None
                found.append(Carried(value, degree, like_weight))
        return found


def _moves(optimizer: torch.optim.Optimizer, name: str, value: Tensor, rule: StateRule) -> bool:
    if rule.moves and rule.empty and bool(value.any()):
        raise ValueError(_refused(optimizer, f"its state {name!r} was zero in a rehearsal and is not here"))
    return rule.moves and not rule.empty and rule.degree != 0


def require_transportable(
    optimizer: Optimizers,
    pairs: Sequence[ScalePair] = (),
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> None:
    """Raise a ValueError where the optimizer's state cannot be carried through a rescaling.

    Args:
        optimizer: any, or several.
        pairs: what is to be rescaled; without them only what holds for whole tensors is asked.
        parameters: the model's, by name; needed with pairs. One at least has to be the optimizer's: all of them absent
            is a mistake that nothing else would show. (Frozen ones may be.)

    Warns:
        UserWarning: coupled weight decay, or eps and clamps of another degree: carrying is only approximate.
    """
    carrier, whole = Carrier(optimizer), whole_parameters(pairs)
    parts = {part.name: part for pair in pairs for part in pair.slices}
    asked = [(parameter_of(parameters or {}, part), name in whole) for name, part in parts.items()]
    owned = [(p, w) for p, w in asked if carrier.owner(p) is not None]
    if asked and not owned:
        raise ValueError(
            f"the {carrier.name} holds none of the pairs' parameters; pass the optimizer of this very model"
        )
    doubts: dict[str, None] = {}
    for parameter, as_whole in owned if asked else [(p, True) for p in carrier.parameters]:
        rules, owner = carrier.rules(parameter), carrier.owner(parameter)
        assert owner is not None
        if reason := rules.refusal(sliced=not as_whole):
            raise ValueError(_refused(owner[0], reason))
        doubts[_doubt(*owner, rules)] = None
    for doubt in filter(None, doubts):
        warnings.warn(doubt, stacklevel=levels_to_caller())


def require_positive(optimizer: Optimizers, pair: ScalePair, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise a ValueError where the optimizer's state cannot follow a negative factor of this pair."""
    carrier = Carrier(optimizer)
    for part in pair.slices:
        parameter = parameter_of(parameters, part)
        owner = carrier.owner(parameter)
        if owner is not None and (name := carrier.rules(parameter).positive_only):
            raise ValueError(
                f"{pair}: the state {name!r} of {_name(owner[0])} cannot follow a negative factor; use a positive one"
            )


def whole_parameters(pairs: Iterable[ScalePair]) -> set[str]:
    """Names of the parameters that no pair takes a part of."""
    parts: list[ParameterSlice] = [part for pair in pairs for part in pair.slices]
    return {part.name for part in parts} - {part.name for part in parts if not part.is_whole()}


def levels_to_caller() -> int:
    """How many frames up the first one outside this package is, for a warning to point at."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "saggs":
        level, frame = level + 1, frame.f_back
    return level


_REMEDY = "Leave its state alone (no optimizer here; transport=False for a Rebalancer), or use another optimizer"


def _refused(optimizer: torch.optim.Optimizer, reason: str) -> str:
    return f"cannot carry the state of {_name(optimizer)} through a rescaling: {reason}. {_REMEDY}"


def _name(optimizer: torch.optim.Optimizer) -> str:
    return (
        f"{type(optimizer).__module__.removesuffix(f'.{type(optimizer).__name__.lower()}')}.{type(optimizer).__name__}"
    )


def _doubt(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rules: StateRules) -> str:
    """What is to be warned of; "" where the state is carried exactly."""
    name = type(optimizer).__name__
    if rules.decay_mixes:
        return (
            f"{name} with coupled weight decay {group.get('weight_decay', '')} mixes weights into its moments; "
            "carrying them is only approximate. Decoupled decay (AdamW) is exact"
        )
    if rules.inexact > TOLERANCE:
        return (
            f"the state of {name} is carried to {rules.inexact:.0e} of itself only, at gradients of order 1: its "
            "settings (eps, clamps) add terms that do not scale"
        )
    return ""


def _undescribed(rules: StateRules, present: Mapping[str, Any], parameter: nn.Parameter) -> str:
    """The first state that was not measured, or in another shape; "" where there is none."""
    for name, value in present.items():
        rule = rules.entries.get(name)
        if rule is None or (isinstance(value, Tensor) and rule.like_weight != (value.shape == parameter.shape)):
            return name
    return ""


def _settings(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[object, ...]:
    """What of a group's settings can change a degree: whether numbers are zero, and all that is no number."""
    return tuple(
        (name, bool(value) if isinstance(value, int | float) else repr(value))
        for name, value in sorted(settings_of(optimizer, group).items())
        if name not in ("lr", "initial_lr") and not isinstance(value, Tensor)
    )


__all__ = ["Carried", "Carrier", "Optimizers", "require_transportable"]
