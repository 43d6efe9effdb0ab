"""The W&B mirror of a run. The run's own files are the truth; this may fail without changing or delaying anything.

Modes: `disabled`; `offline`; `online`; `auto` (online where a key is present, else offline). A server that does not
answer turns online into offline, with a warning, within seconds: a dead one would otherwise block for minutes. The id
is the run's, so a resumed run continues its W&B run; rows carry their own step, so rows logged again after a resume
are not dropped as out of order.
"""

from __future__ import annotations

import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from experiments.config import Config
from experiments.run import runs_root

log = logging.getLogger(__name__)

_PROBE_SECONDS = 2.0
_INIT_SECONDS = 8.0
_FINISH_SECONDS = 8.0


class Tracker:
    """Mirrors rows to W&B, or does nothing."""

    def __init__(self, run: Any | None) -> None:
        self._run = run

    @classmethod
    def start(cls, config: Config, manifest: dict[str, Any]) -> Tracker:
        """Begin mirroring as the configuration says; never raises."""
        if config.wandb.mode == "disabled":
            return cls(None)
        try:
            run = _init(config, manifest, _resolved(config.wandb.mode))
        except Exception as error:
            log.warning("W&B could not start (%s); the run's own files are complete without it", error)
            return cls(None)
        return cls(run)

    def log(self, row: dict[str, Any]) -> None:
        """Mirror one row of metrics."""
        self._quietly(lambda run: run.log(row))

    def summarise(self, result: dict[str, Any]) -> None:
        """Mirror the final figures."""
        self._quietly(lambda run: run.summary.update(result))

    def _quietly(self, action: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            log.warning("W&B stopped (%s); the run goes on and its own files are complete", error)
            self._run = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is None:
            return
        code = 0 if kind is None else 1
        closer = threading.Thread(target=lambda: self._quietly(lambda run: run.finish(exit_code=code)), daemon=True)
        closer.start()
        closer.join(_FINISH_SECONDS)
        if closer.is_alive():
            log.warning("W&B did not finish in %g s; the run does not wait for it", _FINISH_SECONDS)


def _resolved(mode: str) -> str:
    if mode == "auto":
        mode = "online" if _has_key() else "offline"
    if mode == "online" and not _has_key():
        log.warning("wandb.mode=online but no key is present; mirroring offline. Run `wandb login` for the next time")
        return "offline"
    if mode == "online" and not _reachable():
        log.warning("the W&B server does not answer; mirroring offline. `wandb sync` uploads it later")
        return "offline"
    return mode


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return _server().hostname in netrc.read_text().split()
    except OSError:
        return False


def _server() -> SplitResult:
    import wandb

    return urlsplit(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url)


def _reachable() -> bool:
    """Whether the server answers a request at all: one that only accepts connections would block for long."""
    try:
        with urllib.request.urlopen(urlunsplit(_server()), timeout=_PROBE_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def _init(config: Config, manifest: dict[str, Any], mode: str) -> Any:
    import wandb

    directory = runs_root(config) / manifest["run_id"] / "wandb"
    directory.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(init_timeout=_INIT_SECONDS, silent=True, console="off", x_disable_stats=True)
    arguments = {
        "project": config.wandb.project,
        "entity": config.wandb.entity,
        "id": manifest["identity"][:32],
        "name": manifest["run_id"],
        "group": manifest["group"][:32],
        "config": manifest["config"],
        "dir": str(directory),
        "resume": "allow",
        "settings": settings,
    }
    try:
        run = wandb.init(mode="online" if mode == "online" else "offline", **arguments)
    except Exception as error:
        if mode == "offline":
            raise
        log.warning("W&B online failed (%s); mirroring offline", error)
        run = wandb.init(mode="offline", **arguments)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
