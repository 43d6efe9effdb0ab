"""Factorization studies read back: what every arm did at every rate on every seed, and what each selection makes of it.

One run holds all arms of a seed (`members`); here they are gathered over the seeds of a study.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.analysis.collect import one_value_per_seed
from experiments.analysis.selection import Selection, Trial
from experiments.analysis.statistics import Summary, summarize
from experiments.analysis.verdict import Verdict
from experiments.study_config import RuleGrid
from experiments.sweep import SweepRun

Json = Mapping[str, Any]
Measure = Callable[[Json], float | None]
STUDY = ("arm",)
"""What a cell of a study's frame is: `read_rows` puts the study's name where a language model has its arm."""


@dataclass(frozen=True)
class ArmResults:
    """One arm of a study.

    Attributes:
        grid: its rule and rates.
        first, second: (rate, seed) -> what became of it in the first and in the second pass.
    """

    grid: RuleGrid
    first: Mapping[tuple[float, int], Json]
    second: Mapping[tuple[float, int], Json]

    def values(self, rate: float | None, seeds: Sequence[int], measure: Measure) -> dict[int, float | None]:
        """{seed: value} at a rate in the first pass; None where it was not run or diverged."""
        if rate is None:
            return dict.fromkeys(seeds)
        return {s: measure(self.first[rate, s]) if (rate, s) in self.first else None for s in seeds}

    def choose(self, selection: Selection, seeds: Sequence[int], trial: Callable[[Json, Json | None], Trial]) -> Any:
        """The rate of a selection on the seeds that select; None where some of its runs are missing."""
        trials: dict[float, list[Trial]] = {}
        for rate in self.grid.rates:
            for seed in seeds:
                if (rate, seed) not in self.first:
                    return None
                own = trial(self.first[rate, seed], self.second.get((rate, seed)))
                trials.setdefault(rate, []).append(own)
        return selection.choose(trials)


def gather(frame: pd.DataFrame, sweep: Sequence[SweepRun]) -> tuple[dict[str, dict[str, ArmResults]], list[str]]:
    """study -> arm -> results, in the order of the sweep, with notes on what was not plain."""
    kept, notes = one_value_per_seed(frame, STUDY, value=None)
    found: dict[str, dict[str, ArmResults]] = {}
    for run in sweep:
        arms = found.setdefault(run.cell[1], {})
        for name, grid in run.config.rules.items():
            arms.setdefault(name, ArmResults(grid, {}, {}))
    for _, row in kept[kept["status"] == "done"].iterrows():
        for member in row["members"]:
            results = found[row["arm"]][member["arm"]]
            passes = results.second if member["second_pass"] else results.first
            passes[member["rate"], int(row["seed"])] = member  # type: ignore[index]
    return found, notes


def number(key: str) -> Measure:
    """The measure that reads one figure of a member; None where it has none."""

    def read(member: Json) -> float | None:
        value = member.get(key)
        return float(value) if value is not None and math.isfinite(value) else None

    return read


def paired(first: Mapping[int, float | None], second: Mapping[int, float | None]) -> Summary:
    """Mean and standard deviation of first - second over the seeds that both have."""
    return summarize(
        {s: None if (a := first[s]) is None or (b := second[s]) is None else a - b for s in first if s in second}
    )


def worst(members: Sequence[Json], order: Sequence[str]) -> str | None:
    """The worst outcome of several members, of outcomes listed from the best to the worst."""
    return max((m["outcome"] for m in members), key=order.index, default=None)


def verdict(
    study: str,
    arm: str,
    here: Mapping[int, float | None],
    there: Mapping[int, float | None],
    tolerance: float,
    unit: str,
) -> Verdict:
    """Whether every seed's value made here is within a tolerance of the committed one."""
    common = [seed for seed in here if seed in there]
    if not common:
        return Verdict(study, arm, None, None, "no committed cell")
    if any((here[seed] is None) != (there[seed] is None) for seed in common):
        return Verdict(study, arm, False, None, "not reproduced: a seed has a value here or there only")
    gaps = [abs(a - b) for seed in common if (a := here[seed]) is not None and (b := there[seed]) is not None]
    gap = max(gaps, default=0.0)
    if gap > tolerance:
        return Verdict(study, arm, False, gap, f"not reproduced: a seed differs by {gap:.2g} {unit}")
    exact = "bit for bit" if gap == 0 else f"largest gap {gap:.1e} {unit}"
    return Verdict(study, arm, True, gap, f"reproduced (every seed, n = {len(common)}, {exact})")


__all__ = ["STUDY", "ArmResults", "gather", "number", "paired", "verdict", "worst"]
