"""W&B is a mirror: present, absent, dead or mute, it changes no bit of a run and delays it by seconds at most."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import outputs_in
from forked import DEBUG, ROOT, composed, differences, directory, final_state, read, rows, run, signal_at

from experiments import tracking
from experiments.checks import validated

COMMAND = [*DEBUG, "arm=saggs", "training.steps=12", "logging.every=1", "evaluation.every=6", "checkpoint.every=3"]
FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"
DEAD = {"WANDB_API_KEY": FAKE_KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
MOST_SECONDS = 20.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> dict[str, Any]:
    """The final state of the run that W&B hears nothing of."""
    outputs = outputs_in(tmp_path_factory.mktemp("disabled") / "outputs", warm_cache)
    run([*COMMAND, f"paths.outputs={outputs}"], outputs / "log")
    assert not (directory(outputs) / "wandb").exists()
    return final_state(directory(outputs))


@pytest.fixture
def mute_server() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    taken.append(server.accept()[0])
            except OSError:
                return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for connection in taken:
            connection.close()


def real_process(outputs: Path, tmp_path: Path, **environment: str) -> tuple[str, float]:
    """A real process of train.py online; its output, and the seconds from its manifest to its very end.

    To the very end, because W&B's own exit handlers may wait long after the run is done.
    """
    home = tmp_path / "home"  # no key and no settings of this machine
    home.mkdir(exist_ok=True)
    command = [sys.executable, "train.py", *COMMAND, f"paths.outputs={outputs}", "wandb.mode=online"]
    variables = {**os.environ, "HOME": str(home), "NETRC": str(home / ".netrc"), **environment}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False)
    ended = time.time()
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, ended - float(read(directory(outputs) / "manifest.json")["created"])


def seconds_to_first_row(outputs: Path) -> float:
    first = json.loads((directory(outputs) / "timing.jsonl").read_text().splitlines()[0])
    return float(first["time"]) - float(read(directory(outputs) / "manifest.json")["created"])


def logs(outputs: Path) -> list[Path]:
    """W&B's own logs of a run."""
    return sorted(directory(outputs).glob("wandb/**/run-*.wandb"))


# --- whatever W&B does -----------------------------------------------------------------------------------------------


def test_a_dead_server_changes_nothing_and_delays_by_seconds(
    outputs: Path, tmp_path: Path, reference: dict[str, Any]
) -> None:
    text, seconds = real_process(outputs, tmp_path, **DEAD)
    assert "does not answer; mirroring offline" in text
    assert differences(final_state(directory(outputs)), reference) == []
    assert seconds < MOST_SECONDS
    assert logs(outputs), "what was logged offline can be synchronised later"


def test_a_mute_server_changes_nothing_and_delays_by_seconds(
    outputs: Path, tmp_path: Path, mute_server: str, reference: dict[str, Any]
) -> None:
    """The worst kind: the connection stands and no answer comes."""
    key = {"WANDB_API_KEY": FAKE_KEY, "WANDB_BASE_URL": mute_server}
    text, seconds = real_process(outputs, tmp_path, **key)
    assert differences(final_state(directory(outputs)), reference) == []
    assert seconds_to_first_row(outputs) < MOST_SECONDS
    assert "mirroring offline" in text
    assert "could not start" not in text, "it says offline, but the fallback failed: the id is in use"
    assert seconds < MOST_SECONDS, f"{seconds:.0f} s, most of them after the run was done"


@pytest.mark.parametrize(("mode", "said"), [("online", "no key is present"), ("auto", ""), ("offline", "")])
def test_without_a_key_the_mirror_is_offline(
    mode: str, said: str, outputs: Path, tmp_path: Path, reference: dict[str, Any]
) -> None:
    environment = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    child = run([*COMMAND, f"paths.outputs={outputs}", f"wandb.mode={mode}"], outputs / "log", environment=environment)
    assert said in child.text()
    assert logs(outputs)
    assert differences(final_state(directory(outputs)), reference) == []


def broken(kind: str) -> None:
    """In the child: W&B raises where the name says."""
    import wandb

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    if kind == "init":
        wandb.init = fail  # type: ignore[assignment]
    elif kind == "import":
        sys.modules["wandb"] = None  # type: ignore[assignment]
    else:
        real = wandb.init

        def init(**arguments: Any) -> Any:
            started = real(**arguments)
            setattr(started, kind, fail)
            return started

        wandb.init = init  # type: ignore[assignment]


@pytest.mark.parametrize("kind", ["init", "log", "finish", "import"])
def test_an_error_of_wandb_anywhere_is_a_warning_and_no_more(
    kind: str, outputs: Path, tmp_path: Path, reference: dict[str, Any]
) -> None:
    """With a key present, so that "import" also meets the question whether the server answers."""
    environment = {**DEAD, "HOME": str(tmp_path)} if kind == "import" else {"HOME": str(tmp_path)}
    mode = "auto" if kind == "import" else "offline"
    child = run(
        [*COMMAND, f"paths.outputs={outputs}", f"wandb.mode={mode}"],
        outputs / "log",
        expected=None,
        environment=environment,
        before=lambda: broken(kind),
    )
    assert child.code == 0, child.text()[-800:]
    assert "W&B" in child.text()
    assert differences(final_state(directory(outputs)), reference) == []


# --- what it is told -------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_id_and_no_row_is_read_back(outputs: Path, reference: dict[str, Any]) -> None:
    """Each process writes its own log, all of one id; removing them changes nothing, for nothing is read from W&B."""
    command = [*COMMAND, f"paths.outputs={outputs}", "wandb.mode=offline"]
    run(command, outputs / "log", 143, before=signal_at(5, signal.SIGTERM))
    first = logs(outputs)
    for path in first:
        path.write_bytes(b"")
    run(command, outputs / "log")
    names = {path.name for path in logs(outputs)}
    assert len(first) == 1
    assert len(logs(outputs)) == 2
    assert len(names) == 1, f"two ids: {names}"
    identity = read(directory(outputs) / "manifest.json")["identity"]
    assert names == {f"run-{identity[:32]}.wandb"}
    assert [row["step"] for row in rows(directory(outputs)) if "loss" in row] == list(range(1, 13))
    assert differences(final_state(directory(outputs)), reference) == []


class Recorder:
    """Stands in for `wandb.init`: keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.arguments: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.metrics: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.codes: list[int] = []

    def __call__(self, **arguments: Any) -> Recorder:
        self.arguments = arguments
        return self

    def define_metric(self, *names: str, **options: Any) -> None:
        self.metrics.append((names, options))

    def log(self, row: dict[str, Any], **options: Any) -> None:
        assert not options, "W&B drops rows whose own step does not grow: the step is in the row"
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


def test_rows_carry_their_own_step_and_groups_hold_the_seeds_of_a_cell(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    recorders = []
    for seed in (0, 1):
        recorder = Recorder()
        monkeypatch.setattr(wandb, "init", recorder)
        config = validated(composed([*COMMAND, f"paths.outputs={outputs}", "wandb.mode=offline", f"seed={seed}"]))
        manifest = {"run_id": f"run{seed}", "identity": f"{seed}" * 64, "group": "g" * 64, "config": {}}
        with tracking.Tracker.start(config, manifest) as tracker:
            tracker.log({"step": 5, "loss": 1.0})
            tracker.log({"step": 3, "loss": 2.0})
            tracker.summarise({"test": {"perplexity": 2.0}})
        recorders.append(recorder)
    first, second = recorders
    assert [row["step"] for row in first.rows] == [5, 3], "a row logged again after a resume is not dropped"
    assert (("*",), {"step_metric": "step"}) in first.metrics
    assert first.summary == {"test": {"perplexity": 2.0}}
    assert first.codes == [0]
    assert first.arguments["group"] == second.arguments["group"]
    assert first.arguments["id"] != second.arguments["id"]
    assert first.arguments["resume"] == "allow"


@pytest.mark.parametrize(
    ("mode", "key", "reachable", "expected"),
    [
        ("disabled", True, True, "disabled"),
        ("offline", True, True, "offline"),
        ("auto", False, True, "offline"),
        ("auto", True, True, "online"),
        ("auto", True, False, "offline"),
        ("online", True, True, "online"),
        ("online", True, False, "offline"),
        ("online", False, True, "offline"),
    ],
)
def test_the_mode_is_online_only_with_a_key_and_a_server(
    mode: str, key: bool, reachable: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_has_key", lambda: key)
    monkeypatch.setattr(tracking, "_reachable", lambda: reachable)
    assert tracking._resolved(mode) == expected


def test_no_source_reads_anything_back_from_wandb() -> None:
    sources = [path for folder in ("experiments", "scripts") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 10
    reading = re.compile(r"wandb\.(Api|apis|restore|use_artifact)|\.history\(|\.scan_history\(")
    assert [path.name for path in sources if reading.search(path.read_text())] == []
    importing = [path.name for path in sources if re.search(r"^\s*(import|from) wandb", path.read_text(), re.MULTILINE)]
    assert importing == ["tracking.py"]
