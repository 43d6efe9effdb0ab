"""Table 6: which update rules find a matrix of low rank from few measurements?

The paper trains U V^T by nine rules, and finds that those which follow rotations of the factors (gradient descent,
scalar Adam, Muon, Shampoo) come nearer to the truth, at a lower rank, than those that act coordinate by coordinate.
Its rates are chosen by the true error; here two rules that see only what was measured stand beside that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
from matplotlib.figure import Figure

from experiments.analysis import factorizations
from experiments.analysis.selection import HELD_OUT, PUBLISHED_SENSING, TRAINING_LOSS, Trial
from experiments.analysis.statistics import Summary, summarize
from experiments.analysis.studies import ArmResults, Json, gather, number, paired, verdict, worst
from experiments.analysis.tables import Cell, Column, Table
from experiments.analysis.verdict import Verdict
from experiments.artifacts.artifact import Artifact, Rows

SELECTIONS = (PUBLISHED_SENSING, HELD_OUT, TRAINING_LOSS)
OUTCOMES = ("interpolated", "horizon", "diverged")
MEASURES = ("error", "effective_rank", "balancedness", "steps")
TOLERANCE = 0.02
STUDIES = {
    "nine": "nine rules",
    "float64": "in float64",
    "dial": "the dial",
    "flow_adam": "FlowAdam",
    "constant": "constant rates",
    "horizon": "60,000 steps",
    "second_size": "60 x 60, rank 5",
}
ARMS = {
    "coordinate": "clipped by coordinates",
    "global": "clipped by the norm",
    "rotation": "by the norm, p = 0",
    "least_nuclear_norm": "least nuclear norm",
}

# (study, arm) -> the paper's error, effective rank, rate, where it gives them; means over its three seeds.
PAPER: dict[tuple[str, str], tuple[float, float | None, float | None]] = {
    ("nine", "gd"): (0.131, 4.51, 0.01),
    ("nine", "scalar_adam"): (0.201, 5.43, 1e-3),
    ("nine", "muon"): (0.000, 2.95, 0.1),
    ("nine", "shampoo"): (0.286, 6.95, 0.03),
    ("nine", "adam"): (0.573, 14.37, 0.01),
    ("nine", "rmsprop"): (0.527, 12.80, 1e-4),
    ("nine", "signum"): (0.445, 7.83, 3e-3),
    ("nine", "lion"): (0.425, 10.58, 3e-4),
    ("nine", "adafactor"): (0.543, 10.72, 3e-4),
    ("dial", "dial_100"): (0.570, 14.5, None),
    ("dial", "dial_075"): (0.459, 11.1, None),
    ("dial", "dial_050"): (0.348, 8.2, None),
    ("dial", "dial_025"): (0.260, 6.4, None),
    ("dial", "dial_000"): (0.201, 5.4, None),
    ("flow_adam", "coordinate"): (0.347, None, None),
    ("flow_adam", "global"): (0.220, None, None),
    ("flow_adam", "rotation"): (0.169, None, None),
    ("second_size", "gd"): (0.077, None, None),
    ("second_size", "adam"): (0.465, None, None),
    ("second_size", "muon"): (0.0, None, None),
    ("tail_00", "gd"): (0.131, None, None),
    ("tail_00", "adam"): (0.581, None, None),
    ("tail_00", "muon"): (0.0, None, None),
    ("tail_10", "gd"): (0.231, None, None),
    ("tail_10", "adam"): (0.598, None, None),
    ("tail_10", "muon"): (0.185, None, None),
    ("tail_20", "gd"): (0.369, None, None),
    ("tail_20", "adam"): (0.644, None, None),
    ("tail_20", "muon"): (0.359, None, None),
    ("tail_35", "gd"): (0.568, None, None),
    ("tail_35", "adam"): (0.721, None, None),
    ("tail_35", "muon"): (0.587, None, None),
    ("tail_50", "gd"): (0.746, None, None),
    ("tail_50", "adam"): (0.799, None, None),
    ("tail_50", "muon"): (0.765, None, None),
}


@dataclass(frozen=True)
class _Chosen:
    """What a selection makes of an arm: its rate, and every seed's figures there."""

    rate: float | None
    values: Mapping[str, Mapping[int, float | None]]

    def summary(self, measure: str) -> Summary:
        return summarize(self.values[measure])


@dataclass
class _Cells:
    """Every (study, arm) under every selection."""

    rows: Rows
    arms: dict[str, dict[str, ArmResults]] = field(init=False)
    notes: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.arms, self.notes = gather(self.rows.frame, self.rows.sweep)

    def chosen(self, study: str, arm: str, selection: int) -> _Chosen:
        found = self.arms[study][arm]
        rate = found.choose(SELECTIONS[selection], self.rows.seeds, _trial)
        return _Chosen(rate, {name: found.values(rate, self.rows.seeds, number(name)) for name in MEASURES})

    def gradient_descent(self, study: str, selection: int) -> _Chosen | None:
        """Of the same problem: the study's own, else that of the nine rules."""
        for other in (study, "nine"):
            if "gd" in self.arms.get(other, {}):
                return self.chosen(other, "gd", selection)
        return None

    def references(self) -> dict[str, dict[str, dict[int, float | None]]]:
        """study -> measure -> seed -> of the matrix of least nuclear norm; once for studies of one problem."""
        found: dict[str, dict[str, dict[int, float | None]]] = {}
        done = self.rows.frame[self.rows.frame["status"] == "done"]
        for study in self.arms:
            if study != "nine" and not study.startswith(("second", "tail")):
                continue
            own = {int(row["seed"]): row["reference"] for _, row in done[done["arm"] == study].iterrows()}
            found[study] = {
                name: {seed: own[seed][name] if seed in own else None for seed in self.rows.seeds}
                for name in ("error", "effective_rank")
            }
        return found


def _trial(first: Json, second: Json | None) -> Trial:
    diverged = first["outcome"] == "diverged"
    return Trial(
        finished=first["outcome"] == "interpolated",
        loss=math.inf if diverged else first["loss"],
        error=None if diverged else first["error"],
        held_out=None if second is None else second["held_out_loss"],
    )


def build_table(rows: Rows) -> tuple[Table, Table]:
    """(as printed, as CSV): printed one row a (study, arm), in the CSV one a selection of it too."""
    cells = _Cells(rows)
    printed: list[dict[str, Cell]] = []
    facts: list[dict[str, Cell]] = []
    references = cells.references()
    for study, arms in cells.arms.items():
        for arm in arms:
            found = [cells.chosen(study, arm, i) for i in range(len(SELECTIONS))]
            facts += [_fact(cells, study, arm, i, chosen) for i, chosen in enumerate(found)]
            printed.append(_printed(cells, study, arm, found))
        if study in references:
            error, rank = (summarize(references[study][name]) for name in ("error", "effective_rank"))
            printed.append({"study": _study(study), "rule": _arm("least_nuclear_norm"), "error": error, "rank": rank})
            facts.append(
                {
                    "study": study,
                    "rule": "least_nuclear_norm",
                    **_spread("error", error),
                    **_spread("effective_rank", rank),
                }
            )
    csv_columns = list(dict.fromkeys(name for fact in facts for name in fact))
    caption = f"Table 6 ({rows.scale} scale): a matrix of low rank from few measurements, by update rule"
    return Table(_COLUMNS, printed, caption, _notes(rows, cells)), Table([Column(n, n) for n in csv_columns], facts)


_COLUMNS = [
    Column("study", "study"),
    Column("rule", "rule"),
    Column("rate", "rate (published rule)", "g"),
    Column("error", "error", ".3f", lower_is_better=True),
    Column("rank", "effective rank", ".2f"),
    Column("balancedness", "balancedness", ".2g"),
    Column("steps", "steps", ".0f"),
    Column("held_rate", "rate (held out)", "g"),
    Column("held_error", "error", ".3f", lower_is_better=True),
    Column("held_delta", "− GD", ".3f"),
    Column("loss_rate", "rate (training loss)", "g"),
    Column("loss_error", "error", ".3f", lower_is_better=True),
    Column("paper_error", "paper's error", ".3f"),
    Column("paper_rank", "rank", "g"),
    Column("paper_rate", "rate", "g"),
]


def _printed(cells: _Cells, study: str, arm: str, found: Sequence[_Chosen]) -> dict[str, Cell]:
    published, held, loss = found
    row: dict[str, Cell] = {"study": _study(study), "rule": _arm(arm), "rate": published.rate}
    if published.rate is not None:
        row |= {name: published.summary(name) for name in ("error", "balancedness", "steps")}
        row["rank"] = published.summary("effective_rank")
    if held.rate is not None:
        row |= {"held_rate": held.rate, "held_error": held.summary("error")}
        base = cells.gradient_descent(study, 1)
        if base is not None and base.rate is not None and arm != "gd":
            row["held_delta"] = paired(held.values["error"], base.values["error"])
    if loss.rate is not None:
        row |= {"loss_rate": loss.rate, "loss_error": loss.summary("error")}
    return row | dict(zip(("paper_error", "paper_rank", "paper_rate"), PAPER.get((study, arm), ()), strict=False))


def _study(name: str) -> str:
    return f"tail 0.{name.removeprefix('tail_')}" if name.startswith("tail_") else STUDIES.get(name, name)


def _arm(name: str) -> str:
    """A rule's title; of the dial its p, with the mean where it is the geometric one."""
    kind, _, power = name.partition("_")
    if kind in ("dial", "geomean") and power.isdigit():
        return f"p = {int(power) / 100:g}" + (", geometric mean" if kind == "geomean" else "")
    return ARMS.get(name, factorizations.TITLES.get(name, name))


def _fact(cells: _Cells, study: str, arm: str, selection: int, chosen: _Chosen) -> dict[str, Cell]:
    n = chosen.summary("error")
    row: dict[str, Cell] = {
        "study": study,
        "rule": arm,
        "selection": SELECTIONS[selection].name,
        "rate": chosen.rate,
        "n": n.n,
        "n_seeds": n.n_seeds,
    }
    for measure in MEASURES:
        row |= _spread(measure, chosen.summary(measure))
    base = cells.gradient_descent(study, selection)
    if base is not None and arm != "gd":
        row |= _spread("error_minus_gd", paired(chosen.values["error"], base.values["error"]))
    paper = PAPER.get((study, arm), (None, None, None))
    return row | dict(zip(("paper_error", "paper_effective_rank", "paper_rate"), paper, strict=True))


def _spread(name: str, summary: Summary) -> dict[str, Cell]:
    return {f"{name}_mean": summary.mean, f"{name}_std": summary.std}


def _notes(rows: Rows, cells: _Cells) -> list[str]:
    notes = [f"{selection.name.capitalize()}: {selection.description}." for selection in SELECTIONS] + [
        "Error: |U V^T - X| / |X|. Effective rank: exp of the entropy of the singular values. Balancedness: "
        "|U^T U - V^T V|. Three seeds: mean, spread and paired differences (− GD, both at the rates that held-out "
        "measurements choose), no tests.",
        "Where no rate interpolates at every seed within the horizon, the published rule chooses none.",
    ]
    for study, arms in cells.arms.items():
        for arm, found in arms.items():
            diverged = [r for r in found.grid.rates if _outcome(found, r, rows.seeds) == "diverged"]
            if diverged:
                notes.append(
                    f"{_study(study)}, {_arm(arm)}: a seed diverged at {', '.join(f'{rate:g}' for rate in diverged)}."
                )
    far = [(key, paper[0]) for key, paper in PAPER.items() if _is_far(cells, *key, paper[0])]
    notes.append(f"Further than {TOLERANCE:g} from the paper's error: {len(far) or 'none'}.")
    notes += [_beside(cells, study, arm, error) for (study, arm), error in far]
    return notes + cells.notes


def _is_far(cells: _Cells, study: str, arm: str, paper: float) -> bool:
    if arm not in cells.arms.get(study, {}):
        return False
    mean = cells.chosen(study, arm, 0).summary("error").mean
    return mean is not None and abs(mean - paper) > TOLERANCE


def _beside(cells: _Cells, study: str, arm: str, paper: float) -> str:
    """Every rate's error beside the paper's, where the published rule does not lead to it."""
    found, shown = cells.arms[study][arm], []
    for rate in found.grid.rates:
        mean = summarize(found.values(rate, cells.rows.seeds, number("error"))).mean
        shown.append(
            f"{rate:g} {'diverges' if mean is None else f'{mean:.3f}'} ({_outcome(found, rate, cells.rows.seeds)})"
        )
    return f"{_study(study)}, {_arm(arm)}: the paper has {paper:.3f}; here, by rate, {', '.join(shown)}."


def _outcome(found: ArmResults, rate: float, seeds: Sequence[int]) -> str | None:
    return worst([found.first[rate, seed] for seed in seeds if (rate, seed) in found.first], OUTCOMES)


def build_figures(rows: Rows) -> dict[str, Figure]:
    """The dial; every rule against its rate; the spectral tail."""
    cells = _Cells(rows)
    made: dict[str, Figure] = {}
    if "nine" in cells.arms and any(found.first for found in cells.arms["nine"].values()):
        made["table6_rates"] = _rates(rows, cells)
    if "dial" in cells.arms and any(found.first for found in cells.arms["dial"].values()):
        made["table6_dial"] = _dial(cells)
    tails = [study for study in cells.arms if study.startswith("tail_")]
    if any(found.first for study in tails for found in cells.arms[study].values()):
        made["table6_tail"] = _tail(cells, tails)
    return made


def _rates(rows: Rows, cells: _Cells) -> Figure:
    arms = cells.arms["nine"]
    curves = {
        arm: {rate: found.values(rate, rows.seeds, number("error")) for rate in found.grid.rates}
        for arm, found in arms.items()
    }
    ends = {arm: {rate: _outcome(found, rate, rows.seeds) or "diverged" for rate in found.grid.rates}
            for arm, found in arms.items()}  # fmt: skip
    chosen = {arm: {s.name: cells.chosen("nine", arm, i).rate for i, s in enumerate(SELECTIONS)} for arm in arms}
    return factorizations.rate_curves(curves, ends, chosen)


def _dial(cells: _Cells) -> Figure:
    series: dict[str, dict[float, tuple[Summary, Summary]]] = {}
    published = {}
    for arm, found in cells.arms["dial"].items():
        power = float(found.grid.options["precond_power"])
        geometric = found.grid.options.get("scalar") == "geomean"
        label = "geometric mean" if geometric else "root mean square"
        chosen = cells.chosen("dial", arm, 0)
        series.setdefault(label, {})[power] = (chosen.summary("error"), chosen.summary("effective_rank"))
        error, rank, _ = PAPER.get(("dial", arm), (None, None, None))
        if error is not None and rank is not None:
            published[power] = (error, rank)
    base = cells.gradient_descent("dial", 0)
    marks = {} if base is None else {"GD": (base.summary("error"), base.summary("effective_rank"))}
    return factorizations.dial(series, published, marks)


def _tail(cells: _Cells, studies: Sequence[str]) -> Figure:
    errors: dict[str, dict[float, Summary]] = {}
    published: dict[str, dict[float, float]] = {}
    references = cells.references()
    for study in studies:
        tail = float(study.removeprefix("tail_")) / 100
        for arm in cells.arms[study]:
            errors.setdefault(arm, {})[tail] = cells.chosen(study, arm, 0).summary("error")
            if (study, arm) in PAPER:
                published.setdefault(arm, {})[tail] = PAPER[study, arm][0]
    reference = {float(s.removeprefix("tail_")) / 100: summarize(references[s]["error"]) for s in studies}
    return factorizations.tails(errors, published, reference)


def verdicts(rows: Rows, committed: pd.DataFrame) -> list[Verdict]:
    """For each arm of each study: at the published rule's rate, is every seed's error the committed one's?"""
    here = Rows(rows.frame[rows.frame["source"] == "live"], rows.sweep, rows.scale)
    if here.frame.empty and not rows.frame.empty:
        return [Verdict("", "", None, None, "committed, not run here")]
    mine, theirs = _Cells(here), _Cells(rows.relabelled(committed))
    found = []
    for study, arms in mine.arms.items():
        for arm, results in arms.items():
            own = mine.chosen(study, arm, 0)
            rate = own.rate if own.rate is not None else results.grid.rates[0]
            seeds = sorted({seed for _, seed in theirs.arms[study][arm].first} & {seed for _, seed in results.first})
            read = number("error")
            pair = (results.values(rate, seeds, read), theirs.arms[study][arm].values(rate, seeds, read))
            found.append(verdict(study, arm, *pair, TOLERANCE, "in error"))
    return found


ARTIFACT = Artifact(
    name="table6",
    claim="Rules that follow rotations find the matrix of low rank; rules that act by coordinates do not.",
    experiments={"mini": "table6", "debug": "table6_debug"},
    build_table=build_table,
    build_figures=build_figures,
    verdicts=verdicts,
)
