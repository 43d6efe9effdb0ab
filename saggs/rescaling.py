"""The group action: multiply the slices of a pair by powers of a factor, the optimizer's state along with them.

Everything in this project that moves a weight goes through here. For a pair with exponents e and a factor c:

    weight      w  -> c^e w              (1 + w -> c^e (1 + w) for gains used as 1 + w)
    gradient    g  -> c^-e g             where a gradient is present
    state       s  -> c^(e k) s          k from `saggs.transport`: -1 first moments, -2 second, 0 counters

Powers of two multiply exactly in binary floating point: the model's outputs and all gradients then agree bit for bit in
float32, bfloat16 and float64 (not in float16, where subnormals round). Other factors agree to rounding: the product is
computed in float32 (float64 for float64), whatever the dtypes of a pair's tensors, and rounded once.

The action is commutative: pairs may share entries, which are then multiplied by both factors, one round after the
other (`saggs.plan`).

Source: the SAGGS paper (Kim, 2026) for the pairs and Adam's moments; the general action is ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from saggs import transport
from saggs.lines import LOSS, Moving
from saggs.pairs import ScalePair, named_parameters
from saggs.plan import ScalingPlan
from saggs.transport import Optimizers


def rescale(
    model: nn.Module,
    pair: ScalePair,
    factor: float,
    optimizer: Optimizers | None = None,
) -> None:
    """Multiply the pair's left side by `factor` and its right side by 1 / `factor`, in place, state included.

    Args:
        model: the model the pair was found on (wrapped or not).
        pair: from `saggs.find_pairs`.
        factor: finite and not zero; negative only where `pair.signs` is "any".
        optimizer: its state is carried along (or those of several). None leaves all optimizer state alone.

    Raises:
        ValueError: a factor the pair does not allow, an optimizer whose state cannot be carried, or a result that
            overflows or underflows. In each case nothing has been changed.

    Warns:
        UserWarning: weights in float16, whose subnormals are rounded; gains 1 + w in bfloat16 that came near w = -1.
    """
    rescale_checked(model, [pair], [factor], optimizer)


def rescale_checked(
    model: nn.Module,
    pairs: Sequence[ScalePair],
    factors: Sequence[float],
    optimizer: Optimizers | None = None,
) -> None:
    """`rescale` for several pairs, which may share entries: all are checked before the first tensor changes.

    Raises:
        ValueError: as `rescale`. In each case nothing has been changed.
    """
    if not pairs:
        return
    parameters = named_parameters(model)
    if optimizer is not None:
        transport.require_transportable(optimizer, pairs, parameters)
    for pair, factor in zip(pairs, factors, strict=True):
        pair.check_factor(float(factor))
        if optimizer is not None and factor < 0:
            transport.require_positive(optimizer, pair, parameters)
    plan = ScalingPlan(pairs, parameters)
    warn_of_float16(plan, parameters)
    with torch.no_grad():
        moving = plan.moving(parameters, optimizer)
        powers = plan.powers(moving, torch.tensor([float(factor) for factor in factors], dtype=torch.float64))
        given = {id(pair): float(factor) for pair, factor in zip(pairs, factors, strict=True)}
        for item in moving:
            scratch = item._replace(tensor=item.tensor.clone())
            for (_, one), each in zip(plan.rounds, powers, strict=True):
                before = scratch.tensor.clone()
                one.multiply([scratch], each)
                if found := one.first_in(item, _lost(before, scratch.tensor)):
                    raise ValueError(
                        f"{found[0]}: factor {given[id(found[0])]:g} over- or underflows a weight, gradient or moment "
                        f"of {found[1]} in {item.tensor.dtype}; nothing was changed. Use a factor nearer to 1"
                    )
        counts = plan.multiply(moving, powers)
    warn_of_imprecise_gains(sum(int(count) for count in counts))


def _lost(before: Tensor, after: Tensor) -> Tensor:
    """A mask of what overflowed, vanished, or fell among the subnormals, which have fewer bits.

    In float16 ordinary weights lie near the subnormals and fall among them at any factor: that is rounding there.
    """
    wrong = ~torch.isfinite(after)
    if before.dtype == torch.float16:
        return wrong
    smallest = torch.finfo(before.dtype).tiny
    return wrong | ((after.abs() < smallest) & (before.abs() >= smallest))


def rescale_many(
    pairs: Sequence[ScalePair],
    factors: Sequence[Tensor] | Tensor,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizers | None = None,
) -> None:
    """Rescale pairs at once, by a factor tensor each, without checks and without waiting for the device.

    Factors stay on the device and are trusted (finite, positive). For repeated use compile a `ScalingPlan` once.
    """
    if not pairs:
        return
    each = factors if isinstance(factors, Tensor) else torch.stack([*factors])
    apply(ScalingPlan(pairs, parameters), each, parameters, optimizer)


def apply(
    plan: ScalingPlan,
    factors: Tensor,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizers | None = None,
) -> None:
    """`rescale_many` with a compiled plan: factors of shape (pairs,)."""
    with torch.no_grad():
        moving = plan.moving(parameters, optimizer)
        plan.multiply(moving, plan.powers(moving, factors))


def weights_as_moving(weights: Mapping[str, Tensor]) -> list[Moving]:
    """Weights alone, as tensors to multiply."""
    return [Moving(name, weight, 1, True) for name, weight in weights.items()]


def warn_of_float16(plan: ScalingPlan, parameters: Mapping[str, nn.Parameter]) -> None:
    """Say that no rescaling is exact in float16, where any of the plan's weights is in it."""
    if found := next((name for name, w in plan.weights(parameters).items() if w.dtype == torch.float16), None):
        warnings.warn(
            f"{found} is in float16, where entries below 6e-5 are subnormal and lose bits, also by powers of two: the "
            "function is kept to rounding only. Rescale in bfloat16 or float32, and convert afterwards",
            stacklevel=transport.levels_to_caller(),
        )


def warn_of_imprecise_gains(count: int) -> None:
    """Say how many gains 1 + w in a narrow dtype have lost precision."""
    if count:
        warnings.warn(
            f"{count} gains used as 1 + w are near w = -1 now, where the rounding of w is more than {LOSS:g} times an "
            "ordinary weight's relative to 1 + w. Keep gains in float32, or leave their pairs out",
            stacklevel=transport.levels_to_caller(),
        )


__all__ = ["apply", "rescale", "rescale_checked", "rescale_many"]
