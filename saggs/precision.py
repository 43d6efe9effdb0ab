"""The all-float64 mode that keeps modelling code from falling back to float32.

Modelling code asks for float32 in the middle of a float64 model: RMSNorm, softmax, rotary tables and losses do
`x.float()` or `.to(torch.float32)`. An exact symmetry then shows a residual of 1e-7 instead of 1e-15, and cannot be
told from one that is broken by a norm's eps. Inside `float64_everywhere()` every such request yields float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def _widened(value: Any) -> Any:
    return torch.float64 if value in _NARROW else value


class _Float64Mode(TorchFunctionMode):
    """Turns every request for a narrower floating type, by method or by `dtype=`, into float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return torch.Tensor.double(*args, **(kwargs or {}))
        args = tuple(_widened(a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: _widened(v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """Within the block, tensors asked for in float32 (or half, bfloat16) come in float64.

    The model itself is to be `.double()` already. The default dtype is float64 within and restored after.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64Mode():
            yield
    finally:
        torch.set_default_dtype(default)


def use_plain_kernels(model: nn.Module) -> None:
    """Have a float64 copy run its experts one by one, in place: grouped matrix products exist in float32 and narrower.

    Libraries choose such kernels by a setting of the model's configuration; a model without one is left as it is.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
