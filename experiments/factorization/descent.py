"""Many rules at many learning rates on one sensing problem, as one batch: the engine behind `task=matrix_sensing`.

All members share the seed's measurements, so that one pass over them serves every arm: with few members the pass is
bound by memory, and its cost hardly grows with their number. A member that ends is taken out of the batch; the
composition of the batch is a function of the configuration and the results alone, and a resumed run goes on bit for
bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.factorization.sensing import Drawn, Problem, assess, held_out
from experiments.factorization.steppers import Stepper, build, rate_factor
from experiments.study_config import RuleGrid, Sensing

INTERPOLATED, HORIZON, DIVERGED = "interpolated", "horizon", "diverged"


@dataclass(frozen=True)
class Member:
    """One run within the batch; the second pass leaves measurements out."""

    arm: str
    rate: float
    second_pass: bool


class Descent:
    """All arms of one seed.

    Attributes:
        step: updates made.
        results: of members that have ended: arm, rate, second_pass, outcome, steps, loss, and what `assess` finds.
    """

    def __init__(self, settings: Sensing, rules: Mapping[str, RuleGrid], drawn: Drawn) -> None:
        passes = (False, True) if settings.holdout else (False,)
        self._settings, self._rules, self._truth = settings, rules, drawn.truth
        self._problem = Problem(drawn, held_out(settings))
        self._members = [Member(arm, rate, p) for arm, grid in rules.items() for p in passes for rate in grid.rates]
        count = len(self._members)
        self._u, self._v = (t.expand(count, -1, -1).clone() for t in (drawn.u, drawn.v))
        self._weights = self._weights_of_members()
        self._steppers: dict[str, Stepper] = {}
        for arm, own in self._slices():
            rates = [member.rate for member in self._members[own]]
            self._steppers[arm] = build(rules[arm], rates, (self._u[own], self._v[own]))
        self.step = 0
        self.results: list[dict[str, Any]] = []

    @property
    def ended(self) -> bool:
        """Whether no member is left."""
        return not self._members

    @torch.no_grad()
    def advance(self) -> dict[str, dict[str, float | None]] | None:
        """One step of every member, after taking out those that have ended.

        Returns:
            At every `check_every`-th step the training losses by arm and rate, of the first pass; otherwise None.
        """
        residuals = self._problem.residuals(self._u, self._v)
        losses = None
        if self.step % self._settings.check_every == 0 or self.step == self._settings.steps:
            losses, residuals = self._check(residuals)
            if self.ended:
                return losses
        gradients = self._problem.gradients(residuals, self._weights, self._u, self._v)
        self.step += 1
        for arm, own in self._slices():
            factor = rate_factor(self._rules[arm].schedule, self.step, self._settings.steps)
            self._steppers[arm].step((self._u[own], self._v[own]), [g[own] for g in gradients], factor)
        return losses

    def _weights_of_members(self) -> Tensor:
        return self._problem.weights(torch.tensor([m.second_pass for m in self._members], dtype=torch.bool))

    def _slices(self) -> Iterator[tuple[str, slice]]:
        """Every arm with members left, and where they lie."""
        start = 0
        while start < len(self._members):
            arm, stop = self._members[start].arm, start
            while stop < len(self._members) and self._members[stop].arm == arm:
                stop += 1
            yield arm, slice(start, stop)
            start = stop

    def _check(self, residuals: Tensor) -> tuple[dict[str, dict[str, float | None]], Tensor]:
        """Take out the members that have ended; what is left of the residuals, and the losses before."""
        losses = (residuals.square() * self._weights).sum(dim=1)
        finite = torch.isfinite(losses)
        over = ~finite | (losses < self._settings.stop_loss) | (self.step >= self._settings.steps)
        shown: dict[str, dict[str, float | None]] = {}
        for member, loss in zip(self._members, losses.tolist(), strict=True):
            if not member.second_pass:
                shown.setdefault(member.arm, {})[f"{member.rate:g}"] = loss if math.isfinite(loss) else None
        if not bool(over.any()):
            return shown, residuals
        held = self._problem.held_out_loss(residuals).tolist() if self._settings.holdout else None
        for i, loss in enumerate(losses.tolist()):
            if bool(over[i]):
                self.results.append(self._result(i, loss, None if held is None else held[i]))
        stays = ~over
        for arm, own in self._slices():
            self._steppers[arm].keep(stays[own])
        self._members = [m for m, left in zip(self._members, stays.tolist(), strict=True) if left]
        self._u, self._v, self._weights = self._u[stays], self._v[stays], self._weights_of_members()
        return shown, residuals[stays]

    def _result(self, index: int, loss: float, held: float | None) -> dict[str, Any]:
        member = self._members[index]
        diverged = not math.isfinite(loss)
        outcome = DIVERGED if diverged else INTERPOLATED if loss < self._settings.stop_loss else HORIZON
        found = None if diverged else assess(self._u[index], self._v[index], self._truth)
        return {
            **dataclasses.asdict(member),
            "outcome": outcome,
            "steps": self.step,
            "loss": None if diverged else loss,
            "held_out_loss": held if member.second_pass and not diverged else None,
            **({} if found is None else dataclasses.asdict(found)),
        }

    # --- saved and resumed -------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts to go on from."""
        tensors = {"u": self._u, "v": self._v}
        for arm, _ in self._slices():
            tensors |= {f"{arm}//{name}": tensor for name, tensor in self._steppers[arm].state().items()}
        members = [dataclasses.asdict(member) for member in self._members]
        return tensors, {"step": self.step, "members": members, "results": self.results}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.step, self.results = facts["step"], list(facts["results"])
        self._members = [Member(**member) for member in facts["members"]]
        self._u, self._v, self._weights = tensors["u"], tensors["v"], self._weights_of_members()
        for arm, _ in self._slices():
            own = {k.removeprefix(f"{arm}//"): t for k, t in tensors.items() if k.startswith(f"{arm}//")}
            self._steppers[arm].load(own)


__all__ = ["DIVERGED", "HORIZON", "INTERPOLATED", "Descent", "Member"]
