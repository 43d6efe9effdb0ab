"""Runs of rotated twins: stopped and resumed they end bit-equal; at full length they drift as published."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attention_runs import RULES, TASK, TINY, finished
from forked import composed, differences, directory, read

from experiments import command_line, saved
from experiments.attention_rotation import twins
from experiments.run import Interrupted, Run

# --- stopped and resumed ---------------------------------------------------------------------------------------------


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is sent SIGTERM once the row of a step is written."""
    written: Callable[[Run, dict[str, Any]], None] = Run.log

    def log(self: Run, row: dict[str, Any]) -> None:
        written(self, row)
        if row["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Run, "log", log)


def ended(outputs: Path) -> dict[str, Any]:
    """What must not depend on what happened on the way."""
    found = directory(outputs)
    summary = {k: v for k, v in read(found / "summary.json").items() if k not in ("seconds", "code")}
    return {"summary": summary, "metrics": (found / "metrics.jsonl").read_bytes()}


STOPPED = (*TINY, "attention.steps=12", "attention.noises=[1e-7]")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What runs that nothing happened to left behind."""

    @functools.cache
    def made(rule: str) -> dict[str, Any]:
        outputs = tmp_path_factory.mktemp(rule)
        finished(outputs, *RULES[rule], common=STOPPED)
        return ended(outputs)

    return made


@pytest.mark.parametrize(
    ("rule", "harm", "resumed"),
    [
        ("adam", "none", ["step-000007"]),
        ("muon", "none", ["step-000007"]),
        ("muon", "newest", ["step-000006"]),
        ("adam", "all", []),
        ("adam", "metrics", []),
    ],
)
def test_stopped_and_resumed_it_ends_bit_equal(
    rule: str, harm: str, resumed: list[str], tmp_path: Path, calm: Callable[[str], dict[str, Any]]
) -> None:
    """Also from the state before, or from the beginning, where what was saved is damaged."""
    settings = [*STOPPED, *RULES[rule], f"paths.outputs={tmp_path}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "SAVE_EVERY_SECONDS", 0.0)
        stop_at(6, patch)
        with pytest.raises(Interrupted, match="SIGTERM at step 7"):
            command_line.run(composed(settings))
    found = directory(tmp_path)
    states = sorted((found / "checkpoints").glob("step-*"))
    assert [state.name for state in states] == ["step-000006", "step-000007"]
    for state in {"newest": states[-1:], "all": states}.get(harm, []):
        data = (state / "tensors.safetensors").read_bytes()
        (state / "tensors.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if harm == "metrics":
        (found / "metrics.jsonl").write_bytes(b"")
    assert command_line.run(composed(settings)) == "done"
    assert differences(ended(tmp_path), calm(rule)) == []
    timing = (found / "timing.jsonl").read_text() if resumed else ""
    assert [state.name for state in states if state.name in timing] == resumed


def test_a_state_without_the_moments_does_not_end_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Callable[[str], dict[str, Any]]
) -> None:
    """The control of the test above: the comparison sees an optimizer that begins anew."""
    settings = [*STOPPED, *RULES["adam"], f"paths.outputs={tmp_path}"]
    with pytest.MonkeyPatch.context() as patch:
        stop_at(6, patch)
        with pytest.raises(Interrupted):
            command_line.run(composed(settings))
    monkeypatch.setattr(twins, "_unpacked", lambda kept, tensors: [{**kept[0], "state": {}, "groups": [{}]}])
    assert command_line.run(composed(settings)) == "done"
    assert differences(ended(tmp_path), calm("adam")) != []


def test_the_second_command_finds_it_done(tmp_path: Path) -> None:
    finished(tmp_path, *RULES["sgd"], "attention.steps=1")
    again = composed([*TINY, *RULES["sgd"], "attention.steps=1", f"paths.outputs={tmp_path}"])
    assert command_line.run(again) == "skipped"
    shutil.rmtree(directory(tmp_path) / "checkpoints", ignore_errors=True)
    assert command_line.run(again) == "skipped"


# --- the published numbers -------------------------------------------------------------------------------------------


PUBLISHED = (*TASK, "seed=42", "attention.noises=[1e-7]")


@pytest.mark.slow
def test_adams_rotated_twin_drifts_as_published(tmp_path: Path) -> None:
    """Steps 1 and 10: 0.016 and 0.089 within 20 %; at step 600 0.53, of which 0.4 to 0.8 is asked."""
    result = finished(tmp_path, *RULES["adam"], "attention.steps=600", common=PUBLISHED)
    apart = result["arms"]["rotated"]["drift"]
    assert apart["1"] == pytest.approx(0.016, rel=0.2)
    assert apart["10"] == pytest.approx(0.089, rel=0.2)
    assert 0.4 < apart["600"] < 0.8
    assert result["ratios"]["noise_1e-07"]["1"] > 30
    assert set(result["arms"]["identity"]["drift"].values()) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adam"])
def test_the_published_model_follows_rotations_under_the_other_rules(rule: str, tmp_path: Path) -> None:
    result = finished(tmp_path, *RULES[rule], "attention.steps=100", common=PUBLISHED)
    assert max(result["arms"]["rotated"]["drift"].values()) < 1e-4
    assert result["ratios"]["noise_1e-07"]["1"] < 10
    assert set(result["arms"]["identity"]["drift"].values()) == {0.0}
