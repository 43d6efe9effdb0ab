"""Figures draw what the statistics say, hide no run, overlap nothing and are the same bytes for the same data."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from experiments.analysis import figures
from experiments.analysis.statistics import compare

ARMS = ["control", "imbalanced", "saggs"]
TITLES = {"mini_gpt2": "GPT-2 (mini)", "mini_llama": "Llama (mini)"}
OFFSETS = {"control": 0.0, "imbalanced": 0.3, "saggs": 0.02}


def frame(rates: tuple[float, ...] = (0.004,), seeds: int = 5, lost: tuple[tuple[str, int], ...] = ()) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for model, arm, rate, seed in itertools.product(TITLES, ARMS, rates, range(seeds)):
        final = 5.8 + OFFSETS[arm] + 0.05 * np.log2(rate / 0.004) ** 2 + rng.normal(0, 0.01)
        steps = np.arange(0, 161, 20)
        curve = np.exp(final + (8.3 - final) * np.exp(-steps / 30))
        done = (arm, seed) not in lost
        perplexity = float(np.exp(final)) if done else np.nan
        points = [{"step": int(a), "perplexity": float(b)} for a, b in zip(steps, curve, strict=True)]
        rows.append(
            {
                "model": model,
                "arm": arm,
                "learning_rate": rate,
                "seed": seed,
                "status": "done" if done else "diverged",
                "curve": points if done else points[:4],
                "test_perplexity": perplexity,
                "validation_perplexity": perplexity,
            }
        )
    return pd.DataFrame(rows)


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def every_figure() -> dict[str, Figure]:
    lost = (("imbalanced", 3),)
    return {
        "curves": figures.validation_curves(frame(lost=lost), ARMS, TITLES),
        "differences": figures.paired_differences(frame(lost=lost), [("saggs", "control"), ("imbalanced", "control")]),
        "sweep": figures.learning_rate_sweep(frame((0.001, 0.002, 0.004, 0.008), 3, (("imbalanced", 2),)), ARMS, 0.004),
    }


def test_the_same_figure_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    for name, figure in every_figure().items():
        first = [path.read_bytes() for path in figures.save(figure, tmp_path / "a", name)]
        again = [path.read_bytes() for path in figures.save(every_figure()[name], tmp_path / "b", name)]
        assert first == again
        assert not any(b"CreationDate" in content or b"<dc:date>" in content for content in first)
    other = figures.validation_curves(frame(), ARMS, TITLES)
    assert figures.save(other, tmp_path / "c", "curves")[1].read_bytes() != (tmp_path / "a" / "curves.svg").read_bytes()
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".pdf", ".png", ".svg"]


def test_text_stays_text_and_the_width_is_one_column(tmp_path: Path) -> None:
    figure = figures.validation_curves(frame(), ARMS, TITLES)
    pdf, svg, _ = figures.save(figure, tmp_path, "curves")
    assert "validation perplexity</text>" in svg.read_text()
    assert b"/Type3" not in pdf.read_bytes()
    assert figure.get_figwidth() == 3.4


def layout_faults(figure: Figure) -> list[str]:
    """What a reader would call broken: text outside the figure, tick labels or boxes on top of each other."""
    faults = []
    with matplotlib.style.context(["default", figures.STYLE]):
        figure.draw_without_rendering()
        boxes = [figure.legends[0].get_window_extent()]
        for axes in figure.axes:
            for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
                ticks = [label.get_window_extent() for label in labels if label.get_text()]
                faults += ["fewer than two ticks"] * (len(ticks) < 2)
                faults += ["tick labels overlap" for a, b in itertools.combinations(ticks, 2) if a.overlaps(b)]
            box = axes.get_tightbbox()
            assert box is not None
            boxes.append(box)
    faults += ["boxes overlap" for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    width, height = figure.bbox.width + 0.5, figure.bbox.height + 0.5
    outside = [box for box in boxes if min(box.x0, box.y0) < -0.5 or box.x1 > width or box.y1 > height]
    return faults + ["clipped"] * len(outside)


@pytest.mark.parametrize("name", ["curves", "differences", "sweep"])
def test_nothing_is_clipped_and_no_label_covers_another(name: str) -> None:
    figure = every_figure()[name]
    assert layout_faults(figure) == []
    figure.axes[0].set_title("a title that is far too long for " * 4)
    assert "clipped" in layout_faults(figure)


def test_a_long_legend_folds_into_one_column() -> None:
    figure = figures.validation_curves(frame(lost=tuple(("imbalanced", seed) for seed in range(3))), ARMS, TITLES)
    assert layout_faults(figure) == []
    data = frame()
    data.loc[(data["model"] == "mini_llama") & (data["seed"] == 1), "status"] = "failed"
    figure = figures.validation_curves(data, ARMS, TITLES)
    assert "control, n = 5, 4/5 by panel" in legend_texts(figure)
    assert layout_faults(figure) == []


def test_a_curve_is_the_mean_of_the_done_seeds_and_the_band_their_range() -> None:
    data = frame(lost=(("imbalanced", 3),))
    axes = figures.validation_curves(data, ARMS, TITLES).axes[0]
    for arm in ARMS:
        rows = data[(data["model"] == "mini_gpt2") & (data["arm"] == arm) & (data["status"] == "done")]
        values = np.array([[point["perplexity"] for point in curve] for curve in rows["curve"]])
        line = next(
            line for line in axes.lines if line.get_color() == figures.ARM_COLORS[arm] and line.get_zorder() == 3
        )
        assert np.allclose(np.asarray(line.get_ydata()), values.mean(axis=0))
        color = to_rgba(figures.ARM_COLORS[arm], 0.2)
        band = next(band for band in axes.collections if np.allclose(np.asarray(band.get_facecolor())[0], color))
        heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((values.min(), values.max()))


def test_a_diverged_curve_is_shown_dotted_and_counted() -> None:
    figure = figures.validation_curves(frame(lost=(("imbalanced", 3),)), ARMS, TITLES)
    assert [line.get_linestyle() for line in figure.axes[0].lines].count(":") == 1
    assert "imbalanced, n = 4/5" in legend_texts(figure)
    assert "control, n = 5" in legend_texts(figure)
    assert "unfinished run" in legend_texts(figure)
    assert "unfinished run" not in legend_texts(figures.validation_curves(frame(), ARMS, TITLES))


def test_one_seed_has_no_band() -> None:
    figure = figures.validation_curves(frame(seeds=1), ARMS, TITLES)
    assert len(figure.axes[0].collections) == 0
    assert not any("band" in text for text in legend_texts(figure))
    assert any("band: min–max" in text for text in legend_texts(figures.validation_curves(frame(), ARMS, TITLES)))


def test_a_run_that_blew_up_does_not_press_the_others_flat() -> None:
    data = frame(lost=(("imbalanced", 3),))
    row = data.index[data["status"] == "diverged"][0]
    data.at[row, "curve"] = [{"step": 0, "perplexity": 4000.0}, {"step": 20, "perplexity": 1e30}]
    assert figures.validation_curves(data, ARMS, TITLES).axes[0].get_ylim()[1] < 1e5


def test_every_seed_is_a_dot_and_the_interval_is_the_one_of_the_statistics() -> None:
    data = frame()
    axes = figures.paired_differences(data, [("saggs", "control")], TITLES).axes[0]
    rows = data[data["model"] == "mini_gpt2"].set_index("seed")
    by_arm = {arm: rows[rows["arm"] == arm]["test_perplexity"].to_dict() for arm in ARMS}
    expected = compare(by_arm["saggs"], by_arm["control"]).difference
    dots = next(item for item in axes.collections if isinstance(item, PathCollection))
    assert np.asarray(dots.get_offsets())[:, 0] == pytest.approx(list(expected.per_seed.values()))
    intervals = [np.asarray(line.get_xdata()) for line in axes.lines if len(np.asarray(line.get_xdata())) == 2]
    assert any(line == pytest.approx(expected.interval) for line in intervals)
    assert axes.get_yticklabels()[0].get_text() == "SAGGS − control\nn = 5"


def test_without_a_test_there_is_no_interval_and_the_label_says_so() -> None:
    contrasts = [("imbalanced", "control"), ("control", "control")]
    axes = figures.paired_differences(frame(lost=(("imbalanced", 3),)), contrasts).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["imbalanced − control\nn = 4/5, no interval", "control − control\nn = 5, identical"]
    assert len([line for line in axes.lines if len(np.asarray(line.get_xdata())) == 2]) == 1  # the zero line


def test_the_line_of_a_sweep_breaks_where_a_run_diverged() -> None:
    data = frame((0.002, 0.004, 0.008), 3)
    whole = figures.learning_rate_sweep(data, ARMS, {"mini_gpt2": 0.004}, TITLES)
    assert not any("did not finish" in text for text in legend_texts(whole))
    assert all(np.isfinite(np.asarray(line.get_ydata())).all() for line in whole.axes[0].lines)
    lost = (data["arm"] == "imbalanced") & (data["learning_rate"] == 0.008) & (data["seed"] == 1)
    data.loc[lost, ["status", "validation_perplexity"]] = ["diverged", np.nan]
    axes = (broken := figures.learning_rate_sweep(data, ARMS, {"mini_gpt2": 0.004}, TITLES)).axes[0]
    assert "a run did not finish" in legend_texts(broken)
    line = next(
        line
        for line in axes.lines
        if line.get_color() == figures.ARM_COLORS["imbalanced"] and line.get_marker() == "None"
    )
    assert np.isnan(np.asarray(line.get_ydata(), dtype=float)).tolist() == [False, False, True]


def test_the_chosen_rate_is_marked_only_where_it_was_chosen() -> None:
    figure = figures.learning_rate_sweep(frame((0.002, 0.004), 3), ARMS, {"mini_gpt2": 0.004}, TITLES)
    marked = [
        [np.asarray(line.get_xdata()).tolist() == [0.004, 0.004] for line in axes.lines].count(True)
        for axes in figure.axes
    ]
    assert marked == [1, 0]
    assert "chosen rate" in legend_texts(figure)


def test_a_repeated_run_is_refused() -> None:
    twice = pd.concat([frame(), frame().head(1)])
    for draw in (
        lambda: figures.validation_curves(twice, ARMS, TITLES),
        lambda: figures.paired_differences(twice, [("saggs", "control")]),
        lambda: figures.learning_rate_sweep(twice, ARMS),
    ):
        with pytest.raises(ValueError, match="seed 0 has two rows"):
            draw()


def test_nothing_to_draw_is_an_error_and_not_an_empty_figure() -> None:
    with pytest.raises(ValueError, match="no validation curve of 'mini_gpt3'"):
        figures.validation_curves(frame(), ARMS, {"mini_gpt3": "GPT-3"})
    with pytest.raises(ValueError, match="no validation perplexity"):
        figures.learning_rate_sweep(frame(), ["unknown"])
    with pytest.raises(ValueError, match="no contrasts"):
        figures.paired_differences(frame(), [])
    with pytest.raises(ValueError, match="no model to draw"):
        figures.paired_differences(frame().head(0), [("saggs", "control")])


def test_colours_are_distinct_and_an_arm_keeps_its_own() -> None:
    colors = figures._colors([*figures.ARM_COLORS, "one", "two", "three"])
    assert len(set(colors.values())) == 8
    assert figures._colors(["saggs"])["saggs"] == colors["saggs"]


def test_drawing_changes_no_global_setting() -> None:
    before = dict(matplotlib.rcParams)
    every_figure()
    assert dict(matplotlib.rcParams) == before


def test_analysis_needs_no_torch() -> None:
    code = (
        "import sys; import experiments.analysis.figures, experiments.analysis.collect; "
        "sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
