"""Tables 6 to 8 from tiny runs: every number is that of the runs, what is missing is said, verdicts tell apart."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from experiments.analysis.collect import collect
from experiments.analysis.tables import Table, check_latex
from experiments.artifacts import table6, table7, table8
from experiments.artifacts.artifact import Artifact, Rows, read_rows
from experiments.command_line import TASKS
from experiments.run import Run
from experiments.sweep import SweepRun

Change = Callable[[dict[str, Any]], None]


def carried_out(artifact: Artifact, folder: Path, overrides: Sequence[str]) -> list[SweepRun]:
    """The runs of an artifact at debug scale, done."""
    sweep = artifact.sweep("debug", [f"paths.outputs={folder}", "progress=false", *overrides])
    for run in sweep:
        prepared = importlib.import_module(TASKS[run.config.task]).prepare(run.config)
        opened = Run.open(run.config, prepared.facts, prepared.total_steps)
        with opened.recording():
            opened.succeed(prepared.execute(opened))
    return sweep


def summaries(sweep: Sequence[SweepRun]) -> list[dict[str, Any]]:
    return [json.loads((run.directory / "summary.json").read_text()) for run in sweep]


def committed(sweep: Sequence[SweepRun], folder: Path, change: Change | None = None) -> Path:
    """A committed store of the runs, each changed."""
    folder.mkdir()
    for run, summary in zip(sweep, summaries(sweep), strict=True):
        if change:
            change(summary["result"])
        (folder / f"{run.run_id}.json").write_text(json.dumps(summary))
    return folder


def rows_of(sweep: Sequence[SweepRun]) -> Rows:
    return read_rows(sweep, "debug", live=sweep[0].directory.parent)


def records(table: Table) -> list[dict[str, Any]]:
    lines = [line.split(",") for line in table.to_csv().splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


@pytest.fixture(scope="module")
def sensing(tmp_path_factory: pytest.TempPathFactory) -> list[SweepRun]:
    overrides = ["sensing.holdout=0.2", "rules.muon.rates=[3e-2,1e-1]", "rules.gd.rates=[3e-2,1e6]"]
    return carried_out(table6.ARTIFACT, tmp_path_factory.mktemp("sensing"), overrides)


def test_table_6_holds_what_the_members_say(sensing: list[SweepRun]) -> None:
    """The rate that the held-out measurements choose, and mean and spread there, recomputed from the summaries."""
    printed, csv = table6.build_table(rows_of(sensing))
    check_latex(printed.to_latex())
    found = {(r["rule"], r["selection"]): r for r in records(csv)}
    own = [summary["result"]["members"] for summary in summaries(sensing)]
    for arm in ("adam", "muon", "signum"):
        rates = {m["rate"] for m in own[0] if m["arm"] == arm}
        held = {
            rate: fmean(m["held_out_loss"] for seed in own for m in seed
                        if m["arm"] == arm and m["rate"] == rate and m["second_pass"])
            for rate in rates
        }  # fmt: skip
        best = min(held, key=lambda rate: held[rate])
        errors = [m["error"] for seed in own for m in seed
                  if m["arm"] == arm and m["rate"] == best and not m["second_pass"]]  # fmt: skip
        row = found[arm, "held out"]
        assert float(row["rate"]) == best
        assert float(row["error_mean"]) == pytest.approx(fmean(errors), rel=1e-5)
        assert float(row["error_std"]) == pytest.approx(stdev(errors), rel=1e-4)
        assert row["n"] == row["n_seeds"] == "2"
    assert found["gd", "held out"]["rate"] == "0.03", "the other rate diverges"
    assert any("GD: a seed diverged at 1e+06" in note for note in printed.notes)


def test_table_6_says_what_is_missing(sensing: list[SweepRun]) -> None:
    rows = rows_of(sensing)
    first = dataclasses.replace(rows, frame=rows.frame[rows.frame["seed"] == 42])
    assert [run.config.seed for run in first.missing] == [123]
    _, csv = table6.build_table(first)
    assert {r["n"] for r in records(csv) if r["selection"]} == {"0"}, "a selection needs all seeds that select"
    empty = dataclasses.replace(rows, frame=rows.frame[:0])
    printed, _ = table6.build_table(empty)
    assert "nan" not in printed.to_markdown()
    assert table6.build_figures(empty) == {}


def shifted(arm: str, by: float) -> Change:
    def change(result: dict[str, Any]) -> None:
        for member in result["members"]:
            if member["arm"] == arm and member.get("error") is not None:
                member["error"] += by

    return change


def test_verdicts_of_table_6_tell_a_reproduced_arm_from_another(sensing: list[SweepRun], tmp_path: Path) -> None:
    same = table6.verdicts(rows_of(sensing), collect(committed=committed(sensing, tmp_path / "same")))
    assert {v.reproduced for v in same} == {True}
    assert any("bit for bit" in v.text for v in same)
    store = committed(sensing, tmp_path / "other", shifted("adam", 0.1))
    other = {v.arm: v for v in table6.verdicts(rows_of(sensing), collect(committed=store))}
    assert other["adam"].reproduced is False
    assert "differs by 0.1 in error" in other["adam"].text
    assert {v.reproduced for arm, v in other.items() if arm != "adam"} == {True}
    (tmp_path / "none").mkdir()
    none = table6.verdicts(rows_of(sensing), collect(committed=tmp_path / "none"))
    assert {v.text for v in none} == {"no committed cell"}


COMPLETION = [
    *("study=completion", "rules.gd.rates=[1.0,30.0]", "rules.adam.rates=[1e-3,1e-2]"),
    *("rules.scalar_adam.rates=[1e-2]", "rules.muon.rates=[1e-2]"),
]


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> list[SweepRun]:
    return carried_out(table7.ARTIFACT, tmp_path_factory.mktemp("completion"), COMPLETION)


def test_table_7_compares_at_equal_training_error(completion: list[SweepRun]) -> None:
    """The published rule takes the largest rate that reaches the last level; figures are those at that level."""
    printed, csv = table7.build_table(rows_of(completion))
    check_latex(printed.to_latex())
    found = {(r["rule"], r["selection"], r["training_error"]): r for r in records(csv)}
    own = [summary["result"]["members"] for summary in summaries(completion)]
    reached = {m["rate"] for m in own[0] if m["arm"] == "adam" and not m["second_pass"] and m["outcome"] == "reached"}
    assert reached == {1e-3, 1e-2}
    row = found["adam", "published", "0.001"]
    assert float(row["rate"]) == 1e-2
    errors = [m["levels"]["0.001"]["test_rmse"] for seed in own for m in seed
              if m["arm"] == "adam" and m["rate"] == 1e-2 and not m["second_pass"]]  # fmt: skip
    assert float(row["test_rmse_mean"]) == pytest.approx(fmean(errors), rel=1e-5)
    held = found["adam", "held out", "0.001"]
    assert float(held["rate"]) in reached
    assert found["gd", "published", "0.001"]["rate"] == "", "gradient descent does not reach it in 200 steps"
    assert any("completion, gd: 1, 30: not within the horizon" in note for note in printed.notes)
    assert not [m for m in own[0] if m["arm"] == "gd" and m["second_pass"]]


def test_table_7_names_a_chosen_rate_that_was_not_run(completion: list[SweepRun]) -> None:
    """With a third seed that only reports, and of which there is no run; with the two that select there is no note."""
    folder = completion[0].directory.parent
    wider = table7.ARTIFACT.sweep("debug", [*COMPLETION, f"paths.outputs={folder.parent}", "seed=42,123,456"])
    printed, csv = table7.build_table(read_rows(wider, "debug", live=folder))
    notes = [note for note in printed.notes if "which was not run on" in note]
    rates = {r["selection"]: r["rate"] for r in records(csv) if r["rule"] == "adam"}
    for selection in ("published", "held out"):
        said = f"completion, adam: {selection} chooses {float(rates[selection]):g}, which was not run on 456; add it to"
        assert any(note.startswith(said) for note in notes), notes
    assert {(r["n"], r["n_seeds"]) for r in records(csv) if r["rule"] == "adam"} == {("2", "3")}
    assert not [note for note in table7.build_table(rows_of(completion))[0].notes if "which was not run on" in note]


def test_verdicts_of_table_7_tell_a_reproduced_arm_from_another(completion: list[SweepRun], tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        for member in result["members"]:
            if member["arm"] == "adam" and "0.001" in member["levels"]:
                member["levels"]["0.001"]["test_rmse"] *= 1.05

    same = table7.verdicts(rows_of(completion), collect(committed=committed(completion, tmp_path / "same")))
    assert {v.reproduced for v in same if "no committed" not in v.text} == {True}
    store = committed(completion, tmp_path / "other", change)
    other = {v.arm: v for v in table7.verdicts(rows_of(completion), collect(committed=store))}
    assert other["adam"].reproduced is False
    assert other["scalar_adam"].reproduced is not False


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> list[SweepRun]:
    return carried_out(table8.ARTIFACT, tmp_path_factory.mktemp("attention"), [])


def test_table_8_holds_the_drifts_of_the_twins(attention: list[SweepRun]) -> None:
    printed, csv = table8.build_table(rows_of(attention))
    check_latex(printed.to_latex())
    found = {(r["rule"], r["twin"]): r for r in records(csv)}
    own = {(s["optimizer"], s["seed"]): s["result"] for s in summaries(attention)}
    drifts = [own["adam", seed]["arms"]["rotated"]["drift"]["10"] for seed in (42, 43)]
    assert float(found["adam", "rotated"]["drift_10_mean"]) == pytest.approx(fmean(drifts), rel=1e-5)
    ratios = [own["adam", seed]["ratios"]["noise_1e-07"]["1"] for seed in (42, 43)]
    assert float(found["adam", "noise_1e-07"]["rotated_over_it_1_mean"]) == pytest.approx(fmean(ratios), rel=1e-5)
    assert float(found["sgd", "rotated"]["drift_final_mean"]) < 1e-9 < float(found["adam", "rotated"]["drift_1_mean"])
    assert [row["identity"] for row in printed.rows] == ["0 exactly", "0 exactly"]


def test_verdicts_of_table_8_tell_a_reproduced_rule_from_another(attention: list[SweepRun], tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        result["arms"]["rotated"]["drift"]["10"] *= 1.5

    same = table8.verdicts(rows_of(attention), collect(committed=committed(attention, tmp_path / "same")))
    assert {v.reproduced for v in same} == {True}
    store = committed(attention, tmp_path / "other", change)
    other = {v.arm: v.reproduced for v in table8.verdicts(rows_of(attention), collect(committed=store))}
    assert other == {"adam": False, "sgd": True}
