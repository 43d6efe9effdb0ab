"""How a learning rate is chosen among several: as published, and honestly.

A rule looks at trials, one a (rate, seed), on the seeds that select. What it may look at is what tells the rules apart:
the truth or the test entries (as a published rule does), entries kept from training, or the training loss alone. A rate
at which any seed diverged is never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Trial:
    """One rate on one seed.

    Attributes:
        finished: it ended as it should: at the loss, or the training error, where runs are compared.
        loss: the last training loss; infinite where it diverged.
        error: against the truth or on test entries; None where it diverged.
        held_out: on what a second pass left out of training; None without one, or where that diverged.
    """

    finished: bool
    loss: float
    error: float | None
    held_out: float | None


Trials = Mapping[float, Sequence[Trial]]


@dataclass(frozen=True)
class Selection:
    """A rule of selection: `choose` gives the rate, or None where no rate fits the rule."""

    name: str
    description: str
    choose: Callable[[Trials], float | None]


def _least(scores: Mapping[float, float]) -> float | None:
    """The rate of the least score; of equal ones the smallest rate."""
    finite = {rate: score for rate, score in scores.items() if math.isfinite(score)}
    return min(finite, key=lambda rate: (finite[rate], rate)) if finite else None


def _mean(values: Sequence[float | None]) -> float:
    """Infinite where one is missing: the survivors of a divergence are not a sample."""
    present = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(present) if values and len(present) == len(values) else math.inf


def _finished(trials: Trials) -> Trials:
    return {rate: own for rate, own in trials.items() if own and all(trial.finished for trial in own)}


def _least_error(trials: Trials) -> float | None:
    return _least({rate: _mean([t.error for t in own]) for rate, own in _finished(trials).items()})


def _largest(trials: Trials) -> float | None:
    return max(_finished(trials), default=None)


def _least_held_out(trials: Trials) -> float | None:
    return _least({rate: _mean([t.held_out for t in own]) for rate, own in trials.items()})


def _least_loss(trials: Trials) -> float | None:
    return _least({rate: _mean([t.loss for t in own]) for rate, own in trials.items()})


PUBLISHED_SENSING = Selection(
    "published", "the rate of the least true error among those at which every seed interpolates", _least_error
)
"""It looks at the truth. Source: Singh (2026)."""

PUBLISHED_COMPLETION = Selection("published", "the largest rate at which every seed reaches the last level", _largest)
"""Our reading of the published rates, which are all the largest that do. Source: Singh (2026)."""

HELD_OUT = Selection(
    "held out", "the rate of the least error on observed entries that a second pass leaves out of training",
    _least_held_out,
)  # fmt: skip
"""Ours: nothing but what was observed."""

TRAINING_LOSS = Selection("training loss", "the rate of the least final training loss", _least_loss)
"""Ours: what somebody does who keeps nothing out."""


__all__ = ["HELD_OUT", "PUBLISHED_COMPLETION", "PUBLISHED_SENSING", "TRAINING_LOSS", "Selection", "Trial", "Trials"]
