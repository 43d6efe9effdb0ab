"""The sensing task: every arm of `rules` on one seed's problem, and what the convex method makes of it.

    python train.py task=matrix_sensing rules=nine seed=42

The nine rules, the dial, FlowAdam, a second size, the spectral tail, other horizons and schedules are settings:
`configs/experiment/table6*.yaml`. The summary's result:

    members     every (arm, rate, pass): outcome, steps, training loss, held-out loss, error, effective rank, …
    reference   the matrix of least nuclear norm that fits: error, effective rank
    truth       the true matrix: effective rank, nuclear norm
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from experiments import registry, saved
from experiments.config import Config
from experiments.factorization import steppers
from experiments.factorization.descent import Descent
from experiments.factorization.nuclear import least_nuclear_norm
from experiments.factorization.sensing import Drawn, assess, draw
from experiments.language_model.training import stop_signals
from experiments.run import Interrupted, Run
from experiments.study import facts_of
from experiments.tracking import Tracker


@dataclass
class Prepared:
    """A checked run."""

    config: Config
    facts: dict[str, Any]

    @property
    def total_steps(self) -> int:
        """The horizon; most members end before it."""
        return self.config.sensing.steps

    def execute(self, run: Run) -> dict[str, Any]:
        """Run every member to its end; returns the summary's result."""
        drawn = draw(self.config.sensing, self.config.seed)
        descent = Descent(self.config.sensing, self.config.rules, drawn)
        with Tracker.start(self.config, run.manifest) as tracker:
            self._descend(descent, run, tracker)
        members = sorted(descent.results, key=self._place)
        return {"members": members, "reference": self._reference(drawn), "truth": _figures(drawn, drawn.truth)}

    def _descend(self, descent: Descent, run: Run, tracker: Tracker) -> None:
        checkpoints = run.directory / "checkpoints"
        found = saved.load(checkpoints, run)
        if found is not None:
            descent.load(found.tensors, found.facts)
        written = time.monotonic()
        with stop_signals() as stop, self._bar(descent.step) as bar:
            while not descent.ended:
                losses = descent.advance()
                bar.update()
                if losses is None and not stop.asked:
                    continue
                run.beat(descent.step)
                if losses is not None:
                    row = {"step": descent.step - (not descent.ended), "losses": losses}
                    run.log(row)
                    tracker.log(row)
                if stop.asked or time.monotonic() - written > saved.SAVE_EVERY_SECONDS:
                    tensors, facts = descent.state()
                    saved.save(checkpoints, descent.step, tensors, facts, run.metrics_mark())
                    written = time.monotonic()
                if stop.asked:
                    raise Interrupted(f"{stop.asked} at step {descent.step}; the same command goes on from there")
        run.beat(self.total_steps)

    def _bar(self, begun: int) -> Any:
        quiet = not self.config.progress or None
        return tqdm(total=self.total_steps, initial=begun, disable=quiet, unit="step", leave=False)

    def _place(self, result: dict[str, Any]) -> tuple[int, bool, int]:
        """Results in the order of the configuration, not in that of their ends."""
        grid = self.config.rules[result["arm"]]
        return list(self.config.rules).index(result["arm"]), result["second_pass"], grid.rates.index(result["rate"])

    def _reference(self, drawn: Drawn) -> dict[str, float]:
        matrix, moved = least_nuclear_norm(drawn.measurements, drawn.values, self.config.sensing.size)
        return {**_figures(drawn, matrix), "moved": moved}


def _figures(drawn: Drawn, matrix: torch.Tensor) -> dict[str, float]:
    eye = torch.eye(len(matrix), dtype=torch.float64)
    found = dataclasses.asdict(assess(matrix.double(), eye, drawn.truth))
    return {name: found[name] for name in ("error", "effective_rank", "nuclear_norm")}


def prepare(config: Config) -> Prepared:
    """Check every arm before the run is opened.

    Raises:
        ConfigError: an unknown rule, or an option that it does not take.
    """
    torch.set_num_threads(1)
    registry.load_plugins(config.plugins)
    for arm, grid in config.rules.items():
        steppers.check(arm, grid)
    return Prepared(config, facts_of(config, {"draws": config.seed, "start": config.seed + 7}))
