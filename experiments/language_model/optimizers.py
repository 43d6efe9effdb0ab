"""Optimizers of the suite, built from the configuration over two groups: matrices that decay, vectors that do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experiments import registry
from experiments.checks import ConfigError
from experiments.config import SGD, Adam, AdamW, CustomOptimizer, Muon, Optimizer, RMSprop, ScalarAdam
from saggs import rules


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """The optimizer of a model. Weight decay acts on parameters of two and more dimensions.

    Raises:
        ConfigError: Muon, or a custom optimizer that nobody registered, or an option it does not take.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(config, AdamW):
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)
    if isinstance(config, SGD):
        momentum, nesterov = config.momentum, config.nesterov
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=momentum, nesterov=nesterov, fused=True)
    if isinstance(config, RMSprop):
        return torch.optim.RMSprop(groups, lr=config.learning_rate, alpha=config.alpha, eps=config.eps, foreach=True)
    if isinstance(config, Adam):
        betas = (config.beta1, config.beta2)
        return torch.optim.Adam(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)
    if isinstance(config, ScalarAdam):
        return rules.ScalarAdam(groups, config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps)
    if isinstance(config, Muon):
        raise ConfigError(
            "optimizer=muon: a language model has one optimizer, and Muon is for its hidden matrices only; use it with "
            "task=attention_rotation, or choose another optimizer"
        )
    assert isinstance(config, CustomOptimizer)
    rates = {"learning_rate": config.learning_rate, "weight_decay": config.weight_decay}
    built = registry.build("optimizer", config.name, config.options, groups=groups, **rates)
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigError(f"optimizer {config.name!r} returned a {type(built).__name__}, not a torch.optim.Optimizer")
    owned = {id(p) for group in built.param_groups for p in group["params"]}
    if owned != {id(p) for p in parameters}:
        raise ConfigError(f"optimizer {config.name!r} does not hold exactly the model's parameters; pass it `groups`")
    return built
