"""Runs of rotated twins in this process: settings of tiny ones, and what they end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forked import composed, directory, read

from experiments import command_line

TASK = ("task=attention_rotation", "progress=false")
SMALL = (*TASK, "attention.width=16", "attention.heads=2", "attention.mlp_width=32", "seed=1")
TINY = (*SMALL, "attention.modulus=7", "attention.steps=20")
RULES = {
    "adam": ("optimizer=adam",),
    "sgd": ("optimizer=sgd", "optimizer.learning_rate=0.5"),
    "scalar_adam": ("optimizer=scalar_adam",),
    "muon": ("optimizer=muon",),
}


def finished(outputs: Path, *settings: str, common: tuple[str, ...] = TINY) -> dict[str, Any]:
    """The summary's result of a run, a tiny one unless said otherwise."""
    assert command_line.run(composed([*common, *settings, f"paths.outputs={outputs}"])) == "done"
    found: dict[str, Any] = read(directory(outputs) / "summary.json")["result"]
    return found
