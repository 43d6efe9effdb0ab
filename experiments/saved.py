"""Saved states of a run: folders that are whole or not there, and proven intact before they are used.

    checkpoints/step-000080/
        …           the files of whoever saves
        COMPLETE    SHA-256 of each of them; written last

A folder is written under another name, each file synced, the marker last, and then renamed. On resume the newest one
whose hashes agree is used; a damaged one is named in a warning and passed over.

`save` and `load` are for tasks whose state is a set of named tensors and plain facts; a language model's is in
`experiments.language_model.checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from experiments.code_version import code_version
from experiments.files import sync_directory
from experiments.run import Run

log = logging.getLogger(__name__)

SAVE_EVERY_SECONDS = 20.0
_MARKER = "COMPLETE"
_TENSORS, _FACTS = "tensors.safetensors", "facts.json"


class Damaged(ValueError):
    """A saved state whose files are missing or not what the marker says."""


@dataclass(frozen=True)
class Saved:
    """A state as it was saved."""

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    path: Path


def save(
    directory: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Path:
    """Write a state of named tensors and of facts that JSON can hold; the newest two stay.

    Args:
        directory: the run's `checkpoints`.
        step: names the folder.
        tensors: saved with their dtype; copied.
        facts: finite numbers, texts, lists and dictionaries with text keys.
        metrics: `run.metrics_mark()`, so that a resumed run writes no row twice.

    Raises:
        OSError: the disk is full or not writable; earlier states are untouched.
    """
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    described = json.dumps({"step": step, "metrics": metrics, "facts": facts}, allow_nan=False).encode()
    return write_folder(directory, step, {_TENSORS: save_safetensors(kept), _FACTS: described}, keep=2)


def load(directory: Path, run: Run) -> Saved | None:
    """The newest intact state, with the run's metrics rewound to it; None, and no metrics, where there is none."""
    found = newest_folder(directory, (_TENSORS, _FACTS), tidy=True)
    if found is not None:
        path, contents = found
        described = json.loads(contents[_FACTS])
        if run.has_metrics(described["metrics"]):
            run.rewind_metrics(described["metrics"]["bytes"])
            run.log_timing({"step": described["step"], "resumed_from": path.name, "time": time.time(),
                            "code": code_version()})  # fmt: skip
            return Saved(described["step"], load_safetensors(contents[_TENSORS]), described["facts"], path)
        log.warning("metrics.jsonl has lost rows that %s counted: starting again from step 0", path)
        set_aside(directory)
    run.rewind_metrics(0)
    return None


# --- folders ---------------------------------------------------------------------------------------------------------


def write_folder(directory: Path, step: int, contents: Mapping[str, bytes], keep: int) -> Path:
    """Write files under `directory`/step-…; then remove all but the newest `keep`.

    Raises:
        OSError: the disk is full or not writable; earlier folders are untouched.
    """
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / f"step-{step:06d}"
    temporary = directory / f".{final.name}.{os.getpid()}"
    try:
        temporary.mkdir()
        for name, data in contents.items():
            _write_synced(temporary / name, data)
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        _write_synced(temporary / _MARKER, json.dumps(hashes).encode())
        sync_directory(temporary)
        if final.exists():  # a damaged one of the same step, passed over on resume
            shutil.rmtree(final)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(directory)
    for old in [path for path in _all(directory) if path != final][keep - 1 :]:
        shutil.rmtree(old)
    return final


def newest_folder(directory: Path, names: Sequence[str], tidy: bool = False) -> tuple[Path, dict[str, bytes]] | None:
    """The newest intact folder and its files; None where there is none.

    Damaged ones are named in a warning and passed over.

    Args:
        directory: the run's `checkpoints`; need not exist.
        names: the files that a folder has to hold.
        tidy: for the run's own process: set damaged ones aside and remove what a killed save left behind.
    """
    if tidy:
        for leftover in directory.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    candidates = _all(directory)
    for path in candidates:
        try:
            return path, _read(path, names)
        except Damaged as error:
            before = "using the one before it" if path != candidates[-1] else "there is none before it: from step 0"
            log.warning("%s; %s", error, before)
            if tidy:
                path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
    return None


def set_aside(directory: Path) -> None:
    """Rename every folder so that none is found again."""
    for path in _all(directory):
        path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _all(directory: Path) -> list[Path]:
    """Folders, the newest first."""
    found = [path for path in directory.glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def _read(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    try:
        hashes = json.loads((path / _MARKER).read_bytes())
        contents = {name: (path / name).read_bytes() for name in names}
    except (OSError, ValueError) as error:
        raise Damaged(f"checkpoint {path} is incomplete ({error})") from None
    if not isinstance(hashes, dict):
        raise Damaged(f"checkpoint {path} is damaged: {_MARKER} is not what was written")
    for name, data in contents.items():
        if hashlib.sha256(data).hexdigest() != hashes.get(name):
            raise Damaged(f"checkpoint {path} is damaged: {name} is not what was written")
    described = json.loads(next(data for name, data in contents.items() if name.endswith(".json")))
    if described["step"] != int(path.name[5:]):
        raise Damaged(f"checkpoint {path} holds step {described['step']}: it was renamed")
    return contents
