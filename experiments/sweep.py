"""The runs of a sweep: one list for every launcher, for the status table and for the aggregator.

A sweep is what `python train.py -m <overrides>` would run, in the same order: Hydra's own parser expands it, every run
is composed and gets its identity, and a run listed twice (`seed=1,1`) counts once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from experiments import config as schema
from experiments.checks import validated
from experiments.config import Config
from experiments.identity import DECIDED_BY, Identity
from experiments.run import State, peek, runs_root

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    config: Config
    identity: Identity

    @property
    def run_id(self) -> str:
        """The name of the run and of its directory."""
        return self.identity.run_id

    @property
    def directory(self) -> Path:
        """Where the run lies in the live store."""
        return runs_root(self.config) / self.run_id

    @property
    def cell(self) -> tuple[str, str]:
        """(model, arm): the cell of the table this run belongs to; of a study, its problem and its name."""
        if self.config.task not in DECIDED_BY:
            return (self.config.model.name, self.config.arm)
        chosen = [o.partition("=")[2] for o in self.overrides if o.startswith("study=")]
        return (self.config.task, chosen[-1] if chosen else "")


def expand(overrides: Sequence[str]) -> list[SweepRun]:
    """Every run of `python train.py -m <overrides>`, once each, in order.

    Raises:
        ConfigError, or Hydra's own errors: an override that no run could use.
    """
    schema.register()
    runs: dict[str, SweepRun] = {}
    with initialize_config_dir(str(schema.CONFIGS), version_base="1.3"):
        plain = [o for o in overrides if not _is_sweep(o)]
        settings = compose("config", overrides=plain, return_hydra_config=True).hydra.sweeper.params
        params = OmegaConf.to_container(settings) if settings is not None else {}
        assert isinstance(params, dict)
        parsed = OverridesParser.create().parse_overrides([f"{k!s}={v}" for k, v in params.items()] + list(overrides))
        for job in BasicSweeper.split_arguments(parsed, None)[0]:
            config = validated(compose("config", overrides=[o for o in job if not _of_hydra(o)]))
            run = SweepRun(tuple(job), config, Identity.of(config))
            if run.run_id in runs:
                log.warning("%s is listed twice; it counts once", run.run_id)
            runs.setdefault(run.run_id, run)
    return list(runs.values())


def _of_hydra(override: str) -> bool:
    """How to launch, which changes no run. Where configurations are found does change them."""
    return override.startswith(("hydra.", "hydra/")) and not override.startswith("hydra.searchpath")


def _is_sweep(override: str) -> bool:
    return bool(OverridesParser.create().parse_override(override).is_sweep_override())


def state_of(run: SweepRun) -> State:
    """The run's state in the live store; done where `reuse_committed` finds it among the committed ones."""
    state = peek(run.directory)
    committed = schema.RESULTS / "runs" / f"{run.run_id}.json"
    if state.status == "missing" and run.config.reuse_committed and committed.exists():
        return State("done", run.config.training.steps, run.config.training.steps, "committed")
    return state


_COLOURS = {"done": "green", "running": "cyan", "interrupted": "yellow", "failed": "red", "diverged": "magenta"}


def print_states(runs: Sequence[SweepRun], console: Console | None = None, only_unfinished: bool = False) -> None:
    """A table of every run: its status, step, how long ago it was heard of, and why it failed."""
    console = console or Console(stderr=True)
    states = [(run, state_of(run)) for run in runs]
    counts = {s: sum(state.status == s for _, state in states) for s in (*_COLOURS, "missing")}
    table = Table(title=f"{len(runs)} runs: " + ", ".join(f"{n} {s}" for s, n in counts.items() if n))
    for header in ("run", "status", "step", "heard of", "message"):
        table.add_column(header, overflow="fold")
    for run, state in states:
        if only_unfinished and state.status == "done":
            continue
        colour = _COLOURS.get(state.status, "dim")
        ago = f"{time.time() - state.heartbeat:.0f} s ago" if state.heartbeat else ""
        place = f"{run.directory / 'traceback.txt'}\n" if state.status == "failed" else ""
        total = state.total_steps or run.config.training.steps
        table.add_row(run.run_id, f"[{colour}]{state.status}[/]", f"{state.step}/{total}", ago,
                      place + (state.message or ""))  # fmt: skip
    console.print(table)
