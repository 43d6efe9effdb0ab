"""The completion task: every arm of `rules` on one seed's mask of a hyperspectral scene, one member after another.

    python train.py task=hyperspectral rules=completion seed=42

Runs are compared at equal training errors, `scene.levels`, and end at the last of them. The summary's result:

    members     every (arm, rate, pass): outcome, steps, training loss, and for every level reached step, test error, …
    scene       one pixel's and one band's true values, what is observed of them, where the pixels lie
    examples    the same pixel and band as each arm recovers them, at this seed's rate of the least held-out error

The second pass, which leaves out observed entries, is made at those rates that reach the last level in the first.

Steps are counted as the published logs do: that of the first gradient is 1.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from experiments import registry, saved
from experiments.config import Config
from experiments.factorization import scenes, steppers
from experiments.factorization.completion import Problem, draw_masks, draw_start
from experiments.factorization.descent import DIVERGED, HORIZON, Member
from experiments.language_model.training import stop_signals
from experiments.run import Interrupted, Run
from experiments.study import facts_of
from experiments.tracking import Tracker

REACHED = "reached"
_PIXEL = 0
"""Which pixel the pictures show: the first, of a random order."""


@dataclass
class Prepared:
    """A checked run."""

    config: Config
    scene: scenes.Prepared
    facts: dict[str, Any]

    @property
    def members(self) -> list[Member]:
        """Every arm, pass and rate, in the order of the configuration; not every one is run (`_Study._is_due`)."""
        passes = (False, True) if self.config.scene.holdout else (False,)
        return [
            Member(arm, rate, second)
            for arm, grid in self.config.rules.items()
            for second in passes
            for rate in grid.rates
        ]

    @property
    def total_steps(self) -> int:
        """The horizons of all members together; most end before."""
        return self.config.scene.steps * len(self.members)

    def execute(self, run: Run) -> dict[str, Any]:
        """Run every member to its end; returns the summary's result."""
        with Tracker.start(self.config, run.manifest) as tracker:
            return _Study(self, run, tracker).result()


def prepare(config: Config) -> Prepared:
    """Read the scene and check every arm before the run is opened.

    Raises:
        ConfigError: an unknown rule, an option that it does not take, or a scene that cannot be used.
    """
    torch.set_num_threads(1)
    registry.load_plugins(config.plugins)
    for arm, grid in config.rules.items():
        steppers.check(arm, grid)
    scene = scenes.load(config.scene)
    seed = config.seed
    seeds = {"pixels": config.scene.pixel_seed, "mask": seed + 7, "held_out": seed + 13, "start": seed + 1000}
    data = {"name": config.scene.name, "fingerprint": scene.fingerprint, "shape": list(scene.image_shape)}
    return Prepared(config, scene, facts_of(config, seeds, data))


class _Study:
    """One seed: its members one after another, saved in mid-member."""

    def __init__(self, prepared: Prepared, run: Run, tracker: Tracker) -> None:
        self._config, self._scene, self._members = prepared.config, prepared.scene, prepared.members
        self._run, self._tracker = run, tracker
        self._checkpoints = run.directory / "checkpoints"
        self._index = 0
        self._results: list[dict[str, Any]] = []
        self._examples: dict[str, dict[str, Any]] = {}
        self._step, self._levels = 0, dict[str, Any]()
        self._u = self._v = torch.empty(0)
        self._stepper: steppers.Stepper | None = None
        self._written = time.monotonic()

    def result(self) -> dict[str, Any]:
        """Everything that the summary keeps."""
        found = saved.load(self._checkpoints, self._run)
        if found is not None:
            self._results, self._examples = list(found.facts["results"]), dict(found.facts["examples"])
            self._index, self._step = found.facts["member"], found.facts["step"]
            self._levels = dict(found.facts["levels"])
        horizon = self._config.scene.steps
        with stop_signals() as stop, self._bar() as bar:
            while self._index < len(self._members):
                member = self._members[self._index]
                for step in self._descend(member, None if found is None else found.tensors):
                    bar.n = self._index * horizon + step
                    bar.update(0)
                    if stop.asked or time.monotonic() - self._written > saved.SAVE_EVERY_SECONDS:
                        self._save()
                    if stop.asked:
                        raise Interrupted(f"{stop.asked} at step {step} of {member}; the same command goes on there")
                    self._run.beat(self._index * horizon + step)
                found = None
                self._index += 1
        self._run.beat(horizon * len(self._members))
        return {"members": self._results, "scene": self._shown(), "examples": self._examples}

    def _bar(self) -> Any:
        total = self._config.scene.steps * len(self._members)
        return tqdm(total=total, disable=not self._config.progress or None, unit="step", leave=False)

    def _is_due(self, member: Member) -> bool:
        """The second pass is for rates that reach the last level: no other can be compared at equal training error."""
        reached = {(r["arm"], r["rate"]) for r in self._results if not r["second_pass"] and r["outcome"] == REACHED}
        return not member.second_pass or (member.arm, member.rate) in reached

    @torch.no_grad()
    def _descend(self, member: Member, resumed: dict[str, Tensor] | None) -> Iterator[int]:
        """Run one member, if it is due; yields the number of gradients so far, every hundred of them."""
        if not self._is_due(member):
            return
        scene = self._config.scene
        grid = self._config.rules[member.arm]
        shape = (self._scene.matrix.shape[0], self._scene.matrix.shape[1])
        problem = Problem(self._scene.matrix, draw_masks(shape, scene, self._config.seed, member.second_pass))
        if resumed is None:
            self._step, self._levels = 0, {}
            self._u, self._v = draw_start(shape, scene, self._config.seed)
        else:
            self._u, self._v = resumed["u"], resumed["v"]
        stacked = (self._u[None], self._v[None])
        self._stepper = stepper = steppers.build(grid, [member.rate], stacked)
        if resumed is not None:
            stepper.load({k.removeprefix("state//"): t for k, t in resumed.items() if k.startswith("state//")})
        waiting = [level for level in scene.levels if f"{level:g}" not in self._levels]
        while True:
            loss, du, dv = problem.loss_and_gradients(self._u, self._v)
            self._step, value = self._step + 1, float(loss)
            while waiting and value <= waiting[0]:
                row = {"step": self._step, "loss": value, **problem.assess(self._u, self._v)}
                self._levels[f"{waiting.pop(0):g}"] = row
                self._log(member, row)
            if not waiting or not math.isfinite(value) or self._step > scene.steps:
                outcome = REACHED if not waiting else HORIZON if math.isfinite(value) else DIVERGED
                self._end(member, outcome, value, problem)
                return
            factor = steppers.rate_factor(grid.schedule, self._step, scene.steps)
            stepper.step(stacked, (du[None], dv[None]), factor)
            if self._step % 100 == 0:
                yield self._step

    def _log(self, member: Member, row: dict[str, Any]) -> None:
        described = {**dataclasses.asdict(member), **row}
        self._run.log(described)
        self._tracker.log(described)

    def _end(self, member: Member, outcome: str, loss: float, problem: Problem) -> None:
        diverged = outcome == DIVERGED
        found = {} if diverged else problem.assess(self._u, self._v)
        result = {
            **dataclasses.asdict(member),
            "outcome": outcome,
            "steps": self._step,
            "loss": None if diverged else loss,
            **found,
            "levels": self._levels,
        }
        self._results.append(result)
        self._remember(member, result)

    def _remember(self, member: Member, result: dict[str, Any]) -> None:
        """Keep what the arm makes of one pixel and one band, at the rate of the least held-out, else training error."""
        measure = result["held_out_rmse"] if member.second_pass else result["loss"]
        before = self._examples.get(member.arm)
        nearer = before is None or (before["held_out"], -before["measure"]) < (member.second_pass, -(measure or 0.0))
        if measure is None or not nearer:
            return
        pixel, band = _PIXEL, self._scene.matrix.shape[1] // 2
        self._examples[member.arm] = {
            "rate": member.rate,
            "held_out": member.second_pass,
            "measure": measure,
            "pixel": _rounded(self._u[pixel] @ self._v.T),
            "band": _rounded(self._u @ self._v[band]),
        }

    def _shown(self) -> dict[str, Any]:
        matrix, band = self._scene.matrix, self._scene.matrix.shape[1] // 2
        shape = (matrix.shape[0], matrix.shape[1])
        masks = draw_masks(shape, self._config.scene, self._config.seed, second_pass=bool(self._config.scene.holdout))
        return {
            "pixel_index": _PIXEL,
            "band_index": band,
            "image_shape": list(self._scene.image_shape),
            "positions": self._scene.positions.tolist(),
            "pixel": _rounded(matrix[_PIXEL]),
            "band": _rounded(matrix[:, band]),
            "pixel_observed": masks.train[_PIXEL].int().tolist(),
            "band_observed": masks.train[:, band].int().tolist(),
        }

    def _save(self) -> None:
        assert self._stepper is not None
        tensors = {"u": self._u, "v": self._v} | {f"state//{k}": t for k, t in self._stepper.state().items()}
        facts = {"member": self._index, "step": self._step, "levels": self._levels}
        facts |= {"results": self._results, "examples": self._examples}
        step = self._index * self._config.scene.steps + self._step
        saved.save(self._checkpoints, step, tensors, facts, self._run.metrics_mark())
        self._written = time.monotonic()


def _rounded(values: Tensor) -> list[float]:
    """Four significant digits: for pictures."""
    return [float(f"{value:.4g}") for value in values.tolist()]
