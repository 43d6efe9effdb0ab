"""The literal rules of `saggs.reference_rules` by name, and each of them as a `torch.optim.Optimizer`.

For code that measures optimizers: what it finds of these can be checked against formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saggs import reference_rules as rules
from saggs.reference import AdamWState, step_sgd


@dataclass(frozen=True)
class Rule:
    """A step function, the type of what it keeps of one weight, and whether it takes all weights of a group at once."""

    step: Callable[..., tuple[Any, Any]]
    state: type | None = None
    joint: bool = False


RULES: Mapping[str, Rule] = {
    "gd": Rule(rules.step_gd),
    "momentum": Rule(partial(step_sgd, momentum=0.9), Tensor),
    "adam": Rule(rules.step_adam, AdamWState),
    "scalar_adam": Rule(rules.step_scalar_adam, AdamWState, joint=True),
    "dial": Rule(rules.step_dial, AdamWState, joint=True),
    "unrooted_adam": Rule(rules.step_unrooted_adam, AdamWState),
    "rmsprop": Rule(rules.step_rmsprop, rules.SecondMoment),
    "sign": Rule(rules.step_sign),
    "signum": Rule(rules.step_signum, rules.FirstMoment),
    "lion": Rule(rules.step_lion, rules.FirstMoment),
    "adafactor": Rule(rules.step_adafactor, rules.FactoredMoment),
    "scaled_adafactor": Rule(rules.step_scaled_adafactor, rules.FactoredMoment),
    "muon": Rule(rules.step_muon, rules.FirstMoment),
    "polar": Rule(partial(rules.step_muon, exact=True), rules.FirstMoment),
    "shampoo": Rule(rules.step_shampoo, rules.ShampooState),
    "shampoo_half": Rule(partial(rules.step_shampoo, exponent=-0.5), rules.ShampooState),
    "lars": Rule(rules.step_lars, rules.LarsState),
    "lamb": Rule(rules.step_lamb, AdamWState),
    "scaled_gd": Rule(rules.step_scaled_gd, joint=True),
}
"""Every rule by a short name. Settings that differ from its defaults go to `step` or to `ReferenceOptimizer`."""


class ReferenceOptimizer(torch.optim.Optimizer):
    """One rule as an optimizer. Slow, and in float64 inside, whatever the parameters are.

    What the rule keeps lies in `state[parameter]` under the names of its dataclass (SGD's is `momentum_buffer`).
    Settings of the rule, such as eps, are entries of the parameter groups beside `lr`. A joint rule acts on each group
    by itself, and raises a ValueError where only some of a group's weights have a gradient or a state.
    """

    def __init__(self, params: Iterable[Any], rule: Rule, lr: float, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})
        self.rule, self._settings = rule, tuple(settings)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles take the rule along; the base class keeps groups and state only."""
        return {**super().__getstate__(), "rule": self.rule, "_settings": self._settings}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the rule, and return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = {name: group[name] for name in self._settings}
            moving = [p for p in group["params"] if p.grad is not None]
            if self.rule.joint:
                if moving:
                    self._step_jointly(group["params"], group["lr"], settings)
                continue
            for parameter in moving:
                weight, state = self.rule.step(
                    parameter, parameter.grad, self._load(parameter), group["lr"], **settings
                )
                self._store(parameter, weight, state)
        return loss

    def _step_jointly(self, parameters: list[Tensor], rate: float, settings: dict[str, Any]) -> None:
        gradients, states = [p.grad for p in parameters], [self._load(p) for p in parameters]
        if any(g is None for g in gradients):
            raise ValueError("a joint rule needs a gradient of every weight of its group, and one has none")
        started = [state is not None for state in states]
        if any(started) and not all(started):
            raise ValueError("a joint rule needs a state of every weight of its group or of none, and one has none")
        results = self.rule.step(parameters, gradients, states if any(started) else None, rate, **settings)
        for parameter, weight, state in zip(parameters, *results, strict=True):
            self._store(parameter, weight, state)

    def _load(self, parameter: Tensor) -> Any:
        held = self.state.get(parameter)
        if self.rule.state is None or not held:
            return None
        return held["momentum_buffer"] if self.rule.state is Tensor else self.rule.state(**held)

    def _store(self, parameter: Tensor, weight: Tensor, state: Any) -> None:
        parameter.copy_(weight)
        if isinstance(state, Tensor):
            self.state[parameter] = {"momentum_buffer": state}
        elif state is not None:
            fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
            self.state[parameter] = {name: value for name, value in fields.items() if value is not None}
