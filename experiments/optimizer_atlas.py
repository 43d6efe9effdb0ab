"""The atlas: how every optimizer of two libraries answers rescaling, rotation and signed permutation.

One deterministic measurement, a minute on two cores: `saggs.probe` of every row of `experiments.optimizer_builders`.
Nothing of it depends on a model, on data or on training settings, so that a run is identified by its task and its seed
alone (`experiments.identity.DECIDED_BY`), and `train.py` refuses other settings.

A row that cannot be built or run is kept with its exception. Residuals are kept as bounds (`bound`), so that another
machine, whose last bits differ, gives the same summary.
"""

from __future__ import annotations

import os
import platform
import re
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import torch
from tqdm import tqdm

from experiments.code_version import code_version
from experiments.config import Config
from experiments.language_model.training import stop_signals
from experiments.optimizer_builders import Entry, entries
from experiments.run import Interrupted, Run
from saggs.probes import OptimizerProbe, degree_text, probe
from saggs.rehearsal import RehearsalError

PROCESSES = 2


@dataclass
class Prepared:
    """A checked run."""

    config: Config
    facts: dict[str, Any]
    total_steps: int

    def execute(self, run: Run) -> dict[str, Any]:
        """Measure every row; returns the summary's result."""
        run.rewind_metrics(0)
        rows: dict[int, dict[str, str]] = {}
        with (
            stop_signals() as stop,
            tqdm(
                total=self.total_steps, disable=not self.config.progress or None, unit="optimizer", leave=False
            ) as bar,
            ProcessPoolExecutor(PROCESSES, get_context("spawn"), _one_thread) as pool,
        ):
            waiting = {pool.submit(row, i, self.config.seed): i for i in range(self.total_steps)}
            for future in as_completed(waiting):
                if stop.asked:
                    pool.shutdown(cancel_futures=True)
                    raise Interrupted(f"{stop.asked}; the same command begins anew")
                rows[waiting[future]] = future.result()
                bar.update()
                run.beat(len(rows))
        return {"optimizers": [rows[i] for i in sorted(rows)]}


def prepare(config: Config) -> Prepared:
    """Say what the run depends on."""
    facts = {
        **dict.fromkeys(("model", "arm", "optimizer", "learning_rate")),
        "seeds": {"draws": config.seed},
        "data": None,
        "code": code_version(),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pytorch_optimizer": version("pytorch_optimizer"),
            "device": platform.machine(),
            "threads": 1,
            "host_cores": os.cpu_count(),
        },
    }
    return Prepared(config, facts, len(entries()))


def _one_thread() -> None:
    torch.set_num_threads(1)


def row(index: int, seed: int) -> dict[str, str]:
    """One row of the atlas, by its place in `entries`."""
    return measured(entries()[index], seed)


def measured(entry: Entry, seed: int = 0) -> dict[str, str]:
    """The cells of one entry, as text."""
    cells = {"optimizer": entry.optimizer, "library": entry.library}
    try:
        found = probe(entry.build, name=entry.optimizer, seed=seed)
    except Exception as error:  # whatever a class may raise is what the row says
        named = " ".join(str(error).split())  # a RehearsalError's text begins with the exception it came from
        if not isinstance(error, RehearsalError):
            named = f"{type(error).__name__}: {named}"
        return cells | dict.fromkeys(MEASURED, "") | {"setting": entry.setting, "error": named}
    wraps = entry.setting == "around AdamW"
    return cells | _cells(found, wraps) | {"setting": entry.setting, "error": _remark(found)}


MEASURED = (
    *("exponent", "exponent_residual", "rotation_residual", "signed_permutation_residual"),
    *("transport", "slices", "coupling", "eps"),
)


def _cells(found: OptimizerProbe, wraps: bool) -> dict[str, str]:
    scaling = found.scaling
    return {
        "exponent": degree_text(scaling.degree),
        "exponent_residual": bound(scaling.residual, found.exact),
        "rotation_residual": _of_group(found, found.rotation.largest),
        "signed_permutation_residual": _of_group(found, found.signed_permutation),
        "transport": _transport(found, wraps),
        "slices": _slices(found),
        "coupling": _coupling(found),
        "eps": _eps(found),
    }


def bound(residual: float, exact: float = 1e-9) -> str:
    """ "exact", or the power of ten that bounds a residual; "none" where there is no finite one."""
    if residual <= exact:
        return "exact"
    # Small residuals are rounding, and how much of it differs between machines: few bounds there.
    for power in (-6, -4, -3, -2, -1, 0, 1, 2):
        if residual <= 10.0**power:
            return f"1e{power:+03d}"
    return "above 100" if residual < float("inf") else "none"


def _of_group(found: OptimizerProbe, residual: float) -> str:
    """As `bound`; a rule that computes coarsely is told by its own rounding, whose size no machine shares."""
    follows = found.follows(residual)
    if follows is None:
        return "unsettled"
    if found.rounding > found.exact and follows:
        return "rounding"
    return bound(residual, found.exact)


def _transport(found: OptimizerProbe, wraps: bool) -> str:
    """State names with their degrees; entries of one list are one, with ? where their degrees differ."""
    if found.states is None:
        return "not measured"
    degrees: dict[str, set[int | None]] = {}
    for name, rule in found.states.entries.items():
        if rule.moves and not rule.empty:
            degrees.setdefault(re.sub(r"\[\d+\]", "", name), set()).add(rule.degree)
    moving = {n: d for n, d in degrees.items() if d != {0}}
    shown = [f"{n}^{'?' if len(d) > 1 else _power(*d)}" for n, d in moving.items()]
    if wraps and "exp_avg" not in degrees:
        shown.append("AdamW's")
    refused = " (refused)" if found.states.refusal() else ""
    return (" ".join(shown) or "no state") + refused


def _power(degree: int | None) -> str:
    return "?" if degree is None else f"{degree:+d}"


def _slices(found: OptimizerProbe) -> str:
    inside, rest = (_one_digit(degree) for degree in found.scaling.rows)
    if found.states is None or found.states.refusal():
        return f"update {inside} {rest}"
    return f"update {inside} {rest}, state {'no' if found.states.refusal(sliced=True) else 'yes'}"


def _one_digit(degree: float | None) -> str:
    """A degree of some rows; those that are coarse or none of the rule's own have no second digit to show."""
    return degree_text(None if degree is None else round(degree, 1))


def _coupling(found: OptimizerProbe) -> str:
    parts = [f"update {bound(found.scaling.coupling)}"] * found.couples
    if found.states is not None and found.states.coupled:
        parts.append(found.states.coupled.replace(", which all its weights share,", "").removeprefix("its "))
    return ", ".join(parts) or "none"


def _eps(found: OptimizerProbe) -> str:
    if not found.eps_removed:
        return "needed"
    return "none" if found.settings.eps is None else bound(found.settings.eps, found.exact)


def _remark(found: OptimizerProbe) -> str:
    remarks = ["random, with the same draws in both runs"] * found.random
    remarks += [f"{name}={period} is longer than {found.steps} steps" for name, period in found.beyond.items()]
    remarks += [f"transport: {found.states_error}"] * bool(found.states_error)
    return "; ".join(remarks)


__all__ = ["MEASURED", "PROCESSES", "Prepared", "bound", "measured", "prepare", "row"]
