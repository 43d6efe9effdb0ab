"""What makes two runs the same run: a hash of everything that can change the result, and a readable name.

    run_id = <model>-<imbalance>-<rebalance>-<optimizer>-lr<rate>-seed<seed>-<12 hex digits of the identity>
             <task>-<subject>-seed<seed>-<12 hex digits>, for a task without a language model

The identity is the SHA-256 of the resolved configuration, as canonical JSON, less `CANNOT_CHANGE_THE_RESULT`, plus
`NUMERICS_VERSION`. The group is the same without the seed: the runs of one cell of a table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from experiments.checks import flatten
from experiments.config import Config

# Raised on purpose when a change of the code alters numbers: older runs then have other names and are not reused.
NUMERICS_VERSION = 1

# Keys (or whole groups) that change neither weights nor anything in the summary beyond 1e-6 of the perplexity.
CANNOT_CHANGE_THE_RESULT = (
    "arm",
    "scale",
    "checkpoint",
    "evaluation.batch_sequences",
    "paths",
    "progress",
    "reuse_committed",
    "wandb",
)

# Keys added to the schema after runs were made, with the value that means what those runs did. An entry at that value
# is left out of the hash, so that a new setting does not rename every old run.
ADDED_LATER: dict[str, Any] = {}

# Tasks that no model, data or training setting has a part in, with the keys and groups that decide their result.
DECIDED_BY: dict[str, tuple[str, ...]] = {
    "optimizer_atlas": ("task", "seed"),
    "matrix_sensing": ("task", "seed", "plugins", "rules", "sensing"),
    "hyperspectral": ("task", "seed", "plugins", "rules", "scene"),
    "attention_rotation": ("task", "seed", "plugins", "optimizer", "attention"),
}
# Groups that only those tasks have: no part of what decides another one.
STUDIES = ("rules", "sensing", "scene", "attention")


def recorded(config: Config) -> dict[str, Any]:
    """The settings that a run's manifest keeps: those of its task."""
    settings = dataclasses.asdict(config)
    if config.task in DECIDED_BY:
        return {key: settings[key] for key in DECIDED_BY[config.task]}
    return {key: value for key, value in settings.items() if key not in STUDIES}


def relevant(config: Config) -> dict[str, Any]:
    """The flattened settings of the task less what cannot change the result."""
    return {
        key: value
        for key, value in flatten(recorded(config)).items()
        if not any(key == out or key.startswith(f"{out}.") for out in CANNOT_CHANGE_THE_RESULT)
        and not (key in ADDED_LATER and ADDED_LATER[key] == value)
    }


def _digest(entries: dict[str, Any]) -> str:
    text = json.dumps([NUMERICS_VERSION, entries], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who a run is: `run_id` names its directory, `full` is compared on opening, `group` is `full` without seed."""

    run_id: str
    full: str
    group: str

    @classmethod
    def of(cls, config: Config) -> Identity:
        """The identity of a validated configuration."""
        entries = relevant(config)
        full = _digest(entries)
        group = _digest({key: value for key, value in entries.items() if key != "seed"})
        return cls(f"{_slug(config)}-{full[:12]}", full, group)


def _slug(config: Config) -> str:
    if config.task in DECIDED_BY:
        return "-".join([config.task, *_subject(config), f"seed{config.seed}"])
    imbalance, rebalance = config.imbalance, config.rebalance
    factor = getattr(imbalance, "factor", None)
    parts = [
        config.model.name,
        "balanced" if imbalance.name == "none" else f"{imbalance.name}{factor:g}" if factor else imbalance.name,
        "free" if rebalance.name == "none" else rebalance.name,
        config.optimizer.name,
        f"lr{config.optimizer.learning_rate:g}",
        f"seed{config.seed}",
    ]
    return "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in part) for part in parts)


def _subject(config: Config) -> list[str]:
    """What a study is about, for people: the hash tells the rest."""
    if config.task == "matrix_sensing":
        size, arms = config.sensing.size, list(config.rules)
        return [f"{size}x{size}", *([f"tail{config.sensing.tail:g}"] if config.sensing.tail else []), *_few(arms)]
    if config.task == "hyperspectral":
        return [config.scene.name, f"{config.scene.density:g}", *_few(list(config.rules))]
    if config.task == "attention_rotation":
        return [config.attention.name, config.optimizer.name, f"lr{config.optimizer.learning_rate:g}"]
    return []


def _few(arms: list[str]) -> list[str]:
    return arms if len(arms) <= 2 else [f"{len(arms)}_arms"]


def derived_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed for one purpose ("init", "data", "dropout"): one seed drives all of them, separately."""
    digest = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
