"""A new optimizer and a new balancing rule in an afternoon: register them, name them in the configuration.

    PYTHONPATH=examples python train.py scale=debug plugins=[my_plugin] optimizer=custom optimizer.name=sign_momentum \\
        optimizer.learning_rate=1e-3 +optimizer.options.momentum=0.95
    PYTHONPATH=examples python train.py scale=debug plugins=[my_plugin] imbalance=reciprocal \\
        rebalance=custom rebalance.name=balance_once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from experiments.registry import optimizer, rebalance
from saggs import Rebalancer, ScalePair


class SignMomentum(torch.optim.Optimizer):
    """w <- w - lr * sign(m), m an average of gradients, with decoupled weight decay."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average.sign(), alpha=group["lr"])


@optimizer("sign_momentum")
def sign_momentum(groups: Any, learning_rate: float, weight_decay: float, momentum: float = 0.9) -> SignMomentum:
    """Everything after the first three arguments comes from `optimizer.options`."""
    return SignMomentum(groups, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)


class BalanceOnce(Rebalancer):
    """Balance before the first step and never again, whatever `rebalance.every` says."""

    def step(self) -> bool:
        self.steps += 1
        if self.steps > 1:
            return False
        self.rebalance()
        return True


@rebalance("balance_once")
def balance_once(
    model: nn.Module, optimizer: torch.optim.Optimizer, pairs: list[ScalePair], every: int, transport: bool
) -> BalanceOnce:
    """`every` and `transport` come from the configuration's `rebalance`."""
    return BalanceOnce(model, optimizer, pairs, every=every, transport=transport)
