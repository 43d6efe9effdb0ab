"""Checkpoints that are whole or not there, keyed by name, and proven intact before they are used.

    checkpoints/step-000080/
        weights.safetensors    every parameter once (tied ones under their first name) and persistent buffers
        optimizer.pt           per parameter name its state, per group its settings and names: plain tensors and values
        state.json             step, rebalancer, bytes of metrics written so far
        COMPLETE               SHA-256 of the other files; written last

A checkpoint is written into a temporary sibling, each file synced, the marker last, and then renamed. On resume the
newest one whose hashes agree is used; a damaged one is named in a warning and passed over.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from experiments.files import sync_directory
from saggs.pairs import named_parameters, unwrap, unwrapped_name

log = logging.getLogger(__name__)

_FILES = ("weights.safetensors", "optimizer.pt", "state.json")
_MARKER = "COMPLETE"


class CheckpointDamaged(ValueError):
    """A checkpoint whose files are missing or not what the marker says."""


# --- what a checkpoint holds -----------------------------------------------------------------------------------------


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by unwrapped name, tied ones once, and persistent buffers."""
    inner = unwrap(model)
    tensors: dict[str, Tensor] = dict(named_parameters(inner))
    persistent = inner.state_dict().keys()
    tensors |= {unwrapped_name(n): b for n, b in inner.named_buffers() if n in persistent}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def load_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy saved weights into the model, in place. Raises a ValueError unless names, shapes and dtypes all agree."""
    own = weights_of(model)
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or unexpected:
        raise ValueError(f"weights do not belong to this model: missing {missing[:5]}, unexpected {unexpected[:5]}")
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise ValueError(
                f"{name}: saved as {tuple(saved[name].shape)} {saved[name].dtype}, the model has "
                f"{tuple(tensor.shape)} {tensor.dtype}"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def optimizer_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, and each group's settings with the names it holds."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters(model).items()}
    state = {names[p]: {k: _plain(k, v) for k, v in entry.items()} for p, entry in optimizer.state.items()}
    groups = [
        {k: _plain(k, v) for k, v in group.items() if k != "params"} | {"names": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "state": state, "groups": groups}


def _plain(key: str, value: Any) -> Any:
    """Tensors and plain values only: anything else could not be read back without running code."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return type(value)(_plain(key, v) for v in value)
    if isinstance(value, dict):
        return {k: _plain(k, v) for k, v in value.items()}
    raise ValueError(f"optimizer entry {key!r} is a {type(value).__name__}, which a checkpoint cannot hold")


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Put saved state back by parameter name, whatever the order of groups, with the dtype it was saved in.

    (`Optimizer.load_state_dict` maps by position and casts moments to the parameter's dtype.)

    Raises:
        ValueError: another class, other parameters, groups that hold other names, or another shape.
    """
    if saved["class"] != type(optimizer).__name__:
        raise ValueError(f"the state is {saved['class']}'s, the optimizer is {type(optimizer).__name__}")
    parameters = named_parameters(model)
    names = {parameter: name for name, parameter in parameters.items()}
    by_names = {frozenset(group["names"]): group for group in saved["groups"]}
    for group in optimizer.param_groups:
        held = frozenset(names[p] for p in group["params"])
        if held not in by_names:
            raise ValueError(f"no saved group holds exactly the parameters {sorted(held)[:3]}… of this optimizer")
        group.update({k: v for k, v in by_names[held].items() if k != "names"})
    for name, entry in saved["state"].items():
        if name not in parameters:
            raise ValueError(f"state of {name!r} belongs to no parameter of this model")
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameters[name].shape:
                raise ValueError(f"{key} of {name!r} has shape {tuple(value.shape)}, not the parameter's")
        # A step counter lives on the host, unless the kernel reads it on the device.
        device, on_device = parameters[name].device, _reads_steps_on_device(optimizer)
        optimizer.state[parameters[name]] = {
            k: v.to(device if v.dim() or on_device else "cpu").clone() if isinstance(v, Tensor) else v
            for k, v in entry.items()
        }


def _reads_steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


# --- on disk ---------------------------------------------------------------------------------------------------------


def save(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint of `state["step"]` under `directory`; then remove all but the newest `keep`.

    Args:
        directory: the run's `checkpoints`.
        model: weights are saved under unwrapped names.
        optimizer: saved by parameter name.
        state: step and whatever else JSON can hold.
        keep: how many stay, at least 1.

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / f"step-{state['step']:06d}"
    temporary = directory / f".{final.name}.{os.getpid()}"
    buffer = io.BytesIO()
    torch.save(optimizer_state_of(model, optimizer), buffer)
    weights = {name: tensor.cpu().contiguous() for name, tensor in weights_of(model).items()}
    contents = (save_safetensors(weights), buffer.getvalue(), json.dumps(state, allow_nan=False).encode())
    try:
        temporary.mkdir()
        hashes = {}
        for name, data in zip(_FILES, contents, strict=True):
            _write_synced(temporary / name, data)
            hashes[name] = hashlib.sha256(data).hexdigest()
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


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _all(directory: Path) -> list[Path]:
    """Checkpoints, the newest first."""
    found = [path for path in directory.glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def load_newest(directory: Path, tidy: bool = False) -> dict[str, Any] | None:
    """The newest intact checkpoint as {"weights", "optimizer", "state", "path"}; None where there is none.

    Damaged ones are named in a warning and passed over.

    Args:
        directory: the run's `checkpoints`; need not exist.
        tidy: for the run's own process: set damaged ones aside and remove what a killed save left behind.
    """
    if tidy:
        for leftover in directory.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    candidates = _all(directory)
    for path in candidates:
        try:
            return _read(path)
        except CheckpointDamaged as error:
            before = "using the one before it" if path != candidates[-1] else "there is none before it: from step 0"
            log.warning("%s; %s", error, before)
            if tidy:
                path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
    return None


def set_aside(directory: Path) -> None:
    """Rename every checkpoint so that none is found again."""
    for path in _all(directory):
        path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))


def _read(path: Path) -> dict[str, Any]:
    try:
        hashes = json.loads((path / _MARKER).read_bytes())
        contents = {name: (path / name).read_bytes() for name in _FILES}
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"checkpoint {path} is incomplete ({error})") from None
    if not isinstance(hashes, dict):
        raise CheckpointDamaged(f"checkpoint {path} is damaged: {_MARKER} is not what was written")
    for name, data in contents.items():
        if hashlib.sha256(data).hexdigest() != hashes.get(name):
            raise CheckpointDamaged(f"checkpoint {path} is damaged: {name} is not what was written")
    state = json.loads(contents["state.json"])
    if state["step"] != int(path.name[5:]):
        raise CheckpointDamaged(f"checkpoint {path} holds step {state['step']}: it was renamed")
    return {
        "weights": load_safetensors(contents["weights.safetensors"]),
        "optimizer": torch.load(io.BytesIO(contents["optimizer.pt"]), weights_only=True, map_location="cpu"),
        "state": state,
        "path": path,
    }
