"""Figure of how far rotated and disturbed twins of a Transformer drift from their base in training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments.analysis.figures import COLUMN_WIDTH_INCHES, FAINT, INK, draw_legend, number_text, styled

Steps = Mapping[int, Mapping[int, float]]
"""step -> seed -> drift"""
Twins = Mapping[str, Steps]

# Okabe and Ito (2008); dashes, so that twins that lie on each other are both seen.
_LOOKS: dict[str, tuple[str, Any, str]] = {
    "rotated": ("#D55E00", "-", "o"),
    "identity": (INK, (0, (1, 1.2)), "X"),
    "noise_1e-07": ("#0072B2", (0, (4, 1.2)), "s"),
    "noise_1e-05": ("#56B4E9", (0, (4, 1, 1, 1)), "^"),
}
_OTHERS: tuple[tuple[str, Any, str], ...] = (
    *(("#009E73", (0, (2, 1)), "D"), ("#CC79A7", (0, (6, 1, 1, 1)), "v"), ("#E69F00", "-", "P")),
)
_START = 0.25
"""Where step 0 stands on the logarithmic axis of steps, left of a line that sets it apart."""
_APART = 0.5


@styled
def curves(panels: Mapping[str, Twins]) -> Figure:
    """Drift from the base against the step, a panel an update rule, on shared logarithmic axes.

    Mean over the seeds, and a band from the smallest to the largest where there are several; at steps that a seed lacks
    there is no mean, and what the others did is dotted. Step 0, which has no place on such an axis, stands apart as
    points. Nor has a drift of exactly 0 one: the legend says of a twin in how many panels it never drifts.

    Args:
        panels: title -> twin ("rotated", "identity", "noise_1e-07", …) -> step -> seed -> drift.
    """
    twins = list(dict.fromkeys(twin for by_twin in panels.values() for twin in by_twin))
    if not twins:
        raise ValueError("no twin to draw; give {title: {twin: {step: {seed: drift}}}}")
    others = cycle(_OTHERS)
    looks = {twin: _LOOKS.get(twin) or next(others) for twin in twins}
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(COLUMN_WIDTH_INCHES, 1.35 * rows + 0.3), layout="constrained")
    drawn = [_positive(by_twin) for by_twin in panels.values()]
    low, high = _decades([drift for found in drawn for drift in found] or [1e-16, 1.0])
    last = max([step for twins in panels.values() for by_step in twins.values() for step in by_step], default=1)
    partial = band = False
    for index, (title, by_twin) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set(xscale="log", yscale="log", xlim=(_START / 1.6, max(last, 10) * 1.25), ylim=(low, high))
        for twin, by_step in by_twin.items():
            several, unfinished = _draw(axes, by_step, *looks[twin])
            band, partial = band or several, partial or unfinished
        if not drawn[index]:
            axes.text(0.55, 0.5, "0 exactly", transform=axes.transAxes, ha="center", va="center", fontsize=7)
        axes.axvline(_APART, color=FAINT, linewidth=0.6)
        axes.set_title(title)
        _ticks(axes, last, low, high)
        lowest, leftmost = index >= len(panels) - columns, index % columns == 0
        axes.tick_params(labelbottom=lowest, labelleft=leftmost)
        axes.set(xlabel="step" if lowest else "", ylabel="drift from the base" if leftmost else "")
    handles: list[Artist] = []
    for twin, (color, dashes, marker) in looks.items():
        line = Line2D([], [], color=color, linestyle=dashes, marker=marker, markersize=3, label=_label(twin, panels))
        if all(_never(by_twin[twin]) for by_twin in panels.values() if twin in by_twin):
            line.set(linestyle="", marker="")  # there is nothing of it to look for
        handles.append(line)
    if band:
        handles.append(Patch(color=FAINT, alpha=0.3, linewidth=0, label="band: min–max of seeds"))
    if partial:
        handles.append(Line2D([], [], color=FAINT, linestyle=":", linewidth=0.8, label="some seeds only"))
    with matplotlib.rc_context({"legend.handlelength": 2.6}):  # for the dashes
        draw_legend(figure, handles)
    return figure


def _draw(axes: Axes, by_step: Steps, color: str, dashes: Any, marker: str) -> tuple[bool, bool]:
    """Draw one twin; whether it has a band, and whether a seed lacks steps."""
    seeds = sorted({seed for drifts in by_step.values() for seed in drifts})
    steps = sorted(by_step)
    table = np.array([[_number(by_step[step].get(seed)) for step in steps] for seed in seeds])
    if not seeds or not (table > 0).any():
        return False, False
    whole = np.isfinite(table).all(axis=0)
    mean = np.where(whole, table.mean(axis=0), np.nan)
    mean[~(mean > 0)] = np.nan
    places, later = np.array(steps, float), np.array(steps) > 0
    axes.plot(places[later], mean[later], color=color, linestyle=dashes, zorder=3)
    axes.plot([_START] * (~later).sum(), mean[~later], color=color, marker=marker, markersize=3, linestyle="", zorder=3)
    if len(seeds) > 1:
        floor = axes.get_ylim()[0]
        ranges = np.where(whole, [table.min(axis=0), table.max(axis=0)], np.nan).clip(min=floor)
        axes.fill_between(places[later], *ranges[:, later], color=color, alpha=0.2, linewidth=0)
    missing = later & ~whole
    if missing.any():
        missing[:-1] |= missing[1:] & later[:-1]  # from the end of the mean on
        rest = np.where(table > 0, table, np.nan)[:, missing]
        axes.plot(places[missing], rest.T, color=color, linestyle=":", linewidth=0.8)
    return len(seeds) > 1, bool(missing.any())


def _number(drift: float | None) -> float:
    return drift if drift is not None and math.isfinite(drift) else math.nan


def _positive(twins: Twins) -> list[float]:
    """What the axis has to hold: drifts that are not 0, and their means over seeds of which some may be 0."""
    cells = [[_number(drift) for drift in seeds.values()] for steps in twins.values() for seeds in steps.values()]
    return [drift for cell in cells for drift in (*cell, sum(cell) / max(len(cell), 1)) if drift > 0]


def _never(by_step: Steps) -> bool:
    """Whether there are drifts, and all are exactly 0."""
    drifts = [drift for seeds in by_step.values() for drift in seeds.values()]
    return bool(drifts) and all(drift == 0 for drift in drifts)


def _decades(drifts: list[float]) -> tuple[float, float]:
    low, high = math.floor(math.log10(min(drifts))), math.ceil(math.log10(max(drifts)))
    return 10.0 ** (low - 0.3), 10.0 ** (max(high, low + 2) + 0.3)


def _ticks(axes: Axes, last: int, low: float, high: float) -> None:
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    apart = next(apart for apart in (1, 2, 4, 8, 100) if len(powers) <= 5 * apart)
    axes.yaxis.set_major_locator(FixedLocator([10.0**power for power in powers if power % apart == 0]))
    axes.xaxis.set_major_locator(FixedLocator([_START, *(10.0**power for power in range(len(str(last))))]))
    axes.yaxis.set_major_formatter(FuncFormatter(number_text))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: "0" if step < 1 else f"{step:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())


def _label(twin: str, panels: Mapping[str, Twins]) -> str:
    kind, _, level = twin.partition("_")
    name = f"{kind} {number_text(float(level))}" if kind == "noise" and level else twin.replace("_", " ")
    having = [by_twin[twin] for by_twin in panels.values() if twin in by_twin]
    still = sum(map(_never, having))
    if still == len(having):
        return f"{name}: 0 exactly"
    counts = [len({seed for seeds in by_step.values() for seed in seeds}) for by_step in having]
    text = f"{name}, n = {'–'.join(map(str, sorted({min(counts), max(counts)})))}"
    return f"{text}, 0 exactly in {still} of {len(having)}" if still else text
