"""Table 2: does an imbalance that the function does not show harm training, and does balancing undo the harm?

The paper reports, for 101M parameters on WikiText-103, that SAGGS changes the perplexity of an imbalanced start by
-0.374 ± 0.026. It does not state factor, place, period, damping or rate; those here are ours: every exact pair of the
initial model is rescaled by 32 and 1/32, SAGGS balances before the first step and every 10 steps after, Soft SAGGS
closes 30 % of the log-gap each time.

The primary contrasts were fixed before the runs: imbalanced - control, saggs - imbalanced, saggs - control,
control_saggs - control, for each model. Their p-values are Holm's over the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.analysis import figures
from experiments.analysis.collect import one_value_per_seed, statuses_by_seed, values_by_seed
from experiments.analysis.statistics import (
    Comparison,
    Equivalence,
    assess_equivalence,
    compare,
    holm,
    recovered,
    summarize,
)
from experiments.analysis.tables import Cell, Column, Table
from experiments.artifacts.artifact import Artifact, Rows

CONTRASTS = (
    ("imbalanced", "control"),
    ("saggs", "imbalanced"),
    ("saggs", "control"),
    ("control_saggs", "control"),
)
# The paper's values, for rows at the paper's scale only: (model, arm) -> "changes perplexity by". That the change is
# against the imbalanced start is our reading of its abstract, which says neither that nor what ± means.
PAPER = {("gpt_101m", "saggs"): "−0.374 ± 0.026", ("modern_31m", "soft_saggs"): "−0.780 ± 0.040"}

_OF_THE_SWEEP = ("model", "seed", "arm", "experiment", "reuse_committed", "progress", "paths.outputs", "data.path")

TITLES = {
    "mini_gpt2": "GPT-2-like, 1.33M",
    "mini_llama": "Llama-like, 1.32M",
    "debug_gpt2": "GPT-2-like, debug",
    "debug_llama": "Llama-like, debug",
    "gpt_101m": "GPT-2-like, 101M",
    "modern_31m": "Llama-like, 31M",
}


class _Cells:
    """Values and statuses of every (model, arm), over the seeds fixed beforehand, and their contrasts."""

    def __init__(self, rows: Rows) -> None:
        self.frame, self.notes = one_value_per_seed(rows.frame)
        self._seeds = rows.seeds
        pairs = [(model, first, second) for model in rows.models for first, second in CONTRASTS]
        compared = {pair: self.compare(*pair) for pair in pairs}
        corrected = holm([c.p_value for c in compared.values()])
        self.holm_p = dict(zip(pairs, corrected, strict=True))

    def values(self, model: str, arm: str, column: str = "test_perplexity") -> dict[int, float | None]:
        return values_by_seed(self._cell(model, arm), column, self._seeds)

    def statuses(self, model: str, arm: str) -> dict[int, str]:
        return statuses_by_seed(self._cell(model, arm), self._seeds)

    def compare(self, model: str, first: str, second: str) -> Comparison:
        values, statuses = self.values, self.statuses
        return compare(values(model, first), values(model, second), statuses(model, first), statuses(model, second))

    def equivalence(self, model: str, first: str, second: str) -> Equivalence:
        values, statuses = self.values, self.statuses
        return assess_equivalence(
            values(model, first),
            values(model, second),
            first_status=statuses(model, first),
            second_status=statuses(model, second),
        )

    def _cell(self, model: str, arm: str) -> Any:
        return self.frame[(self.frame["model"] == model) & (self.frame["arm"] == arm)]


def build_table(rows: Rows) -> tuple[Table, Table]:
    """(as printed, as CSV): one row a (model, arm)."""
    cells = _Cells(rows)
    facts = [_row(rows, cells, model, arm) for model in rows.models for arm in rows.arms]
    csv = Table([Column(name, name) for name in facts[0]], facts)
    printed = Table(
        _printed_columns(rows.scale),
        [_printed_row(rows, cells, row) for row in facts],
        caption=f"Table 2 ({rows.scale} scale): test perplexity after training from a balanced and an imbalanced start",
        notes=_notes(rows, cells),
    )
    return printed, csv


def _row(rows: Rows, cells: _Cells, model: str, arm: str) -> dict[str, Cell]:
    summary = summarize(cells.values(model, arm))
    row: dict[str, Cell] = {
        "model": model,
        "arm": arm,
        "n": summary.n,
        "ppl_mean": summary.mean,
        "ppl_std": summary.std,
    }
    against = {other: cells.compare(model, arm, other) if arm != other else None for other in ("control", "imbalanced")}
    for other, found in against.items():
        row[f"delta_{other}_mean"] = found.difference.mean if found else None
        row[f"delta_{other}_std"] = found.difference.std if found else None
    for other, found in against.items():
        low, high = (found.difference.interval if found else None) or (None, None)
        row |= {f"delta_{other}_low": low, f"delta_{other}_high": high}
        row[f"delta_{other}_p_holm"] = cells.holm_p.get((model, arm, other))
        row[f"delta_{other}_identical"] = _yes(found.identical) if found else None
    same = cells.equivalence(model, arm, "control") if arm != "control" else None
    row["within_1_percent_of_control"] = _yes(same.equivalent) if same else None
    row["within_1_percent_of_control_p"] = same.p_value if same else None
    for name, column in (("word_ppl", "test_word_perplexity"), ("bits_per_byte", "test_bits_per_byte")):
        found_summary = summarize(cells.values(model, arm, column))
        row |= {f"{name}_mean": found_summary.mean, f"{name}_std": found_summary.std}
    row["n_seeds"] = summary.n_seeds
    return row


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _printed_columns(scale: str) -> list[Column]:
    columns = [
        Column("model", "model"),
        Column("arm", "arm"),
        Column("ppl", "perplexity", ".1f" if scale != "paper" else ".3f", lower_is_better=True),
        Column("delta_control", "− control", ".1f" if scale != "paper" else ".3f"),
        Column("interval", "95 % interval"),
        Column("p", "p of − control (Holm)"),
        Column("delta_imbalanced", "− imbalanced", ".1f" if scale != "paper" else ".3f"),
        Column("word_ppl", "word perplexity", ".0f" if scale != "paper" else ".2f"),
        Column("bits_per_byte", "bits per byte", ".4f"),
    ]
    return columns + ([Column("paper", "the paper's change")] if scale == "paper" else [])


def _printed_row(rows: Rows, cells: _Cells, facts: Mapping[str, Cell]) -> dict[str, Cell]:
    model, arm = str(facts["model"]), str(facts["arm"])
    digits = 3 if rows.scale == "paper" else 1
    row: dict[str, Cell] = {"model": model, "arm": arm, "ppl": summarize(cells.values(model, arm))}
    if arm != "control":
        found = cells.compare(model, arm, "control")
        row["delta_control"] = _difference(found)
        if found.difference.interval:
            row["interval"] = "[{:.{d}f}, {:.{d}f}]".format(*found.difference.interval, d=digits).replace("-", "−")
        p = cells.holm_p.get((model, arm, "control"))
        row["p"] = None if p is None else f"{p:.1g}"
    if arm not in ("control", "imbalanced"):
        row["delta_imbalanced"] = _difference(cells.compare(model, arm, "imbalanced"))
    for name, column in (("word_ppl", "test_word_perplexity"), ("bits_per_byte", "test_bits_per_byte")):
        row[name] = summarize(cells.values(model, arm, column))
    if rows.scale == "paper":
        row["paper"] = PAPER.get((model, arm))
    return row


def _difference(found: Comparison) -> Cell:
    return "identical" if found.identical else summarize(found.difference.per_seed)


def _notes(rows: Rows, cells: _Cells) -> list[str]:
    notes = []
    if rows.scale == "debug":
        notes.append("Debug scale is a check of the machinery: nothing here is a finding.")
    changed = sorted({o for run in rows.sweep for o in run.overrides if o.partition("=")[0] not in _OF_THE_SWEEP})
    if changed:
        notes.append(f"Made with further settings: {', '.join(changed)}.")
    notes += [
        "Paired over seeds: the same seed has the same initial function and the same batches. Intervals are "
        "t-intervals of the paired differences; p is a paired t-test on log-perplexity, Holm over the table's primary "
        "contrasts (imbalanced − control, saggs − imbalanced, saggs − control, control_saggs − control, for each "
        "model).",
    ]
    for model in rows.models:
        for arm in ("saggs", "soft_saggs"):
            found = recovered(*(cells.values(model, other) for other in ("control", "imbalanced", arm)))
            each = [share for share in found.per_seed.values() if share is not None]
            harm = cells.compare(model, "imbalanced", "control").difference.interval
            if found.fraction is not None and each and harm is not None and harm[0] > 0:
                untested = "; not tested" if arm == "soft_saggs" else ""
                notes.append(
                    f"{model}: {arm} recovers {found.fraction:.0%} of the perplexity gap between imbalanced and "
                    f"control (single seeds {min(each):.0%} to {max(each):.0%}{untested})."
                )
        p = cells.holm_p[(model, "saggs", "imbalanced")]
        if p is not None:
            notes.append(f"{model}: saggs − imbalanced has p = {p:.1g} (Holm).")
        if note := _equivalence_note(cells, model):
            notes.append(note)
        if cells.compare(model, "saggs", "control_saggs").identical:
            notes.append(
                f"{model}: saggs and control_saggs are identical to the bit, as they must be: balancing before the "
                "first step maps both starts, which differ by powers of two, to one. Two tests of the family are one "
                "test therefore; Holm's correction is conservative for it."
            )
    done = cells.frame[cells.frame["status"] == "done"]
    for model in rows.models:
        of_model = done[(done["model"] == model) & done["test_tokens"].notna()]
        if len(of_model):
            first = of_model.iloc[0]
            data = first["data"]
            notes.append(
                f"{model}: {data['name']} ({data['variant']}), {int(first['test_tokens'])} predicted tokens in "
                f"windows of {int(first['test_context'])}, stride {int(first['test_stride'])}; {data['tokenizer']}; "
                f"{int(first['test_words'])} words; learning rate {first['learning_rate']:g}; "
                f"{int(first['steps'])} steps."
            )
    if rows.scale == "paper":
        notes.append("The paper's change is its abstract's; that it is against the imbalanced start is our reading.")
    else:
        notes.append("The paper's figures are for 101M and 31M parameters on WikiText-103; none stands at this scale.")
    return notes + cells.notes


def _equivalence_note(cells: _Cells, model: str) -> str | None:
    """Whether saggs is as good as control is a claim of its own: no significant difference does not prove it."""
    found = cells.equivalence(model, "saggs", "control")
    if found.equivalent is None or found.p_value is None or found.n < 3:
        return None
    shown = "is shown" if found.equivalent else "is not shown"
    return f"{model}: that saggs is within 1 % of control {shown} (two one-sided tests, p = {found.p_value:.1g})."


def build_figures(rows: Rows) -> dict[str, Figure]:
    """Validation curves with bands over seeds; paired differences of every seed."""
    frame, _ = one_value_per_seed(rows.frame)
    if not (frame["status"] == "done").any():
        return {}
    titles = {model: TITLES.get(model, model) for model in rows.models}
    against_control = [(arm, "control") for arm in rows.arms if arm != "control"]
    # On one axis the harm would squash what balancing leaves, so the hard arms have a figure of their own.
    hard = [(first, second) for first, second in against_control if first in ("saggs", "control_saggs")]
    start = max(run.config.training.warmup_steps for run in rows.sweep) if rows.scale != "debug" else 0
    return {
        "table2_curves": figures.validation_curves(frame, rows.arms, titles, from_step=start),
        "table2_differences": figures.paired_differences(frame, against_control, titles, rows.seeds),
        "table2_differences_hard": figures.paired_differences(frame, hard, titles, rows.seeds),
    }


ARTIFACT = Artifact(
    name="table2",
    claim="An imbalance of the exact pairs harms training with AdamW; balancing them undoes the harm.",
    experiments={"debug": "table2_debug", "mini": "table2", "paper": "table2_paper"},
    build_table=build_table,
    build_figures=build_figures,
)
