"""Table 8: does a rule see the basis in which attention scores are written?

Queries and keys of each head rotated alike leave every score as it was. The paper trains such twins and finds with Adam
that their score forms part by 56 %, with gradient descent and scalar Adam by rounding alone. Training also amplifies
rounding: Muon, which follows rotations, ends apart as well. So each drift stands beside those of twins that were
disturbed by noise, and of one that was rotated by the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.analysis import drifts
from experiments.analysis.collect import one_value_per_seed
from experiments.analysis.statistics import Summary, summarize
from experiments.analysis.studies import STUDY, verdict
from experiments.analysis.tables import Cell, Column, Table
from experiments.analysis.verdict import Verdict
from experiments.artifacts.artifact import Artifact, Rows

# (problem, rule) -> the paper's drift of the rotated twin after 1 step, 10 steps and at the end, in float32.
PAPER: dict[tuple[str, str], tuple[str | None, str | None, str]] = {
    ("modular", "adam"): (".016", ".089", ".56"),
    ("modular", "sgd"): (None, None, "7e-6"),
    ("modular", "scalar_adam"): (None, None, "2.6e-6"),
    ("modular", "muon"): (None, None, ".80"),
}
TITLES = {"adam": "Adam", "sgd": "SGD, momentum 0.9", "scalar_adam": "scalar Adam", "muon": "Muon"}
PROBLEMS = {"modular": "modular addition", "characters": "characters"}
TOLERANCE = 0.2
_ROTATED, _IDENTITY = "rotated", "identity"


@dataclass
class _Cells:
    """Every study's twins, by seed."""

    rows: Rows
    found: dict[str, dict[int, Mapping[str, Any]]] = field(init=False)
    ratios: dict[str, dict[int, Mapping[str, Any]]] = field(init=False)
    notes: list[str] = field(init=False)

    def __post_init__(self) -> None:
        frame, self.notes = one_value_per_seed(self.rows.frame, STUDY, value=None)
        done = frame[frame["status"] == "done"]
        self.found = {study: {} for study in self.rows.arms}
        self.ratios = {study: {} for study in self.rows.arms}
        for _, row in done.iterrows():
            self.found[row["arm"]][int(row["seed"])] = row["arms"]
            self.ratios[row["arm"]][int(row["seed"])] = row["ratios"]

    def config(self, study: str) -> Any:
        return next(run.config for run in self.rows.sweep if run.cell[1] == study)

    def names(self, study: str) -> tuple[str, str]:
        """(problem, rule) of a study."""
        config = self.config(study)
        return config.attention.name, config.optimizer.name

    def noises(self, study: str) -> list[str]:
        first = next(iter(self.found[study].values()), {})
        return [twin for twin in first if twin.startswith("noise_")]

    def drift(self, study: str, twin: str, step: int) -> dict[int, float | None]:
        """{seed: drift of a twin after a step}; the last one for -1."""
        values: dict[int, float | None] = {}
        for seed in self.rows.seeds:
            curve = self.curve(study, twin, seed)
            values[seed] = curve.get(max(curve) if step < 0 else step) if curve else None
        return values

    def curve(self, study: str, twin: str, seed: int) -> dict[int, float]:
        arms = self.found[study].get(seed, {})
        return {int(step): value for step, value in arms.get(twin, {}).get("drift", {}).items() if value is not None}

    def ratio(self, study: str, noise: str, at: str) -> dict[int, float | None]:
        return {seed: self.ratios[study].get(seed, {}).get(noise, {}).get(at) for seed in self.rows.seeds}

    def figure(self, study: str, twin: str, name: str) -> dict[int, float | None]:
        return {seed: self.found[study].get(seed, {}).get(twin, {}).get(name) for seed in self.rows.seeds}


def build_table(rows: Rows) -> tuple[Table, Table]:
    """(as printed, as CSV): printed one row a (problem, rule), in the CSV one a twin."""
    cells = _Cells(rows)
    printed = [_printed(cells, study) for study in cells.found]
    facts = [fact for study in cells.found for fact in _facts(cells, study)]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    columns = [Column("problem", "problem"), Column("rule", "rule"), Column("rate", "rate", "g")]
    columns += [Column(name, header) for name, header in _DRIFTS.items()]
    columns += [Column(name, header, ".2g") for name, header in _RATIOS.items()]
    columns += [
        Column("accuracy", "validation accuracy", ".3f"),
        Column("accuracy_rotated", "of the rotated twin", ".3f"),
    ]
    columns += [Column("paper", "the paper's drift: 1, 10, end")]
    caption = f"Table 8 ({rows.scale} scale): drift of attention's score forms from those of a twin, by update rule"
    return Table(columns, printed, caption, _notes(cells)), Table([Column(name, name) for name in names], facts)


_DRIFTS = {
    "step_1": "rotated: drift after 1 step",
    "step_10": "10 steps",
    "final": "at the end",
    "identity": "identity: largest",
    "noise": "noise 1e-7: after 1 step",
    "noise_final": "at the end",
}
_RATIOS = {"ratio_1": "rotated / noise 1e-7: 1 step", "ratio_10": "10 steps", "ratio_final": "at the end"}


def _printed(cells: _Cells, study: str) -> dict[str, Cell]:
    problem, rule = cells.names(study)
    row: dict[str, Cell] = {"problem": PROBLEMS.get(problem, problem), "rule": TITLES.get(rule, rule)}
    row["rate"] = cells.config(study).optimizer.learning_rate
    for name, step in (("step_1", 1), ("step_10", 10), ("final", -1)):
        row[name] = _shown(summarize(cells.drift(study, _ROTATED, step)))
    row["identity"] = _largest(cells, study)
    noises = cells.noises(study)
    if noises:
        row["noise"] = _shown(summarize(cells.drift(study, noises[0], 1)))
        row["noise_final"] = _shown(summarize(cells.drift(study, noises[0], -1)))
        row |= {f"ratio_{at}": summarize(cells.ratio(study, noises[0], at)) for at in ("1", "10", "final")}
    row["accuracy"] = summarize(cells.figure(study, "base", "validation_accuracy"))
    row["accuracy_rotated"] = summarize(cells.figure(study, _ROTATED, "validation_accuracy"))
    if (problem, rule) in PAPER:
        row["paper"] = ", ".join(value or "not given" for value in PAPER[problem, rule])
    return row


def _shown(summary: Summary) -> str | None:
    """A drift with its spread; of sizes so different that no one format serves them."""
    if summary.mean is None:
        return None
    text = f"{summary.mean:.2g}" + ("" if summary.std is None else f" ± {summary.std:.1g}")
    return text.replace("-", "−") + (f" (n={summary.n}/{summary.n_seeds})" if summary.n < summary.n_seeds else "")


def _largest(cells: _Cells, study: str) -> str | None:
    """The identity twin's largest drift at any step of any seed."""
    values = [value for seed in cells.rows.seeds for value in cells.curve(study, _IDENTITY, seed).values()]
    return None if not values else "0 exactly" if max(values) == 0 else f"{max(values):.1e}".replace("-", "−")


def _facts(cells: _Cells, study: str) -> list[dict[str, Cell]]:
    problem, rule = cells.names(study)
    found = []
    for twin in (_ROTATED, _IDENTITY, *cells.noises(study)):
        row: dict[str, Cell] = {"problem": problem, "rule": rule, "twin": twin}
        row["rate"] = cells.config(study).optimizer.learning_rate
        row |= {"n": summarize(cells.drift(study, twin, -1)).n, "n_seeds": len(cells.rows.seeds)}
        for name, step in (("drift_1", 1), ("drift_10", 10), ("drift_final", -1)):
            row |= _spread(name, summarize(cells.drift(study, twin, step)))
        for at in ("1", "10", "final"):
            ratio = summarize(cells.ratio(study, twin, at)) if twin.startswith("noise_") else summarize({})
            row |= _spread(f"rotated_over_it_{at}", ratio)
        row |= _spread("validation_accuracy", summarize(cells.figure(study, twin, "validation_accuracy")))
        row |= _spread("validation_accuracy_base", summarize(cells.figure(study, "base", "validation_accuracy")))
        found.append(row)
    return found


def _spread(name: str, summary: Summary) -> dict[str, Cell]:
    return {f"{name}_mean": summary.mean, f"{name}_std": summary.std}


def _notes(cells: _Cells) -> list[str]:
    notes = [
        "Drift: mean over heads of |M1 - M2| / mean norm, M = W_Q^T W_K; base and twin are trained on the same "
        "batches. A rule that follows rotations keeps the rotated twin as near as rounding lets it; from then on both "
        "part as any two runs do that differ by rounding, which the noise twins show.",
        "Identity: rotated by the identity matrix. Ratios: the rotated twin's drift over that of a twin whose weights "
        "were disturbed by relative noise of 1e-7. At the end of training a ratio near 1 tells nothing of the rule.",
    ]
    for study in cells.found:
        config, seeds = cells.config(study), cells.found[study]
        lost = {f"{twin}, seed {seed}: {arm['status']}" for seed, arms in seeds.items() for twin, arm in arms.items()
                if arm["status"] != "trained"}  # fmt: skip
        problem, rule = cells.names(study)
        notes += [f"{problem}, {rule}, {text}." for text in sorted(lost)]
        if study == next(s for s in cells.found if cells.names(s)[0] == problem):
            n = ", ".join(map(str, cells.rows.seeds))
            notes.append(f"{problem}: {config.attention.steps} steps in {config.attention.precision}, seeds {n}.")
    notes.append("The paper's drifts are in float32, of one seed.")
    return notes + cells.notes


def build_figures(rows: Rows) -> dict[str, Figure]:
    """Drift against the step, one panel a rule; one figure a problem."""
    cells = _Cells(rows)
    made = {}
    for problem in dict.fromkeys(cells.names(study)[0] for study in cells.found):
        panels: dict[str, dict[str, dict[int, dict[int, float]]]] = {}
        for study in cells.found:
            if cells.names(study)[0] != problem or not cells.found[study]:
                continue
            title = TITLES.get(cells.names(study)[1], cells.names(study)[1])
            for twin in (_ROTATED, _IDENTITY, *cells.noises(study)):
                own = panels.setdefault(title, {}).setdefault(twin, {})
                for seed in cells.rows.seeds:
                    for step, value in cells.curve(study, twin, seed).items():
                        own.setdefault(step, {})[seed] = value
        if panels:
            made["table8" if problem == "modular" else f"table8_{problem}"] = drifts.curves(panels)
    return made


def verdicts(rows: Rows, committed: pd.DataFrame) -> list[Verdict]:
    """For each study: is every seed's drift after 10 steps the committed one's to 20 %? Rounding is not compared."""
    here = Rows(rows.frame[rows.frame["source"] == "live"], rows.sweep, rows.scale)
    if here.frame.empty and not rows.frame.empty:
        return [Verdict("", "", None, None, "committed, not run here")]
    mine, theirs = _Cells(here), _Cells(rows.relabelled(committed))
    found = []
    for study in mine.found:
        twin = _ROTATED if mine.names(study)[1] == "adam" else next(iter(mine.noises(study)), _ROTATED)
        pair: Sequence[dict[int, float | None]] = [
            {seed: value for seed, value in cells.drift(study, twin, 10).items() if value is not None}
            for cells in (mine, theirs)
        ]
        scale = max((value for value in pair[1].values() if value), default=1.0)
        relative = [{seed: (value or 0.0) / scale for seed, value in own.items()} for own in pair]
        found.append(verdict(*mine.names(study), relative[0], relative[1], TOLERANCE, f"of the drift of {twin}"))
    return found


ARTIFACT = Artifact(
    name="table8",
    claim="Adam sees the basis of attention's scores: a rotated twin parts from the first step on. SGD does not.",
    experiments={"mini": "table8", "debug": "table8_debug"},
    build_table=build_table,
    build_figures=build_figures,
    verdicts=verdicts,
)
