"""Small language models with defaults for their inputs, whose pairs depend on what is between two matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Function = Callable[[Tensor], Tensor]


class Tongue(nn.Module):
    """A language model of two matrices between a table and a head; what is between the two is given to it."""

    def __init__(self, between: Any = functional.relu, width: int = 6, neurons: int = 9, vocabulary: int = 20) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.table, self.up = nn.Embedding(vocabulary, width), nn.Linear(width, neurons)
        self.down, self.norm = nn.Linear(neurons, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.between = between
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator) + (name == "norm.weight"))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = self.table(input_ids)
        return self.head(x + self.down(self.activated(self.up(self.norm(x)))))

    def activated(self, x: Tensor) -> Tensor:
        return self.between(x)


class Hidden(Tongue):
    """As `Tongue`, but no public attribute tells what is between."""

    def __init__(self, between: Any = functional.relu) -> None:
        super().__init__(None)
        self._between = between

    def activated(self, x: Tensor) -> Tensor:
        return self._between(x)


class Buffered(Tongue):
    """The power of the activation is a buffer."""

    power: Tensor

    def __init__(self, power: int) -> None:
        super().__init__(None)
        self.register_buffer("power", torch.tensor(float(power)))

    def activated(self, x: Tensor) -> Tensor:
        return torch.relu(x) ** self.power


class Power:
    """A callable with a setting in its dictionary; its method is another."""

    def __init__(self, power: int) -> None:
        self.power = power

    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x) ** self.power


def plain(x: Tensor) -> Tensor:
    return torch.relu(x)


def raised(function: Function, power: int) -> Function:
    """A function that claims to be another one."""

    @functools.wraps(function)
    def wrapper(x: Tensor) -> Tensor:
        return function(x) ** power

    return wrapper
