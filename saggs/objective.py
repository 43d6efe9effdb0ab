"""Which factor balances a pair: the one that makes its weights least on their orbit.

A pair's weights w_i of exponents e_i become c^(e_i) w_i. Let |.| be the Frobenius norm and r = 2, or |.| the sum of
absolute values and r = 1. The objective

    f(c) = sum_i |w_i|^r c^(r e_i)

is convex in log c, and has one minimum, where sum_i e_i |w_i|^r c^(r e_i) = 0. With one exponent a side, p and -q,

    c = ( (q |B|^r) / (p |A|^r) )^(1 / (r (p + q))),        c = (|B| / |A|)^(1/2)  for p = q = 1,

where both norms become equal. r = 2 is balancing as in SAGGS, r = 1 the objective of WISCA.

Where a side mixes exponents there is no closed form. With t = log c and

    h(t) = log sum_left p_i |w_i|^r e^(r p_i t)  -  log sum_right q_j |w_j|^r e^(-r q_j t)

the minimum is the root of h, whose slope lies between r (min p + min q) and r (max p + max q): Newton's method on h,
kept inside the bracket that these slopes give. For one exponent a side h is a straight line and one step is exact,
which is the closed form again.

The closed form is written as `sqrt` of a ratio because that is exact for powers of two: balance(2^k A, B / 2^k) gives
the very bits of balance(A, B), weights and moments (`exp` of half a logarithm does not).

Source: the SAGGS paper (Kim, 2026) for r = 2 and exponents 1; WISCA for r = 1; other exponents are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from saggs.lines import Constant
from saggs.pairs import ParameterSlice, ScalePair

Norm = Literal["l2", "l1"]
ORDERS: dict[str, int] = {"l2": 2, "l1": 1}
_NEWTON_STEPS = 30


def order_of(norm: str) -> int:
    """The r of "l2" or "l1". Raises a ValueError for anything else."""
    if norm not in ORDERS:
        raise ValueError(f"norm={norm!r}: choose l2 (Frobenius norms) or l1 (sums of absolute values)")
    return ORDERS[norm]


class Terms:
    """The norms that decide the factors of some pairs, numbered.

    Each side of a pair has one term; a side that mixes exponents has one for each of them. Numbered are first every
    pair's left term, then every pair's right term, then the further ones of mixed sides. Biases count in none.

    Attributes:
        count: how many terms there are.
        mixed: pairs with more than two terms: index -> [(number of the term, its exponent)].
    """

    def __init__(self, pairs: Sequence[ScalePair]) -> None:
        self._pairs = len(pairs)
        self.count = 2 * len(pairs)
        self.mixed: dict[int, list[tuple[int, int]]] = {}
        self._number: dict[tuple[int, int], int] = {}
        firsts: list[tuple[int, int]] = []
        for index, pair in enumerate(pairs):
            left, right = (
                sorted({p.exponent for p in side if not p.bias}, key=abs) for side in (pair.left, pair.right)
            )
            firsts.append((left[0], -right[0]))
            self._number[index, left[0]], self._number[index, right[0]] = index, index + len(pairs)
            for exponent in left[1:] + right[1:]:
                self._number[index, exponent] = self.count
                self.count += 1
            if len(left) + len(right) > 2:
                self.mixed[index] = [(self._number[index, exponent], exponent) for exponent in left + right]
        exponents = torch.tensor(firsts).T
        self._plain = not self.mixed and bool((exponents == 1).all())
        self._exponents = Constant(exponents)
        if self.mixed:
            most = max(len(terms) for terms in self.mixed.values())
            table = torch.tensor([terms + [(self.count, 0)] * (most - len(terms)) for terms in self.mixed.values()])
            self._index = Constant(torch.tensor(list(self.mixed)))
            self._table, self._powers = Constant(table[..., 0]), Constant(table[..., 1])

    def number(self, index: int, part: ParameterSlice) -> int:
        """The term in which a slice of pair `index` counts; -1 for a bias."""
        return -1 if part.bias else self._number[index, part.exponent]

    def sides(self, norms: Tensor, order: int) -> tuple[Tensor, Tensor]:
        """The norms of the left and right sides, shape (pairs,) each, from those of the terms, shape (terms,)."""
        sides = norms[: self._pairs], norms[self._pairs : 2 * self._pairs]
        if not self.mixed:
            return sides
        each, powers = self._of_mixed(norms)
        joint = [torch.linalg.vector_norm(torch.where(powers * s > 0, each, 0.0), order, dim=1) for s in (1, -1)]
        index = self._index.on(norms.device)
        left, right = (side.index_copy(0, index, j.to(side)) for side, j in zip(sides, joint, strict=True))
        return left, right

    def factors(self, norms: Tensor, order: int) -> Tensor:
        """The factor of every pair, shape (pairs,): zero, infinite or NaN where it has no balanced point."""
        left, right = norms[: self._pairs], norms[self._pairs : 2 * self._pairs]
        factors = torch.sqrt(right / left)
        if self._plain:
            return factors
        p, q = self._exponents.on(norms.device).to(norms.dtype).unbind()
        general = ((q * right**order) / (p * left**order)) ** (1 / (order * (p + q)))
        factors = torch.where((p == 1) & (q == 1), factors, general)
        if not self.mixed:
            return factors
        each, powers = self._of_mixed(norms)
        solved = torch.exp(_solve(each.log(), powers, order))
        return factors.index_copy(0, self._index.on(norms.device), solved.to(norms.dtype))

    def _of_mixed(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Norms and exponents of the mixed pairs' terms in float64, shape (mixed pairs, most terms); 0 where none."""
        padded = torch.cat([norms.double(), norms.new_zeros(1, dtype=torch.float64)])
        return padded[self._table.on(norms.device)], self._powers.on(norms.device).double()


def _solve(logs: Tensor, powers: Tensor, order: int) -> Tensor:
    """The roots t of h, shape (pairs,), from log-norms and exponents of shape (pairs, terms); NaN where none.

    A fixed number of steps, so that no device has to be waited for. A step that leaves the bracket is halved into it.
    """
    weights = order * logs + powers.abs().log()
    left, right = powers > 0, powers < 0
    sizes = powers.abs()
    extremes = [torch.where(side, sizes, none) for side in (left, right) for none in (math.inf, 0.0)]
    flat = order * (extremes[0].amin(1) + extremes[2].amin(1))
    steep = order * (extremes[1].amax(1) + extremes[3].amax(1))
    t = torch.zeros_like(flat)
    low, high = torch.full_like(flat, -math.inf), torch.full_like(flat, math.inf)
    for _ in range(_NEWTON_STEPS):
        now = weights + order * powers * t[:, None]
        sums = [torch.where(side, now, -math.inf) for side in (left, right)]
        height = torch.logsumexp(sums[0], 1) - torch.logsumexp(sums[1], 1)
        slope = order * sum((torch.softmax(s, 1) * sizes).sum(1) for s in sums)
        near, far = t - height / steep, t - height / flat
        low, high = torch.maximum(low, torch.minimum(near, far)), torch.minimum(high, torch.maximum(near, far))
        step = t - height / slope
        t = torch.where((step >= low) & (step <= high), step, (low + high) / 2)
    return t


def nearest_power_of_two(factors: Tensor) -> Tensor:
    """The power of two nearest in log2 to every factor (positive, finite).

    c = m 2^e with 1/2 <= m < 1 goes to 2^(e - 1) where m < sqrt(1/2), and to 2^e otherwise. Decided by the mantissa,
    which a factor 2^k leaves alone, it is idempotent to the bit: what is left after rounding rounds to 1. (`round` of
    a logarithm is not, near half-integers.)
    """
    mantissa, _ = torch.frexp(factors)
    power = factors / mantissa
    below = mantissa.double() < math.sqrt(0.5)  # the root's float32 is below the root
    return torch.where(below, power / 2, power)
