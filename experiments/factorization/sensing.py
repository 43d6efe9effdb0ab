"""Matrix sensing: a matrix X of low rank, known by Gaussian measurements b_i = <A_i, X>, to be found as U V^T.

The loss is mean_i (<A_i, U V^T> - b_i)^2. Draws, for agreement number for number with the published ones: one generator
of the seed gives U* and V* (standard normal, divided by sqrt(rank)), then E where there is a tail, then the A_i; a
second one, of seed + 7, gives U and V, times `start_scale`. All in float32 on the CPU.

Source: Singh (2026), whose setting follows Gunasekar et al. (2017).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.study_config import Sensing


@dataclass(frozen=True)
class Drawn:
    """What a seed gives: the matrix (size, size), the measurements (count, size^2), their values, and the start."""

    truth: Tensor
    measurements: Tensor
    values: Tensor
    u: Tensor
    v: Tensor


def draw(settings: Sensing, seed: int) -> Drawn:
    """Everything random of a sensing problem, drawn in float32 and given in the study's precision."""
    size, rank, dtype = settings.size, settings.rank, getattr(torch, settings.precision)
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(size, rank, generator=generator) / math.sqrt(rank)
    right = torch.randn(size, rank, generator=generator) / math.sqrt(rank)
    truth = left @ right.T
    if settings.tail:
        truth = with_tail(truth, rank, torch.randn(size, size, generator=generator), settings.tail)
    measurements = torch.randn(settings.measurements, size * size, generator=generator)
    start = torch.Generator().manual_seed(seed + 7)
    u = torch.randn(size, settings.width, generator=start) * settings.start_scale
    v = torch.randn(size, settings.width, generator=start) * settings.start_scale
    truth, measurements = truth.to(dtype), measurements.to(dtype)
    return Drawn(truth, measurements, measurements @ truth.flatten(), u.to(dtype), v.to(dtype))


def with_tail(matrix: Tensor, rank: int, noise: Tensor, tail: float) -> Tensor:
    """sqrt(1 - tail^2) X + tail E, with E made orthogonal to X's row and column spaces and given X's norm.

    The norm stays that of X, and `tail`^2 of its energy lies outside the rank. Source: Singh (2026).
    """
    left, _, right = torch.linalg.svd(matrix.double())
    outside = noise.double() - left[:, :rank] @ (left[:, :rank].T @ noise.double())
    outside = outside - (outside @ right[:rank].T) @ right[:rank]
    outside = outside * (matrix.double().norm() / outside.norm())
    return (math.sqrt(1 - tail**2) * matrix.double() + tail * outside).to(matrix.dtype)


class Problem:
    """Losses and gradients of stacked members; those of the second pass see only the first measurements.

    Written out by hand: with R the residuals, G = sum_i 2 R_i A_i / count, dU = G V and dV = G^T U.

    Args:
        drawn: of the seed; all members share its measurements.
        held_out: how many of the last measurements the second pass leaves out.
    """

    def __init__(self, drawn: Drawn, held_out: int) -> None:
        self._a, self._b = drawn.measurements, drawn.values
        self._a_transposed = drawn.measurements.T.contiguous()  # half as long for a few rows at a time
        count = len(self._b)
        self._weights = torch.full((2, count), 1.0 / count, dtype=self._b.dtype)
        self._weights[1, : count - held_out] = 1.0 / (count - held_out)
        self._weights[1, count - held_out :] = 0.0
        self._held_out = held_out

    def weights(self, second_pass: Tensor) -> Tensor:
        """For each member what each measurement counts in its loss, (members, count); summing to 1."""
        return self._weights[second_pass.long()]

    def residuals(self, u: Tensor, v: Tensor) -> Tensor:
        """<A_i, U V^T> - b_i of each member, (members, count)."""
        products = torch.bmm(u, v.mT).flatten(1)
        return torch.addmm(self._b, products, self._a_transposed, beta=-1)

    def gradients(self, residuals: Tensor, weights: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """dU and dV of sum_i weight_i residual_i^2; the residuals are overwritten."""
        slope = torch.mm(residuals.mul_(weights).mul_(2), self._a).view(len(u), u.shape[1], v.shape[1])
        return torch.bmm(slope, v), torch.bmm(slope.mT, u)

    def held_out_loss(self, residuals: Tensor) -> Tensor:
        """Mean squared residual of the measurements that the second pass leaves out."""
        return residuals[:, len(self._b) - self._held_out :].square().mean(dim=1)


def held_out(settings: Sensing) -> int:
    """How many measurements the second pass leaves out."""
    return round(settings.holdout * settings.measurements)


@dataclass(frozen=True)
class Found:
    """How near a factorization came, in float64.

    Attributes:
        error: |U V^T - X| / |X| in the Frobenius norm.
        effective_rank: exp of the entropy of the singular values' shares of their sum.
        nuclear_norm: the sum of the singular values.
        balancedness: |U^T U - V^T V| in the Frobenius norm.
    """

    error: float
    effective_rank: float
    nuclear_norm: float
    balancedness: float


def assess(u: Tensor, v: Tensor, truth: Tensor) -> Found:
    """How near U V^T came to the truth. Source: Singh (2026); the effective rank is Roy and Vetterli's (2007)."""
    u, v, truth = u.double(), v.double(), truth.double()
    product = u @ v.T
    values = torch.linalg.svdvals(product)
    balancedness = float((u.T @ u - v.T @ v).norm())
    return Found(float((product - truth).norm() / truth.norm()), effective_rank(values), float(values.sum()),
                 balancedness)  # fmt: skip


def effective_rank(singular_values: Tensor) -> float:
    """exp(-sum p log p) with p the shares of the sum; 0 for the zero matrix. Source: Roy and Vetterli (2007)."""
    total = singular_values.sum()
    if total == 0:
        return 0.0
    shares = singular_values / total
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))


__all__ = ["Drawn", "Found", "Problem", "assess", "draw", "effective_rank", "held_out", "with_tail"]
