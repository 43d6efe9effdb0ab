"""One module for many small networks: parameters by name, and a function of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """forward(x) = function(self, x); shapes become random parameters, modules stay."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, nn.Parameter(torch.zeros(part)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                start = 1.0 if name.endswith(("norm.weight", "gain")) else 0.0
                parameter.copy_(0.5 * noise if parameter.dim() > 1 else start + 0.4 * noise)

    if TYPE_CHECKING:  # parts are parameters or modules, by names of the test's own

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def mlp(activation: Callable[[Tensor], Tensor], bias: bool = True) -> Net:
    """down(activation(up(x))), six inputs, nine neurons, five outputs."""
    up, down = nn.Linear(6, 9, bias=bias), nn.Linear(9, 5)
    return Net(lambda net, x: net.down(activation(net.up(x))), up=up, down=down)


def rows(width: int = 6) -> Callable[[torch.Generator, int], Mapping[str, Tensor]]:
    """`inputs`: one row of numbers a sample."""
    return lambda generator, count: {"x": torch.randn(count, width, generator=generator)}


def sequences(width: int = 6, length: int = 8) -> Callable[[torch.Generator, int], Mapping[str, Tensor]]:
    """`inputs`: a sequence of rows a sample."""
    return lambda generator, count: {"x": torch.randn(count, length, width, generator=generator)}


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention on [..., length, size]."""
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT).masked_fill(future, float("-inf")).softmax(-1) @ v
