"""Deliberate imbalance, for experiments: the same function from a start that the optimizer sees differently."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saggs.pairs import ScalePair
from saggs.rescaling import rescale_checked


def inject_imbalance(
    model: nn.Module,
    pairs: Sequence[ScalePair],
    factor: float | Sequence[float] | Tensor,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Multiply the left side of every pair by `factor` and divide the right side by it, in place.

    Args:
        model: the model the pairs were found on.
        pairs: from `saggs.find_pairs`. An entry that two of them share takes both factors.
        factor: one for all pairs, or one a pair (see `log_uniform_factors`). A power of two keeps the function to
            the bit.
        optimizer: its moments are carried along; None leaves optimizer state alone.

    Raises:
        ValueError: no pairs, a wrong number of factors, or a factor that a pair does not allow or that overflows.
            Nothing has been changed then.
    """
    if not pairs:
        raise ValueError("no pairs to unbalance: the model has no exact pair of the chosen kinds")
    if isinstance(factor, Tensor):
        factor = factor.tolist()
    if isinstance(factor, str | bytes):
        raise ValueError(f"factor {factor!r} is text; give a number, or one a pair")
    factors = [float(f) for f in factor] if isinstance(factor, Sequence) else [float(factor)] * len(pairs)
    if len(factors) != len(pairs):
        raise ValueError(f"{len(factors)} factors for {len(pairs)} pairs; give one, or one a pair")
    rescale_checked(model, pairs, factors, optimizer)


def log_uniform_factors(count: int, factor: float, seed: int) -> list[float]:
    """`count` factors drawn log-uniformly from [1 / factor, factor], the same for the same seed.

    Raises:
        ValueError: a factor that is not finite and above 1.
    """
    if not factor > 1 or math.isinf(factor):
        raise ValueError(f"factor {factor} must be finite and above 1 to span the range [1/factor, factor]")
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1
    return [float(factor**e) for e in exponents.tolist()]
