"""A table from nothing: data, sweep, table, figures, verdict.

python scripts/reproduce.py table2 --scale mini --seeds 0,1,2,3,4 --launcher joblib
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from _door import ROOT, enter, wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.artifacts.artifact import Artifact, Rows
    from experiments.sweep import SweepRun


LAUNCHERS = ("joblib", "basic")


def main() -> int:
    """Exit code 0 only if every run is done and, with --strict, every cell is reproduced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--scale", default="mini", help="debug, mini or paper")
    parser.add_argument("--seeds", help="instead of the seeds fixed in the sweep, as 0,1,2")
    parser.add_argument("--launcher", default="joblib", help="hydra/launcher: basic or joblib")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time with joblib (default: 2)")
    parser.add_argument("--reuse", choices=["none", "committed"], default="none",
                        help="committed: count committed summaries as done instead of training them again")  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="fail where a cell is not reproduced")
    parser.add_argument("overrides", nargs="*", help="further Hydra overrides for every run, as data.path=FOLDER")
    chosen = parser.parse_intermixed_args()
    if chosen.jobs < 1:
        raise ValueError(f"JOBS={chosen.jobs}: at least 1")
    if chosen.launcher not in LAUNCHERS:
        raise ValueError(f"LAUNCHER={chosen.launcher}: choose one of {', '.join(LAUNCHERS)}")

    from experiments import launch, sweep
    from experiments.artifacts import get
    from experiments.artifacts.artifact import read_rows
    from experiments.command_line import REFUSED

    console, begun = wide_console(), time.monotonic()
    artifact = get(chosen.artifact)
    overrides = list(chosen.overrides)
    overrides += [f"seed={chosen.seeds}"] if chosen.seeds else []
    overrides += ["reuse_committed=true"] if chosen.reuse == "committed" else []
    runs = artifact.sweep(chosen.scale, overrides)
    console.print(f"[bold]{artifact.name}[/] at {chosen.scale} scale. The claim it tests: {artifact.claim}")
    jobs = chosen.jobs if chosen.launcher == "joblib" else 1
    todo = launch.print_plan(runs, jobs, console)
    outputs = Path(runs[0].config.paths.outputs)
    if todo:
        require_device(todo)
        prepare_data(todo, console)
        launcher = [f"hydra/launcher={chosen.launcher}"]
        launcher += [f"hydra.launcher.n_jobs={jobs}"] if chosen.launcher == "joblib" else []
        log = outputs / "logs" / f"{artifact.stem(chosen.scale)}.log"
        for command in artifact.commands(chosen.scale, overrides):
            own = {run.run_id for run in sweep.expand(command)}
            waiting = [run for run in todo if run.run_id in own]
            if waiting and launch.launch([*command, *launcher], waiting, log, console) == REFUSED:
                raise ValueError(f"the sweep was refused; the last line of {log}: {log.read_text().splitlines()[-1]}")
    committed = ROOT / "results" / "runs"
    rows = read_rows(runs, chosen.scale, outputs / "runs", committed if chosen.reuse == "committed" else None)
    printed, _ = artifact.build_table(rows)
    printed.print_terminal(console)
    agree = print_verdicts(artifact, rows, console)
    paths = artifact.write(rows, outputs / "tables", outputs / "figures")
    console.print("written: " + ", ".join(os.path.relpath(path) for path in paths))
    unfinished = [run for run in runs if run.run_id in {r.run_id for r in rows.missing}]
    if unfinished:
        sweep.print_states(unfinished, console)
    console.print(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    return 1 if unfinished or (chosen.strict and not agree) else 0


def require_device(runs: list[SweepRun]) -> None:
    """Refuse a sweep that this machine has no device for, before every run of it does."""
    import torch

    if any(run.config.training.device == "cuda" for run in runs) and not torch.cuda.is_available():
        raise ValueError(
            "training.device=cuda: no CUDA device is available here; run this scale where one is, or insist on weeks "
            "of CPU time with OVERRIDES='training.device=cpu'"
        )


def prepare_data(runs: list[SweepRun], console: Console) -> None:
    """Tokenise each corpus of the sweep once, before any run needs it."""
    from experiments.identity import DECIDED_BY

    needing = [run.config for run in runs if run.config.task not in DECIDED_BY]
    if needing:
        from experiments.language_model.data import load_data
    for config in {repr(config.data): config for config in needing}.values():
        data = load_data(config)
        console.print(f"data: {data.name} ({data.variant}), {data.counts['train'].tokens:,} training tokens, "
                      f"sha256 {data.fingerprint[:12]}… verified")  # fmt: skip


def print_verdicts(artifact: Artifact, rows: Rows, console: Console) -> bool:
    """The verdict of every cell against the committed runs; True if none is against."""
    from rich.table import Table

    from experiments.analysis.collect import collect

    committed = ROOT / "results" / "runs"
    verdicts = artifact.verdicts(rows, collect(committed=committed if committed.is_dir() else None))
    if {verdict.text for verdict in verdicts} == {"no committed cell"}:
        console.print("verdict against the committed runs: no committed cell, so nothing to compare with")
        return True
    table = Table(title="verdict against the committed runs")
    for header in ("model", "arm", "verdict"):
        table.add_column(header)
    for verdict in verdicts:
        colour = {True: "green", False: "red", None: "yellow"}[verdict.reproduced]
        table.add_row(verdict.model, verdict.arm, f"[{colour}]{verdict.text}[/]")
    console.print(table)
    return all(verdict.reproduced is not False for verdict in verdicts)


enter(main)
