"""Cell by cell: does a table made here agree with the committed one?

A cell is reproduced if every seed's test log-perplexity is within 0.01 of the committed run of the same identity. It is
compared seed by seed, so that two errors cannot cancel in a mean. A cell without a committed run is called that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

TOLERANCE = 0.01  # in log-perplexity, nats a token


@dataclass(frozen=True)
class Verdict:
    """One cell's: `text` is for people; `reproduced` is None where there was nothing to compare."""

    model: str
    arm: str
    reproduced: bool | None
    largest_gap: float | None
    text: str


def judge(frame: pd.DataFrame, committed: pd.DataFrame) -> list[Verdict]:
    """A verdict for every (model, arm) of `frame`, against the committed runs of the same run ids."""
    there = committed[committed["status"] == "done"].set_index("run_id")["test_nll_per_token"].to_dict()
    verdicts = []
    for (model, arm), cell in frame.groupby(["model", "arm"], sort=False):
        done = cell[cell["status"] == "done"]
        compared = [
            (row["test_nll_per_token"], there[row["run_id"]]) for _, row in done.iterrows() if row["run_id"] in there
        ]
        verdicts.append(_of_cell(str(model), str(arm), len(cell), len(done), compared))
    return verdicts


def _of_cell(model: str, arm: str, seeds: int, done: int, compared: list[tuple[float, float]]) -> Verdict:
    if not compared:
        return Verdict(model, arm, None, None, "no committed cell")
    gap = max(abs(here - there) for here, there in compared)
    if done < seeds:
        return Verdict(model, arm, False, gap, f"not reproduced: only {done} of {seeds} runs finished")
    if gap > TOLERANCE or not math.isfinite(gap):
        return Verdict(model, arm, False, gap, f"not reproduced: a seed differs by {gap:.3f} in log-perplexity")
    same = f"{len(compared)} of {seeds} seeds compared" if len(compared) < seeds else f"{seeds} seeds"
    exact = "bit for bit" if gap == 0 else f"largest gap {gap:.1e} in log-perplexity"
    return Verdict(model, arm, True, gap, f"reproduced ({same}, {exact})")
