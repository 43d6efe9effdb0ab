"""Inputs to run a model on, and which tensor of its result counts.

Functions that must run a model take `inputs`, a callable of a generator and a count that returns keyword arguments
for that many samples, and `output`, a callable of the result that returns the tensor to compare. A model with a
configuration has natural defaults; any other module has to say.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[torch.Generator, int], Mapping[str, Any]]
Output = Callable[[Any], Tensor]

_TOKENS = 16


def default_inputs(model: nn.Module) -> Inputs:
    """Random inputs for a model that says what it takes; a ValueError for any other module.

    Token sequences for a language model (a causal one, a masked one, an encoder with a decoder), noise for a model of
    pictures: by the arguments of its forward pass and the sizes in its configuration.
    """
    config = getattr(model, "config", None)
    accepted = inspect.signature(model.forward).parameters
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int) and "input_ids" in accepted:
        length = min(_TOKENS, int(getattr(config, "max_position_embeddings", None) or _TOKENS))
        ids = ("input_ids", "decoder_input_ids") if getattr(config, "is_encoder_decoder", False) else ("input_ids",)
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        flags = {"use_cache": False} if "use_cache" in accepted or takes_any else {}

        def tokens(generator: torch.Generator, count: int) -> Mapping[str, Any]:
            drawn = {name: torch.randint(0, vocabulary, (count, length), generator=generator) for name in ids}
            return {**drawn, **flags}

        return tokens
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if isinstance(size, int) and isinstance(channels, int) and "pixel_values" in accepted:

        def pictures(generator: torch.Generator, count: int) -> Mapping[str, Any]:
            noise = torch.randn(count, channels, size, size, generator=generator, dtype=torch.float64)
            return {"pixel_values": noise.to(next(model.parameters()).dtype)}

        return pictures
    raise ValueError(
        f"{type(model).__name__} does not say what it takes (a configuration with vocab_size and a forward pass with "
        "input_ids, or image_size and pixel_values); pass inputs=, a callable of (generator, count) that returns the "
        "keyword arguments of a forward pass"
    )


def default_output(result: Any) -> Tensor:
    """The logits of a model's result, the result itself if it is a tensor, or all its floating tensors end to end."""
    found = getattr(result, "logits", result)
    if isinstance(found, tuple | list):
        every = [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]
        found = every[0] if len(every) == 1 else torch.cat([t.flatten() for t in every]) if every else None
    if not isinstance(found, Tensor):
        raise ValueError(f"a {type(result).__name__} has no logits; pass output=, a callable that returns a tensor")
    return found


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Every floating tensor in the result of a forward pass."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from floating_tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from floating_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from floating_tensors(getattr(value, field.name))


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Whatever a forward pass raises on the probing inputs becomes a ValueError that names the model's class."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # any model may fail in its own way
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{type(model).__name__}'s forward pass failed on the probing inputs ({type(error).__name__}: {why}); pass "
            "inputs= that it accepts"
        ) from error


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
