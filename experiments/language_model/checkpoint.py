"""Checkpoints that are whole or not there, keyed by name, and proven intact before they are used.

    checkpoints/step-000080/
        weights.safetensors    every parameter once (tied ones under their first name) and persistent buffers
        optimizer.pt           per parameter name its state, per group its settings and names: plain tensors and values
        state.json             step, rebalancer, bytes of metrics written so far
        COMPLETE               SHA-256 of the other files; written last

How a folder is written whole, and found intact, is `experiments.saved`'s.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from experiments.saved import newest_folder, set_aside, write_folder
from saggs.pairs import named_parameters, unwrap, unwrapped_name

_FILES = ("weights.safetensors", "optimizer.pt", "state.json")

__all__ = [
    "load_newest",
    "load_optimizer_state",
    "load_weights",
    "optimizer_state_of",
    "save",
    "set_aside",
    "weights_of",
]


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
    buffer = io.BytesIO()
    torch.save(optimizer_state_of(model, optimizer), buffer)
    weights = {name: tensor.cpu().contiguous() for name, tensor in weights_of(model).items()}
    contents = (save_safetensors(weights), buffer.getvalue(), json.dumps(state, allow_nan=False).encode())
    return write_folder(directory, state["step"], dict(zip(_FILES, contents, strict=True)), keep)


def load_newest(directory: Path, tidy: bool = False) -> dict[str, Any] | None:
    """The newest intact checkpoint as {"weights", "optimizer", "state", "path"}; None where there is none.

    Damaged ones are named in a warning and passed over; with `tidy`, for the run's own process, they are set aside.
    """
    found = newest_folder(directory, _FILES, tidy)
    if found is None:
        return None
    path, contents = found
    return {
        "weights": load_safetensors(contents["weights.safetensors"]),
        "optimizer": torch.load(io.BytesIO(contents["optimizer.pt"]), weights_only=True, map_location="cpu"),
        "state": json.loads(contents["state.json"]),
        "path": path,
    }
