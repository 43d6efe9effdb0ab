"""The slow, literal, float64 version of every formula, as the papers write it.

Nothing here is fast, and nothing in the library calls it: the tests hold the fast code against these lines. Every
function is pure; it returns new tensors in float64 and leaves its arguments alone.

A pair (A, B) with factor c stands for (c A, B / c). The gradients of the same function are then (G_A / c, c G_B), and
whatever an optimizer has built from gradients follows them. Its *updates* do not follow: with the moments carried,
AdamW moves c A by exactly as much as A, so that relative to the weight the step is c times too small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor


def rescale_pair(a: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """(A, B) -> (c A, B / c), which keeps A B^T. Source: SAGGS paper (Kim, 2026)."""
    return a.double() * factor, b.double() / factor


def rescale_entries(tensor: Tensor, ranges: Sequence[tuple[int, int] | None], multiplier: float) -> Tensor:
    """The tensor with the entries inside `ranges` multiplied one by one, all others as they were.

    `ranges` has one entry a dimension: None for all of it, or (start, stop). Source: ours.
    """
    result = tensor.double().clone()
    bounds = [(0, size) if r is None else r for size, r in zip(tensor.shape, ranges, strict=True)]
    for index in itertools.product(*(range(start, stop) for start, stop in bounds)):
        result[index] = float(result[index]) * multiplier
    return result


def carry_first_moment(moment: Tensor, factor: float) -> Tensor:
    """m -> m / c where the weight goes to c w: an average of gradients, each G / c. Also the momentum of SGD.

    Source: SAGGS paper (Kim, 2026) for Adam's moments; momentum by the same algebra.
    """
    return moment.double() / factor


def carry_second_moment(moment: Tensor, factor: float) -> Tensor:
    """v -> v / c^2 where the weight goes to c w: an average of squared gradients. Also AMSGrad's maximum.

    Source: SAGGS paper (Kim, 2026) for Adam's moments; AMSGrad's maximum by the same algebra.
    """
    return moment.double() / (factor * factor)


def find_balanced_factor(a: Tensor, b: Tensor, damping: float = 1.0) -> float:
    """c = (|B| / |A|)^(alpha / 2): for alpha = 1 both norms become equal.

    After it, log(|A| / |B|) is (1 - alpha) times what it was. Source: SAGGS paper (Kim, 2026), hard and damped.
    """
    norm_a = math.sqrt(sum(x * x for x in a.double().flatten().tolist()))
    norm_b = math.sqrt(sum(x * x for x in b.double().flatten().tolist()))
    return math.pow(norm_b / norm_a, damping / 2)


def search_balanced_factor(a: Tensor, b: Tensor, p: int, q: int) -> float:
    """The c > 0 at which |c^p A|^2 + |c^-q B|^2 is least, by golden section over log c.

    The function is convex in log c, so the search cannot stop at another minimum. Near the minimum it is flat to
    second order, so that c comes out to about 1e-8 relative and no better. Source: ours.
    """
    square_a = float(a.double().square().sum())
    square_b = float(b.double().square().sum())

    def cost(log_c: float) -> float:
        return math.exp(2 * p * log_c) * square_a + math.exp(-2 * q * log_c) * square_b

    golden = (math.sqrt(5) - 1) / 2
    low, high = -40.0, 40.0
    for _ in range(120):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if cost(left) < cost(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def find_l1_factor(a: Tensor, b: Tensor, p: int = 1, q: int = 1) -> float:
    """The c at which c^p |A|_1 + c^-q |B|_1 is least: ( q |B|_1 / (p |A|_1) )^(1 / (p + q)).

    The derivative p c^(p - 1) |A|_1 - q c^(-q - 1) |B|_1 vanishes there. For p = q = 1 it is (|B|_1 / |A|_1)^(1/2), and
    the two sums of absolute values become equal. Source: WISCA for p = q = 1; other exponents are ours.
    """
    sum_a = sum(abs(x) for x in a.double().flatten().tolist())
    sum_b = sum(abs(x) for x in b.double().flatten().tolist())
    return math.pow(q * sum_b / (p * sum_a), 1 / (p + q))


def solve_balanced_factor(terms: Sequence[tuple[Tensor, int]], order: int = 2) -> float:
    """The c > 0 at which f(c) = sum over (w, e) of sum |w|^order c^(order e) is least, by bisection of df / d log c.

    f is convex in log c, so that its derivative sum e |w|^order c^(order e) has one root; halving a bracket of 80
    a hundred times leaves nothing of it. Source: ours.
    """
    sums = [(math.fsum(abs(x) ** order for x in w.double().flatten().tolist()), e) for w, e in terms]

    def slope(log_c: float) -> float:
        return math.fsum(e * size * math.exp(order * e * log_c) for size, e in sums)

    low, high = -40.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return math.exp((low + high) / 2)


def round_to_power_of_two(factor: float) -> float:
    """The power of two nearest to the factor in log2: the 2^k with 2^(2k - 1) <= c^2 < 2^(2k + 1), in exact fractions.

    Source: ours.
    """
    square, k = Fraction(factor) ** 2, 0
    while square >= Fraction(2) ** (2 * k + 1):
        k += 1
    while square < Fraction(2) ** (2 * k - 1):
        k -= 1
    return float(Fraction(2) ** k)


Slices = Sequence[tuple[str, Sequence[tuple[int, int] | None], int, int]]
"""Slices of one pair: (name of the tensor, ranges, exponent, offset)."""


def rescale_slices(weights: Mapping[str, Tensor], slices: Slices, factor: float) -> dict[str, Tensor]:
    """All tensors, with w -> c^e (offset + w) - offset inside the slices. Source: ours."""
    result = {name: tensor.double().clone() for name, tensor in weights.items()}
    for name, ranges, exponent, offset in slices:
        result[name] = rescale_entries(result[name] + offset, ranges, math.pow(factor, exponent)) - offset
    return result


def balance_slices(weights: Mapping[str, Tensor], slices: Slices, order: int = 2) -> float:
    """The factor that makes the slices least, whatever their exponents; see `solve_balanced_factor`. Source: ours."""
    terms = []
    for name, ranges, exponent, offset in slices:
        index = tuple(slice(None) if r is None else slice(*r) for r in ranges)
        terms.append((weights[name].double()[index] + offset, exponent))
    return solve_balanced_factor(terms, order)


def balance_by_sweeps(
    weights: Mapping[str, Tensor], pairs: Sequence[Slices], sweeps: int, order: int = 2
) -> tuple[dict[str, Tensor], list[float]]:
    """Coordinate descent: balance one pair after the other, `sweeps` times; the weights and the products of factors.

    Pairs may share entries. What it goes to, the least sum of |w|^order over all slices, does not depend on their
    order where the pairs are independent: that sum is strictly convex in the log-factors. Source: ours.
    """
    result, totals = dict(weights), [1.0] * len(pairs)
    for _ in range(sweeps):
        for index, slices in enumerate(pairs):
            factor = balance_slices(result, slices, order)
            result = rescale_slices(result, slices, factor)
            totals[index] *= factor
    return result, totals


def permute_columns(tensor: Tensor, order: Sequence[int], signs: Sequence[int]) -> Tensor:
    """Column j of the result is signs[j] times column order[j]: a signed permutation P, so A P (B P)^T = A B^T.

    Source: ours; first moments follow their weight with the signs, second moments without.
    """
    return torch.stack([tensor[:, i].double() * sign for i, sign in zip(order, signs, strict=True)], dim=1)


@dataclass(frozen=True)
class AdamWState:
    """What AdamW keeps of one weight: steps taken, first and second moment, and with AMSGrad the latter's maximum."""

    step: int
    first: Tensor
    second: Tensor
    maximum: Tensor | None = None


def start_adamw(weight: Tensor, amsgrad: bool = False) -> AdamWState:
    """The state before the first step: zeros."""
    zero = torch.zeros_like(weight, dtype=torch.float64)
    return AdamWState(0, zero, zero, zero if amsgrad else None)


def step_adamw(
    weight: Tensor,
    gradient: Tensor,
    state: AdamWState,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.01,
) -> tuple[Tensor, AdamWState]:
    """One step of AdamW: the new weight and the new state.

        w <- w - lr decay w
        m <- b1 m + (1 - b1) g                    v <- b2 v + (1 - b2) g^2
        w <- w - lr (m / (1 - b1^t)) / ( sqrt(v / (1 - b2^t)) + eps )

    Decay is decoupled and multiplied by the learning rate, eps stands outside the root, and AMSGrad takes the largest
    v so far in place of v, as in PyTorch. Source: Loshchilov and Hutter (2019), Reddi et al. (2018).
    """
    w, g = weight.double(), gradient.double()
    step = state.step + 1
    w = w - learning_rate * decay * w
    first = betas[0] * state.first + (1 - betas[0]) * g
    second = betas[1] * state.second + (1 - betas[1]) * g * g
    maximum = None if state.maximum is None else torch.maximum(state.maximum, second)
    corrected_first = first / (1 - betas[0] ** step)
    corrected_second = (second if maximum is None else maximum) / (1 - betas[1] ** step)
    w = w - learning_rate * corrected_first / (corrected_second.sqrt() + eps)
    return w, AdamWState(step, first, second, maximum)


def step_sgd(
    weight: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None,
    learning_rate: float,
    momentum: float = 0.0,
    decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """One step of SGD with momentum and coupled decay: the new weight and the new momentum buffer.

        g <- g + decay w          m <- momentum m + g   (m = g at the first step)          w <- w - lr m

    As in PyTorch, without dampening and without Nesterov's variant. Source: Polyak (1964), Sutskever et al. (2013).
    """
    w, g = weight.double(), gradient.double()
    g = g + decay * w
    buffer = g if momentum_buffer is None else momentum * momentum_buffer.double() + g
    return w - learning_rate * buffer, buffer


def scale_adamw_settings(learning_rate: float, eps: float, decay: float, factor: float) -> tuple[float, float, float]:
    """Learning rate, eps and decay with which AdamW on c w repeats the run on w: (lr c, eps / c, decay / c).

    The update of w has degree 0 in w, so its rate takes a factor c; eps stands beside sqrt(v), of degree -1; and what
    counts of the decay is lr * decay, which stays as it was. Source: SAGGS paper (Kim, 2026); the settings are ours.
    """
    return learning_rate * factor, eps / factor, decay / factor


def scale_sgd_settings(learning_rate: float, decay: float, factor: float) -> tuple[float, float]:
    """Learning rate and coupled decay with which SGD on c w repeats the run on w: (lr c^2, decay / c^2).

    The update has degree -1 in w; the decayed gradient g + decay w has it too where decay goes as c^-2. Source: ours.
    """
    return learning_rate * factor * factor, decay / (factor * factor)
