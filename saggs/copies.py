"""Float64 copies of a model to measure on, and what is changed in them so that nothing looks exact by accident."""

from __future__ import annotations

import copy

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


__all__ = ["RAISED_EPS", "cloned", "draw_statistics", "raise_eps", "require_real"]
