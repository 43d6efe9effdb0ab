"""Real runs at the price of a fork: the parent has imported torch and transformers already.

A child is a process of its own that does what train.py does; it may be stopped and killed at any moment. A single run
is composed by the parent, once for equal settings; a sweep executes train.py itself as `__main__`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import json
import logging
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "train.py"
DEBUG = ("scale=debug", "progress=false")


@functools.cache
def warm_up() -> None:
    """Do once what every run does, so that children inherit what is imported, compiled and looked up on first use."""
    import torch

    from experiments.language_model import checkpoint, task
    from experiments.language_model.model import build_model
    from experiments.language_model.optimizers import build_optimizer
    from experiments.language_model.training import StepLoss, schedule
    from experiments.sweep import expand
    from saggs import find_pairs

    torch.set_num_threads(1)
    assert task.__name__
    for run in expand(["scale=debug", "model=debug_gpt2,debug_llama", "optimizer=adamw"]):
        model, training = build_model(run.config, 0), run.config.training
        find_pairs(model)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        StepLoss(model, training, "cpu").backward(tokens, tokens)
        optimizer = build_optimizer(model, run.config.optimizer)
        schedule(training, 1e-3)(1)
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(Path(folder), model, optimizer, {"step": 1}, keep=1)
            checkpoint.load_newest(Path(folder))
    gc.collect()
    gc.freeze()  # children then copy fewer pages


@dataclass
class Child:
    """A process that runs train.py."""

    pid: int
    output: Path
    began: float = field(default_factory=time.monotonic)
    code: int | None = None

    def poll(self) -> int | None:
        """The exit code; negative for the signal that ended it; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the end and return the exit code; a child that does not end is killed and fails the test."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"still running after {timeout:g} s:\n{self.text()}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def wait_until(self, condition: Callable[[], bool], timeout: float = 30.0) -> bool:
        """Wait until the condition holds (True) or the child has ended (False)."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"nothing happened within {timeout:g} s:\n{self.text()}"
            time.sleep(0.0005)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this child, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait_stopped(self) -> None:
        """Wait until it has stopped itself (SIGSTOP)."""
        stat = Path(f"/proc/{self.pid}/stat")
        assert self.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T"), self.text()

    def kill(self) -> int:
        """Kill it where it stands."""
        self.send(signal.SIGKILL)
        return self.wait()

    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace")


@functools.cache
def _composed(overrides: tuple[str, ...]) -> Any:
    from hydra import compose, initialize_config_dir

    from experiments import config

    config.register()
    with initialize_config_dir(str(config.CONFIGS), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def composed(arguments: Sequence[str]) -> Any:
    """The settings of one run, as Hydra composes them."""
    stores = [a for a in arguments if a.startswith("paths.outputs=")]
    settings = copy.deepcopy(_composed(tuple(a for a in arguments if a not in stores)))
    if stores:
        settings.paths.outputs = stores[-1].partition("=")[2]
    return settings


def start(
    arguments: Sequence[str],
    output: Path,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Child:
    """Do in a forked child what `python train.py <arguments>` does, its output into the file `output`.

    Args:
        arguments: what stands on the command line.
        output: stdout and stderr.
        environment: variables to set in the child.
        before: called in the child first, to break something there.
    """
    warm_up()
    settings = None if arguments[0] == "-m" else composed(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, output)
    code = 70
    try:
        _redirect(output)
        code = _child(arguments, settings, environment or {}, before)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(output: Path) -> None:
    os.setpgid(0, 0)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s", force=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _child(
    arguments: Sequence[str], settings: Any, environment: Mapping[str, str], before: Callable[[], None] | None
) -> int:
    os.environ.update(environment)
    sys.path[:0] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if before is not None:
        before()
    if settings is not None:
        from experiments import command_line

        return command_line.main(lambda: command_line.run(settings), arguments)
    sys.argv = [str(TRAIN), *arguments]
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def run(arguments: Sequence[str], output: Path, expected: int | None = 0, **options: Any) -> Child:
    """Start a child and wait for it; fails unless it ends with the expected exit code (None: any)."""
    child = start(arguments, output, **options)
    code = child.wait(120)
    assert expected is None or code == expected, f"exit code {code}, not {expected}:\n{child.text()}"
    return child


def signal_at(step: int, number: signal.Signals) -> Callable[[], None]:
    """For `before`: the run sends itself a signal once the row of a step is written (log every step)."""

    def prepare() -> None:
        from experiments.run import Run

        written = Run.log

        def log(self: Run, row: dict[str, Any]) -> None:
            written(self, row)
            if row["step"] == step and "loss" in row:
                os.kill(os.getpid(), number)

        Run.log = log  # type: ignore[method-assign]

    return prepare


# --- what a run left behind ------------------------------------------------------------------------------------------


def directories(outputs: Path) -> list[Path]:
    """The run directories of a live store."""
    return sorted(path for path in (outputs / "runs").glob("*") if path.is_dir())


def directory(outputs: Path) -> Path:
    """The only run directory of a live store."""
    found = directories(outputs)
    assert len(found) == 1, f"not one run but {[path.name for path in found]}"
    return found[0]


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_bytes())


def rows(run_directory: Path) -> list[dict[str, Any]]:
    """The rows of metrics."""
    return [json.loads(line) for line in (run_directory / "metrics.jsonl").read_bytes().splitlines()]


def final_state(run_directory: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on what happened on the way."""
    import torch
    from safetensors.torch import load_file

    newest = sorted((run_directory / "checkpoints").glob("step-*"))[-1]
    summary = {k: v for k, v in read(run_directory / "summary.json").items() if k not in ("seconds", "code")}
    summary["config"] = {k: v for k, v in summary["config"].items() if k not in ("paths", "checkpoint", "wandb")}
    return {
        "step": newest.name,
        "weights": load_file(newest / "weights.safetensors"),
        "optimizer": torch.load(newest / "optimizer.pt", weights_only=True),
        "state": read(newest / "state.json"),
        "metrics": (run_directory / "metrics.jsonl").read_bytes(),
        "summary": summary,
    }


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two nested values differ; tensors are compared bit for bit, with their dtypes."""
    import torch

    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        found = [f"{path}.{key}: in one only" for key in one.keys() ^ other.keys()]
        return found + [
            d for key in one.keys() & other.keys() for d in differences(one[key], other[key], f"{path}.{key}")
        ]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} entries"]
        return [d for n, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{path}[{n}]")]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        same = same and bytes(one.reshape(-1).view(torch.uint8)) == bytes(other.reshape(-1).view(torch.uint8))
        return [] if same else [f"{path}: tensors differ"]
    return [] if one == other else [f"{path}: {str(one)[:80]} and {str(other)[:80]}"]


class StopAfter:
    """Asks to stop at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def asked(self) -> str | None:
        self.looks -= 1
        return "SIGTERM" if self.looks < 0 else None

    def __enter__(self) -> StopAfter:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def stopped_at(looks: int) -> Callable[[], StopAfter]:
    """In the place of `stop_signals`, for a task that runs in this process."""
    return lambda: StopAfter(looks)
