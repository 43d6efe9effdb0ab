"""One arm of a study: an update rule applied to members (a learning rate each) that are stacked along dimension 0.

A rule of `saggs.rules` updates all members in one call. Any other optimizer, registered by a plugin, has one instance a
member: slower, and the same to whoever uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from experiments import registry
from experiments.checks import ConfigError, nearest
from experiments.study_config import RuleGrid
from saggs.rules import RULES, Rule

FACTORS = ("u", "v")


class Stepper(Protocol):
    """What a study asks of an arm."""

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], factor: float) -> None:
        """Update the weights, each (members, rows, columns), in place; `factor` multiplies all learning rates."""

    def keep(self, members: Tensor) -> None:
        """Forget all members but those where the mask is True."""

    def state(self) -> dict[str, Tensor]:
        """Everything that is kept between steps, by name."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""


def build(grid: RuleGrid, rates: Sequence[float], weights: Sequence[Tensor]) -> Stepper:
    """The stepper of an arm for members of these learning rates.

    Raises:
        ConfigError: an unknown rule, or an option that it does not take.
    """
    if grid.rule in RULES:
        return Stacked(RULES[grid.rule], grid.options, rates, weights)
    if grid.rule in registry.builders("optimizer"):
        return Separate(grid.rule, grid.options, rates, weights)
    known = [*RULES, *registry.builders("optimizer")]
    raise ConfigError(
        f"rule {grid.rule!r} is not known{nearest(grid.rule, known)}; there are {', '.join(known)}, and a plugin's own "
        "optimizer is one where plugins=[…] lists it"
    )


def check(arm: str, grid: RuleGrid) -> None:
    """Raise a ConfigError, naming the arm, where its stepper could not be built."""
    tiny = [torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)]
    try:
        build(grid, grid.rates[:1], tiny)
    except ValueError as error:
        raise ConfigError(f"rules.{arm}: {error}") from error


def rate_factor(schedule: str, step: int, steps: int) -> float:
    """What multiplies the learning rate at a step, counted from 1: 1, or (1 + cos(pi (step - 1) / steps)) / 2."""
    return 0.5 * (1 + math.cos(math.pi * (step - 1) / steps)) if schedule == "cosine" else 1.0


class Stacked:
    """A rule of `saggs.rules`, all members in one call."""

    def __init__(
        self, rule: type[Rule], options: Mapping[str, Any], rates: Sequence[float], weights: Sequence[Tensor]
    ) -> None:
        for name in options:
            if name not in rule.DEFAULTS:
                known = ", ".join(rule.DEFAULTS) or "none"
                raise ConfigError(
                    f"{rule.__name__} has no option {name!r}{nearest(name, rule.DEFAULTS)}; it has {known}"
                )
        # Built once as an optimizer: that checks options and shapes, and gives the group's settings.
        group = rule([nn.Parameter(w[0].clone()) for w in weights], lr=1.0, **dict(options)).param_groups[0]
        self._settings = {name: group[name] for name in rule.DEFAULTS}
        self._rule = rule
        self._rates = torch.tensor(rates, dtype=weights[0].dtype).view(-1, 1, 1)
        self._states = [rule.begin(weight, self._settings) for weight in weights]

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], factor: float) -> None:
        directions = self._rule.advance(weights, gradients, self._states, [self._settings] * len(weights))
        for weight, direction in zip(weights, directions, strict=True):
            weight.addcmul_(direction, self._rates, value=-factor)

    def keep(self, members: Tensor) -> None:
        self._rates = self._rates[members]
        self._states = [{name: value[members] for name, value in state.items()} for state in self._states]

    def state(self) -> dict[str, Tensor]:
        kept = {f"{f}/{n}": t for f, s in zip(FACTORS, self._states, strict=True) for n, t in s.items()}
        return kept | {"rates": self._rates}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._rates = state["rates"]
        for factor, own in zip(FACTORS, self._states, strict=True):
            own.clear()
            own |= {name.removeprefix(f"{factor}/"): t for name, t in state.items() if name.startswith(f"{factor}/")}


class Separate:
    """Any optimizer, one instance a member. Its state has to be tensors and numbers."""

    def __init__(
        self, name: str, options: Mapping[str, Any], rates: Sequence[float], weights: Sequence[Tensor]
    ) -> None:
        self._build = lambda parameters, rate: registry.build(
            "optimizer", name, dict(options), groups=[{"params": parameters}], learning_rate=rate, weight_decay=0.0
        )
        self._rates = list(rates)
        self._parameters = [[nn.Parameter(w[i].clone()) for w in weights] for i in range(len(rates))]
        self._optimizers = [self._build(own, rate) for own, rate in zip(self._parameters, rates, strict=True)]

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], factor: float) -> None:
        for i, (rate, own, optimizer) in enumerate(zip(self._rates, self._parameters, self._optimizers, strict=True)):
            with torch.no_grad():
                for parameter, weight, gradient in zip(own, weights, gradients, strict=True):
                    parameter.copy_(weight[i])
                    parameter.grad = gradient[i].clone()
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            for parameter, weight in zip(own, weights, strict=True):
                weight[i].copy_(parameter.detach())

    def keep(self, members: Tensor) -> None:
        kept = [i for i, stays in enumerate(members.tolist()) if stays]
        self._rates = [self._rates[i] for i in kept]
        self._parameters = [self._parameters[i] for i in kept]
        self._optimizers = [self._optimizers[i] for i in kept]

    def state(self) -> dict[str, Tensor]:
        found = {"rates": torch.tensor(self._rates, dtype=torch.float64)}
        for i, (own, optimizer) in enumerate(zip(self._parameters, self._optimizers, strict=True)):
            for factor, parameter in zip(FACTORS, own, strict=True):
                for name, value in optimizer.state.get(parameter, {}).items():
                    kind = "tensor" if isinstance(value, Tensor) else "number"
                    if not isinstance(value, Tensor | int | float):
                        raise ValueError(f"state {name!r} is a {type(value).__name__}, which a saved run cannot hold")
                    found[f"{i}/{factor}/{kind}/{name}"] = torch.as_tensor(value)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._rates = state["rates"].tolist()
        count = len(self._rates)
        self._parameters = self._parameters[:count]
        self._optimizers = [self._build(own, r) for own, r in zip(self._parameters, self._rates, strict=True)]
        for key, value in state.items():
            if key != "rates":
                i, factor, kind, name = key.split("/", 3)
                parameter = self._parameters[int(i)][FACTORS.index(factor)]
                self._optimizers[int(i)].state[parameter][name] = value.item() if kind == "number" else value


__all__ = ["FACTORS", "Separate", "Stacked", "Stepper", "build", "check", "rate_factor"]
