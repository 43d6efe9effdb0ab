"""FlowAdam: the dial's step, or where the gradient changes in size or direction, a step of gradient flow.

Over all weights of all groups together, two averages with decay 0.9, each started at its first value:

    n_t  of  |g_t|                     d_t  of  |g_t - g_(t-1)|,  with g_0 = 0

In the steps after the first `warmup` + 1, where |g_t| < 0.90 n_t or |g_t - g_(t-1)| > 0.1 d_t, the step is

    u = 0.5 clip(g)                                              w <- w - lr u

with every entry clipped to [-1, 1], or all entries together to the norm 10; and of what is kept only

    m <- 0.5 m + 0.5 min(1, 5 |m| / |u|) u                       norms of each weight by itself

moves: v and the count of steps stay. Everywhere else it is a step of the dial (`saggs.rules.dial`). The flow step is
one of Euler's method, from the gradient at hand; no closure is needed.

A rotation (U, V) -> (U Q, V Q) is followed with p = 0, the root mean square and the clip of the norm, and only so.

What the paper leaves open is settled here, and by its numbers where they tell: the averages contain the value they are
compared with, and the first step that may be one of flow is the twelfth, as if counted from 0. On the matrix sensing of
the paper, where nearly every later step is one of flow, 11 steps of Adam give the published errors at lr = 1e-3 (.347,
.219, .169 against .347, .220, .169; 10 steps .341, .214, .168), and the other choices change nothing.

Source: Singh (2026).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from saggs.rules.dial import (
    DIAL_RANGES,
    Betas,
    begin_moments,
    bunched,
    corrected,
    dial_denominators,
    quotients,
    spread,
)
from saggs.rules.rule import FRACTION, OneOf, OrNone, Range, Rule, Settings, State, Within, entry_norm


class FlowAdam(Rule):
    """The dial, with steps of gradient flow between; see the module.

    Args:
        params, lr, weight_decay: as of every rule.
        precond_power, scalar, betas, eps: the dial's; p = 1 is Adam.
        clip: "coordinate", every entry by itself, or "global", the norm over all weights.
        clip_value: to what; None is 1 for coordinates and 10 for the norm, infinity clips nothing.
        flow_rate: what a flow step multiplies the clipped gradient by.
        warmup: steps that are the dial's whatever the gradient does, beside the very first.
        decay: of the two averages.
        norm_ratio: a flow step follows a gradient shorter than so many averages,
        change_ratio: or one whose change is more than so many averages.
        moment_limit: how many times its length a flow step may add to the first moment.
        mix: how much of the first moment stays in a flow step.

    Source: Singh (2026).
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "precond_power": 1.0,
        "scalar": "rms",
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "clip": "coordinate",
        "clip_value": None,
        "flow_rate": 0.5,
        "warmup": 10,
        "decay": 0.9,
        "norm_ratio": 0.9,
        "change_ratio": 0.1,
        "moment_limit": 5.0,
        "mix": 0.5,
    }
    RANGES: ClassVar[Mapping[str, Range]] = {
        **DIAL_RANGES,
        "clip": OneOf(("coordinate", "global")),
        "clip_value": OrNone(Within(infinite=True)),
        "flow_rate": Within(),
        "warmup": Within(whole=True),
        "decay": FRACTION,
        "norm_ratio": Within(),
        "change_ratio": Within(infinite=True),
        "moment_limit": Within(),
        "mix": Within(0.0, 1.0),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        weight_decay: float = 0.0,
        *,
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
    ) -> None:
        super().__init__(
            params,
            lr,
            weight_decay,
            precond_power=precond_power,
            scalar=scalar,
            betas=betas,
            eps=eps,
            clip=clip,
            clip_value=clip_value,
            flow_rate=flow_rate,
            warmup=warmup,
            decay=decay,
            norm_ratio=norm_ratio,
            change_ratio=change_ratio,
            moment_limit=moment_limit,
            mix=mix,
        )

    @classmethod
    def begin(cls, weight: Tensor, settings: Settings) -> State:
        members = len(weight)
        # In the weight's dtype: loading a state dictionary casts all but `step` to it.
        norms = {name: weight.new_zeros(members) for name in ("gradient_norm", "change_norm")}
        return {**begin_moments(weight), "previous": torch.zeros_like(weight), **norms}

    @classmethod
    def advance(
        cls,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        settings: Sequence[Settings],
    ) -> list[Tensor]:
        norms = _measure(gradients, states)
        bunches, flows, numerators = [], [], []
        for indices in bunched(cls.DEFAULTS, states, settings):
            own, c = [states[i] for i in indices], settings[indices[0]]
            flow = _decide(own, norms, c)
            numerators.append(_advance_moments(own, [gradients[i] for i in indices], norms, flow, c))
            bunches.append(corrected(indices, own, c))
            flows.append(flow.double())
        directions = list(gradients)
        for bunch, above, flow, below in zip(bunches, numerators, flows, dial_denominators(bunches), strict=True):
            # A step of flow is over 1. No entry need be chosen: 0 times a denominator is 0.
            below = below._replace(gain=below.gain * (1 - flow), offset=below.offset * (1 - flow) + flow)
            for index, direction in zip(bunch.indices, quotients(above, below), strict=True):
                directions[index] = direction
        return directions


def _measure(gradients: Sequence[Tensor], states: Sequence[State]) -> Tensor:
    """The norms of the gradients and of their changes, each of all weights together: (2, members), in float64.

    What is kept of the last gradients becomes that of these.
    """
    device, norms = gradients[0].device, []
    for g, state in zip(gradients, states, strict=True):
        previous = state["previous"]
        norms += [entry_norm(g), entry_norm(torch.sub(previous, g, out=previous))]
        previous.copy_(g)
    stacked = torch.stack([norm.to(device, torch.float64) for norm in norms])
    joint: Tensor = torch.linalg.vector_norm(stacked.view(-1, 2, stacked.shape[1]), dim=0)
    return joint


def _decide(states: Sequence[State], norms: Tensor, settings: Settings) -> Tensor:
    """Where the step is one of flow, (weights, members); the averages have then moved on."""
    steps = torch.stack([state["step"] for state in states])
    kept = [state[name] for name in ("gradient_norm", "change_norm") for state in states]
    before, now = torch.stack(kept).double().view(2, *steps.shape), norms.to(steps.device).unsqueeze(1)
    # The first step is always the dial's, so that the count is 0 at the first step and at no other.
    average = torch.where(steps == 0, now, torch.lerp(before, now, 1 - settings["decay"]))
    torch._foreach_copy_(kept, list(average.flatten(0, 1).unbind()))
    shorter, changed = now[0] < settings["norm_ratio"] * average[0], now[1] > settings["change_ratio"] * average[1]
    flow: Tensor = (shorter | changed) & (steps > settings["warmup"])
    return flow


@lru_cache(maxsize=64)
def _factors(betas: Betas, mix: float, flow_rate: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """What m and the gradient, v and the square gradient, and in the step m and the gradient are multiplied by.

    In a step of the dial and in one of flow, (6, 1, 1) each; the square is that of the gradient times its factor.
    """
    dial = [betas[0], 1 - betas[0], betas[1], math.sqrt(1 - betas[1]), 1.0, 0.0]
    flow = [mix, 0.0, 1.0, 0.0, 0.0, flow_rate]
    both = torch.tensor([dial, flow], dtype=torch.float64, device=device)
    return both[0].view(6, 1, 1), both[1].view(6, 1, 1)


def _advance_moments(
    states: Sequence[State], gradients: Sequence[Tensor], norms: Tensor, flow: Tensor, settings: Settings
) -> list[Tensor]:
    """Advance moments and count by a step of the dial, or the first moment alone by one of flow, in place.

    Returns:
        The numerators of the directions: the first moment, or `flow_rate` times the clipped gradient.
    """
    weight = flow.double()
    dial, flowing = _factors(tuple(settings["betas"]), settings["mix"], settings["flow_rate"], flow.device)
    factors = torch.lerp(dial, flowing, weight)  # exactly the one or the other
    value = settings["clip_value"]
    if settings["clip"] == "global":
        clipped = list(gradients)
        factors[5].mul_(((10.0 if value is None else value) / norms[0].to(flow.device)).clamp_max_(1.0))
    else:
        limits = spread(torch.full_like(weight, 1.0 if value is None else value).where(flow, math.inf), gradients)
        clipped = [torch.maximum(g, -limit).minimum(limit) for g, limit in zip(gradients, limits, strict=True)]
    lengths = factors[5] * torch.stack([entry_norm(x) for x in clipped]).double()
    limit = settings["moment_limit"] * torch.stack([entry_norm(state["first"]) for state in states]).double()
    # Where a flow step has no length there is nothing to add either.
    share = (limit / lengths.clamp_min_(torch.finfo(torch.float64).tiny)).clamp_max_(1.0)
    factors[1].add_(share.mul_(factors[5]), alpha=1 - settings["mix"])
    numerators, of_weights = [], factors.to(clipped[0].dtype).unbind(1)
    for state, x, own in zip(states, clipped, of_weights, strict=True):
        old_m, new_m, old_v, new_v, moment, gradient = own.view(6, -1, *(1,) * (x.dim() - 1)).unbind()
        first, root = state["first"].mul_(old_m).add_(x * new_m), x * new_v
        state["second"].mul_(old_v).addcmul_(root, root)
        numerators.append((first * moment).add_(x * gradient))
    torch._foreach_add_([state["step"] for state in states], list((1 - weight).unbind()))
    return numerators
