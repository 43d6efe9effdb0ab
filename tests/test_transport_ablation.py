"""Table 5's task: what repeats the run repeats it to the bit, what does not goes away; and what is refused."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from forked import composed

from experiments import command_line
from experiments.analysis.verdict import judge
from experiments.artifacts import get, table5
from experiments.artifacts.artifact import Rows, read_rows
from experiments.sweep import SweepRun
from experiments.transport_ablation import ARMS

ABLATION = ["scale=debug", "arm=ablation", "model=debug_llama", "task=transport_ablation", "imbalance.factor=8.0",
            "imbalance.step=15", "training.clip_norm=null", "training.precision=float64", "progress=false"]  # fmt: skip
EXACT = {"reference", "rates", "balance_carry"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of one run of two seeds' worth of table 5 at debug scale."""
    store = tmp_path_factory.mktemp("ablation")
    assert command_line.run(composed([*ABLATION, "logging.every=1", f"paths.outputs={store}"])) == "done"
    return store


@pytest.fixture(scope="module")
def result(outputs: Path) -> dict[str, Any]:
    (directory,) = (outputs / "runs").iterdir()
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())["result"]
    return found


def test_what_repeats_the_run_repeats_it_to_the_bit_and_nothing_else_does(result: dict[str, Any]) -> None:
    """c is a power of two: with rates, eps and decay scaled, or balanced and carried, every distance is zero."""
    arms = result["arms"]
    assert set(arms) == set(ARMS) == set(table5.ARMS)
    for arm, found in arms.items():
        distance = {int(step): value for step, value in found["distance"].items()}
        assert sorted(distance) == list(range(15, 31))
        assert distance[15] < 1e-14, arm  # at the restart all are the same function
        same = arm in EXACT
        after = [value for step, value in distance.items() if step > 15]
        assert (max(after) == 0) == same, arm
        assert same or min(after) > 1e-3, arm
        assert (found["test_perplexity"] == result["test"]["perplexity"]) == same, arm


def test_an_eps_that_is_not_scaled_is_told_from_one_that_is(result: dict[str, Any]) -> None:
    """Against its own reference, which has the large eps too: nearer than to the reference that has it not."""
    large = result["arms"]["rates_large_eps"]["distance"]["30"]
    assert 1e-3 < large < result["arms"]["reference_large_eps"]["distance"]["30"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("imbalance.step=0", ["imbalance.step=0", "later step"]),
        ("training.clip_norm=1.0", ["training.clip_norm=1.0", "null"]),
        ("training.precision=float32", ["training.precision", "float64"]),
        ("rebalance=saggs", ["rebalance=saggs", "rebalance=none"]),
        ("optimizer=sgd", ["optimizer=sgd", "optimizer=adamw"]),
        ("imbalance.distribution=log_uniform", ["imbalance.distribution", "fixed"]),
        ("imbalance.transport=false", ["imbalance.transport", "true"]),
        ("model=debug_gpt2", ["debug_gpt2", "fused", "model=mini_llama"]),
        ("training.compile=true", ["training.compile", "false"]),
        ("wandb.mode=offline", ["wandb.mode=offline", "disabled"]),
    ],
)
def test_what_the_task_has_no_use_for_is_refused_by_name(change: str, expected: list[str], tmp_path: Path) -> None:
    kept = [setting for setting in ABLATION if setting.partition("=")[0] != change.partition("=")[0]]
    with pytest.raises(ValueError) as caught:
        command_line.run(composed([*kept, change, f"paths.outputs={tmp_path}"]))
    assert [word for word in expected if word not in str(caught.value)] == []
    assert not (tmp_path / "runs").exists()


def test_float64_is_refused_where_nothing_computes_in_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.precision=float64.*transport_ablation"):
        command_line.run(composed(["scale=debug", "training.precision=float64", f"paths.outputs={tmp_path}"]))


def _rows(outputs: Path) -> Rows:
    sweep = get("table5").sweep("debug", ["seed=0,1"])
    return read_rows(sweep, "debug", outputs / "runs")


def _twice(rows: Rows) -> Rows:
    """The first seed's run, and a second seed that differs a little in every arm that is not exact."""
    frame, (first, second) = rows.frame, rows.sweep
    other = frame.iloc[0].copy()
    arms = copy.deepcopy(other["arms"])
    for arm, found in arms.items():
        found["test_perplexity"] *= 1.01 if arm in EXACT else 1.02
    other["seed"], other["run_id"], other["arms"] = second.config.seed, second.run_id, arms
    return Rows(pd.concat([frame, other.to_frame().T], ignore_index=True), [first, second], "debug")


def test_the_table_says_what_is_identical_and_tests_the_rest(outputs: Path) -> None:
    rows = _rows(outputs)
    assert len(rows.frame) == 1, "the debug experiment and this file's settings are one run"
    printed, csv = table5.build_table(_twice(rows))
    by_arm = {row["arm"]: row for row in csv.rows}
    assert list(by_arm) == list(table5.ARMS)
    assert {arm for arm, row in by_arm.items() if row["delta_identical"] == "yes"} == EXACT - {"reference"}
    assert all(row["n"] == 2 for row in csv.rows)
    assert by_arm["rescale_carry"]["delta_p_holm"] is not None
    assert by_arm["rates"]["delta_p_holm"] is None
    exact = [row for row in printed.rows if row["last"] == "0 exactly"]
    assert len(exact) == len(EXACT)


def test_a_missing_seed_is_counted_and_never_tested(outputs: Path) -> None:
    _, csv = table5.build_table(_rows(outputs))
    assert all(row["n"] == 1 and row["n_seeds"] == 2 for row in csv.rows)
    assert all(row["delta_p_holm"] is None for row in csv.rows)


def test_the_figure_shows_every_arm_and_names_the_exact_ones(outputs: Path) -> None:
    (figure,) = table5.build_figures(_rows(outputs)).values()
    (axes,) = figure.axes
    assert len(axes.lines) == len(table5.ARMS) - 2 - 2  # without two references and two exact arms
    assert any("0 exactly" in text.get_text() for text in axes.texts)


def test_the_verdict_looks_at_every_arm(outputs: Path) -> None:
    """An arm that comes out otherwise is not reproduced, though the reference is."""
    frame = _rows(outputs).frame
    (same,) = judge(frame, frame, 1)
    assert same.reproduced
    assert "bit for bit" in same.text
    other = frame.copy()
    arms = copy.deepcopy(frame.iloc[0]["arms"])
    arms["like_weights"]["test_perplexity"] *= math.exp(0.02)
    other["arms"] = [arms]
    (differs,) = judge(other, frame, 1)
    assert differs.reproduced is False
    assert "0.020" in differs.text


def test_a_second_command_finds_it_done(outputs: Path) -> None:
    settings = composed([*ABLATION, "logging.every=1", f"paths.outputs={outputs}"])
    assert command_line.run(settings) == "skipped"
    assert isinstance(get("table5").sweep("debug")[0], SweepRun)
