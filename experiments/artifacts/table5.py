"""Table 5: what has to be carried through a rescaling, for the run to go on as if nothing had happened.

One mid-run training state of a language model, in canonical form, is continued in ten ways (see
`experiments.transport_ablation`). The paper claims for AdamW that carrying both moments along is not enough, since the
updates still do not follow the parameters' scale, and that balancing and carrying bring equivalent states to one
starting point. It gives no such table; arms and settings are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.analysis import trajectories
from experiments.analysis.collect import one_value_per_seed, statuses_by_seed
from experiments.analysis.statistics import Comparison, compare, holm, summarize
from experiments.analysis.tables import Cell, Column, Table
from experiments.artifacts.artifact import Artifact, Rows
from experiments.artifacts.table2 import TITLES

# Arm -> (what it says in the table, in the figure, the arm it is compared with).
ARMS: dict[str, tuple[str, str, str | None]] = {
    "reference": ("reference: not rescaled", "reference", None),
    "rescale_carry": ("rescaled, moments carried", "carried", "reference"),
    "rescale_alone": ("rescaled, moments left alone", "left alone", "reference"),
    "rates": ("rescaled, carried, rates × c and / c, eps / c and × c", "carried, rates scaled", "reference"),
    "reference_large_eps": ("reference with eps = 1e-3", "reference, eps 1e-3", None),
    "rates_large_eps": (
        "rescaled, carried, rates × c and / c, eps = 1e-3",
        "carried, rates scaled, eps 1e-3",
        "reference_large_eps",
    ),
    "balance_carry": ("rescaled and carried, balanced and carried", "balanced, carried", "reference"),
    "balance_alone": ("rescaled and carried, balanced without carrying", "balanced, not carried", "reference"),
    "carried_late": ("rescaled without carrying, balanced and carried", "carried late", "reference"),
    "like_weights": ("rescaled, moments moved like weights", "moved like weights", "reference"),
}


@dataclass(frozen=True)
class _Arm:
    """What the seeds say of one arm of one model."""

    perplexity: Mapping[int, float | None]
    first: list[float]
    last: list[float]
    comparison: Comparison | None


def _arms(rows: Rows) -> tuple[pd.DataFrame, list[str], dict[tuple[str, str], _Arm]]:
    frame, notes = one_value_per_seed(rows.frame)
    found = {}
    for model in rows.models:
        cell = frame[frame["model"] == model]
        statuses = statuses_by_seed(cell, rows.seeds)
        details = {int(row["seed"]): row["arms"] for _, row in cell.iterrows() if row["status"] == "done"}
        for arm, (_, _, against) in ARMS.items():
            values = _perplexities(details, arm, rows.seeds)
            other = None if against is None else _perplexities(details, against, rows.seeds)
            curves = [trajectories.curve_of(each, arm) for each in details.values()]
            found[model, arm] = _Arm(
                values,
                [curve[sorted(curve)[1]] for curve in curves],
                [curve[max(curve)] for curve in curves],
                None if other is None else compare(values, other, statuses, statuses),
            )
    return frame, notes, found


def _perplexities(details: Mapping[int, Any], arm: str, seeds: list[int]) -> dict[int, float | None]:
    return {seed: details[seed][arm]["test_perplexity"] if seed in details else None for seed in seeds}


def build_table(rows: Rows) -> tuple[Table, Table]:
    """(as printed, as CSV): one row a (model, arm)."""
    frame, notes, arms = _arms(rows)
    tested = [key for key, arm in arms.items() if arm.comparison is not None]
    corrected = dict(zip(tested, holm([_p(arms[key]) for key in tested]), strict=True))
    csv, printed = [], []
    for (model, arm), found in arms.items():
        summary, comparison = summarize(found.perplexity), found.comparison
        row: dict[str, Cell] = {"model": model, "arm": arm, "n": summary.n, "n_seeds": summary.n_seeds}
        row |= {"distance_first": _mean(found.first), "distance_last": _mean(found.last)}
        row |= {"distance_last_max": max(found.last, default=None)}
        row |= {"ppl_mean": summary.mean, "ppl_std": summary.std}
        low, high = (comparison.difference.interval if comparison else None) or (None, None)
        row |= {
            "delta_mean": comparison.difference.mean if comparison else None,
            "delta_std": comparison.difference.std if comparison else None,
            "delta_low": low,
            "delta_high": high,
            "delta_p_holm": corrected.get((model, arm)),
            "delta_identical": None if comparison is None else "yes" if comparison.identical else "no",
        }
        csv.append(row)
        cells: dict[str, Cell] = {"model": model, "arm": ARMS[arm][0], "ppl": summary}
        cells |= {"first": _shown(found.first), "last": _shown(found.last)}
        if comparison is not None:
            same = comparison.identical
            cells["delta"] = "identical" if same else summarize(comparison.difference.per_seed)
            p = corrected.get((model, arm))
            cells["p"] = None if p is None or same else f"{p:.1g}"
        printed.append(cells)
    columns = [
        Column("model", "model"),
        Column("arm", "what is done at the restart"),
        Column("first", "distance after 1 step"),
        Column("last", "at the end"),
        Column("ppl", "test perplexity", ".2f", lower_is_better=True),
        Column("delta", "− its reference", ".2f"),
        Column("p", "p (Holm)"),
    ]
    caption = f"Table 5 ({rows.scale} scale): one training state, rescaled in mid-run and continued"
    return Table(columns, printed, caption, _notes(rows, frame) + notes), Table([Column(n, n) for n in csv[0]], csv)


def _p(arm: _Arm) -> float | None:
    return None if arm.comparison is None else arm.comparison.p_value


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shown(values: list[float]) -> str | None:
    """A mean distance; that it is zero for every seed is said in a word."""
    mean = _mean(values)
    if mean is None:
        return None
    return "0 exactly" if mean == 0 else f"{mean:.1e}".replace("-", "−") if math.isfinite(mean) else "diverged"


def _notes(rows: Rows, frame: pd.DataFrame) -> list[str]:
    notes = []
    if rows.scale == "debug":
        notes.append("Debug scale is a check of the machinery: nothing here is a finding.")
    done = frame[frame["status"] == "done"]
    for run in rows.sweep[:1]:
        config = run.config
        notes.append(
            f"AdamW, float64 throughout, no clipping, learning rate {config.optimizer.learning_rate:g}, decay "
            f"{config.optimizer.weight_decay:g}; {config.training.steps} steps, rescaled after "
            f"{config.imbalance.step}: every exact pair by c = {config.imbalance.factor:g} and 1/c, a power of two."  # type: ignore[attr-defined]
        )
    notes.append(
        "The reference goes on from the balanced state, and so do the arms that are rescaled only. The arms that "
        "balance do so after the rescaling."
    )
    notes.append(
        "Distance: |canonical(arm) − canonical(reference)| / |canonical(reference)| over all weights, mean over seeds; "
        "canonical forms are balanced, so that equivalent weights are equal. An arm with eps = 1e-3 is compared with a "
        "reference that has it too. Seeds are paired; p is a paired t-test on log-perplexity, Holm over the table."
    )
    for model in rows.models:
        of_model = done[(done["model"] == model) & done["test_tokens"].notna()]
        if len(of_model):
            first = of_model.iloc[0]
            data, tokens, context = first["data"], int(first["test_tokens"]), int(first["test_context"])
            notes.append(
                f"{model}: {data['name']} ({data['variant']}), {tokens} predicted tokens, windows of {context}."
            )
    notes.append("The paper has no such table at any scale that we know of: no value of its own stands here.")
    return notes


def build_figures(rows: Rows) -> dict[str, Figure]:
    """Distance to the reference against the step."""
    frame, _, _ = _arms(rows)
    done = frame[frame["status"] == "done"]
    if done.empty:
        return {}
    labels = {arm: short for arm, (_, short, against) in ARMS.items() if against is not None}
    titles = {model: TITLES.get(model, model) for model in rows.models}
    return {"table5_distances": trajectories.distances(done, labels, titles)}


ARTIFACT = Artifact(
    name="table5",
    claim="A rescaled run goes on as before only if rates are scaled too, or the state is balanced and carried.",
    experiments={"debug": "table5_debug", "mini": "table5"},
    build_table=build_table,
    build_figures=build_figures,
)
