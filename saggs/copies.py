"""Float64 copies of a model to measure on, and what is changed in them so that nothing looks exact by accident."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

RAISED_EPS = 1e-2
_LARGEST_EPS = 1e-4


def cloned(module: nn.Module) -> nn.Module:
    """A float64 copy on the CPU in evaluation mode. A ValueError where the module cannot be copied."""
    try:
        return copy.deepcopy(module).double().eval().cpu()
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{type(module).__name__} cannot be copied ({error}); remove what it holds besides weights (activations "
            "with their graph, hooks of old-style weight norm or pruning: make them permanent first)"
        ) from error


def draw_statistics(model: nn.Module, generator: torch.Generator) -> None:
    """Random running statistics in batch norms, in place: fresh ones, 0 and 1, hide that a norm shifts."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                assert module.running_var is not None
                shape = module.running_mean.shape
                module.running_mean.copy_(torch.randn(shape, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(shape, generator=generator))


def redraw(parameters: Mapping[str, nn.Parameter], spread: float, last: float, generator: torch.Generator) -> None:
    """Matrices from a normal law of this standard deviation; biases and gains are random already and stay.

    Where they are from such a law already, of standard deviation `last`, the same draw is stretched.
    """
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.dim() < 2:
                continue
            if last:
                parameter.mul_(spread / last)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(spread))


def draw_degenerate(parameters: Mapping[str, nn.Parameter], generator: torch.Generator) -> None:
    """Draw biases and gains (1-D), and constant tensors of any shape, from a normal law: zeros and ones hide faults."""
    with torch.no_grad():
        for parameter in parameters.values():
            constant = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            if parameter.dim() <= 1 or constant:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(parameter + 0.4 * noise)


def dtype_of(model: nn.Module) -> torch.dtype | None:
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def require_real(model: nn.Module) -> None:
    """Raise a ValueError, naming the parameter, where a model has no plain floating-point weights to look at."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device; load real weights before certifying")
        if not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}: quantised weights cannot be certified, nor whole or complex "
                "numbers; only real floating-point weights"
            )


def raise_eps(model: nn.Module) -> None:
    """Set every tiny float that a submodule keeps (a norm's eps, under whatever name) to 0.01, in place."""
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and 0 < value <= _LARGEST_EPS:
                setattr(module, key, RAISED_EPS)


__all__ = [
    "RAISED_EPS",
    "cloned",
    "draw_degenerate",
    "draw_statistics",
    "dtype_of",
    "raise_eps",
    "redraw",
    "require_real",
]
