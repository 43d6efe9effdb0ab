"""What a run is: a directory named by its identity that says first what it is, and last how it ended.

    outputs/runs/<run_id>/
        manifest.json    the resolved configuration, seeds, versions, data: written first
        status.json      running | interrupted | failed | diverged | done, with step, process and heartbeat
        metrics.jsonl    one row a logged step: equal for equal runs, bit for bit
        timing.jsonl     what may differ between equal runs
        checkpoints/     the task's
        summary.json     written last, before the status says done
        lock             held (flock) by the one process that runs it

The same command on the same directory skips a finished run, resumes an interrupted or failed one, and leaves one alone
that is alive: its lock is held, or, from another host whose locks may not reach here, its heartbeat is fresh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import socket
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from experiments.config import Config
from experiments.files import read_json, sync_directory, write_atomically, write_json
from experiments.identity import NUMERICS_VERSION, Identity, recorded

log = logging.getLogger(__name__)

Status = Literal["missing", "running", "interrupted", "failed", "diverged", "done"]
ENDED: tuple[Status, ...] = ("done", "diverged")
HEARTBEAT_SECONDS = 2.0
STALE_AFTER_SECONDS = 120.0


_IDENTIFYING = (
    *("run_id", "identity", "group", "numerics_version", "model", "arm", "scale", "optimizer", "seed"),
    *("learning_rate", "config"),
)


class RunAlive(Exception):
    """Another process is running this very run."""


class RunEnded(Exception):
    """The run is done, or has diverged for good: there is nothing left to do."""


class Interrupted(BaseException):
    """The run was asked to stop (SIGTERM, SIGINT) and has saved its state. No `except Exception` may go on after it."""


class Diverged(Exception):
    """The loss is NaN or infinite: nothing after this step means anything."""


@dataclasses.dataclass(frozen=True)
class State:
    """What a run's directory says of it, read without touching it."""

    status: Status
    step: int = 0
    total_steps: int = 0
    message: str | None = None
    started: float = 0.0
    heartbeat: float = 0.0


def runs_root(config: Config) -> Path:
    """Where the runs of this configuration's live store lie."""
    return Path(config.paths.outputs) / "runs"


def peek(directory: Path) -> State:
    """The state of a run's directory. One whose process is gone, or whose files are damaged, is `interrupted`."""
    try:
        data = read_json(directory / "status.json")
        state = State(**{f.name: data[f.name] for f in dataclasses.fields(State) if f.name in data})
        alive = state.status == "running" and _is_alive(directory, data)
    except FileNotFoundError:
        return State("missing")
    except (ValueError, TypeError, KeyError, AttributeError):
        return State("interrupted", message="its status.json is damaged")
    if state.status == "running" and not alive:
        return dataclasses.replace(state, status="interrupted", message="its process ended without a word")
    if state.status in ENDED and not _has_summary(directory, state.status):
        return dataclasses.replace(state, status="interrupted", message="its summary.json is missing or damaged")
    return state


def _has_summary(directory: Path, status: Status) -> bool:
    try:
        return bool(read_json(directory / "summary.json")["status"] == status)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _is_alive(directory: Path, status: dict[str, Any]) -> bool:
    if status.get("host") != socket.gethostname():
        return time.time() - float(status["heartbeat"]) < STALE_AFTER_SECONDS
    try:
        with open(directory / "lock", "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:  # somebody removed the lock: believe the process and its heartbeat
        fresh = time.time() - float(status["heartbeat"]) < STALE_AFTER_SECONDS
        return fresh and Path(f"/proc/{status['pid']}").exists()
    except BlockingIOError:
        return True
    return False


def _locked(stream: IO[bytes]) -> bool:
    """Take the lock; False where a run holds it. Whoever only looks (`peek`) holds it for an instant: try again."""
    for _ in range(10):
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return True
    return False


class Run:
    """An open run: the one writer of its directory. Made by `Run.open`."""

    def __init__(self, directory: Path, lock: IO[bytes], manifest: dict[str, Any], total_steps: int) -> None:
        self.directory = directory
        self.manifest = manifest
        self._lock = lock
        self._total_steps = total_steps
        self._step = 0
        self._started = time.time()
        self._last_beat = 0.0
        self._metrics: IO[bytes] | None = None
        self._timing: IO[bytes] | None = None

    @classmethod
    def open(cls, config: Config, facts: dict[str, Any], total_steps: int) -> Run:
        """Take the run's lock and write its manifest, or check the one that is there.

        Args:
            config: validated.
            facts: what else the manifest says (seeds, data, environment, code). `facts["data"]` must not have changed
                since the run began.
            total_steps: for progress.

        Raises:
            RunAlive: another process holds it.
            RunEnded: nothing is left to do.
            ValueError: the directory belongs to another configuration, or the data has changed.
        """
        identity = Identity.of(config)
        directory = runs_root(config) / identity.run_id
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / "lock", "ab")  # noqa: SIM115 - held for the run's life
        if not _locked(lock):
            lock.close()
            raise RunAlive(f"{identity.run_id} is running in another process; it is left alone")
        try:
            if _beats_without_lock(directory):
                raise RunAlive(f"{identity.run_id} has a fresh heartbeat of another process; it is left alone")
            if (ended := peek(directory).status) in ENDED:
                raise RunEnded(f"{identity.run_id} is {ended} already")
            manifest = cls._manifest(directory, identity, config, facts)
        except BaseException:
            lock.close()
            raise
        run = cls(directory, lock, manifest, total_steps)
        run._write_status("running", None)
        return run

    @staticmethod
    def _manifest(directory: Path, identity: Identity, config: Config, facts: dict[str, Any]) -> dict[str, Any]:
        path = directory / "manifest.json"
        if path.exists():
            manifest = read_json(path)
            if not isinstance(manifest, dict) or not manifest.keys() >= {*_IDENTIFYING, *facts}:
                raise ValueError(f"{path} is damaged; move {directory} away to start anew")
            if manifest["identity"] != identity.full:
                raise ValueError(
                    f"{directory} belongs to identity {manifest['identity']}, not {identity.full}; move it away"
                )
            if manifest["data"] != facts["data"]:
                raise ValueError(
                    f"{directory} was begun on data {manifest['data'].get('fingerprint')}, which is now "
                    f"{facts['data'].get('fingerprint')}; restore the data, or move the directory away to start anew"
                )
            if manifest["environment"].get("device") != facts["environment"].get("device"):
                log.warning("%s began on %s and goes on on %s: its numbers belong to neither", identity.run_id,
                            manifest["environment"].get("device"), facts["environment"].get("device"))  # fmt: skip
            history = manifest.setdefault("code_history", [manifest["code"]])
            if facts.get("code", history[-1]) != history[-1]:
                history.append(facts["code"])
                write_json(path, manifest)
            return dict(manifest)
        manifest = {
            "run_id": identity.run_id,
            "identity": identity.full,
            "group": identity.group,
            "numerics_version": NUMERICS_VERSION,
            "model": config.model.name,
            "arm": config.arm,
            "scale": config.scale,
            "optimizer": config.optimizer.name,
            "seed": config.seed,
            "learning_rate": config.optimizer.learning_rate,
            "created": time.time(),
            "config": recorded(config),
            **facts,
        }
        write_json(path, manifest)
        return manifest

    # --- while it runs ---------------------------------------------------------------------------------------------

    def log(self, row: dict[str, Any]) -> None:
        """Append a row of metrics, flushed to the system: a killed process loses none of it."""
        self._metrics = self._append(self._metrics, "metrics.jsonl", row)

    def log_timing(self, row: dict[str, Any]) -> None:
        """Append a row of what may differ between equal runs: times, speeds, restarts."""
        self._timing = self._append(self._timing, "timing.jsonl", row)

    def _append(self, stream: IO[bytes] | None, name: str, row: dict[str, Any]) -> IO[bytes]:
        if stream is None:
            stream = open(self.directory / name, "ab", buffering=0)  # noqa: SIM115 - closed with the run
        stream.write((json.dumps(row, allow_nan=False) + "\n").encode())
        return stream

    def metrics_mark(self) -> dict[str, Any]:
        """Bytes of metrics so far, synced to disk, and their hash: a checkpoint stores this to resume from."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())
        written = self._metrics_bytes()
        return {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}

    def has_metrics(self, mark: dict[str, Any]) -> bool:
        """Whether the rows that a checkpoint counted are still there, unchanged."""
        return hashlib.sha256(self._metrics_bytes()[: mark["bytes"]]).hexdigest() == mark["sha256"]

    def _metrics_bytes(self) -> bytes:
        path = self.directory / "metrics.jsonl"
        return path.read_bytes() if path.exists() else b""

    def rewind_metrics(self, offset: int) -> None:
        """Drop the rows written after `offset`: the resumed run writes them again, each step once."""
        path = self.directory / "metrics.jsonl"
        if path.exists() and path.stat().st_size > offset:
            write_atomically(path, path.read_bytes()[:offset])
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics so far."""
        return [json.loads(line) for line in self._metrics_bytes().splitlines()]

    def beat(self, step: int) -> None:
        """Say that the run is alive and how far it is; writes at most every two seconds."""
        self._step = step
        if time.monotonic() - self._last_beat >= HEARTBEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._require_own_lock()
            self._write_status("running", None)

    def _require_own_lock(self) -> None:
        path = self.directory / "lock"
        if not path.exists() or path.stat().st_ino != os.fstat(self._lock.fileno()).st_ino:
            raise RuntimeError(f"{path} was removed while the run was alive; it stops so that no other one interferes")

    # --- how it ends -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Whatever happens inside ends in the status: interrupted, diverged, or failed with its traceback."""
        try:
            yield
        except (Interrupted, KeyboardInterrupt) as error:
            self._close("interrupted", str(error) or "interrupted from the keyboard")
            raise
        except Diverged as error:
            self._finish("diverged", str(error), None)
            raise
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                write_atomically(self.directory / "traceback.txt", traceback.format_exc().encode())
                self._close("failed", f"{type(error).__name__} at {place}: {error}")
            raise
        finally:
            self._lock.close()

    def succeed(self, result: dict[str, Any]) -> None:
        """Write the summary, then the status `done`. To be called inside `recording`."""
        self._finish("done", None, result)

    def _finish(self, status: Status, message: str | None, result: dict[str, Any] | None) -> None:
        keep = (*_IDENTIFYING, "code", "environment", "data")
        summary = {key: self.manifest[key] for key in keep}
        if len(history := self.manifest.get("code_history", [])) > 1:
            summary["code_history"] = history
        curve = [row["validation"] | {"step": row["step"]} for row in self.metrics() if "validation" in row]
        summary |= {"status": status, "steps": self._step, "message": message, "result": result, "curve": curve}
        summary["seconds"] = round(time.time() - self._started, 1)
        write_json(self.directory / "summary.json", summary)
        self._close(status, message)

    def _close(self, status: Status, message: str | None) -> None:
        for stream in (self._metrics, self._timing):
            if stream is not None:
                stream.close()
        self._metrics = self._timing = None
        self._write_status(status, message)
        sync_directory(self.directory)

    def _write_status(self, status: Status, message: str | None) -> None:
        now = time.time()
        write_json(
            self.directory / "status.json",
            {
                "status": status,
                "step": self._step,
                "total_steps": self._total_steps,
                "message": message,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "started": self._started,
                "heartbeat": now,
            },
        )


def _beats_without_lock(directory: Path) -> bool:
    """True where the status tells of another process with a fresh heartbeat, whose lock does not reach here."""
    try:
        data = read_json(directory / "status.json")
        fresh = data["status"] == "running" and time.time() - float(data["heartbeat"]) < STALE_AFTER_SECONDS
        if data["host"] != socket.gethostname():
            return bool(fresh)
        # On this host the lock is the truth, unless it was removed under a living process and made anew.
        return bool(fresh and data["pid"] != os.getpid() and _holds(data["pid"], directory / "lock"))
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _holds(pid: int, lock: Path) -> bool:
    """Whether a process has a removed file of this name open."""
    handles = Path(f"/proc/{pid}/fd")
    if not handles.exists():
        return False
    with contextlib.suppress(OSError):
        return any(os.readlink(handle) == f"{lock.resolve()} (deleted)" for handle in handles.iterdir())
    return False
