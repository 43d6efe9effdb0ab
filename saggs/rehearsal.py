"""An optimizer rehearsed: a copy of it run on tiny weights with gradients that are laid down beforehand.

What an optimizer keeps, and how far it moves, is asked of the optimizer itself. A rehearsal is a pure function of
(how to build the optimizer, weights, gradients): the gradients do not depend on where the weights have gone, so that
two rehearsals differ by what was changed between them and by nothing else. Random draws are the same in all of them.

Source: ours.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Value = Tensor | float

_HOOKS = ("_optimizer_", "_zero_grad_profile_name", "_patch_step_function", "_warned_capturable_if_run_uncaptured")
_VARIANTS = ("fused", "foreach", "capturable", "differentiable")


class RehearsalError(ValueError):
    """An optimizer that cannot be rehearsed: it cannot be copied or built, or its step fails."""


@dataclass(frozen=True)
class Rehearsal:
    """What came of one run.

    Attributes:
        updates: for every step, the change of every weight.
        weights: the weights at the end.
        states: entry -> value, for every weight: tensors (also of lists and dictionaries, by their path) and numbers.
        shared: numbers and tensors that belong to no weight: of a param group, or of the optimizer itself.
    """

    updates: list[list[Tensor]]
    weights: list[Tensor]
    states: list[dict[str, Value]]
    shared: dict[str, Value]

    @property
    def finite(self) -> bool:
        """Whether weights and states are free of NaN and infinity."""
        values = [*self.weights, *(v for s in self.states for v in s.values() if isinstance(v, Tensor))]
        return all(bool(torch.isfinite(v).all()) for v in values if v.is_floating_point())


def rehearse(
    build: Build,
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    *,
    rate: float = 1.0,
    settings: Mapping[re.Pattern[str], float] | None = None,
    before_last: Callable[[torch.optim.Optimizer, list[nn.Parameter]], None] | None = None,
) -> Rehearsal:
    """Run a fresh optimizer over the gradients, one step each.

    Args:
        build: makes the optimizer from its parameters.
        weights: where it starts; copied.
        gradients: for every step, one gradient a weight.
        rate: multiplies the learning rates that it was built with (1e-3 in place of one that is 0).
        settings: patterns of the names of numbers in a group to overwrite; those of a tuple all alike.
        before_last: called with the optimizer and its parameters before the last step.

    Raises:
        RehearsalError: the optimizer cannot be built, or its step fails.
    """
    try:
        return _run(build, weights, gradients, rate, settings or {}, before_last, closure=False)
    except Exception as error:  # whatever a class may raise; it is named
        if "closure" not in str(error):
            raise RehearsalError(_named(error)) from error
    try:
        return _run(build, weights, gradients, rate, settings or {}, before_last, closure=True)
    except Exception as error:
        raise RehearsalError(_named(error)) from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _run(
    build: Build,
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    rate: float,
    settings: Mapping[re.Pattern[str], float],
    before_last: Callable[[torch.optim.Optimizer, list[nn.Parameter]], None] | None,
    closure: bool,
) -> Rehearsal:
    parameters = [nn.Parameter(w.clone()) for w in weights]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        optimizer = build(parameters)
        _adjust(optimizer, rate, settings)
        before = _numbers(optimizer)
        updates = [_step(optimizer, parameters, each, closure) for each in gradients[:-1]]
        if before_last is not None:
            before_last(optimizer, parameters)
        updates.append(_step(optimizer, parameters, gradients[-1], closure))
    after = _numbers(optimizer)
    shared = {name: v for name, v in after.items() if name not in before or not _same(v, before[name])}
    states = [{n: _kept(v) for n, v in entries(optimizer.state.get(p, {}))} for p in parameters]
    return Rehearsal(updates, [p.detach() for p in parameters], states, shared)


def copies_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Build:
    """Builds fresh copies of an optimizer, settings and attributes included, with one group and no state.

    Raises:
        RehearsalError: on building, where the optimizer cannot be copied: it keeps its weights in other places too.
    """
    cls = type(optimizer)

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        memo = {id(p): parameters[0] for g in optimizer.param_groups for p in g["params"]}
        keep = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups", "step")}
        attributes = {k: v for k, v in keep.items() if not k.startswith(_HOOKS)}
        own = settings_of(optimizer, group)
        if any(id(value) in memo for _, value in entries(attributes)):
            raise RehearsalError(f"{cls.__name__} keeps its weights in a list of its own, beside its param groups")
        fresh = cls.__new__(cls)
        fresh.__dict__.update(copy.deepcopy(attributes, memo))
        settings = {**copy.deepcopy(own, memo), **{k: False for k in _VARIANTS if k in own}}
        # As unpickling does it: the class's own __setstate__ fills in hooks and what older versions lacked.
        state = defaultdict(
            dict, {k: copy.deepcopy(v) for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
        )
        fresh.__setstate__({"state": state, "param_groups": [{"params": parameters, **settings}], "defaults": {}})
        fresh.defaults = dict(attributes.get("defaults", {}))
        if not isinstance(getattr(fresh, "_optimizer_step_pre_hooks", None), OrderedDict):
            raise RehearsalError(f"{cls.__name__} does not restore what every optimizer has")
        return fresh

    return build


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters and counters: whole numbers that the class's defaults do not name.

    A copy starts from step 0, whenever it is made, and what is measured on it does not depend on when that was.
    """
    return {
        name: value
        for name, value in group.items()
        if name not in ("params", "param_names")
        and (name in optimizer.defaults or not isinstance(value, int) or isinstance(value, bool))
    }


def draw(
    shapes: Sequence[Sequence[int]], steps: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Random weights (normal, of standard deviation 0.5) and gradients for a rehearsal.

    Gradients are standard normal noise about a mean of that size, so that what estimates distances sees progress.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)

    weights, common = [0.5 * normal(s) for s in shapes], [normal(s) for s in shapes]
    return weights, [[normal(s) + c for s, c in zip(shapes, common, strict=True)] for _ in range(steps)]


def _step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], each: Sequence[Tensor], closure: bool
) -> list[Tensor]:
    before = [p.detach().clone() for p in parameters]

    def loss() -> float:
        """Gradients that do not depend on the weights, and a loss that does not either."""
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
        return 1.0

    loss()
    if closure:
        optimizer.step(loss)
    else:
        optimizer.step()
    return [p.detach() - b for p, b in zip(parameters, before, strict=True)]


def _adjust(optimizer: torch.optim.Optimizer, rate: float, settings: Mapping[re.Pattern[str], float]) -> None:
    """Set what a rehearsal asks for in every param group."""
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), int | float | Tensor):
            group["lr"] = (group["lr"] or 1e-3) * rate
        for name, old in list(group.items()):
            for pattern, value in settings.items():
                if pattern.match(name) and isinstance(old, int | float | tuple | list) and not isinstance(old, bool):
                    group[name] = type(old)(value for _ in old) if isinstance(old, tuple | list) else value


def entries(state: Any, path: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Value]]:
    """Tensors (themselves, not copies) and numbers in nested dictionaries, lists, queues and objects, by their path.

    `within`: the objects that lead here, which are not entered again.
    """
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, bool | int | float):
        yield path, float(state)
    elif isinstance(state, Mapping):
        for index, (key, value) in enumerate(state.items()):
            name = (
                key
                if isinstance(key, str)
                else f"#{key}"
                if isinstance(key, float | int) and key < 1e6
                else f"[{index}]"
            )
            yield from entries(value, f"{path}.{name}" if path else name, within)
    elif isinstance(state, list | tuple | deque):
        for index, value in enumerate(state):
            yield from entries(value, f"{path}[{index}]", within)
    elif _is_container(state) and id(state) not in within:
        yield from entries(vars(state), path, (*within, id(state)))


def _is_container(state: Any) -> bool:
    """Whether it is an object that may hold tensors, and neither a class, function, module nor optimizer."""
    holds = isinstance(getattr(state, "__dict__", None), dict)
    return holds and not callable(state) and not isinstance(state, torch.optim.Optimizer)


def _kept(value: Value) -> Value:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Value]:
    """What belongs to no weight: numbers and tensors of groups, of the optimizer, and of state under other keys."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    groups = {
        f"group[{i}]": {k: v for k, v in g.items() if k != "params"} for i, g in enumerate(optimizer.param_groups)
    }
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups", "defaults")}
    attributes = {k: v for k, v in attributes.items() if not k.startswith(_HOOKS)}
    others = {str(k): v for k, v in optimizer.state.items() if id(k) not in own}
    found = entries({**groups, "optimizer": attributes, "state": others})
    return {name: _kept(value) for name, value in found if id(value) not in own}


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and (a == b or (math.isnan(a) and math.isnan(b)))


__all__ = ["Build", "Rehearsal", "RehearsalError", "Value", "copies_of", "draw", "entries", "rehearse", "settings_of"]
