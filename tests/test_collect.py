"""Runs on disk become rows, and nothing is averaged that is not one finished run of one configuration and seed."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.analysis.collect import COLUMNS, collect, one_value_per_seed, statuses_by_seed, values_by_seed
from experiments.analysis.statistics import summarize

Json = dict[str, Any]


def evaluation(perplexity: float) -> Json:
    nll = math.log(perplexity)
    return {
        "nll_nats": 1000 * nll,
        "tokens": 1000,
        "nll_per_token": nll,
        "perplexity": perplexity,
        "words": 700,
        "word_perplexity": math.exp(1000 * nll / 700),
        "bytes": 4000,
        "bits_per_byte": nll / 4 / math.log(2),
        "context": 128,
        "stride": 128,
    }


def summary(seed: int = 0, perplexity: float | None = 350.0, **changes: Any) -> Json:
    learning_rate = changes.get("learning_rate", 0.004)
    arm = changes.get("arm", "control")
    group = hashlib.sha256(f"{arm} {learning_rate}".encode()).hexdigest()
    config = {"seed": seed, "model": {"name": "mini_gpt2"}, "optimizer": {"learning_rate": learning_rate}, "arm": arm}
    return {
        "run_id": f"mini_gpt2-{arm}-seed{seed}-{group[:8]}{seed:04d}",
        "identity": f"{seed:064x}",
        "group": group,
        "numerics_version": 1,
        "status": "done" if perplexity else "failed",
        "model": "mini_gpt2",
        "arm": arm,
        "scale": "mini",
        "optimizer": "adamw",
        "seed": seed,
        "learning_rate": learning_rate,
        "config": config,
        "code": {"commit": "a" * 40, "dirty": False},
        "environment": {"torch": "2.9"},
        "data": {"name": "wikitext"},
        "steps": 160,
        "message": None,
        "curve": [{"step": 0, "perplexity": 4023.0}],
        "result": {"validation": evaluation(perplexity * 1.01), "test": evaluation(perplexity)} if perplexity else None,
        **changes,
    }


def commit(store: Path, record: Json, name: str | None = None) -> Path:
    store.mkdir(parents=True, exist_ok=True)
    path = store / f"{name or record['run_id']}.json"
    path.write_text(json.dumps(record))
    return path


def run(store: Path, record: Json, name: str | None = None, status: str | None = None, heartbeat: float = 1e9) -> Path:
    directory = store / (name or record["run_id"])
    directory.mkdir(parents=True)
    manifest = {key: value for key, value in record.items() if key not in ("result", "curve", "status", "steps")}
    state = status or record["status"]
    (directory / "manifest.json").write_text(json.dumps({**manifest, "created": "2025-01-02T03:04:05Z"}))
    (directory / "status.json").write_text(
        json.dumps({"status": state, "step": 50, "total_steps": 160, "heartbeat": heartbeat, "message": None})
    )
    if state in ("done", "failed", "diverged"):
        (directory / "summary.json").write_text(json.dumps({**record, "status": state}))
    return directory


def test_both_stores_give_the_same_row(tmp_path: Path) -> None:
    run(tmp_path / "live", summary())
    commit(tmp_path / "committed", summary())
    live, committed = collect(live=tmp_path / "live"), collect(committed=tmp_path / "committed")
    assert tuple(live.columns) == tuple(committed.columns) == COLUMNS
    apart = ["source", "path", "last_written"]
    pd.testing.assert_frame_equal(live.drop(columns=apart), committed.drop(columns=apart))
    row = live.iloc[0]
    assert (row["seed"], row["test_perplexity"], row["validation_tokens"]) == (0, 350.0, 1000)
    assert row["config"]["optimizer"] == {"learning_rate": 0.004}
    assert row["curve"][0]["perplexity"] == 4023.0


def test_a_published_copy_is_the_same_run_and_a_changed_copy_is_not(tmp_path: Path) -> None:
    run(tmp_path / "live", summary())
    path = commit(tmp_path / "committed", summary())
    assert len(collect(tmp_path / "live", tmp_path / "committed")) == 1
    path.write_text(json.dumps(summary(perplexity=351.0)))
    assert len(collect(tmp_path / "live", tmp_path / "committed")) == 2


def test_an_empty_store_is_an_empty_frame_and_a_missing_one_an_error(tmp_path: Path) -> None:
    frame = collect(committed=tmp_path)
    assert tuple(frame.columns) == COLUMNS
    assert len(one_value_per_seed(frame)[0]) == 0
    with pytest.raises(ValueError, match="no directory"):
        collect(committed=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Expecting value"),
        ('{"run_id": ', "Expecting value"),
        ("[1, 2]", "holds a list"),
        ("{}", "field 'run_id' is missing"),
        ('{"run_id": 3}', "field 'run_id' is 3"),
        (json.dumps({**summary(), "seed": True}), "field 'seed' is True"),
        (json.dumps({**summary(), "status": "finished"}), "status is 'finished'"),
        (json.dumps({**summary(), "result": 350.0}), "result is 350.0"),
    ],
)
def test_an_unreadable_summary_is_a_row_with_its_reason(tmp_path: Path, content: str, reason: str) -> None:
    commit(tmp_path, summary(seed=1))
    (tmp_path / "broken.json").write_text(content)
    frame = collect(committed=tmp_path)
    broken = frame[frame["status"] == "unreadable"]
    assert len(frame) == 2
    assert len(broken) == 1
    assert reason in broken.iloc[0]["message"]
    kept, notes = one_value_per_seed(frame)
    assert len(kept) == 2
    assert any("unreadable" in note for note in notes)


@pytest.mark.parametrize("name", ["manifest.json", "status.json", "summary.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "binary"])
def test_a_damaged_live_run_is_a_row_without_a_value(tmp_path: Path, name: str, damage: str) -> None:
    directory = run(tmp_path, summary())
    assert collect(live=tmp_path).iloc[0]["status"] == "done"
    path = directory / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"\xff\xfe\x00" if damage == "binary" else path.read_bytes()[:40])
    row = collect(live=tmp_path).iloc[0]
    assert row["status"] == "unreadable"
    assert name in row["message"]
    assert row["run_id"] == directory.name
    assert math.isnan(row["test_perplexity"])


def test_a_summary_that_contradicts_manifest_or_status_is_unreadable(tmp_path: Path) -> None:
    directory = run(tmp_path, summary())
    for change in ({"seed": 7}, {"status": "diverged"}, {"group": "f" * 64}):
        (directory / "summary.json").write_text(json.dumps(summary() | change))
        row = collect(live=tmp_path).iloc[0]
        assert row["status"] == "unreadable"
        assert next(iter(change)) in row["message"]


def test_a_summary_older_than_a_restart_gives_no_value(tmp_path: Path) -> None:
    directory = run(tmp_path, summary(), status="running")
    (directory / "summary.json").write_text(json.dumps(summary()))
    row = collect(live=tmp_path).iloc[0]
    assert row["status"] == "running"
    assert math.isnan(row["test_perplexity"])


def test_a_missing_seed_does_not_turn_the_other_seeds_into_floats(tmp_path: Path) -> None:
    commit(tmp_path, summary(seed=0))
    (tmp_path / "broken.json").write_text("{")
    seeds = collect(committed=tmp_path).sort_values("status")["seed"]
    assert str(seeds.dtype) == "Int64"
    assert seeds.iloc[0] == 0


def test_a_repeated_run_counts_once_and_is_reported(tmp_path: Path) -> None:
    run(tmp_path, summary(seed=0), heartbeat=100)
    run(tmp_path, summary(seed=1), name="z-first", heartbeat=200)
    run(tmp_path, summary(seed=1, perplexity=356.0), name="a-again", heartbeat=300)
    frame = collect(live=tmp_path)
    kept, notes = one_value_per_seed(frame)
    assert len(frame) == 3
    assert values_by_seed(kept) == {0: 350.0, 1: 356.0}
    assert len(notes) == 1
    assert "seed 1: 2 runs" in notes[0]
    assert "350" in notes[0]
    assert "a-again" in notes[0].partition("kept the latest complete one")[2]
    with pytest.raises(ValueError, match="seed 1 has two rows"):
        values_by_seed(frame)


def test_a_complete_run_is_kept_over_a_later_one_that_crashed(tmp_path: Path) -> None:
    run(tmp_path, summary(seed=1), heartbeat=100)
    run(tmp_path, summary(seed=1), name="later", status="interrupted", heartbeat=900)
    kept, notes = one_value_per_seed(collect(live=tmp_path))
    assert values_by_seed(kept) == {1: 350.0}
    assert "2 runs" in notes[0]


def test_a_run_that_differs_in_more_than_the_seed_is_an_error_naming_the_key(tmp_path: Path) -> None:
    commit(tmp_path, summary(seed=0))
    commit(tmp_path, summary(seed=1))
    assert len(one_value_per_seed(collect(committed=tmp_path))[0]) == 2
    commit(tmp_path, summary(seed=2, learning_rate=0.008))
    frame = collect(committed=tmp_path)
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate = 0\.004 in .*, 0\.008 in ") as caught:
        one_value_per_seed(frame)
    assert "seed" not in str(caught.value).partition("the seed:")[2].replace("-seed", "")
    assert len(one_value_per_seed(frame, cell=("model", "arm", "learning_rate"))[0]) == 3


def test_another_numerics_version_in_a_cell_is_an_error(tmp_path: Path) -> None:
    commit(tmp_path, summary(seed=0))
    commit(tmp_path, summary(seed=1, numerics_version=2, group="e" * 64))
    with pytest.raises(ValueError, match=r"numerics_version = 1 in .*, 2 in "):
        one_value_per_seed(collect(committed=tmp_path))


def test_a_setting_outside_the_identity_may_differ(tmp_path: Path) -> None:
    first, second = summary(seed=0), summary(seed=1)
    second["config"] = {**copy.deepcopy(second["config"]), "device": "cuda"}
    commit(tmp_path, first)
    commit(tmp_path, second)
    assert one_value_per_seed(collect(committed=tmp_path))[1] == []


@pytest.mark.parametrize("status", ["failed", "diverged", "interrupted", "running"])
def test_a_run_that_is_not_done_is_counted_and_never_averaged(tmp_path: Path, status: str) -> None:
    for seed in range(4):
        run(tmp_path, summary(seed=seed, perplexity=350.0 + seed))
    run(tmp_path, summary(seed=4, perplexity=9e9), status=status)
    kept, notes = one_value_per_seed(collect(live=tmp_path))
    result = summarize(values_by_seed(kept))
    assert (result.mean, result.n, result.n_seeds, result.missing) == (351.5, 4, 5, (4,))
    assert statuses_by_seed(kept)[4] == status
    assert kept.loc[kept["seed"] == 4, "test_perplexity"].isna().all()
    assert any(f"seed 4: {status}" in note for note in notes)


def test_a_seed_fixed_beforehand_without_a_run_is_missing(tmp_path: Path) -> None:
    commit(tmp_path, summary(seed=0))
    commit(tmp_path, summary(seed=100))
    frame = collect(committed=tmp_path)
    assert values_by_seed(frame, seeds=(0, 1)) == {0: 350.0, 1: None}
    assert statuses_by_seed(frame, seeds=(0, 1)) == {0: "done", 1: "not run"}


def test_two_arms_are_never_joined_and_one_configuration_under_two_names_is_noted(tmp_path: Path) -> None:
    commit(tmp_path, summary(seed=0))
    commit(tmp_path, {**summary(seed=0, perplexity=360.0, arm="saggs"), "group": summary()["group"]})
    kept, notes = one_value_per_seed(collect(committed=tmp_path))
    assert len(kept) == 2
    assert notes == ["mini_gpt2 control, mini_gpt2 saggs: the same configuration under 2 names"]


def test_runs_of_different_code_in_one_cell_are_noted(tmp_path: Path) -> None:
    commit(tmp_path, summary(seed=0))
    commit(tmp_path, summary(seed=1))
    assert one_value_per_seed(collect(committed=tmp_path))[1] == []
    commit(tmp_path, summary(seed=2, code={"commit": "b" * 40, "dirty": True}))
    commit(tmp_path, summary(seed=3, code={"commit": None, "dirty": None}))
    notes = one_value_per_seed(collect(committed=tmp_path))[1]
    assert "aaaaaaaaaaaa (seed 0, 1); an unknown commit (seed 3); bbbbbbbbbbbb (seed 2)" in notes[0]
    assert notes[1].endswith("uncommitted changes in the code of seed 2")
