"""Figures of how far training runs have gone apart, against the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.analysis.figures import STYLE

_WIDTH_INCHES, _HEIGHT_INCHES = 6.8, 3.2
# Okabe and Ito (2008), then line styles: neighbours in the figure differ in both.
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000", "#8C8C8C")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.2)), (0, (1.2, 1.0)), (0, (4, 1, 1, 1)))


def curve_of(arms: Mapping[str, Any], arm: str) -> dict[int, float]:
    """{step: distance} of one arm of a summary."""
    return {int(step): float(d) if d is not None else math.nan for step, d in arms[arm]["distance"].items()}


def distances(frame: pd.DataFrame, labels: Mapping[str, str], titles: Mapping[str, str]) -> Figure:
    """Distance to the reference against the step: mean over seeds, band from the smallest to the largest.

    Labels stand at the ends of the lines. An arm whose distance is zero throughout has no place on a logarithmic axis;
    it is named below the others, as what it is.

    Args:
        frame: finished runs, with a column `arms`.
        labels: arm -> what to call it, in the order of the table.
        titles: model -> the panel's title.
    """
    with matplotlib.style.context(["default", STYLE]):
        height = _HEIGHT_INCHES * len(titles)
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        for index, (model, title) in enumerate(titles.items()):
            axes = figure.add_subplot(len(titles), 1, index + 1)
            _draw(axes, frame[frame["model"] == model], labels)
            axes.set_title(title)
            axes.set_ylabel("distance to the reference")
            axes.set_xlabel("step")
    return figure


def _draw(axes: Axes, frame: pd.DataFrame, labels: Mapping[str, str]) -> None:
    exact, ends = [], []
    axes.set_yscale("log")
    last = 0
    for number, (arm, label) in enumerate(labels.items()):
        curves = [curve_of(arms, arm) for arms in frame["arms"]]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))[1:]  # at the restart all distances are 0
        values = np.array([[curve[step] for step in steps] for curve in curves])
        if not values.any():
            exact.append(label)
            continue
        color = _COLORS[number % len(_COLORS)]
        axes.plot(steps, values.mean(axis=0), color=color, linestyle=_DASHES[number % len(_DASHES)])
        if len(curves) > 1:
            axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.18, linewidth=0)
        ends.append((float(values[:, -1].mean()), label, color))
        last = max(last, steps[-1])
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(x=0.02)
    _label_ends(axes, last, sorted(ends))
    if exact:
        axes.text(0.01, 0.02, f"0 exactly, at every step and for every seed: {'; '.join(exact)}",
                  transform=axes.transAxes, fontsize=7, va="bottom")  # fmt: skip
        low, high = axes.get_ylim()
        axes.set_ylim(low / (high / low) ** 0.12, high)


def _label_ends(axes: Axes, step: int, ends: list[tuple[float, str, str]]) -> None:
    """Labels right of the lines' ends, pushed apart where they would lie on each other."""
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    gap, at = 0.055 * (high - low), -math.inf
    for value, label, color in ends:
        at = max(math.log10(value), at + gap)
        axes.annotate(label, (step, 10**at), xytext=(4, 0), textcoords="offset points", color=color, fontsize=7,
                      va="center", annotation_clip=False)  # fmt: skip
