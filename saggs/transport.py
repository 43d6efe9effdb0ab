"""How an optimizer's state answers when a weight is multiplied by c.

Where w' = c w, the same function has the gradient g' = g / c. A state tensor that is built from gradients alone and is
homogeneous of degree d in them therefore answers s' = c^k s with k = -d: first moments k = -1, second moments k = -2,
step counters k = 0. This module knows k for AdamW and Adam (with AMSGrad's maximum) and for SGD with momentum;
any other optimizer is refused by name, since carrying its state by a guess would be worse than not balancing at all.

Carrying the state makes it what it would have been on the rescaled weights. It does not make the *updates* follow:
AdamW moves cA by as much as A (see `saggs.reference`); that is what balancing is for.

Source of the rules: the SAGGS paper (Kim, 2026) for Adam's two moments; the rest by the same algebra.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from saggs.pairs import ScalePair, parameter_of

# Optimizer class -> state name -> k. `step` is a counter, not a tensor of the weight's shape.
_RULES: dict[type[torch.optim.Optimizer], dict[str, int]] = {
    torch.optim.AdamW: {"step": 0, "exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2},
    torch.optim.Adam: {"step": 0, "exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2},
    torch.optim.SGD: {"momentum_buffer": -1},
}


def transportable() -> tuple[str, ...]:
    """Names of the optimizer classes whose state can be carried."""
    return tuple(sorted({cls.__name__ for cls in _RULES}))


def require_transportable(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> None:
    """Raise a ValueError where the optimizer's state cannot be carried through a rescaling.

    A subclass of a known optimizer is refused too: it may keep more state, or other state under the same name.
    Coupled weight decay puts lr-independent multiples of w into the moments; they are not homogeneous then, and a
    warning says so.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if cls not in _RULES:
        raise ValueError(
            f"cannot carry the state of {cls.__module__}.{cls.__qualname__} through a rescaling: its rule is not "
            f"known. Use one of {', '.join(transportable())}, or leave its state alone (no optimizer here; "
            "transport=False for a Rebalancer)"
        )
    if isinstance(optimizer, type):
        return
    coupled = [g["weight_decay"] for g in optimizer.param_groups if _decays_coupled(cls, g)]
    if coupled:
        warnings.warn(
            f"{cls.__name__} with coupled weight decay {coupled[0]} mixes weights into its moments; carrying them is "
            "only approximate. Decoupled decay (AdamW) is exact",
            stacklevel=_levels_to_caller(),
        )


def require_owned(
    optimizer: torch.optim.Optimizer, pairs: Iterable[ScalePair], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Raise a ValueError where the optimizer holds no parameter of any pair: it must be another model's.

    Some may be absent (frozen parameters have no state); all of them absent is a mistake nothing else would show.
    """
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    wanted = [parameter_of(parameters, part) for pair in pairs for part in pair.slices]
    if wanted and not any(id(parameter) in owned for parameter in wanted):
        raise ValueError(
            f"the {type(optimizer).__name__} holds none of the pairs' parameters; pass the optimizer of this very model"
        )


def _levels_to_caller() -> int:
    """How many frames up the first one outside this package is, for a warning to point at."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "saggs":
        level, frame = level + 1, frame.f_back
    return level


def _decays_coupled(cls: type[torch.optim.Optimizer], group: dict[str, object]) -> bool:
    return cls is not torch.optim.AdamW and bool(group["weight_decay"]) and not group.get("decoupled_weight_decay")


def state_tensors(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[tuple[Tensor, int]]:
    """The state tensors of `parameter` that move with its weight, each with its k.

    Empty before the optimizer's first step and for parameters it does not own. Raises a ValueError for a state entry
    that has no rule, or that is not of the parameter's shape.
    """
    rules = _RULES[type(optimizer)]
    found = []
    for name, value in optimizer.state.get(parameter, {}).items():
        if value is None:
            continue
        if name not in rules:
            raise ValueError(
                f"{type(optimizer).__name__} keeps a state {name!r} that has no rule (known: {', '.join(rules)}); "
                "it cannot be carried through a rescaling"
            )
        degree = rules[name]
        if degree == 0:
            continue
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            raise ValueError(f"{type(optimizer).__name__}'s state {name!r} has not the shape of its parameter")
        found.append((value, degree))
    return found
