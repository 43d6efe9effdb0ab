"""Tables and figures from committed summaries: complete, byte for byte, and honest about what is missing."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments.analysis.collect import collect, one_value_per_seed
from experiments.analysis.verdict import judge
from experiments.artifacts import ARTIFACTS, get, tune_table2
from experiments.artifacts.artifact import read_rows
from experiments.config import RESULTS

ROOT = RESULTS.parent
FIRST_COLUMNS = (
    "model,arm,n,ppl_mean,ppl_std,delta_control_mean,delta_control_std,delta_imbalanced_mean,delta_imbalanced_std"
)


@pytest.fixture(scope="module")
def copied_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the committed runs, to be damaged."""
    copy = tmp_path_factory.mktemp("results") / "runs"
    shutil.copytree(RESULTS / "runs", copy)
    return copy


@pytest.fixture(scope="module")
def table2_rows():  # type: ignore[no-untyped-def]
    return read_rows(get("table2").sweep("mini"), "mini", committed=RESULTS / "runs")


COMMITTED = sorted(name for name in ARTIFACTS if (RESULTS / "tables" / f"{name}.md").exists())


def test_make_tables_makes_every_committed_table() -> None:
    makefile = (ROOT / "Makefile").read_text().splitlines()
    for target, script in (("tables", "aggregate.py"), ("figures", "plot.py")):
        rule = next(i for i, line in enumerate(makefile) if line.startswith(f"{target}: "))
        words = makefile[rule + 1].split(script)[1].split()
        assert sorted(word for word in words if not word.startswith("-")) == COMMITTED


@pytest.mark.parametrize("name", sorted(ARTIFACTS))
def test_every_artifact_has_its_two_commands(name: str) -> None:
    """What `make` would run, each named once; a name that no artifact has is the control."""

    def would_run(target: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)

    tuned = name.startswith("tune_")
    made = would_run(name.replace("_", "-") if tuned else f"reproduce-{name}")
    assert f"scripts/reproduce.py {name} " in made.stdout
    assert "overriding" not in made.stderr + made.stdout
    again = would_run("tables" if tuned else name)
    assert f" {name} " in next(line for line in again.stdout.splitlines() if "scripts/aggregate.py" in line)
    assert "scripts/reproduce.py" not in again.stdout
    assert would_run(f"reproduce-{name}x").returncode != 0


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_tables_are_what_committed_summaries_give_byte_for_byte(name: str, tmp_path: Path) -> None:
    artifact = get(name)
    rows = read_rows(artifact.sweep("mini"), "mini", committed=RESULTS / "runs")
    assert not rows.missing
    for path in artifact.write(rows, tmp_path / "tables", tmp_path / "figures"):
        if path.parent.name == "tables":
            assert path.read_bytes() == (RESULTS / "tables" / path.name).read_bytes(), path.name
        else:
            assert (RESULTS / "figures" / path.name).stat().st_size > 0


def test_a_changed_summary_changes_the_table(copied_runs: Path, tmp_path: Path) -> None:
    """The control of the test before: the bytes do depend on the summaries."""
    artifact = get("table2")
    sweep = artifact.sweep("mini")
    victim = copied_runs / f"{sweep[0].run_id}.json"
    original = victim.read_bytes()
    summary = json.loads(original)
    summary["result"]["test"]["perplexity"] += 1.0
    victim.write_text(json.dumps(summary))
    paths = artifact.write(read_rows(sweep, "mini", committed=copied_runs), tmp_path, tmp_path)
    victim.write_bytes(original)
    assert paths[0].read_bytes() != (RESULTS / "tables" / paths[0].name).read_bytes()


def test_the_csv_begins_with_the_promised_columns_and_has_a_row_for_every_cell() -> None:
    with open(RESULTS / "tables" / "table2.csv", newline="") as stream:
        text = stream.read()
    assert text.startswith(FIRST_COLUMNS)
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == 10
    assert {row["n"] for row in rows} == {"5"}


def test_the_harm_is_significant_and_hard_saggs_recovers_nine_tenths_of_it() -> None:
    """What table 2 is for, read off the committed table: a claim of ours that a change may not quietly lose."""
    with open(RESULTS / "tables" / "table2.csv", newline="") as stream:
        rows = {(row["model"], row["arm"]): row for row in csv.DictReader(stream)}
    for model in ("mini_gpt2", "mini_llama"):
        imbalanced, saggs = rows[model, "imbalanced"], rows[model, "saggs"]
        assert float(imbalanced["delta_control_low"]) > 0
        assert -float(saggs["delta_imbalanced_mean"]) >= 0.9 * float(imbalanced["delta_control_mean"])


def test_a_missing_run_is_shown_as_four_of_five_and_fails_under_strict(copied_runs: Path, tmp_path: Path) -> None:
    sweep = get("table2").sweep("mini")
    victim = copied_runs / f"{sweep[3].run_id}.json"
    original = victim.read_bytes()
    victim.unlink()
    command = [sys.executable, str(ROOT / "scripts" / "aggregate.py"), "table2", "--runs", str(copied_runs)]
    done = subprocess.run([*command, "--tables", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert sweep[3].run_id in done.stdout
    assert "n=4/5" in (tmp_path / "table2.md").read_text()
    strict = subprocess.run([*command, "--tables", str(tmp_path / "strict"), "--strict"], check=False)
    assert strict.returncode == 1
    assert not (tmp_path / "strict").exists()
    victim.write_bytes(original)


def test_a_diverged_run_has_no_value_and_its_arm_no_test(copied_runs: Path) -> None:
    sweep = get("table2").sweep("mini")
    victim = copied_runs / f"{next(r for r in sweep if r.config.arm == 'saggs').run_id}.json"
    original = victim.read_bytes()
    summary = json.loads(original) | {"status": "diverged", "result": None, "message": "the training loss is nan"}
    victim.write_text(json.dumps(summary))
    printed, _ = get("table2").build_table(read_rows(sweep, "mini", committed=copied_runs))
    victim.write_bytes(original)
    row = next(r for r in printed.to_csv().splitlines() if r.startswith("mini_gpt2,saggs"))
    assert ",4,5," in row
    saggs = next(r for r in printed.rows if (r["model"], r["arm"]) == ("mini_gpt2", "saggs"))
    assert saggs.get("p") is None
    assert "interval" not in saggs


def test_cells_are_found_by_identity_and_not_by_label(copied_runs: Path) -> None:
    """A run that another sweep made under another name is the same run; one of another configuration never is."""
    sweep = get("table2").sweep("mini")
    path = copied_runs / f"{sweep[0].run_id}.json"
    original = path.read_bytes()
    path.write_text(json.dumps(json.loads(original) | {"arm": "a name of another sweep"}))
    rows = read_rows(sweep, "mini", committed=copied_runs)
    path.write_bytes(original)
    assert not rows.missing
    assert set(rows.frame["arm"]) == set(rows.arms)


def test_verdicts_compare_seed_by_seed(table2_rows) -> None:  # type: ignore[no-untyped-def]
    committed = collect(committed=RESULTS / "runs")
    here = table2_rows.frame.assign(source="live")  # as if they had been run here
    assert all(v.reproduced and "bit for bit" in v.text for v in judge(here, committed))
    moved = here.copy()
    chosen = moved.index[moved["arm"] == "saggs"][:2]
    # Two errors that cancel in the mean: the seeds still differ.
    moved.loc[chosen[0], "test_nll_per_token"] += 0.02
    moved.loc[chosen[1], "test_nll_per_token"] -= 0.02
    against = {(v.model, v.arm): v for v in judge(moved, committed)}
    assert against["mini_gpt2", "saggs"].reproduced is False
    assert against["mini_gpt2", "control"].reproduced is True
    slightly = here.assign(test_nll_per_token=here["test_nll_per_token"] + 0.009)
    assert all(v.reproduced for v in judge(slightly, committed))
    assert {v.text for v in judge(here, collect())} == {"no committed cell"}


def test_committed_runs_are_no_evidence_for_themselves(table2_rows) -> None:  # type: ignore[no-untyped-def]
    committed = collect(committed=RESULTS / "runs")
    assert {(v.reproduced, v.text) for v in judge(table2_rows.frame, committed)} == {(None, "committed, not run here")}


def test_a_seed_that_was_not_run_keeps_its_cell_from_being_reproduced(table2_rows) -> None:  # type: ignore[no-untyped-def]
    committed = collect(committed=RESULTS / "runs")
    here = table2_rows.frame.assign(source="live")
    without = here.drop(index=here.index[(here["arm"] == "control") & (here["seed"] == 1)])
    against = {(v.model, v.arm): v for v in judge(without, committed, seeds=5)}
    assert against["mini_gpt2", "control"].reproduced is False
    assert "only 4 of 5" in against["mini_gpt2", "control"].text
    assert against["mini_gpt2", "saggs"].reproduced is True


def test_runs_on_other_data_are_neither_compared_nor_averaged(table2_rows) -> None:  # type: ignore[no-untyped-def]
    """A path in the configuration does not say what was in the file; the fingerprint does."""
    committed = collect(committed=RESULTS / "runs")
    here = table2_rows.frame.assign(source="live")
    other = here.assign(data=[data | {"fingerprint": "0" * 64} for data in here["data"]])
    assert {v.text for v in judge(other, committed)} == {"no committed cell"}
    one_value_per_seed(here)
    mixed = pd.concat([here.iloc[:1], other.iloc[1:]], ignore_index=True)
    with pytest.raises(ValueError, match="saw different data"):
        one_value_per_seed(mixed)


def test_the_rate_of_table_2_is_the_control_arms_best_on_the_validation_split() -> None:
    rows = read_rows(get("tune_table2").sweep("mini"), "mini", committed=RESULTS / "runs")
    table2 = get("table2").sweep("mini")
    assert min(rows.seeds) >= 100 > max(run.config.seed for run in table2)
    for model in rows.models:
        used = {run.config.optimizer.learning_rate for run in table2 if run.config.model.name == model}
        assert used == {tune_table2.best_rate(rows, model, "control")}


def test_every_committed_run_of_one_start_is_the_same_function_at_step_0(table2_rows) -> None:  # type: ignore[no-untyped-def]
    """Arms are paired: one seed's balanced and imbalanced starts agree to the bit before the first step."""
    first: dict[tuple[str, int], set[float]] = {}
    for _, row in table2_rows.frame.iterrows():
        start = next(point["nll_per_token"] for point in row["curve"] if point["step"] == 0)
        first.setdefault((row["model"], row["seed"]), set()).add(start)
    assert all(len(values) == 1 for values in first.values())
    assert len(set().union(*first.values())) == len(first)  # the control: other seeds start elsewhere


def test_no_artifact_of_an_unknown_name_or_scale() -> None:
    with pytest.raises(ValueError, match="did you mean 'table2'"):
        get("tabel2")
    with pytest.raises(ValueError, match="is made at mini"):
        get("tune_table2").sweep("paper")


def test_perplexities_of_committed_runs_are_the_exponentials_of_their_likelihoods() -> None:
    for path in (RESULTS / "runs").glob("*.json"):
        result = json.loads(path.read_text())["result"]
        if "test" not in result:  # the atlas and the studies train no language model
            continue
        for split in ("validation", "test"):
            found = result[split]
            assert found["perplexity"] == pytest.approx(math.exp(found["nll_nats"] / found["tokens"]), rel=1e-12)


def test_every_row_of_the_readmes_table_stands_in_the_committed_one() -> None:
    """No number in the README that no committed run produced."""
    committed = [
        line.strip("| \n").split(" | ") for line in (RESULTS / "tables" / "table2.md").open() if line[0] == "|"
    ]
    quoted = [line.strip("| \n").split(" | ") for line in (ROOT / "README.md").open() if line.startswith("| mini_")]
    table = [row for row in quoted if row[1] in ("control", "imbalanced", "saggs", "soft_saggs", "control_saggs")]
    assert len(table) == 10

    def stands(row: list[str]) -> bool:
        return any(row == other[: len(row)] for other in committed)

    assert all(stands(row) for row in table)
    assert not stands([*table[0][:2], "1.0 ± 0.1", *table[0][3:]])  # the control: a number nobody measured


def test_the_readmes_speeds_are_those_of_the_committed_benchmark() -> None:
    measured = json.loads((RESULTS / "benchmarks" / "training_step.json").read_text())["rows"]
    readme = (ROOT / "README.md").read_text()
    for row in measured:
        assert f"| {row['model']} | {row['step_ms']:.0f} ms | {row['bare_loop_ms']:.0f} ms |" in readme
        assert f"{row['speed_ratio']:.2f} | {row['rebalance_share_at_period_10']:.2%}".replace("%", " %") in readme
