"""Figures of the second paper's studies draw what they are given, hide no run, overlap nothing and do not vary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text

from experiments.analysis import drifts, factorizations, figures
from experiments.analysis.factorizations import Band, Pixel
from experiments.analysis.statistics import Summary, summarize

SEEDS = (42, 123, 456)
RATES = {
    "gd": (0.01, 0.03, 0.1, 0.3), "adam": (0.001, 0.01, 0.03), "scalar_adam": (0.001, 0.003, 0.01, 0.03),
    "rmsprop": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), "signum": (1e-4, 3e-4, 1e-3, 3e-3), "lion": (1e-4, 3e-4, 1e-3, 3e-3),
    "adafactor": (3e-4, 1e-3, 3e-3, 1e-2), "muon": (3e-3, 1e-2, 3e-2, 0.1), "shampoo": (0.03, 0.1, 0.3, 1.0),
}  # fmt: skip
ENDS = {"gd": {0.1: "diverged", 0.3: "diverged"}, "muon": {0.003: "horizon"}}
CHOSEN = {rule: {"published": by[-1], "held out": by[0], "training loss": by[0]} for rule, by in RATES.items()}
FEW = ("gd", "adam", "scalar_adam", "muon")
POWERS, TAILS = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)
LEVELS, STEPS = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5), (0, 1, 2, 5, 10, 100, 1000, 1500)
TWINS = {"rotated": 0.01, "identity": 0.0, "noise_1e-07": 1e-7, "noise_1e-05": 1e-5}
LOST = summarize({42: 0.3, 123: None, 456: 0.4})
BLUE, VERMILION = "#0072B2", "#D55E00"

Curves = dict[str, dict[float, dict[int, float | None]]]


def seeds(value: float, n: int = 3) -> dict[int, float]:
    return {seed: value * (1 + 0.05 * index) for index, seed in enumerate(SEEDS[:n])}


def over(value: float, n: int = 3) -> Summary:
    return summarize(seeds(value, n))


def pair(power: float, n: int = 3) -> tuple[Summary, Summary]:
    return over(0.2 + 0.35 * power, n), over(5 + 9 * power, n)


def dial(n: int = 3, **changed: Any) -> Figure:
    given: dict[str, Any] = {
        "series": {label: {p: pair(p, n) for p in POWERS} for label in ("root mean square", "geometric mean")},
        "published": {1: (0.57, 14.5), 0.5: (0.348, 8.2), 0: (0.201, 5.4)},
        "marks": {"GD": (over(0.131, n), over(4.51, n)), "FlowAdam, by coordinate": pair(0.4, n)},
    }
    return factorizations.dial(**(given | changed))


def sensing(n: int = 3) -> Curves:  # Muon recovers the matrix; GD diverges, at one rate for one of the seeds only
    curves: Curves = {rule: {x: dict(seeds(0.1 + 0.1 * i, n)) for i, x in enumerate(by)} for rule, by in RATES.items()}
    curves["muon"][0.1] = dict(seeds(7e-6, n))
    curves["gd"][0.3], curves["gd"][0.1][42] = dict.fromkeys(SEEDS[:n]), None
    return curves


def rates(curves: Curves | None = None, chosen: Mapping[str, Any] = CHOSEN, ends: Mapping[str, Any] = ENDS) -> Figure:
    return factorizations.rate_curves(curves or sensing(), ends, chosen)


def four(n: int = 2) -> Figure:
    curves = {rule: {rate: dict(seeds(0.014 + 0.3 * rate, n)) for rate in RATES[rule] if rate < 0.05} for rule in FEW}
    return factorizations.rate_curves(curves, {}, {"adam": {"published": 0.03, "held out": None}}, "test error")


def tails(n: int = 3, **changed: Any) -> Figure:
    given: dict[str, Any] = {
        "errors": {rule: {t: over(0.1 * i + t, n) for t in TAILS} for i, rule in enumerate(("muon", "gd", "adam"))},
        "published": {"gd": {0.0: 0.131, 0.5: 0.746}},
        "reference": {t: over(0.01 + 1.2 * t, n) for t in TAILS},
    }
    return factorizations.tails(**(given | changed))


def levels(n: int = 3) -> dict[str, Any]:
    def own(error: float) -> dict[float, dict[int, float]]:
        return {level: seeds(error * (level / 1e-5) ** 0.15, n) for level in LEVELS}

    errors = {"published": 0.017, "held-out": 0.012}
    return {name: {rule: own(error + 0.003 * i) for i, rule in enumerate(FEW)} for name, error in errors.items()}


def scene(seen: float = 0.3, shape: tuple[int, int] = (20, 30)) -> tuple[Pixel, Band]:
    rng = np.random.default_rng(0)
    truth, observed = rng.normal(0, 0.02, (60, 40)), (rng.random((60, 40)) < seen).astype(int)
    positions = [divmod(cell, shape[1]) for cell in rng.permutation(math.prod(shape))[:60].tolist()]
    one, other = ({label: (0.9 * own).tolist() for label in ("GD, rate 30", "Adam, rate 0.0001")}
                  for own in (truth[0], truth[:, 20]))  # fmt: skip
    pixel = Pixel(0, truth[0].tolist(), observed[0].tolist(), one)
    return pixel, Band(20, positions, shape, truth[:, 20].tolist(), observed[:, 20].tolist(), other)


def completion(given: dict[str, Any] | None = None) -> Figure:
    return factorizations.completion(given or levels(), *scene())


def panels(n: int = 3) -> dict[str, Any]:
    return {
        title: {twin: {step: seeds(size * (1 + step) ** 0.3, n) for step in STEPS} for twin, size in TWINS.items()}
        for title in ("Adam", "SGD, momentum 0.9", "scalar Adam", "Muon")
    }


def odd_panels() -> dict[str, Any]:  # under Adam a rotated twin diverges and the identity drifts; Muon has that only
    given = panels()
    given["Muon"] = {"identity": given["Muon"]["identity"]}
    given["Adam"]["identity"][10] = {42: 1e-16, 123: 0.0, 456: 0.0}
    del given["Adam"]["rotated"][1000][42], given["Adam"]["rotated"][1500][42]
    return given


def drifted(given: dict[str, Any] | None = None) -> Figure:
    return drifts.curves(given or panels())


FIGURES: dict[str, tuple[Callable[[], Figure], int]] = {  # with the number of panels
    "dial": (dial, 2),
    "dial, one seed": (lambda: dial(1, published={}, marks={}), 2),
    "nine rules": (rates, 9),
    "five rules, one seed, none chosen": (lambda: rates(dict([*sensing(1).items()][-5:]), {}), 5),
    "four rules, two seeds": (four, 4),
    "one rule, one rate": (lambda: rates({"one": {0.01: {42: 0.3}}}, {"one": {"held out": None}}, {}), 1),
    "tails": (tails, 1),
    "tails, one seed, lost seeds": (lambda: tails(1, published={}, reference={0.1: LOST}), 1),
    "completion": (completion, 2 + 4 + 1),
    "completion, one seed, tall": (lambda: factorizations.completion(levels(1), *scene(0.0, (60, 9))), 7),
    "drifts": (drifted, 4),
    "drifts, only zeros": (lambda: drifted({"Adam": {"identity": {step: {42: 0.0, 123: 0.0} for step in STEPS}}}), 1),
    "drifts, some zeros, a lost seed": (lambda: drifted(odd_panels()), 4),
}


@cache  # to be looked at, not changed
def shown(name: str) -> Figure:
    return FIGURES[name][0]()


def legends_of(figure: Figure) -> list[Legend]:
    return [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()))]


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for legend in legends_of(figure) for text in legend.get_texts()]


def written(axes: Axes) -> list[Text]:
    """What is written in and at a panel, without its legend; ticks outside the view are not drawn."""
    found = [axes.xaxis.label, axes.yaxis.label, *(own for own in axes.get_children() if isinstance(own, Text))]
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [tick for tick in axis.get_major_ticks() if low <= float(tick.get_loc()) <= high]
        found += [label for tick in ticks for label in (tick.label1, tick.label2)]
    return [text for text in found if text.get_visible() and text.get_text()]


def faults(figure: Figure) -> set[str]:
    """What a reader would call broken."""
    with matplotlib.style.context(["default", figures.STYLE]):
        figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in written(axes)]
    texts += [text for legend in legends_of(figure) for text in legend.get_texts()]
    boxes = [text.get_window_extent() for text in texts]
    keys, inside = [legend.get_window_extent() for legend in legends_of(figure)], [axes.bbox for axes in figure.axes]
    found = {"small" for text in texts if float(text.get_fontsize()) < 6.5}
    found |= {"texts overlap" for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)}
    found |= {"a legend covers a panel" for a in keys for b in inside if a.overlaps(b)}
    found |= {"flat" for box in inside if min(box.width, box.height) < 0.05 * figure.dpi}
    width, height = figure.bbox.width + 0.5, figure.bbox.height + 0.5
    outside = [b for b in (*boxes, *keys, *inside) if min(b.x0, b.y0) < -0.5 or b.x1 > width or b.y1 > height]
    return found | {"clipped"} if outside else found


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_clipped_small_or_covered(name: str) -> None:
    assert (faults(shown(name)), len(shown(name).axes)) == (set(), FIGURES[name][1])
    assert shown(name).get_figwidth() == (7.0 if name.startswith("completion") else 3.4)


def test_what_is_broken_is_seen() -> None:
    figure = tails()
    axes = figure.axes[0]
    axes.text(0.05, -0.08, "over a tick's label", transform=axes.transAxes, fontsize=5)
    assert faults(figure) == {"small", "texts overlap"}
    figure.legends[0].set_loc("center")
    axes.set_title("far too long a title for " * 4, loc="left")
    assert faults(figure) >= {"clipped", "a legend covers a panel"}
    axes.set_position((0.2, 0.2, 0.01, 0.5))
    assert "flat" in faults(figure)


def test_the_same_data_give_the_same_bytes_and_no_setting_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def svg(figure: Figure) -> bytes:
        return figures.save(figure, tmp_path, "figure")[1].read_bytes()

    def only_svg(figure: Figure, to: Any, format: str, **how: Any) -> None:  # the other formats take their time
        if format == "svg":
            write(figure, to, format=format, **how)

    write, before = Figure.savefig, dict(matplotlib.rcParams)
    monkeypatch.setattr(Figure, "savefig", only_svg)
    made = [svg(draw()) for draw in (dial, four, tails, completion, drifted)]
    assert [svg(draw()) for draw in (dial, four, tails, completion, drifted)] == made
    assert svg(tails(2)) != made[2]
    assert dict(matplotlib.rcParams) == before


def test_nothing_to_draw_is_an_error_and_not_an_empty_figure() -> None:
    for message, draw, nothing in (
        ("no series of the dial", factorizations.dial, ({"root mean square": {}}, {}, {})),
        ("no error to draw", factorizations.rate_curves, ({"gd": {0.1: {42: None}}}, {}, {})),
        ("no error to draw", factorizations.tails, ({}, {}, {0.1: over(0.2)})),
        ("no test error to draw", factorizations.completion, ({"held-out": {"gd": {}}}, *scene())),
        ("no twin to draw", drifts.curves, ({"Adam": {}},)),
    ):
        with pytest.raises(ValueError, match=message):
            draw(*nothing)


def xs(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata(), dtype=float).tolist()


def ys(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata(), dtype=float).tolist()


def lines(axes: Axes, **wanted: Any) -> list[Line2D]:
    fits = [all(getattr(line, f"get_{name}")() == value for name, value in wanted.items()) for line in axes.lines]
    return [line for line, fit in zip(axes.lines, fits, strict=True) if fit and ys(line)]


def finite(found: list[Line2D]) -> list[float]:
    return [y for line in found for y in ys(line) if math.isfinite(y)]


def picture(axes: Axes) -> np.ndarray:
    return np.ma.filled(np.ma.asarray(axes.images[0].get_array()), np.nan)


def test_the_dial_shows_means_deviations_and_what_was_published() -> None:
    for index, axes in enumerate(shown("dial").axes):
        summaries = [pair(p)[index] for p in POWERS]
        assert ys(lines(axes, color=BLUE)[0]) == [summary.mean for summary in summaries]
        bars = [np.concatenate(own[2][0].get_segments())[:, 1] for own in axes.containers]
        ends = [(s.mean or 0) + sign * (s.std or 0) for s in summaries for sign in (-1, 1)]
        assert sum(np.allclose(bar, ends) for bar in bars if len(bar) == len(ends)) == 2
        assert finite(lines(axes, markerfacecolor="none")) == [[0.57, 0.348, 0.201], [14.5, 8.2, 5.4]][index]
        assert ys(lines(axes, color=figures.INK)[0]) == [(over(0.131), over(4.51))[index].mean] * 2
    assert {"root mean square, n = 3", "± 1 standard deviation", "published", "GD"} <= set(legend_texts(shown("dial")))
    assert legend_texts(shown("dial, one seed")) == ["root mean square, n = 1", "geometric mean, n = 1"]


def test_a_lost_seed_breaks_the_line_and_gets_a_cross() -> None:
    broken = dial(series={"root mean square": {0: pair(0), 0.5: (LOST, LOST), 1: pair(1)}}, marks={})
    for axes, whole in zip(broken.axes, shown("dial").axes, strict=True):
        assert np.isnan(ys(lines(axes, color=BLUE)[0])).tolist() == [False, True, False]
        assert [[xs(line) for line in lines(own, marker="x")] for own in (axes, whole)] == [[[0.5]], []]
    assert {"root mean square, n = 2–3", "a seed has no number"} <= set(legend_texts(broken))
    assert "a seed has no number" not in legend_texts(shown("dial"))


def test_every_seed_is_drawn_and_the_mean_only_where_none_diverged() -> None:
    axes, other = shown("nine rules").axes[:2]
    for seed, line in zip(SEEDS, lines(axes, alpha=0.45), strict=True):
        expected = np.array([sensing()["gd"][rate][seed] for rate in RATES["gd"]], float)
        assert np.array_equal(ys(line), expected, equal_nan=True)
    mean = ys(lines(axes, color=BLUE, linestyle="-", marker="None")[0])
    assert mean == pytest.approx([0.105, 0.21, math.nan, math.nan], nan_ok=True)
    assert [[xs(line) for line in lines(own, marker="x")] for own in (axes, other)] == [[[0.1], [0.3]], []]
    assert {"one seed, n = 3", "a seed diverged"} <= set(legend_texts(shown("nine rules")))
    well = legend_texts(shown("four rules, two seeds"))
    assert ["one seed, n = 2" in well, "a seed diverged" in well] == [True, False]


def test_a_rate_that_did_not_interpolate_is_hollow() -> None:
    found = [[xs(line) for line in lines(axes, markerfacecolor="white")] for axes in shown("nine rules").axes]
    assert found == [[]] * 7 + [[[0.003]], []]
    assert "a seed ended at the horizon" in legend_texts(shown("nine rules"))
    assert "a seed ended at the horizon" not in legend_texts(shown("four rules, two seeds"))


def test_the_chosen_rates_are_marked_beside_each_other_in_shapes_of_their_own() -> None:
    figure, shapes = shown("nine rules"), {"published": "^", "held out": "D", "training loss": "s"}
    for axes, rule in zip(figure.axes, RATES, strict=True):
        marks = {str(line.get_marker()): line for line in lines(axes, markersize=3.4)}
        assert {name: xs(marks[shape])[0] for name, shape in shapes.items()} == CHOSEN[rule]
        places = [marks[shape].get_transform().transform((RATES[rule][0], 0))[0] for shape in "Ds"]
        assert abs(places[0] - places[1]) > 3.4 / 72 * figure.dpi
        assert len(axes.patches) == 1
    assert [text for text in legend_texts(figure) if "chosen" in text] == [f"rate chosen: {name}" for name in shapes]
    bare = shown("five rules, one seed, none chosen")
    assert not any(axes.patches or lines(axes, markersize=3.4) for axes in bare.axes)
    assert not any("chosen" in text for text in legend_texts(bare))
    assert [len(lines(axes, markersize=3.4)) for axes in shown("four rules, two seeds").axes] == [0, 1, 0, 0]


def test_an_error_near_zero_is_in_view_and_does_not_press_the_others_flat() -> None:
    axes = shown("nine rules").axes[7]
    heights = axes.transAxes.inverted().transform(axes.transData.transform([(0.1, y) for y in (7e-6, 0.1, 0.4)]))[:, 1]
    assert heights[0] > 0.15
    assert heights[2] - heights[1] > 0.25
    assert [own.get_yscale() for own in (axes, shown("four rules, two seeds").axes[0])] == ["symlog", "log"]


def test_the_tail_shows_the_reference_and_what_was_published() -> None:
    axes = shown("tails").axes[0]
    assert ys(lines(axes, color=BLUE)[0]) == pytest.approx([over(0.1 + t).mean for t in TAILS])
    assert ys(lines(axes, color=figures.INK)[0]) == pytest.approx([over(0.01 + 1.2 * t).mean for t in TAILS])
    assert finite(lines(axes, markerfacecolor="none")) == [0.131, 0.746]
    assert {"GD, n = 3", "published", "least nuclear norm"} <= set(legend_texts(shown("tails")))
    bare = tails(published={}, reference={})
    assert lines(bare.axes[0], markerfacecolor="none") == lines(bare.axes[0], color=figures.INK) == []
    assert legend_texts(bare)[:4] == ["Muon, n = 3", "GD, n = 3", "Adam, n = 3", "± 1 standard deviation"]


def test_the_held_out_selection_is_solid_and_the_published_one_dashed_and_hollow() -> None:
    axes = shown("completion").axes[0]
    for selection, style, face in (("held-out", "-", VERMILION), ("published", "--", "none")):
        own = levels()[selection]["adam"]
        line = lines(axes, color=VERMILION, linestyle=style, markerfacecolor=face)[0]
        assert ys(line) == pytest.approx([np.mean(list(own[level].values())) for level in sorted(LEVELS)])
    assert axes.get_xlim()[0] > max(LEVELS) > min(LEVELS) > axes.get_xlim()[1]
    found = [legend_texts(shown(name)) for name in ("completion", "completion, one seed, tall")]
    assert ["band: min–max of seeds" in texts for texts in found] == [True, False]


def test_a_level_that_a_seed_did_not_reach_has_points_and_no_mean() -> None:
    given = levels()
    del given["held-out"]["adam"][1e-5][42]
    axes, whole = completion(given).axes[0], shown("completion").axes[0]
    means = [lines(own, color=VERMILION, linestyle=style)[0] for own in (axes, whole) for style in ("-", "--")]
    assert [int(np.isnan(ys(line)).sum()) for line in means] == [1, 0, 0, 0]
    assert finite(lines(axes, markersize=2.2)) == [given["held-out"]["adam"][1e-5][seed] for seed in (123, 456)]
    assert finite(lines(whole, markersize=2.2)) == []


def test_the_images_show_what_is_observed_and_share_their_colours() -> None:
    (pixel, band), axes = scene(), shown("completion").axes
    truth, observed, *recovered = map(picture, axes[2:6])
    assert len({own.images[0].get_clim() for own in axes[2:6]}) == 1
    assert [truth[place] for place in band.positions] == band.truth
    known = np.array(band.observed, bool)
    assert [observed[tuple(place)] for place in np.array(band.positions)[known]] == np.array(band.truth)[known].tolist()
    assert np.isnan(observed).sum() > np.isnan(truth).sum() > 0
    assert [found[band.positions[0]] for found in recovered] == [0.9 * band.truth[0]] * 2
    assert np.isfinite(ys(lines(axes[1], marker="o")[0])).tolist() == [bool(seen) for seen in pixel.observed]
    assert np.isnan(picture(shown("completion, one seed, tall").axes[3])).all()


def test_a_drift_is_the_mean_of_the_seeds_and_the_band_their_range() -> None:
    axes = shown("drifts").axes[2]
    table = np.array([list(panels()["Adam"]["rotated"][step].values()) for step in STEPS])
    assert ys(lines(axes, color=VERMILION, marker="None")[0]) == pytest.approx(table[1:].mean(axis=1).tolist())
    start = lines(axes, color=VERMILION, marker="o")[0]
    assert (ys(start)[0], xs(start)[0] < 1) == (pytest.approx(table[0].mean()), True)
    assert axes.get_xticklabels()[0].get_text() == "0"
    band = next(b for b in axes.collections if np.allclose(np.asarray(b.get_facecolor())[0], to_rgba(VERMILION, 0.2)))
    heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((table[1:].min(), table[1:].max()))
    assert "band: min–max of seeds" in legend_texts(shown("drifts"))
    alone = drifted(panels(1))
    assert len(alone.axes[0].collections) == 0
    assert legend_texts(alone) == ["rotated, n = 1", "identity: 0 exactly", "noise 1e−7, n = 1", "noise 1e−5, n = 1"]


def test_a_twin_that_never_drifts_is_named_and_one_that_does_is_drawn() -> None:
    figure, some = shown("drifts"), shown("drifts, some zeros, a lost seed")
    assert "identity: 0 exactly" in legend_texts(figure)
    assert "identity, n = 3, 0 exactly in 3 of 4" in legend_texts(some)
    assert lines(figure.axes[0], color=figures.INK) == []
    assert finite(lines(some.axes[0], color=figures.INK)) == [pytest.approx(1e-16 / 3)]
    assert some.axes[0].get_ylim()[0] < 1e-16 / 3
    found = [axes.texts for axes in (*some.axes, *shown("drifts, only zeros").axes)]
    assert [[text.get_text() for text in texts] for texts in found] == [[]] * 3 + [["0 exactly"]] * 2


def test_a_seed_that_diverged_leaves_the_others_dotted() -> None:
    figure = shown("drifts, some zeros, a lost seed")
    assert np.isnan(ys(lines(figure.axes[0], color=VERMILION, marker="None")[0])).tolist() == [False] * 5 + [True] * 2
    own = odd_panels()["Adam"]["rotated"]
    dotted = [ys(line) for line in lines(figure.axes[0], linestyle=":")]
    assert dotted[1:] == [pytest.approx([own[step][seed] for step in (100, 1000, 1500)]) for seed in (123, 456)]
    assert ["some seeds only" in legend_texts(own) for own in (figure, shown("drifts"))] == [True, False]
