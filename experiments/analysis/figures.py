"""Figures of perplexity over steps, seeds and learning rates, one panel a model.

Each plotting function takes the frame of `collect` after `one_value_per_seed` and returns a figure; `save` writes it.
The style is applied around each function and no figure belongs to a window, so nothing here keeps global state.
A run that is not done enters no mean: its curve is drawn thin and dotted, its learning rate gets a cross, n says 4/5.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from experiments.analysis.collect import statuses_by_seed, values_by_seed
from experiments.analysis.statistics import Comparison, Summary, compare, summarize
from experiments.analysis.tables import seeds_text, write_atomically

STYLE = Path(__file__).with_name("style.mplstyle")
COLUMN_WIDTH_INCHES = 3.4

# One colour an arm in every figure, from the colour-blind-safe palette of Okabe and Ito (2008).
ARM_COLORS = {
    "control": "#0072B2",
    "imbalanced": "#D55E00",
    "saggs": "#009E73",
    "soft_saggs": "#CC79A7",
    "control_saggs": "#E69F00",
}
OTHER_COLORS = ("#56B4E9", "#000000", "#8C8C8C")
# Dashes let an arm be seen that lies exactly on another.
ARM_DASHES: dict[str, Any] = {"saggs": (0, (4, 1.2)), "soft_saggs": (0, (1.2, 1.0)), "control_saggs": (0, (4, 1, 1, 1))}
ARM_LABELS = {"saggs": "SAGGS", "soft_saggs": "soft SAGGS", "control_saggs": "control + SAGGS"}
LOG_STEPS = {8: (1, 1.5, 2, 3, 4, 6, 8), 40: (1, 2, 3, 5), 300: (1, 2, 5), math.inf: (1,)}  # by the axis's ratio
ROUND_STEPS = [1, 2, 2.5, 5, 10]
INK, FAINT = "#202020", "#6E6E6E"

P = ParamSpec("P")
R = TypeVar("R")


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Apply the style of all figures while a function draws, and leave none of it behind."""

    @wraps(function)
    def with_style(*arguments: P.args, **keywords: P.kwargs) -> R:
        with matplotlib.style.context(["default", STYLE]):
            return function(*arguments, **keywords)

    return with_style


@styled
def validation_curves(
    frame: pd.DataFrame, arms: Sequence[str], title_by_model: Mapping[str, str], from_step: int = 0
) -> Figure:
    """Validation perplexity against the step: mean over the done seeds, band from the smallest to the largest.

    Steps that a done seed lacks are left out of the mean. Raises ValueError if there is no curve to draw.
    """
    figure, panels = _panels(len(title_by_model), height_inches=1.75)
    colors = _colors(arms)
    counts: dict[str, list[Summary]] = {arm: [] for arm in arms}
    bands = partial_runs = False
    for axes, (model, title) in zip(panels, title_by_model.items(), strict=True):
        drawn: list[float] = []
        partial: list[float] = []
        for arm in arms:
            rows = _cell(frame, model, arm)
            counts[arm].append(summarize(values_by_seed(rows)))
            done = [_curve(row, from_step) for _, row in rows[rows["status"] == "done"].iterrows()]
            steps = sorted(set.intersection(*(set(curve) for curve in done))) if done else []
            values = np.array([[curve[step] for step in steps] for curve in done])
            if steps:
                axes.plot(steps, values.mean(axis=0), color=colors[arm], linestyle=ARM_DASHES.get(arm, "-"), zorder=3)
                if len(done) > 1:
                    bands = True
                    axes.fill_between(
                        steps, values.min(axis=0), values.max(axis=0), color=colors[arm], alpha=0.2, linewidth=0
                    )
                drawn += values.ravel().tolist()
            for _, row in rows[rows["status"] != "done"].iterrows():
                if curve := _curve(row, from_step):
                    axes.plot(list(curve), list(curve.values()), color=colors[arm], linestyle=":", linewidth=0.8)
                    partial += curve.values()
                    partial_runs = True
        if drawn:  # a run that blew up must not press the others flat
            partial = [min(value, 10 * max(drawn)) for value in partial]
        if not (drawn := drawn + partial):
            raise ValueError(f"no validation curve of {model!r} in {', '.join(arms)}; collect runs that have one")
        axes.set_title(title)
        axes.set_ylabel("validation perplexity")
        axes.margins(x=0.02)
        log_axis(axes.yaxis, drawn)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=ROUND_STEPS))
        axes.xaxis.set_major_formatter(FuncFormatter(number_text))
    _label_lowest(panels, "step")
    handles: list[Artist] = [
        Line2D([], [], color=colors[arm], linestyle=ARM_DASHES.get(arm, "-"), label=f"{_label(arm)}, {_n(counts[arm])}")
        for arm in arms
    ]
    if bands:
        handles.append(Patch(color=FAINT, alpha=0.3, linewidth=0, label="band: min–max of seeds"))
    if partial_runs:
        handles.append(Line2D([], [], color=FAINT, linestyle=":", linewidth=0.8, label="unfinished run"))
    draw_legend(figure, handles)
    return figure


@styled
def paired_differences(
    frame: pd.DataFrame,
    contrasts: Sequence[tuple[str, str]],
    title_by_model: Mapping[str, str] | None = None,
    seeds: Sequence[int] | None = None,
) -> Figure:
    """Test perplexity of the first arm less that of the second: each seed, and the mean with its 95 % t-interval.

    `seeds` are those fixed beforehand, so that one that no arm ran counts as missing. Where no test is made there is no
    interval, and the row's label says so. Raises ValueError without contrasts.
    """
    if not contrasts:
        raise ValueError("no contrasts; give pairs of arms such as ('saggs', 'control')")
    titles = _titles(frame, title_by_model)
    figure, panels = _panels(len(titles), height_inches=0.55 + 0.37 * len(contrasts))
    colors = _colors([first for first, _ in contrasts])
    for axes, (model, title) in zip(panels, titles.items(), strict=True):
        labels = []
        for height, (first, second) in enumerate(contrasts):
            left, right = (_cell(frame, model, arm) for arm in (first, second))
            comparison = compare(
                values_by_seed(left, seeds=seeds),
                values_by_seed(right, seeds=seeds),
                statuses_by_seed(left, seeds),
                statuses_by_seed(right, seeds),
            )
            labels.append(f"{_label(first)} − {_label(second)}\n{_difference_note(comparison)}")
            _draw_difference(axes, height, comparison, colors[first])
        axes.axvline(0, color=INK, linewidth=0.8, zorder=2)
        axes.set_title(title)
        axes.set_ylim(len(contrasts) - 0.5, -0.5)
        axes.set_yticks(range(len(contrasts)), labels, linespacing=1.15)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.margins(x=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND_STEPS, min_n_ticks=3))
        axes.xaxis.set_major_formatter(FuncFormatter(number_text))
    _label_lowest(panels, "paired difference in test perplexity\n(below zero: the first arm is better)")
    dot = Line2D([], [], linestyle="", marker="o", color=FAINT, alpha=0.6, markeredgewidth=0, label="one seed")
    mean = Line2D([], [], marker="D", color=INK, linewidth=1, markersize=3, label="mean with 95 % t-interval")
    draw_legend(figure, [dot, mean])
    return figure


@styled
def learning_rate_sweep(
    frame: pd.DataFrame,
    arms: Sequence[str],
    chosen: float | Mapping[str, float] | None = None,
    title_by_model: Mapping[str, str] | None = None,
) -> Figure:
    """Validation perplexity against the learning rate: a dot a seed, a line through the means of each arm.

    ``chosen`` is the rate to mark, one for all models or one a model. The line breaks at a rate where a run did not
    finish (the mean of the survivors would flatter it), and a cross at the top marks that rate.
    """
    titles = _titles(frame, title_by_model)
    figure, panels = _panels(len(titles), height_inches=1.75)
    colors = _colors(arms)
    counts: dict[str, list[int]] = {arm: [] for arm in arms}
    crosses = False
    for axes, (model, title) in zip(panels, titles.items(), strict=True):
        drawn: list[float] = []
        rates: set[float] = set()
        for position, arm in enumerate(arms):
            means: dict[float, float] = {}
            shift = 1.03 ** (position - (len(arms) - 1) / 2)
            for rate, rows in _cell(frame, model, arm).groupby("learning_rate", sort=True):
                by_seed = values_by_seed(rows, "validation_perplexity")
                summary = summarize(by_seed)
                values = [value for value in by_seed.values() if value is not None and math.isfinite(value)]
                means[rate] = summary.mean if summary.mean is not None and not summary.missing else math.nan
                counts[arm].append(summary.n_seeds)
                axes.scatter([rate * shift] * len(values), values, s=9, color=colors[arm], alpha=0.55, linewidth=0)
                drawn += values
                if summary.missing:
                    crosses = True
                    above: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 4}
                    axes.plot([rate * shift], [1.0], marker="x", color=colors[arm], markersize=4, **above)
            axes.plot(list(means), list(means.values()), color=colors[arm], linestyle=ARM_DASHES.get(arm, "-"))
            rates |= means.keys()
        if not drawn:
            raise ValueError(f"no validation perplexity of {model!r} in {', '.join(arms)}; collect a finished sweep")
        axes.set_title(title, pad=7)
        axes.set_ylabel("validation perplexity")
        log_axis(axes.yaxis, drawn)
        log_axis(axes.xaxis, rates, ticks=sorted(rates)[:: math.ceil(len(rates) / 7)])
        rate = chosen.get(model) if isinstance(chosen, Mapping) else chosen
        if rate is not None:
            axes.axvline(rate, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    _label_lowest(panels, "learning rate")
    handles: list[Artist] = [
        Line2D(
            *([], []),
            color=colors[arm],
            linestyle=ARM_DASHES.get(arm, "-"),
            marker="o",
            markersize=3,
            label=f"{_label(arm)}, n = {'–'.join(map(str, sorted({min(counts[arm]), max(counts[arm])})))}",
        )
        for arm in arms
        if counts[arm]
    ]
    if chosen is not None:
        handles.append(Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (2, 2)), label="chosen rate"))
    if crosses:
        handles.append(
            Line2D([], [], color=FAINT, linestyle="", marker="x", markersize=4, label="a run did not finish")
        )
    draw_legend(figure, handles)
    return figure


@styled
def save(figure: Figure, directory: Path, stem: str) -> list[Path]:
    """Write ``stem``.pdf, .svg and .png, each atomically, without dates: the same figure gives the same bytes."""
    undated: dict[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
    }
    paths = []
    for suffix, metadata in undated.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, metadata=metadata)
        paths.append(Path(directory) / f"{stem}.{suffix}")
        write_atomically(paths[-1], buffer.getvalue())
    return paths


def _panels(count: int, height_inches: float) -> tuple[Figure, list[Axes]]:
    """Up to three panels stand in one column of the paper; more stand two beside each other."""
    if count == 0:
        raise ValueError("no model to draw; the frame has no rows or the titles are empty")
    columns = 1 if count <= 3 else 2
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(COLUMN_WIDTH_INCHES * columns, rows * height_inches + 0.2), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


def _label_lowest(panels: Sequence[Axes], text: str) -> None:
    columns = 1 if len(panels) <= 3 else 2
    for axes in panels[-columns:]:
        axes.set_xlabel(text)


def draw_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """A legend below the panels, in two columns where they fit the width; the figure grows by its height."""
    for columns in (2, 1):
        legend = figure.legend(handles=list(handles), loc="outside lower center", ncols=columns)
        box = legend.get_window_extent()
        if box.width <= figure.bbox.width or columns == 1:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)


def _titles(frame: pd.DataFrame, title_by_model: Mapping[str, str] | None) -> Mapping[str, str]:
    return title_by_model or {model: str(model) for model in sorted(frame["model"].dropna().unique())}


def _cell(frame: pd.DataFrame, model: str, arm: str) -> pd.DataFrame:
    return frame[(frame["model"] == model) & (frame["arm"] == arm)]


def _colors(arms: Iterable[str]) -> dict[str, str]:
    others = iter(OTHER_COLORS * 10)
    return {arm: ARM_COLORS.get(arm) or next(others) for arm in dict.fromkeys(arms)}


def _label(arm: str) -> str:
    return ARM_LABELS.get(arm, arm.replace("_", " "))


def _n(summaries: Sequence[Summary]) -> str:
    """ "n = 5", or every panel's own number where they differ."""
    numbers = [seeds_text(summary) for summary in summaries]
    return "n = " + (numbers[0] if len(set(numbers)) == 1 else ", ".join(numbers) + " by panel")


def _curve(row: Any, from_step: int) -> dict[int, float]:
    """{step: perplexity} of a run's curve, without points that are not finite."""
    points = row["curve"] if isinstance(row["curve"], list) else []
    return {
        point["step"]: point["perplexity"]
        for point in points
        if point["step"] >= from_step and math.isfinite(point.get("perplexity") or math.nan)
    }


def _draw_difference(axes: Axes, height: float, comparison: Comparison, color: str) -> None:
    difference = comparison.difference
    values = list(difference.per_seed.values())
    spread = np.linspace(-0.08, 0.08, len(values)) if len(values) > 1 else np.zeros(len(values))
    axes.scatter(values, height - 0.12 + spread, s=11, color=color, alpha=0.6, linewidth=0, zorder=3)
    if difference.interval is not None:
        axes.plot(difference.interval, [height + 0.2] * 2, color=INK, linewidth=1, zorder=3)
    if difference.mean is not None:
        axes.plot([difference.mean], [height + 0.2], marker="D", color=INK, markersize=3, zorder=4)


def _difference_note(comparison: Comparison) -> str:
    n = comparison.difference.n
    text = f"n = {n}" if n == comparison.n_seeds else f"n = {n}/{comparison.n_seeds}"
    if comparison.identical:
        return f"{text}, identical"
    return text if comparison.difference.interval is not None else f"{text}, no interval"


def log_axis(axis: Axis, values: Iterable[float], ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis with plain numbers at round places, however narrow or wide the range."""
    low, high = min(values := list(values)), max(values)
    margin = max(high / low, 1.0001) ** 0.05
    low, high = low / margin, high * margin
    name = "x" if axis is axis.axes.xaxis else "y"
    axis.axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    if ticks is None and high / low < 3:
        ticks = list(MaxNLocator(5, steps=ROUND_STEPS).tick_values(low, high))
    elif ticks is None:
        steps = next(steps for widest, steps in LOG_STEPS.items() if high / low < widest)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(number_text))


def number_text(value: float, _position: object = None) -> str:
    """A number at a tick: three significant digits, a real minus sign, no zeros in front of an exponent."""
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):.3g}e{int(exponent)}".replace("-", "−")
    return (f"{value:.3g}" if abs(value) < 1 else f"{value:,.6g}").replace("-", "−")
