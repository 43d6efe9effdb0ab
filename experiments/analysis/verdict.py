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


def judge(frame: pd.DataFrame, committed: pd.DataFrame, seeds: int | None = None) -> list[Verdict]:
    """A verdict for every (model, arm) of `frame` against the committed runs of the same run ids and data.

    Args:
        frame: as `read_rows` gives it. Rows that were read from the committed store are no evidence and do not count.
        committed: the committed runs, from `collect`.
        seeds: how many a cell needs; as many as `frame` has rows of it where None.
    """
    there = {}
    for _, row in committed[committed["status"] == "done"].iterrows():
        there[row["run_id"], _fingerprint(row)] = _log_perplexities(row)
    verdicts = []
    for (model, arm), cell in frame.groupby(["model", "arm"], sort=False):
        here = cell[(cell["status"] == "done") & (cell["source"] == "live")]
        keyed = [(_log_perplexities(row), (row["run_id"], _fingerprint(row))) for _, row in here.iterrows()]
        gaps = [_gap(values, there[key]) for values, key in keyed if key in there]
        wanted = len(cell) if seeds is None else seeds
        reused = int((cell["source"] == "committed").sum())
        verdicts.append(_of_cell(str(model), str(arm), wanted, len(here), reused, gaps))
    return verdicts


def _log_perplexities(row: pd.Series) -> dict[str, float]:
    """The run's own, in nats a token, and those of the arms of a run that has several."""
    arms = row.get("arms")
    found = {"": float(row["test_nll_per_token"])}
    if isinstance(arms, dict):
        found |= {arm: math.log(figures["test_perplexity"]) for arm, figures in arms.items()}
    return found


def _gap(live: dict[str, float], there: dict[str, float]) -> float:
    if live.keys() != there.keys():
        return math.inf
    return max(abs(value - there[name]) for name, value in live.items())


def _fingerprint(row: pd.Series) -> str | None:
    return row["data"].get("fingerprint") if isinstance(row["data"], dict) else None


def _of_cell(model: str, arm: str, seeds: int, here: int, reused: int, gaps: list[float]) -> Verdict:
    if here == 0 and reused:
        return Verdict(model, arm, None, None, "committed, not run here")
    if not gaps:
        return Verdict(model, arm, None, None, "no committed cell")
    gap = max(gaps)
    if here + reused < seeds:
        return Verdict(model, arm, False, gap, f"not reproduced: only {here + reused} of {seeds} runs finished")
    if gap > TOLERANCE or not math.isfinite(gap):
        return Verdict(model, arm, False, gap, f"not reproduced: a seed differs by {gap:.3f} in log-perplexity")
    same = f"{len(gaps)} of {seeds} seeds compared" if len(gaps) < seeds else f"every seed, n = {seeds}"
    exact = "bit for bit" if gap == 0 else f"largest gap {gap:.1e} in log-perplexity"
    return Verdict(model, arm, True, gap, f"reproduced ({same}, {exact})")
