"""Figures of matrix sensing and hyperspectral completion, from plain numbers.

Colours are those of Okabe and Ito (2008), and never alone: markers or dashes say the same. What a paper published is
hollow. A mean is drawn only where every seed has a number, since that of the survivors would flatter a rule; a cross on
the upper edge stands where one has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation
from scipy.spatial import cKDTree

from experiments.analysis.figures import COLUMN_WIDTH_INCHES, FAINT, INK, draw_legend, log_axis, number_text, styled
from experiments.analysis.statistics import Summary

# Title, whether the rule follows rotations, its colour, its marker.
RULES: dict[str, tuple[str, bool, str, str]] = {
    "gd": ("GD", True, "#0072B2", "o"),
    "scalar_adam": ("scalar Adam", True, "#56B4E9", "s"),
    "muon": ("Muon", True, "#009E73", "^"),
    "shampoo": ("Shampoo", True, "#CC79A7", "D"),
    "adam": ("Adam", False, "#D55E00", "v"),
    "rmsprop": ("RMSProp", False, "#E69F00", "P"),
    "signum": ("signum", False, "#000000", "X"),
    "lion": ("Lion", False, "#8C8C8C", "p"),
    "adafactor": ("Adafactor", False, "#F0E442", "h"),
}
TITLES = {rule: title for rule, (title, *_) in RULES.items()}
HORIZON, DIVERGED, HELD_OUT = "horizon", "diverged", "held-out"

_DASHED, _DOTTED = (0, (4, 1.2)), (0, (1.2, 1.0))
_CLASSES: dict[bool | None, tuple[str, Any, str]] = {
    True: ("#0072B2", "-", "mean, follows rotations"),
    False: ("#D55E00", _DASHED, "mean, does not follow"),
    None: (INK, _DOTTED, "mean, other rule"),
}
_SERIES: tuple[Any, ...] = (("#0072B2", "o", "-"), ("#E69F00", "s", _DASHED), ("#009E73", "^", _DOTTED))
_REFERENCES: tuple[Any, ...] = ((0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (2, 2)))
_SELECTIONS = (("^", INK), ("D", "#CC79A7"), ("s", "#009E73"), ("v", "#E69F00"))
_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2}
_STRIP = 0.15  # the share of a panel's height, below the errors, in which the chosen rates are marked

Curves = Mapping[float, Mapping[int, float | None]]  # x -> seed -> error
Means = Mapping[float, Summary]  # x -> over seeds
Pair = tuple[Summary, Summary]  # error, effective rank


@dataclass(frozen=True)
class Pixel:
    """One pixel's value in every band; ``observed`` is 1 where it is seen; ``recovered`` by label, as "GD, rate 30"."""

    index: int
    truth: Sequence[float]
    observed: Sequence[int]
    recovered: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Band:
    """One band's value at every pixel, whose places in the image are ``positions`` (row, column); else as `Pixel`."""

    index: int
    positions: Sequence[tuple[int, int]]
    image_shape: tuple[int, int]
    truth: Sequence[float]
    observed: Sequence[int]
    recovered: Mapping[str, Sequence[float]]


@styled
def dial(
    series: Mapping[str, Mapping[float, Pair]],
    published: Mapping[float, tuple[float, float]],
    marks: Mapping[str, Pair],
) -> Figure:
    """Relative error above and effective rank below, against the dial's p: mean and standard deviation over seeds.

    `series` is label -> p -> (error, effective rank), `published` p -> those of the paper, `marks` label -> those of
    what has no p, drawn as levels.
    """
    if not any(series.values()):
        raise ValueError("no series of the dial to draw; give {label: {p: (error, effective rank)}}")
    figure = Figure(figsize=(COLUMN_WIDTH_INCHES, 3.1), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    levels = dict(zip(marks, cycle(_REFERENCES), strict=False))
    handles: list[Artist] = []
    for (label, dashes), (index, axes) in product(levels.items(), enumerate(panels)):
        _draw_means(axes, dict.fromkeys((-0.05, 1.05), marks[label][index]), INK, "", dashes)
    for position, (label, points) in enumerate(series.items()):
        color, marker, dashes = _SERIES[position % len(_SERIES)]
        shift = 0.012 * (2 * position - len(series) + 1)  # else one series hides another where they agree
        for index, axes in enumerate(panels):
            _draw_means(axes, {p + shift: pair[index] for p, pair in points.items()}, color, marker, dashes)
        n = _n(summary.n for pair in points.values() for summary in pair)
        handles.append(Line2D([], [], color=color, marker=marker, linestyle=dashes, label=f"{label}, {n}"))
    for index, (axes, name) in enumerate(zip(panels, ("relative error", "effective rank"), strict=True)):
        axes.plot(list(published), [pair[index] for pair in published.values()], **_hollow("D", INK))
        axes.set_ylabel(name)
        _from_zero(axes)
    panels[1].set_xticks([0, 0.25, 0.5, 0.75, 1], ["0\nscalar Adam", "0.25", "0.5", "0.75", "1\nAdam"])
    panels[1].set_xlabel("dial p")
    figure.align_ylabels(panels)
    handles += [_key(**_hollow("D", INK), label="published")] * bool(published)
    handles += [Line2D([], [], color=INK, linestyle=d, label=label) for label, d in levels.items()]
    draw_legend(figure, [*handles, *_notes(s for points in series.values() for pair in points.values() for s in pair)])
    return figure


@styled
def rate_curves(
    curves: Mapping[str, Curves],
    ends: Mapping[str, Mapping[float, str]],
    chosen: Mapping[str, Mapping[str, float | None]],
    ylabel: str = "relative error",
) -> Figure:
    """Error against the learning rate, a panel a rule: every seed faint, the mean strong, the chosen rates marked.

    The errors share one logarithmic axis. Where some are far below all others, as those of a matrix recovered exactly
    are, it is linear from zero to about a tenth of the largest, lest the others be pressed into its upper edge.

    Args:
        curves: rule -> rate -> seed -> error, None where the run diverged.
        ends: rule -> rate -> how the worst of its seeds ended, "interpolated", "horizon" or "diverged".
        chosen: rule -> name of a way to select -> the rate that it takes, None where it finds none.
        ylabel: what the errors are.
    """
    errors = [error for rule in curves.values() for seeds in rule.values() for error in _finite(seeds)]
    if not errors:
        raise ValueError("no error to draw; give {rule: {rate: {seed: error}}} with a run that did not diverge")
    selections = dict(zip(dict.fromkeys(n for by in chosen.values() for n in by), cycle(_SELECTIONS), strict=False))
    columns = 2 if len(curves) in (2, 4) else min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(COLUMN_WIDTH_INCHES, 1.2 * rows + 0.3), layout="constrained")
    for index, (rule, by_rate) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        _scale_errors(axes, errors, bool(selections))
        _draw_rates(axes, rule, by_rate, ends.get(rule, {}))
        _mark_chosen(axes, chosen.get(rule, {}), selections)
        _scale_rates(axes, [*by_rate, *(rate for rate in chosen.get(rule, {}).values() if rate is not None)])
        axes.set_title(_facts(rule)[0], pad=5)
        axes.tick_params(labelleft=index % columns == 0)
        axes.set_ylabel("" if index % columns else ylabel)
        axes.set_xlabel("learning rate" if index >= len(curves) - columns else "")
    draw_legend(figure, _rate_handles(curves, ends, selections))
    return figure


@styled
def tails(errors: Mapping[str, Means], published: Mapping[str, Mapping[float, float]], reference: Means) -> Figure:
    """Relative error against the share τ of the matrix that lies outside its rank: mean and standard deviation.

    `errors` and, of the paper, `published` are rule -> τ -> error; `reference` is τ -> that of the least nuclear norm.
    """
    if not any(errors.values()):
        raise ValueError("no error to draw; give {rule: {tau: error}}")
    figure = Figure(figsize=(COLUMN_WIDTH_INCHES, 2.3), layout="constrained")
    axes = figure.subplots()
    handles: list[Artist] = []
    for rule, by_tail in errors.items():
        title, _, color, marker = _facts(rule)
        _draw_means(axes, by_tail, color, marker, "-")
        points = published.get(rule, {})
        axes.plot(list(points), list(points.values()), **_hollow(marker, color))
        n = _n(summary.n for summary in by_tail.values())
        handles.append(Line2D([], [], color=color, marker=marker, label=f"{title}, {n}"))
    if reference:
        _draw_means(axes, reference, INK, "", _REFERENCES[0])
        handles.append(Line2D([], [], color=INK, linestyle=_REFERENCES[0], label="least nuclear norm"))
    handles += [_key(**_hollow("o", FAINT), label="published")] * any(published.get(rule) for rule in errors)
    axes.set(xlabel="spectral tail τ", ylabel="relative error")
    axes.xaxis.set_major_formatter(FuncFormatter(number_text))
    _from_zero(axes)
    draw_legend(figure, [*handles, *_notes(summary for by in (*errors.values(), reference) for summary in by.values())])
    return figure


@styled
def completion(levels: Mapping[str, Mapping[str, Curves]], pixel: Pixel, band: Band) -> Figure:
    """Test error at equal training errors, and what it looks like in one pixel and in one band. Two columns wide.

    Training goes from left to right. Where a seed did not reach a level there is no mean, only points of the others.
    The images are of few of a scene's pixels: a cell shows the nearest of them, if one is near.

    `levels` is the name of a way to select ("held-out", "published") -> rule -> training error -> seed -> test error.
    """
    if not any(_finite(seeds) for rules in levels.values() for by in rules.values() for seeds in by.values()):
        raise ValueError("no test error to draw; give {selection: {rule: {training error: {seed: error}}}}")
    figure = Figure(figsize=(2 * COLUMN_WIDTH_INCHES + 0.2, 4.95), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(3.2, 1.75))
    left, right = parts[0].subplots(1, 2)
    _draw_levels(left, levels)
    _draw_pixel(right, pixel)
    _draw_band(parts[1], band)
    return figure


def _facts(rule: str) -> tuple[str, bool | None, str, str]:
    return RULES.get(rule) or (rule.replace("_", " "), None, INK, "*")


def _hollow(marker: str, color: str, line: Any = "") -> dict[str, Any]:
    """Larger than the filled markers, so that both are seen where they agree."""
    return {"marker": marker, "color": color, "linestyle": line, "markerfacecolor": "none", "markersize": 6}


def _key(**look: Any) -> Line2D:
    return Line2D([], [], **{"color": FAINT, "linestyle": ""} | look)


def _n(numbers: Iterable[int]) -> str:
    """ "n = 3", or "n = 2–3" where some are smaller."""
    return f"n = {'–'.join(map(str, sorted({min(known := list(numbers), default=0), max(known, default=0)})))}"


def _finite(seeds: Mapping[int, float | None]) -> list[float]:
    return [value for value in seeds.values() if value is not None and math.isfinite(value)]


def _mean(seeds: Mapping[int, float | None]) -> float:
    return float(np.mean(found)) if len(found := _finite(seeds)) == len(seeds) > 0 else math.nan


def _whole(summary: Summary) -> bool:
    return summary.mean is not None and summary.n == summary.n_seeds


def _cross(axes: Axes, places: Sequence[float], color: str) -> None:
    edge = axes.get_xaxis_transform()
    for place in places:  # not as one line: the layout takes an empty one for something at the figure's corner
        axes.plot([place], [1.0], marker="x", color=color, markersize=4, transform=edge, clip_on=False, zorder=5)


def _draw_means(axes: Axes, by_x: Means, color: str, marker: str, dashes: Any) -> None:
    """Means with their standard deviations, in a line that breaks where a seed is missing."""
    places = sorted(by_x)
    cells = [(by_x[x].mean, by_x[x].std) if _whole(by_x[x]) else (None, None) for x in places]
    means, deviations = np.array(cells, float).reshape(-1, 2).T
    axes.plot(places, means, color=color, marker=marker, linestyle=dashes, zorder=3)
    axes.errorbar(places, means, yerr=deviations, fmt="none", ecolor=color, elinewidth=0.8, capsize=1.8, zorder=2)
    _cross(axes, [x for x in places if not _whole(by_x[x])], color)


def _from_zero(axes: Axes) -> None:
    axes.margins(x=0.04, y=0.12)
    axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])  # a little below, so that a marker at zero is whole
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(number_text))


def _notes(summaries: Iterable[Summary]) -> list[Line2D]:
    spread, lost = zip(*((s.std is not None, not _whole(s)) for s in summaries), strict=True)
    bar = _key(marker="|", markersize=7, label="± 1 standard deviation")
    return [bar] * any(spread) + [_key(marker="x", label="a seed has no number")] * any(lost)


def _scale_errors(axes: Axes, errors: Sequence[float], with_strip: bool) -> None:
    """The shared axis of the errors, and below it, if wanted, a strip for the marks of the chosen rates."""
    log_axis(axes.yaxis, [error for error in errors if error > 0])
    if min(errors) < 0.01 * max(errors):
        unit, top = 10.0 ** (round(math.log10(max(errors))) - 1), 1.2 * max(errors)
        ticks = [tick for tick in (0, unit, 3 * unit, 10 * unit, 30 * unit) if tick < top]
        axes.set_yscale("symlog", linthresh=unit, linscale=0.6)
        axes.set_ylim(-0.2 * unit, top)
        axes.yaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(number_text))
    if with_strip:
        scale = axes.yaxis.get_transform()
        low, high = scale.transform(axes.get_ylim())
        axes.set_ylim(bottom=float(scale.inverted().transform([low - (high - low) * _STRIP / (1 - _STRIP)])[0]))
        axes.add_patch(Rectangle((0, 0), 1, _STRIP, transform=axes.transAxes, color="#F1F1F1", linewidth=0))


def _scale_rates(axes: Axes, rates: Sequence[float]) -> None:
    """A tick at every rate; numbers at the powers of ten, for which alone there is room."""
    low, high = min(rates) / 1.3, max(rates) * 1.3
    decades = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    log_axis(axes.xaxis, (low, high), ticks=decades if len(decades) > 1 else sorted({min(rates), max(rates)}))
    axes.xaxis.set_minor_locator(FixedLocator(sorted(set(rates))))
    axes.tick_params(axis="x", which="minor", length=1.8, width=0.6)


def _draw_rates(axes: Axes, rule: str, curves: Curves, ends: Mapping[float, str]) -> None:
    color, dashes, _ = _CLASSES[_facts(rule)[1]]
    rates = sorted(curves)
    faint: dict[str, Any] = {"alpha": 0.45, "linewidth": 0.6, "marker": "o", "markersize": 1.6, "markeredgewidth": 0}
    for seed in sorted({seed for by_seed in curves.values() for seed in by_seed}):
        values = np.array([curves[rate].get(seed) for rate in rates], float)
        axes.plot(rates, np.where(np.isfinite(values), values, np.nan), color=color, **faint)
    means = [_mean(curves[rate]) for rate in rates]
    axes.plot(rates, means, color=color, linestyle=dashes, zorder=3)
    for rate, mean in zip(rates, means, strict=True):
        face = "white" if ends.get(rate) == HORIZON else color
        axes.plot([rate], [mean], marker="o", color=color, markerfacecolor=face, markersize=3.8, zorder=4)
        _cross(axes, [rate] * (math.isnan(mean) or ends.get(rate) == DIVERGED), color)


def _mark_chosen(axes: Axes, chosen: Mapping[str, float | None], looks: Mapping[str, tuple[str, str]]) -> None:
    """Marks in the strip below the errors, side by side where several ways of selecting take one rate."""
    for rate in {rate: None for rate in chosen.values() if rate is not None}:
        for position, name in enumerate(names := [name for name in looks if chosen.get(name) == rate]):
            inches = 5.2 / 72 * (position - (len(names) - 1) / 2)
            place = axes.get_xaxis_transform() + ScaledTranslation(inches, 0, axes.figure.dpi_scale_trans)
            marker, color = looks[name]
            axes.plot([rate], [_STRIP / 2], marker=marker, color=color, markersize=3.4, transform=place, zorder=4)


def _rate_handles(
    curves: Mapping[str, Curves], ends: Mapping[str, Mapping[float, str]], selections: Mapping[str, tuple[str, str]]
) -> list[Line2D]:
    """One legend for all panels, of what is in them."""
    looks = [_CLASSES[kind] for kind in dict.fromkeys(_facts(rule)[1] for rule in curves)]
    handles = [_key(color=color, linestyle=dashes, label=text) for color, dashes, text in looks]
    cells = [(seeds, ends.get(rule, {}).get(rate)) for rule, by in curves.items() for rate, seeds in by.items()]
    n = _n(len(seeds) for seeds, _ in cells)
    handles.append(_key(linestyle="-", linewidth=0.6, marker="o", markersize=1.6, label=f"one seed, {n}"))
    if any(end == HORIZON and not math.isnan(_mean(seeds)) for seeds, end in cells):
        handles.append(_key(marker="o", markerfacecolor="white", label="a seed ended at the horizon"))
    if crossed := [end for seeds, end in cells if end == DIVERGED or math.isnan(_mean(seeds))]:
        handles.append(_key(marker="x", label="a seed has no error" if HORIZON in crossed else "a seed diverged"))
    return handles + [_key(marker=m, color=c, label=f"rate chosen: {name}") for name, (m, c) in selections.items()]


def _draw_levels(axes: Axes, levels: Mapping[str, Mapping[str, Curves]]) -> None:
    counts: dict[str, list[int]] = {rule: [] for rules in levels.values() for rule in rules}
    for selection, rules in levels.items():
        for rule, by_level in rules.items():
            _, _, color, marker = _facts(rule)
            places, seeds = sorted(by_level), sorted({seed for own in by_level.values() for seed in own})
            counts[rule].append(len(seeds))
            table = np.array([[by_level[level].get(seed) for seed in seeds] for level in places], float)
            whole = np.array([row if np.isfinite(row).all() else row * np.nan for row in table])
            look = {"color": color, "marker": marker} if selection == HELD_OUT else _hollow(marker, color, _DASHED)
            if places and seeds:
                axes.plot(places, whole.mean(axis=1), **look)
                axes.fill_between(places, whole.min(axis=1), whole.max(axis=1), color=color, alpha=0.15, linewidth=0)
                axes.plot(places, np.where(np.isfinite(whole), np.nan, table), marker, color=color, markersize=2.2)
    cells = [(level, seeds) for rules in levels.values() for by in rules.values() for level, seeds in by.items()]
    log_axis(axes.yaxis, [error for _, seeds in cells for error in _finite(seeds)])
    log_axis(axes.xaxis, {level for level, _ in cells}, ticks=sorted({level for level, _ in cells}))
    axes.invert_xaxis()
    axes.set(xlabel="training mean squared error", ylabel="test RMSE", title="a  test error at equal training errors")
    handles: list[Artist] = [
        Line2D([], [], color=_facts(rule)[2], marker=_facts(rule)[3], label=f"{_facts(rule)[0]}, {_n(numbers)}")
        for rule, numbers in counts.items()
    ]
    for name in levels:
        look = {"marker": "o", "linestyle": "-"} if name == HELD_OUT else _hollow("o", FAINT, _DASHED)
        handles.append(_key(**look, label=f"rate chosen: {name}"))
    band = [Patch(color=FAINT, alpha=0.3, linewidth=0, label="band: min–max of seeds")]
    axes.legend(handles=handles + band * (max(map(max, counts.values())) > 1), **_BELOW)


def _draw_pixel(axes: Axes, pixel: Pixel) -> None:
    rules = {title: rule for rule, title in TITLES.items()}
    axes.plot(pixel.truth, color="#C4C4C4", linewidth=3, label="truth")
    for (label, values), dashes in zip(pixel.recovered.items(), cycle(("-", _DASHED, _DOTTED)), strict=False):
        named = rules.get(label.split(",")[0], "")
        axes.plot(values, color=_facts(named)[2], linestyle=dashes, linewidth=1, label=label)
    axes.plot(np.where(pixel.observed, pixel.truth, np.nan), "o", markersize=2.6, color=INK, label="observed", zorder=4)
    axes.set(xlabel="band", ylabel="reflectance less the band’s mean", title=f"b  pixel {pixel.index}")
    axes.margins(x=0.02)
    axes.yaxis.set_major_formatter(FuncFormatter(number_text))
    axes.legend(**_BELOW)


def _draw_band(figure: SubFigure, band: Band) -> None:
    seen = np.where(band.observed, band.truth, np.nan).tolist()
    shown: dict[str, Sequence[float]] = {"truth": band.truth, "observed": seen, **band.recovered}
    low, high = np.percentile(band.truth, (1, 99))
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="#D9D9D9")
    panels = figure.subplots(1, len(shown))
    for axes, (label, values) in zip(panels, shown.items(), strict=True):
        image = axes.imshow(_raster(band, values), cmap=colors, vmin=low, vmax=high, interpolation="nearest")
        axes.set(xticks=[], yticks=[], title=f"c  band {band.index}, {label}" if label == "truth" else label)
        axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=list(panels), extend="both", pad=0.015, format=FuncFormatter(number_text))
    bar.set_label("reflectance\nless the band’s mean")


def _raster(band: Band, values: Sequence[float]) -> np.ndarray:
    """Each cell of the image with the value of the nearest pixel that has one, NaN where none is near."""
    known = np.isfinite(values)
    reach = max(round((math.sqrt(0.85 * math.prod(band.image_shape) / len(known)) - 1) / 2), 0)
    cells = np.indices(band.image_shape).reshape(2, -1).T
    near = cKDTree(np.array(band.positions)[known]).query(cells, p=np.inf, distance_upper_bound=reach + 0.5)[1]
    return np.append(np.array(values)[known], np.nan)[near].reshape(band.image_shape)
