"""Launching a sweep and watching it: the plan, the bars, the account.

The sweep itself is `python train.py -m …` in a process of its own, whatever the launcher; what is shown comes from the
runs' own status files, so that the same view serves two processes on a laptop and a cluster.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from experiments.code_version import ROOT
from experiments.files import read_json
from experiments.run import ENDED
from experiments.sweep import SweepRun, state_of

POLL_SECONDS = 1.0


def print_plan(runs: Sequence[SweepRun], jobs: int, console: Console) -> list[SweepRun]:
    """Say what there is to do and about how long it takes; returns the runs that are not done."""
    states = {run.run_id: state_of(run) for run in runs}
    todo = [run for run in runs if states[run.run_id].status not in ENDED]
    resumed = sum(states[run.run_id].step > 0 for run in todo)
    console.print(f"[bold]{len(runs)} runs[/]: {len(runs) - len(todo)} done already, {len(todo)} to do"
                  + (f" ({resumed} of them resumed)" if resumed else ""))  # fmt: skip
    if todo:
        console.print(f"estimated time: {_estimate(runs, todo, jobs)}")
    return todo


def _estimate(runs: Sequence[SweepRun], todo: Sequence[SweepRun], jobs: int) -> str:
    seconds = [s for run in runs if (s := recorded_seconds(run)) is not None]
    if not seconds:
        return "unknown until the first run has ended (none of this sweep has run here or is committed)"
    total = len(todo) * statistics.median(seconds) / max(1, min(jobs, len(todo)))
    return f"about {total / 60:.0f} minutes with {jobs} at a time, from the runs recorded so far"


def recorded_seconds(run: SweepRun) -> float | None:
    """Wall-clock seconds of the run, from the live store or the committed summary."""
    from experiments.config import RESULTS

    for path in (run.directory / "summary.json", RESULTS / "runs" / f"{run.run_id}.json"):
        if path.exists():
            seconds = read_json(path).get("seconds")
            return None if seconds is None else float(seconds)
    return None


def launch(command: Sequence[str], runs: Sequence[SweepRun], log: Path, console: Console) -> int:
    """Run `train.py` with the command, its output in `log`, bars on the terminal; returns its exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    arguments = [sys.executable, str(ROOT / "train.py"), "-m", *command, "progress=false"]
    console.print(f"[dim]{' '.join(command)}; output in {log}[/]")
    with open(log, "wb") as stream:
        child = subprocess.Popen(arguments, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        try:
            _watch(child, runs, console)
        except KeyboardInterrupt:
            console.print("stopping: each run saves its state; the same command resumes")
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
    return child.returncode


def _watch(child: subprocess.Popen[bytes], runs: Sequence[SweepRun], console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining())
    steps = {run.run_id: run.config.training.steps for run in runs}  # until the run itself says how many
    pending, bars, finished = list(runs), dict[str, TaskID](), 0
    # Speed over the last minutes: a resumed run starts with steps that took no time here.
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=300) as progress:
        sweep = progress.add_task("steps of the sweep", total=sum(steps.values()))
        said = time.monotonic()
        while True:
            ended = child.poll() is not None
            running = 0
            for run in list(pending):
                state = state_of(run)
                steps[run.run_id] = state.total_steps or steps[run.run_id]
                if state.status in (*ENDED, "failed"):
                    pending.remove(run)
                    finished += steps[run.run_id]
                    if run.run_id in bars:
                        progress.remove_task(bars.pop(run.run_id))
                elif state.status == "running":
                    running += state.step
                    if run.run_id not in bars:
                        bars[run.run_id] = progress.add_task(f"  {run.run_id}", total=steps[run.run_id])
                    progress.update(bars[run.run_id], completed=state.step)
            progress.update(sweep, completed=finished + running, total=sum(steps.values()))
            if not console.is_terminal and time.monotonic() - said > 60:
                said = time.monotonic()
                console.print(f"{len(runs) - len(pending)} of {len(runs)} runs ended")
            if ended:
                return
            time.sleep(POLL_SECONDS)
