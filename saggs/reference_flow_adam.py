"""The slow, literal, float64 version of FlowAdam; beside `saggs.reference_rules`, and a pure function like those.

Source: Singh (2026).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from saggs.reference import AdamWState, start_adamw
from saggs.reference_rules import Betas, advance_moments, correct_moments, root_mean_square


@dataclass(frozen=True)
class FlowAdamState:
    """Adam's state, the last gradient, and the averages of the gradients' norm and of that of their changes.

    `step` counts Adam's steps alone. The two averages are those of all weights together, and every weight has them.
    """

    step: int
    first: Tensor
    second: Tensor
    previous: Tensor
    gradient_norm: float
    change_norm: float


def joint_norm(tensors: Sequence[Tensor]) -> float:
    """sqrt(sum of squares) of all entries of all tensors."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def step_flow_adam(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[FlowAdamState] | None,
    learning_rate: float,
    precond_power: float = 1.0,
    scalar: Literal["rms", "geomean"] = "rms",
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    clip: Literal["coordinate", "global"] = "coordinate",
    clip_value: float | None = None,
    flow_rate: float = 0.5,
    warmup: int = 10,
    decay: float = 0.9,
    norm_ratio: float = 0.9,
    change_ratio: float = 0.1,
    moment_limit: float = 5.0,
    mix: float = 0.5,
) -> tuple[list[Tensor], list[FlowAdamState]]:
    """A step of gradient flow where the gradient is short or has changed, and one of the dial everywhere else.

        n <- decay n + (1 - decay) |g|               d <- decay d + (1 - decay) |g - previous|      over all weights
        flow where more than `warmup` steps of Adam were taken and |g| < norm_ratio n or |g - previous| > change_ratio d

        flow:  u = flow_rate clip(g);  w <- w - lr u;  m <- mix m + (1 - mix) min(1, moment_limit |m| / |u|) u
        dial:  m, v as Adam's;         w <- w - lr m / ( (s_i + eps)^p (s + eps)^(1 - p) + eps ),  at p = 1 Adam

    n and d start at their first values, and `previous` at zero. `clip` takes every entry to [-clip_value, clip_value]
    (1 where None), or the norm over all weights to clip_value (10). |m| and |u| are norms of each weight by itself.

    Source: Singh (2026). Ours where the paper leaves it open: n and d contain the value they are compared with, the
    change at the first step is the gradient, and the steps before the first of flow are warmup + 1.
    """
    found = [gradient.double() for gradient in gradients]
    last = [torch.zeros_like(g) for g in found] if states is None else [state.previous for state in states]
    norm = joint_norm(found)
    change = joint_norm([g - before for g, before in zip(found, last, strict=True)])
    averages = [(norm, change)] * len(found)
    if states is not None:
        averages = [
            (decay * s.gradient_norm + (1 - decay) * norm, decay * s.change_norm + (1 - decay) * change) for s in states
        ]
    counts = [0] * len(found) if states is None else [state.step for state in states]
    flows = [
        count > warmup and (norm < norm_ratio * n or change > change_ratio * d)
        for count, (n, d) in zip(counts, averages, strict=True)
    ]
    steps, kept = [], []
    for index, (g, (n, d)) in enumerate(zip(found, averages, strict=True)):
        before = (
            start_adamw(g) if states is None else AdamWState(counts[index], states[index].first, states[index].second)
        )
        if flows[index]:
            clipped = clip_gradient(g, norm, clip, clip_value)
            step = flow_rate * clipped
            share = min(1.0, moment_limit * float(before.first.norm()) / max(float(step.norm()), 1e-300))
            new = AdamWState(before.step, mix * before.first + (1 - mix) * share * step, before.second)
        else:
            step, new = None, advance_moments(g, before, betas)
        steps.append(step)
        kept.append(FlowAdamState(new.step, new.first, new.second, g, n, d))
    moments = [correct_moments(AdamWState(s.step, s.first, s.second), betas) for s in kept]
    roots = torch.cat([second.sqrt().flatten() for _, second in moments])
    scale = root_mean_square(roots) if scalar == "rms" else torch.exp(torch.log(roots + eps).mean())
    moved = []
    for weight, step, (first, second) in zip(weights, steps, moments, strict=True):
        if step is None:
            denominator = (second.sqrt() + eps).pow(precond_power) * (scale + eps).pow(1 - precond_power) + eps
            step = first / (second.sqrt() + eps if precond_power == 1 else denominator)
        moved.append(weight.double() - learning_rate * step)
    return moved, kept


def clip_gradient(
    gradient: Tensor, joint: float, kind: Literal["coordinate", "global"], value: float | None = None
) -> Tensor:
    """Every entry to [-value, value] (1), or all gradients of joint norm `joint` to the norm `value` (10)."""
    if kind == "coordinate":
        limit = 1.0 if value is None else value
        return gradient.clamp(-limit, limit)
    limit = 10.0 if value is None else value
    return gradient * min(1.0, limit / joint) if joint > 0 else gradient
