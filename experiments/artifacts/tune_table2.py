"""The learning rate of table 2: chosen on the validation split, on the control arm, with seeds that no table uses.

An imbalance of c is a change of every matrix's learning rate, so a gain against the imbalanced arm at one rate could be
a gain that another rate would give too. The imbalanced arm is therefore swept as well, and its best rate is shown.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.analysis import figures
from experiments.analysis.collect import one_value_per_seed, values_by_seed
from experiments.analysis.statistics import Summary, summarize
from experiments.analysis.tables import Cell, Column, Table
from experiments.artifacts.artifact import Artifact, Rows
from experiments.artifacts.table2 import TITLES

_CELL = ("model", "arm", "learning_rate")


def _summaries(rows: Rows) -> dict[tuple[str, str, float], Summary]:
    """Validation perplexity over seeds of every (model, arm, rate), rates in order."""
    frame, _ = one_value_per_seed(rows.frame, _CELL)
    rates = sorted({run.config.optimizer.learning_rate for run in rows.sweep})
    found = {}
    for model in rows.models:
        for arm in rows.arms:
            for rate in rates:
                cell = frame[(frame["model"] == model) & (frame["arm"] == arm) & (frame["learning_rate"] == rate)]
                found[model, arm, rate] = summarize(values_by_seed(cell, "validation_perplexity", rows.seeds))
    return found


def best_rate(rows: Rows, model: str, arm: str) -> float | None:
    """The rate with the lowest mean validation perplexity among those where every seed finished."""
    return _best(_summaries(rows), model, arm)


def _best(summaries: dict[tuple[str, str, float], Summary], model: str, arm: str) -> float | None:
    complete = {
        rate: s.mean
        for (m, a, rate), s in summaries.items()
        if (m, a) == (model, arm) and s.mean is not None and s.n == s.n_seeds
    }
    return min(complete, key=lambda rate: complete[rate]) if complete else None


def build_table(rows: Rows) -> tuple[Table, Table]:
    """(as printed, as CSV): one row a (model, arm, rate); the best rate of each (model, arm) is marked."""
    csv, printed = [], []
    summaries = _summaries(rows)
    for (model, arm, rate), summary in summaries.items():
        chosen = _best(summaries, model, arm) == rate
        row: dict[str, Cell] = {"model": model, "arm": arm, "learning_rate": rate}
        printed.append(row | {"ppl": summary, "best": "best" if chosen else ""})
        csv.append(row | {"n": summary.n, "validation_ppl_mean": summary.mean, "validation_ppl_std": summary.std,
                          "best": "yes" if chosen else "no"})  # fmt: skip
    columns = [
        Column("model", "model"),
        Column("arm", "arm"),
        Column("learning_rate", "learning rate", "g"),
        Column("ppl", "validation perplexity", ".1f", lower_is_better=True),
        Column("best", "best rate"),
    ]
    notes = [f"Seeds {', '.join(map(str, rows.seeds))}, which no table uses. Table 2 takes the control arm's best rate "
             "for every arm."]  # fmt: skip
    notes += one_value_per_seed(rows.frame, _CELL)[1]
    caption = f"Learning rates of table 2 ({rows.scale} scale)"
    return Table(columns, printed, caption, notes), Table([Column(name, name) for name in csv[0]], csv)


def build_figures(rows: Rows) -> dict[str, Figure]:
    """Validation perplexity against the rate, one panel a model, the chosen rate marked."""
    frame, _ = one_value_per_seed(rows.frame, _CELL)
    if not (frame["status"] == "done").any():
        return {}
    chosen = {model: rate for model in rows.models if (rate := best_rate(rows, model, "control")) is not None}
    frame = pd.DataFrame(frame)
    titles = {model: TITLES.get(model, model) for model in rows.models}
    return {"tune_table2": figures.learning_rate_sweep(frame, rows.arms, chosen, titles)}


ARTIFACT = Artifact(
    name="tune_table2",
    claim="The rate of table 2 and the imbalanced arm's own best rate.",
    experiments={"mini": "tune_table2"},
    build_table=build_table,
    build_figures=build_figures,
)
