"""What a run is: its own directory, one writer, a status that tells the truth, and a sweep that accounts for all."""

from __future__ import annotations

import fcntl
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import outputs_in
from forked import (
    DEBUG,
    ROOT,
    composed,
    differences,
    directories,
    directory,
    final_state,
    read,
    rows,
    run,
    signal_at,
    start,
)

from experiments.checks import validated
from experiments.identity import recorded
from experiments.run import Run, RunAlive, peek

SHORT = [*DEBUG, "arm=control", "training.steps=8", "logging.every=1", "evaluation.every=8", "checkpoint.every=4"]


def at(outputs: Path, *arguments: str) -> list[str]:
    return [*SHORT, f"paths.outputs={outputs}", *arguments]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> Path:
    """A live store with one finished run."""
    outputs = outputs_in(tmp_path_factory.mktemp("finished") / "outputs", warm_cache)
    run(at(outputs), outputs / "log")
    return outputs


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> Path:
    """A live store with one run killed after its first checkpoint."""
    outputs = outputs_in(tmp_path_factory.mktemp("half") / "outputs", warm_cache)
    run(at(outputs), outputs / "log", -9, before=signal_at(5, signal.SIGKILL))
    assert peek(directory(outputs)).status == "interrupted"
    return outputs


def copied(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "copied", symlinks=True))


# --- one directory a run, one writer a directory ---------------------------------------------------------------------


def test_eight_runs_at_once_have_eight_directories(outputs: Path) -> None:
    children = [start(at(outputs, f"seed={seed}"), outputs / f"log{seed}") for seed in range(8)]
    assert [child.wait(180) for child in children] == [0] * 8
    found = directories(outputs)
    assert sorted(read(path / "manifest.json")["seed"] for path in found) == list(range(8))
    for path in found:
        assert f"seed{read(path / 'manifest.json')['seed']}-" in path.name
        assert read(path / "manifest.json")["run_id"] == path.name
        assert [row["step"] for row in rows(path) if "loss" in row] == list(range(1, 9))
        assert read(path / "summary.json")["status"] == "done"
    assert len({(path / "metrics.jsonl").read_bytes() for path in found}) == 8


def test_the_same_command_four_times_at_once_is_one_run(finished: Path, outputs: Path) -> None:
    children = [start(at(outputs), outputs / f"log{n}") for n in range(4)]
    assert [child.wait(120) for child in children] == [0] * 4
    said = "".join(child.text() for child in children)
    assert said.count(" is done: ") == 1
    assert said.count("left alone") + said.count(" is done already") == 3
    assert differences(final_state(directory(outputs)), final_state(directory(finished))) == []


WATCH = """
import runpy, sys
sys.argv = ["train.py", *sys.argv[1:]]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    assert not end.code
print("torch" in sys.modules)
"""


def test_a_finished_run_is_skipped_at_once_without_importing_torch(finished: Path) -> None:
    """In a real process of train.py."""
    before = {path: path.stat().st_mtime_ns for path in directory(finished).rglob("*")}
    command = [sys.executable, "-c", WATCH, *at(finished)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "is done already" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
    assert {path: path.stat().st_mtime_ns for path in directory(finished).rglob("*")} == before


@pytest.mark.parametrize("change", ["optimizer.learning_rate=1e-3", "seed=1", "training.steps=9"])
def test_another_setting_does_not_resume_the_old_run(change: str, half_way: Path, tmp_path: Path) -> None:
    outputs = copied(half_way, tmp_path)
    old = directory(outputs)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    run(at(outputs, change), outputs / "log")
    (new,) = set(directories(outputs)) - {old}
    assert rows(new)[0]["step"] == 0
    assert "resumed_from" not in (new / "timing.jsonl").read_text()
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("age", "alive"), [(10.0, True), (1000.0, False)])
def test_a_run_of_another_host_is_left_alone_while_its_heartbeat_is_fresh(
    age: float, alive: bool, half_way: Path, tmp_path: Path
) -> None:
    """Locks may not reach another host; the heartbeat does."""
    outputs = copied(half_way, tmp_path)
    path = directory(outputs) / "status.json"
    status = read(path) | {"status": "running", "host": f"not-{socket.gethostname()}", "heartbeat": time.time() - age}
    path.write_text(json.dumps(status))
    assert peek(directory(outputs)).status == ("running" if alive else "interrupted")
    child = run(at(outputs), outputs / "log")
    assert ("left alone" in child.text()) == alive
    assert (read(path)["status"] == "done") == (not alive)
    assert (read(path) == status) == alive


def test_looking_at_a_run_does_not_keep_it_from_being_opened(half_way: Path, tmp_path: Path) -> None:
    """A status table reads while a run starts. The control: a writer does keep it."""
    outputs = copied(half_way, tmp_path)
    config = validated(composed(at(outputs)))
    manifest = read(directory(outputs) / "manifest.json")
    facts = {"data": manifest["data"], "environment": manifest["environment"]}
    with open(directory(outputs) / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunAlive):
            Run.open(config, facts, 8)
    with open(directory(outputs) / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # what `peek` holds for a moment
        release = threading.Timer(0.05, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        release.start()
        try:
            opened = Run.open(config, facts, 8)
        except RunAlive:
            opened = None
        release.join()
    assert opened is not None, "Run.open took a reader's lock of 50 ms for a running process: nobody runs it"
    opened._lock.close()


@pytest.mark.parametrize(("key", "what"), [("data", "was begun on data"), ("identity", "belongs to identity")])
def test_a_directory_of_other_data_or_of_another_identity_is_refused(
    key: str, what: str, half_way: Path, tmp_path: Path
) -> None:
    outputs = copied(half_way, tmp_path)
    path = directory(outputs) / "manifest.json"
    manifest = read(path)
    manifest[key] = manifest[key] | {"fingerprint": "other"} if key == "data" else "other"
    path.write_text(json.dumps(manifest))
    before = (directory(outputs) / "metrics.jsonl").read_bytes()
    child = run(at(outputs), outputs / "log", expected=2)
    assert child.text().startswith("refused: ")
    assert what in child.text()
    assert "move" in child.text()
    assert (directory(outputs) / "metrics.jsonl").read_bytes() == before


def test_the_manifest_comes_first_and_says_what_runs(half_way: Path) -> None:
    manifest = read(directory(half_way) / "manifest.json")
    assert manifest["environment"]["weights_dtype"] == "float32"
    assert manifest["seeds"].keys() == {"init", "data", "dropout"}
    assert len(set(manifest["seeds"].values())) == 3
    assert manifest["config"]["training"]["steps"] == 8
    assert not (directory(half_way) / "summary.json").exists()


# --- a sweep accounts for every run ----------------------------------------------------------------------------------

PLUGIN = """
import os
from pathlib import Path
import torch
from experiments.registry import optimizer

class Flaky(torch.optim.SGD):
    calls = 0
    def step(self, closure=None):
        Flaky.calls += 1
        super().step(closure)
        if Flaky.calls == 5 and self.seed in (1, 2) and not Path(os.environ["MENDED"]).exists():
            raise RuntimeError(f"injected for seed {self.seed}")

@optimizer("flaky")
def flaky(groups, learning_rate, weight_decay, seed):
    built = Flaky(groups, lr=learning_rate)
    built.seed, Flaky.calls = seed, 0
    return built
"""
FLAKY = ["plugins=[flaky_plugin]", "optimizer=custom", "optimizer.name=flaky", "optimizer.learning_rate=0.1",
         "+optimizer.options.seed=${seed}"]  # fmt: skip


def test_failed_runs_of_a_sweep_are_named_and_only_they_run_again(outputs: Path, tmp_path: Path) -> None:
    (tmp_path / "flaky_plugin.py").write_text(PLUGIN)
    environment = {"PYTHONPATH": str(tmp_path), "MENDED": str(tmp_path / "mended"), "COLUMNS": "200"}
    command = ["-m", *at(outputs, *FLAKY), "seed=0,1,2"]
    child = run(command, outputs / "log", expected=1, environment=environment)
    by_seed = {read(path / "manifest.json")["seed"]: path for path in directories(outputs)}
    status = {seed: read(path / "status.json") for seed, path in by_seed.items()}
    assert {seed: s["status"] for seed, s in status.items()} == {0: "done", 1: "failed", 2: "failed"}
    assert status[1]["message"].startswith("RuntimeError at flaky_plugin.py:")
    assert status[1]["message"].endswith("injected for seed 1")
    assert "injected for seed 2" in (by_seed[2] / "traceback.txt").read_text()
    table = re.sub(r"[^\w./-]", "", child.text().partition("3 runs:")[2])
    assert "3 runs: 1 done, 2 failed" in child.text()
    for seed in (1, 2):
        assert by_seed[seed].name in table
        assert f"{by_seed[seed].name}/traceback.txt" in table, "the table says where the traceback is"
        assert f"injectedforseed{seed}" in table
    before = (by_seed[0] / "status.json").read_bytes()
    (tmp_path / "mended").touch()
    again = run(command, outputs / "log2", expected=0, environment=environment)
    assert (by_seed[0] / "status.json").read_bytes() == before
    assert again.text().count(" is done: ") == 2
    assert again.text().count("is done already") == 1
    resumed = [(path / "timing.jsonl").read_text().count("resumed_from") for _, path in sorted(by_seed.items())]
    assert resumed == [0, 1, 1]
    assert [row["step"] for row in rows(by_seed[1]) if "loss" in row] == list(range(1, 9))


def test_a_run_listed_twice_counts_once_and_runs_once(outputs: Path) -> None:
    child = run(["-m", *at(outputs), "seed=1,1"], outputs / "log")
    assert len(directories(outputs)) == 1
    assert child.text().count(" is done: ") == 1
    assert "1 runs: 1 done" in child.text()


def test_a_sweep_with_options_of_hydra_is_accounted_for(outputs: Path, tmp_path: Path) -> None:
    """`--config-dir FOLDER` is no override: the account of the sweep must not trip over it."""
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text("# @package _global_\ntraining: {warmup_steps: 2}\n")
    command = ["-m", "--config-dir", str(tmp_path / "own"), *at(outputs), "experiment=mine", "seed=0,1"]
    child = run(command, outputs / "log", expected=None)
    assert len(directories(outputs)) == 2
    assert "2 runs: 2 done" in child.text(), child.text()[-1500:]
    assert child.code == 0


# --- a run that diverges ---------------------------------------------------------------------------------------------

POISON = """
import torch
from experiments.registry import optimizer

class Poison(torch.optim.SGD):
    calls = 0
    def step(self, closure=None):
        super().step(closure)
        Poison.calls += 1
        if Poison.calls == 6:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(float("nan"))

@optimizer("poison")
def poison(groups, learning_rate, weight_decay):
    Poison.calls = 0
    return Poison(groups, lr=learning_rate)
"""
POISONED = ["plugins=[poison_plugin]", "optimizer=custom", "optimizer.name=poison", "optimizer.learning_rate=0.1"]
TOO_FAST = ["optimizer=sgd", "optimizer.learning_rate=1e6", "training.clip_norm=null", "training.warmup_steps=6"]
DIVERGING = {"nan weights": POISONED, "rate of 1e6": TOO_FAST}


@pytest.mark.parametrize("what", DIVERGING)
def test_a_run_that_diverges_says_at_which_step_and_has_no_result(what: str, outputs: Path, tmp_path: Path) -> None:
    (tmp_path / "poison_plugin.py").write_text(POISON)
    environment = {"PYTHONPATH": str(tmp_path)}
    command = at(outputs, *DIVERGING[what], "checkpoint.every=1", "evaluation.every=8")
    child = run(command, outputs / "log", expected=3, environment=environment)
    path = directory(outputs)
    status, summary = read(path / "status.json"), read(path / "summary.json")
    assert child.text().splitlines()[-1].startswith("diverged: ")
    assert status["status"] == summary["status"] == "diverged"
    step = int(re.findall(r"at step (\d+)", status["message"])[0])
    assert summary["message"] == status["message"]
    assert summary["result"] is None
    if what == "nan weights":
        assert step == 7
        assert [row["step"] for row in rows(path) if "loss" in row] == list(range(1, 7))
    kept = sorted(p.name for p in (path / "checkpoints").glob("step-*"))
    assert kept
    assert all(int(name[5:]) < step for name in kept)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    again = run(command, outputs / "log2", environment=environment)
    assert "is diverged already" in again.text()
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("logging_every", [1, 8])
def test_an_infinite_gradient_of_a_finite_loss_is_a_divergence(logging_every: int, outputs: Path) -> None:
    """It makes every weight NaN at this very step, so no checkpoint of it may be written either."""

    def overflow() -> None:
        import torch

        real, calls = torch.nn.utils.clip_grad_norm_, 0

        def clip(parameters: Any, limit: float) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 6:
                parameters[0].grad.fill_(math.inf)
            return real(parameters, limit)

        torch.nn.utils.clip_grad_norm_ = clip  # type: ignore[assignment]

    command = at(outputs, "checkpoint.every=1", f"logging.every={logging_every}")
    child = run(command, outputs / "log", expected=None, before=overflow)
    kept = sorted(int(p.name[5:]) for p in (directory(outputs) / "checkpoints").glob("step-*"))
    assert read(directory(outputs) / "status.json")["status"] == "diverged", child.text()[-600:]
    assert child.code == 3
    assert max(kept) == 5, f"a checkpoint of step {max(kept)} was written with NaN in it"


def test_a_diverged_run_makes_a_sweep_end_with_1_and_stands_in_its_table(outputs: Path) -> None:
    command = ["-m", *at(outputs, *TOO_FAST, "optimizer.learning_rate=1e6,0.1")]
    child = run(command, outputs / "log", expected=1, environment={"COLUMNS": "200"})
    assert "2 runs: 1 done, 1 diverged" in child.text()


def test_configurations_are_not_changed_by_running(finished: Path) -> None:
    config = validated(composed(at(finished)))
    stored = read(directory(finished) / "manifest.json")["config"]
    assert stored == json.loads(json.dumps(recorded(config)))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
