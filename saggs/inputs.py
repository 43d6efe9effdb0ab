"""Inputs to run a model on, and which tensor of its result counts.

Functions that must run a model take `inputs`, a callable of a generator and a count that returns keyword arguments
for that many samples, and `output`, a callable of the result that returns the tensor to compare. A causal language
model has natural defaults; any other module has to say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[torch.Generator, int], Mapping[str, Any]]
Output = Callable[[Any], Tensor]

_TOKENS = 16


def default_inputs(model: nn.Module) -> Inputs:
    """Random token sequences for a causal language model; a ValueError for any other module."""
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int) or "input_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} is not a causal language model with a configuration; pass inputs=, a callable of "
            "(generator, count) that returns the keyword arguments of a forward pass"
        )
    length = min(_TOKENS, int(getattr(config, "max_position_embeddings", None) or _TOKENS))

    def inputs(generator: torch.Generator, count: int) -> Mapping[str, Any]:
        return {"input_ids": torch.randint(0, vocabulary, (count, length), generator=generator), "use_cache": False}

    return inputs


def default_output(result: Any) -> Tensor:
    """The logits of a model's result, the result itself if it is a tensor, or its first entry."""
    found = getattr(result, "logits", result)
    if isinstance(found, tuple | list):
        found = found[0]
    if not isinstance(found, Tensor):
        raise ValueError(f"a {type(result).__name__} has no logits; pass output=, a callable that returns a tensor")
    return found


def widened(value: Any) -> Any:
    """`value` with every floating tensor in it in float64: what a float64 copy of the model can be fed."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping) and type(value) in (dict, MappingProxyType):
        return {key: widened(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(widened(item) for item in value)
    return value


def on_device(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """`value` with every tensor in it on `device`, floating ones in `dtype` where one is given."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    if isinstance(value, Mapping) and type(value) in (dict, MappingProxyType):
        return {key: on_device(item, device, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_device(item, device, dtype) for item in value)
    return value
