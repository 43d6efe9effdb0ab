"""What an update rule is: a `torch.optim.Optimizer` whose formula is written once, over stacked members.

A rule says two things: what it keeps of a weight before the first step (`begin`), and how weights, gradients and what
is kept become the direction u of

    w <- w - lr u                                                                                          (`advance`)

In both, dimension 0 of every tensor is the *member*: independent models that are updated alike. A batch of small
problems is so many members and one call; `Optimizer.step` is the same call with one member. Nothing mixes members, and
nothing in a step waits for the device: choices are made by `torch.where`, counters are tensors.

Weight decay is decoupled, w <- w (1 - lr decay) before the step, as AdamW has it.

Source: ours; the rules are those of Singh (2026).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

State = dict[str, Tensor]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Within:
    """Numbers from `low` to `high`, which does not belong where `below`; infinity only where `infinite`."""

    low: float = 0.0
    high: float = math.inf
    below: bool = False
    whole: bool = False
    infinite: bool = False

    def admits(self, value: object) -> bool:
        kinds = int if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        if math.isinf(value) and not self.infinite:
            return False
        return self.low <= value < self.high or (value == self.high and not self.below)

    def __str__(self) -> str:
        noun = "a whole number" if self.whole else "a number"
        if math.isinf(self.high):
            return f"{noun}, {self.low:g} or more{'' if self.infinite else ', and finite'}"
        return f"{noun} in [{self.low:g}, {self.high:g}{')' if self.below else ']'}"


@dataclass(frozen=True)
class Pair:
    """Two numbers, each within the same bounds."""

    each: Within

    def admits(self, value: object) -> bool:
        return isinstance(value, tuple | list) and len(value) == 2 and all(self.each.admits(v) for v in value)

    def __str__(self) -> str:
        return f"two of {self.each}"


@dataclass(frozen=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def admits(self, value: object) -> bool:
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return " or ".join(map(repr, self.words))


@dataclass(frozen=True)
class OrNone:
    """What another range holds, or None."""

    other: Within

    def admits(self, value: object) -> bool:
        return value is None or self.other.admits(value)

    def __str__(self) -> str:
        return f"None or {self.other}"


Range = Within | Pair | OneOf | OrNone
FRACTION = Within(0.0, 1.0, below=True)
"""A decay of an average: 0 forgets at once, 1 would never learn."""
_OF_EVERY_RULE: Mapping[str, Range] = {"lr": Within(), "weight_decay": Within()}
_HOST = torch.device("cpu")
_OF_EVERY_GROUP = ("params", "param_names", "name", "initial_lr")


class Rule(torch.optim.Optimizer):
    """An update rule as an optimizer; see the module.

    Args:
        params: parameters, named parameters or groups of them; a group may have its own lr, decay and settings.
        lr: learning rate, a number or a 0-dimensional tensor.
        weight_decay: decoupled: w <- w (1 - lr weight_decay) before each step.
        settings: the rule's own constants, in place of those in `DEFAULTS`.

    Attributes:
        DEFAULTS: the rule's own constants by name.
        RANGES: what each of them may be.
        ON_HOST: names of state that stays on the CPU: what the host must know to choose what it launches.

    Raises:
        ValueError: an unknown setting, a value out of its range, a parameter of a shape that the rule has no answer to;
            on a step, a gradient that is sparse or complex.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    RANGES: ClassVar[Mapping[str, Range]] = {}
    ON_HOST: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """Refuse an unknown setting here: the signature of a class would do so without naming the nearest one."""
        for name in settings.keys() - {"params"}:
            cls._require_known(name)
        return super().__new__(cls)

    def __init__(self, params: ParamsT, lr: float | Tensor, weight_decay: float = 0.0, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **self.DEFAULTS, **settings})

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        """What is kept of a weight before the first step; dimension 0 of it all is the member, as it is the weight's.

        Args:
            weight: shape (members, ...).
            settings: the weight's parameter group, or anything else that holds what `DEFAULTS` names.
        """
        raise NotImplementedError

    @classmethod
    def advance(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        settings: Sequence[Settings],
    ) -> list[Tensor]:
        """Advance the states, in place or by new entries, and return the directions u: the step is w <- w - lr u.

        Args:
            weights: each of shape (members, ...); of all groups at once, for some rules share a number among all.
            gradients: in the weights' shapes.
            states: what is kept of each.
            settings: for each weight its group; weights of one group have the very same object.

        Returns:
            The directions. A direction may be the gradient or an entry of the state itself: read it, write nowhere.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; returns what the closure returns.

        Raises:
            ValueError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not moving:
            return loss
        for parameter, _ in moving:
            _require_dense(type(self).__name__, parameter)
        given = [self._load(parameter, group) for parameter, group in moving]
        states = [dict(state) for state in given]
        weights = [parameter.unsqueeze(0) for parameter, _ in moving]
        gradients = [parameter.grad.unsqueeze(0) for parameter, _ in moving]
        directions = self.advance(weights, gradients, states, [group for _, group in moving])
        for (parameter, group), before, after, direction in zip(moving, given, states, directions, strict=True):
            rate, decay = group["lr"], group["weight_decay"]
            if decay != 0:
                parameter.mul_(1 - rate * decay)
            if isinstance(rate, Tensor):
                parameter.sub_(direction.squeeze(0) * rate)
            else:
                parameter.add_(direction.squeeze(0), alpha=-rate)
            for name, value in after.items():
                if value is not before.get(name):  # a new entry; the others were advanced in place, through views
                    self.state[parameter][name] = value.squeeze(0)
        return loss

    def _load(self, parameter: nn.Parameter, group: Settings) -> State:
        """The state of one parameter as that of one member: views of what is kept, made now where nothing is."""
        kept = self.state.get(parameter)
        if not kept:
            begun = self.begin(parameter.unsqueeze(0), group)
            if begun:
                self.state[parameter] = {name: value.squeeze(0) for name, value in begun.items()}
            return begun
        for name, value in kept.items():
            # A state dictionary loaded from elsewhere: PyTorch leaves `step` on the device it was saved from.
            device = _HOST if name in self.ON_HOST else parameter.device
            if value.device != device:
                kept[name] = value.to(device)
        return {name: value.unsqueeze(0) for name, value in kept.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own settings.

        Raises:
            ValueError: as on construction; the group is then not added.
        """
        for name in param_group:
            if name not in _OF_EVERY_GROUP:
                self._require_known(name)
        for name, value in {**self.defaults, **param_group}.items():
            self._require_in_range(name, value)
        super().add_param_group(param_group)
        try:
            self._require_shapes(self.param_groups[-1]["params"])
        except ValueError:
            del self.param_groups[-1]
            raise

    @classmethod
    def _require_shapes(cls, parameters: Sequence[Tensor]) -> None:
        """Raise a ValueError where a group holds a parameter whose shape the rule has no answer to."""

    @classmethod
    def _require_known(cls, name: str) -> None:
        known = [*_OF_EVERY_RULE, *cls.DEFAULTS]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"{cls.__name__} has no setting {name!r}{hint}. Its settings are {', '.join(known)}")

    @classmethod
    def _require_in_range(cls, name: str, value: object) -> None:
        allowed = {**_OF_EVERY_RULE, **cls.RANGES}.get(name)
        if name == "lr" and isinstance(value, Tensor):
            if value.dim() != 0:
                raise ValueError(f"lr has shape {tuple(value.shape)}; give a number or a 0-dimensional tensor")
        elif allowed is not None and not allowed.admits(value):
            near = (
                difflib.get_close_matches(value, allowed.words, 1)
                if isinstance(allowed, OneOf) and isinstance(value, str)
                else []
            )
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"{cls.__name__}: {name}={value!r} must be {allowed}{hint}")


class MatrixRule(Rule):
    """A rule that sees rows and columns: every parameter is a matrix, stacked (members, rows, columns)."""

    @classmethod
    def _require_shapes(cls, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if parameter.dim() != 2:
                raise ValueError(
                    f"{cls.__name__} is a rule for matrices, and a parameter has shape {tuple(parameter.shape)}; give "
                    "biases, gains and all else that is no matrix to torch.optim.Adam"
                )


def entry_sum(tensor: Tensor) -> Tensor:
    """The sum of each member's entries: (members, ...) -> (members,)."""
    # A sum over no dimension at all would be one over all of them.
    return tensor.sum(tuple(range(1, tensor.dim()))) if tensor.dim() > 1 else tensor


def entry_norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm of each member's entries: (members, ...) -> (members,)."""
    dims = tuple(range(1, tensor.dim()))
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dims) if dims else tensor.abs()
    return norm


def _require_dense(name: str, parameter: nn.Parameter) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ValueError(
            f"{name} got a gradient of layout {gradient.layout}; use dense ones (sparse=False in nn.Embedding), or "
            "torch.optim.SparseAdam for this parameter"
        )
    if gradient.is_complex():
        raise ValueError(
            f"{name} got a gradient of dtype {gradient.dtype}; train torch.view_as_real of the parameter instead"
        )


__all__ = [
    "FRACTION",
    "MatrixRule",
    "OneOf",
    "OrNone",
    "Pair",
    "Range",
    "Rule",
    "Settings",
    "State",
    "Within",
    "entry_norm",
    "entry_sum",
]
