"""The group action: multiply the slices of a pair by powers of a factor, the optimizer's state along with them.

Everything in this project that moves a weight goes through here. For a pair with exponents e and a factor c:

    weight      w  -> c^e w              (1 + w -> c^e (1 + w) for gains used as 1 + w)
    gradient    g  -> c^-e g             where a gradient is present
    state       s  -> c^(e k) s          k from `saggs.transport`: -1 first moments, -2 second, 0 counters

Powers of two multiply exactly in binary floating point: the model's outputs and all gradients then agree bit for bit in
float32, bfloat16 and float64 (not in float16, where subnormals round). Other factors agree to rounding.

Source: the SAGGS paper (Kim, 2026) for the pairs and Adam's moments; the general action is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from saggs import transport
from saggs.pairs import ParameterSlice, ScalePair, named_parameters, parameter_of, require_disjoint


def rescale(
    model: nn.Module,
    pair: ScalePair,
    factor: float,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Multiply the pair's left side by `factor` and its right side by 1 / `factor`, in place, state included.

    Args:
        model: the model the pair was found on (wrapped or not).
        pair: from `saggs.find_pairs`.
        factor: finite and not zero; negative only where `pair.signs` is "any".
        optimizer: its moments are carried along. None leaves all optimizer state alone.

    Raises:
        ValueError: a factor the pair does not allow, an optimizer whose state cannot be carried, or a result that
            overflows or underflows. In each case nothing has been changed.
    """
    rescale_checked(model, [pair], [factor], optimizer)


def rescale_checked(
    model: nn.Module,
    pairs: Sequence[ScalePair],
    factors: Sequence[float],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """`rescale` for several disjoint pairs: all of them are checked before the first tensor changes.

    Raises:
        ValueError: as `rescale`, or pairs that share entries. In each case nothing has been changed.
    """
    require_disjoint(pairs)
    parameters = named_parameters(model)
    if optimizer is not None:
        transport.require_transportable(optimizer)
        transport.require_owned(optimizer, pairs, parameters)
    scales = [torch.tensor(float(factor), dtype=torch.float64) for factor in factors]
    with torch.no_grad():
        for pair, factor, scale in zip(pairs, factors, scales, strict=True):
            pair.check_factor(float(factor))
            for target, multiplier in zip(*scaling_plan([pair], [scale], parameters, optimizer), strict=True):
                _require_representable(pair, float(factor), target, multiplier)
    rescale_many(pairs, scales, parameters, optimizer)


def _require_representable(pair: ScalePair, factor: float, target: Tensor, multiplier: Tensor) -> None:
    """Raise a ValueError where an entry overflows, vanishes, or falls among the subnormals, which have fewer bits."""
    result = (target * multiplier.to(target.device)).abs()
    smallest = torch.finfo(target.dtype).tiny
    lost = (result < smallest) & (target.abs() >= smallest)
    if not bool(torch.isfinite(result).all()) or bool(lost.any()):
        raise ValueError(
            f"{pair}: factor {factor:g} over- or underflows a weight, gradient or moment in {target.dtype}; "
            "nothing was changed. Use a factor nearer to 1"
        )


def rescale_many(
    pairs: Sequence[ScalePair],
    factors: Sequence[Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Rescale disjoint pairs at once by 0-dimensional factor tensors, in foreach calls, without a host sync.

    The hot path of `saggs.balancing`: factors stay on the device and are trusted (finite, positive).
    """
    targets, scales = scaling_plan(pairs, factors, parameters, optimizer)
    with torch.no_grad():
        if targets:
            torch._foreach_mul_(targets, scales)
        _shift_offsets(pairs, factors, parameters)


def scaling_plan(
    pairs: Sequence[ScalePair],
    factors: Sequence[Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Every tensor slice that the factors multiply, with its multiplier as a 0-dimensional tensor."""
    targets: list[Tensor] = []
    scales: list[Tensor] = []
    for pair, factor in zip(pairs, factors, strict=True):
        powers = _Powers(factor)
        for part in pair.slices:
            parameter = parameter_of(parameters, part)
            for tensor, exponent in _moving_tensors(parameter, part, optimizer):
                targets.append(part.view(tensor))
                scales.append(powers[exponent].to(tensor.device))
    return targets, scales


def _moving_tensors(
    parameter: nn.Parameter, part: ParameterSlice, optimizer: torch.optim.Optimizer | None
) -> Iterable[tuple[Tensor, int]]:
    yield parameter.detach(), part.exponent
    if parameter.grad is not None:
        yield parameter.grad, -part.exponent
    if optimizer is not None:
        for tensor, k in transport.state_tensors(optimizer, parameter):
            yield tensor, k * part.exponent


class _Powers:
    """Integer powers of a factor. Negative ones are powers of one reciprocal, so that powers of two stay exact."""

    def __init__(self, factor: Tensor) -> None:
        self._base = {1: factor, -1: factor.reciprocal()}

    def __getitem__(self, exponent: int) -> Tensor:
        if exponent not in self._base:
            sign = 1 if exponent > 0 else -1
            self._base[exponent] = self[exponent - sign] * self._base[sign]
        return self._base[exponent]


def _shift_offsets(
    pairs: Sequence[ScalePair], factors: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]
) -> None:
    """After w -> s w, add s - 1 to gains used as 1 + w: s w + s - 1 = s (1 + w) - 1."""
    for pair, factor in zip(pairs, factors, strict=True):
        powers = _Powers(factor)
        for part in pair.slices:
            if part.offset:
                view = part.view(parameter_of(parameters, part).detach())
                view.add_((powers[part.exponent] - 1).to(view.device))
