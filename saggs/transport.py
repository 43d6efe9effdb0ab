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
from saggs.rehearsal import RehearsalError, copies_of, entries
from saggs.state_rules import TOLERANCE, StateRule, StateRules, measure

_SIDE, _LARGER_SIDE = 12, 136  # the larger one lies above the sizes from which some factor their second moments

_Key = tuple[object, ...]
_measured: WeakKeyDictionary[torch.optim.Optimizer, dict[_Key, StateRules]] = WeakKeyDictionary()
_of_classes: dict[_Key, StateRules] = {}


class Carried(NamedTuple):
    """A state tensor that moves with its weight: s -> (factor ** exponent) ** degree s.

    `like_weight` where it has the weight's shape, so that slices of the one are slices of the other.
    """

    tensor: Tensor
    degree: int
    like_weight: bool


class Carrier:
    """The state of one optimizer, as it can be carried now. Made anew for every event, at no cost to speak of."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer updates this parameter."""
        return id(parameter) in self._group_of

    def rules(self, parameter: nn.Parameter, side: int = _SIDE) -> StateRules:
        """What was measured for the parameter's group and shape; now, if it was not yet.

        Raises:
            ValueError: the optimizer cannot be rehearsed.
        """
        group, optimizer = self._group_of[id(parameter)], self._optimizer
        shape = tuple(min(size, side) for size in parameter.shape)
        key = (shape, *_settings(group))
        known = _measured.setdefault(optimizer, {})
        if key not in known:
            of_class = (type(optimizer), *key) if _is_plain(optimizer) else None
            if of_class not in _of_classes:
                try:
                    rules = measure(copies_of(optimizer, group), shape)
                except RehearsalError as error:
                    raise ValueError(
                        f"cannot carry the state of {_name(optimizer)} through a rescaling: a copy of it could not be "
                        f"measured ({error}). {_REMEDY}"
                    ) from error
                if of_class is None:
                    known[key] = rules
                    return rules
                _of_classes[of_class] = rules
            assert of_class is not None
            known[key] = _of_classes[of_class]
        return known[key]

    def tensors(self, parameter: nn.Parameter, whole: bool = False) -> list[Carried]:
        """The state tensors that move with the parameter; empty before the first step and where it is not owned.

        Args:
            parameter: of the model.
            whole: it is rescaled as a whole, and no part of it by itself.

        Raises:
            ValueError: a state that cannot be carried so.
        """
        if not self.owns(parameter) or not self._optimizer.state.get(parameter):
            return []
        present = dict(entries(self._optimizer.state[parameter]))
        rules = self.rules(parameter)
        if not _describes(rules, present, parameter):
            rules = self.rules(parameter, _LARGER_SIDE)
        if reason := rules.refusal(sliced=not whole):
            raise ValueError(_refused(self._optimizer, reason))
        found = []
        for name, value in present.items():
            rule = rules.entries.get(name)
            if rule is None or (isinstance(value, Tensor) and rule.like_weight != (value.shape == parameter.shape)):
                raise ValueError(
                    _refused(self._optimizer, f"its state {name!r} is another one than in a rehearsal (measured: "
                             f"{', '.join(rules.entries) or 'none'})")
                )  # fmt: skip
            if isinstance(value, Tensor) and rule.moves and self._moves(name, value, rule):
                assert rule.degree is not None
                found.append(Carried(value, rule.degree, rule.like_weight))
        return found

    def _moves(self, name: str, value: Tensor, rule: StateRule) -> bool:
        if rule.empty and bool(value.any()):
            raise ValueError(_refused(self._optimizer, f"its state {name!r} was zero in a rehearsal and is not here"))
        return not rule.empty and rule.degree != 0


def require_transportable(
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[ScalePair] = (),
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> None:
    """Raise a ValueError where the optimizer's state cannot be carried through a rescaling.

    Args:
        optimizer: any.
        pairs: what is to be rescaled; without them only what holds for whole tensors is asked.
        parameters: the model's, by name; needed with pairs. One at least has to be the optimizer's: all of them absent
            is a mistake that nothing else would show. (Frozen ones may be.)

    Warns:
        UserWarning: coupled weight decay, or eps and clamps of another degree: carrying is only approximate.
    """
    carrier, whole = Carrier(optimizer), whole_parameters(pairs)
    asked: dict[int, tuple[nn.Parameter, bool]] = {}
    for pair in pairs:
        for part in pair.slices:
            parameter = parameter_of(parameters or {}, part)
            asked[id(parameter)] = parameter, part.name in whole
    owned = [(p, w) for p, w in asked.values() if carrier.owns(p)]
    if asked and not owned:
        raise ValueError(
            f"the {type(optimizer).__name__} holds none of the pairs' parameters; pass the optimizer of this very model"
        )
    if not asked:
        owned = [(p, True) for group in optimizer.param_groups for p in group["params"]]
    warned: set[str] = set()
    for parameter, as_whole in owned:
        rules = carrier.rules(parameter)
        if reason := rules.refusal(sliced=not as_whole):
            raise ValueError(_refused(optimizer, reason))
        warned.add(_doubt(optimizer, carrier, parameter, rules))
    for doubt in sorted(warned - {""}):
        warnings.warn(doubt, stacklevel=levels_to_caller())


def require_positive(optimizer: torch.optim.Optimizer, pair: ScalePair, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise a ValueError where the optimizer's state cannot follow a negative factor of this pair."""
    carrier = Carrier(optimizer)
    for part in pair.slices:
        parameter = parameter_of(parameters, part)
        if carrier.owns(parameter) and (name := carrier.rules(parameter).positive_only):
            raise ValueError(
                f"{pair}: the state {name!r} of {_name(optimizer)} cannot follow a negative factor; use a positive one"
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


def _doubt(optimizer: torch.optim.Optimizer, carrier: Carrier, parameter: nn.Parameter, rules: StateRules) -> str:
    """What is to be warned of; "" where the state is carried exactly."""
    name = type(optimizer).__name__
    if rules.decay_mixes:
        decay = carrier._group_of[id(parameter)].get("weight_decay", "")
        return (
            f"{name} with coupled weight decay {decay} mixes weights into its moments; carrying them is only "
            "approximate. Decoupled decay (AdamW) is exact"
        )
    if rules.inexact > TOLERANCE:
        return (
            f"the state of {name} is carried to {rules.inexact:.0e} of itself only, at gradients of order 1: its "
            "settings (eps, clamps) add terms that do not scale"
        )
    return ""


def _describes(rules: StateRules, present: Mapping[str, Any], parameter: nn.Parameter) -> bool:
    """Whether these are the states, in these shapes, that were measured."""
    return all(
        name in rules.entries
        and (not isinstance(value, Tensor) or rules.entries[name].like_weight == (value.shape == parameter.shape))
        for name, value in present.items()
    )


def _settings(group: Mapping[str, Any]) -> list[object]:
    """What of a group's settings can change a degree: whether numbers are zero, and all that is no number."""
    return [
        (name, bool(value) if isinstance(value, int | float | Tensor) else repr(value))
        for name, value in sorted(group.items())
        if name not in ("params", "param_names", "lr", "initial_lr")
    ]


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that it is stands in its param groups: PyTorch's own classes."""
    return type(optimizer).__module__.startswith("torch.optim.")


__all__ = ["Carried", "Carrier", "require_transportable"]
