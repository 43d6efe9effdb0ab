"""Balancing from sums alone: each tensor is cut into the rectangles that the pairs' slices make of it, its cells.

Every slice is a union of cells, and a rescaling multiplies each cell by one number m. So the squared norm of a slice is

    |slice|^2 = sum over its cells of m^2 n,        n = the cell's sum of w^2 (or of (1 + w)^2, or |w| for L1),

and once every n is known, one pass over the weights, any pairs can be balanced without the weights: at matrix, head or
channel granularity, disjoint or not. Pairs that share no entry have a closed form. Pairs that do (a norm gain and the
queries it feeds) are balanced in turn, over the sums, until nothing moves: coordinate descent on a convex function (a
sum of exponentials in the logarithms of the factors), exact, with no further pass over the weights.

A tensor whose rows belong to one channel pair and whose columns to another has as many cells as entries; its sums would
be the tensor itself. That is refused (`CELL_LIMIT`), not approximated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saggs.checkpoints.shards import CheckpointError
from saggs.objective import Terms, nearest_power_of_two
from saggs.pairs import ParameterSlice, ScalePair

CELL_LIMIT = 1 << 21
"""Cells of one tensor, at most: 16 MiB of sums."""
_SWEEPS = 2000
_SETTLED = 1e-13


class Grid:
    """The cells of one tensor.

    Attributes:
        shape: of the tensor.
        offset: 1 where the model uses 1 + w.
        cuts: per dimension the boundaries of the cells, from 0 to the length.
        first, cells: the tensor's cells are [first, first + cells) of the plan's.
    """

    def __init__(self, name: str, shape: tuple[int, ...], parts: Sequence[ParameterSlice], first: int) -> None:
        self.shape, self.first = shape, first
        offsets = {part.offset for part in parts}
        if len(offsets) != 1:
            raise CheckpointError(f"{name} is used as w by one pair and as 1 + w by another; leave one of them out")
        self.offset = offsets.pop()
        bounds = [[r or (0, n) for r, n in zip(part.ranges, shape, strict=True)] for part in parts]
        self._bounds = torch.tensor(bounds, dtype=torch.int64).reshape(len(parts), len(shape), 2)
        ends = torch.tensor([[0, n] for n in shape], dtype=torch.int64).reshape(len(shape), 2)
        self.cuts = [torch.unique(torch.cat([self._bounds[:, d].flatten(), ends[d]])) for d in range(len(shape))]
        self.counts = tuple(len(cut) - 1 for cut in self.cuts)
        self.cells = int(torch.tensor(self.counts, dtype=torch.int64).prod()) if shape else 1
        if self.cells > CELL_LIMIT:
            raise CheckpointError(
                f"{name}: the pairs cut it into {self.cells} cells, rows for one kind of pair and columns for another, "
                "which cannot be balanced from sums. Choose kinds whose pairs do not cross, or a coarser granularity"
            )
        self._line_cell = [torch.repeat_interleave(torch.arange(len(c) - 1), c.diff()) for c in self.cuts]

    def members(self) -> tuple[Tensor, Tensor]:
        """(index of the slice, cell) for every cell of every slice."""
        slices, dims = self._bounds.shape[:2]
        if dims == 0:
            return torch.arange(slices), torch.full((slices,), self.first)
        low = torch.stack(
            [torch.searchsorted(self.cuts[d], self._bounds[:, d, 0].contiguous()) for d in range(dims)], 1
        )
        high = torch.stack(
            [torch.searchsorted(self.cuts[d], self._bounds[:, d, 1].contiguous()) for d in range(dims)], 1
        )
        width = high - low
        count = width.prod(1)
        if int(count.sum()) > 4 * CELL_LIMIT:
            raise CheckpointError("the pairs' slices overlap too often to be balanced from sums; choose fewer kinds")
        owner = torch.repeat_interleave(torch.arange(slices), count)
        rest = torch.arange(len(owner)) - torch.repeat_interleave(count.cumsum(0) - count, count)
        cell, stride = torch.zeros_like(rest), 1
        for d in reversed(range(dims)):
            cell += (low[owner, d] + rest % width[owner, d]) * stride
            rest //= width[owner, d]
            stride *= self.counts[d]
        return owner, cell + self.first

    def add_sums(self, rows: Tensor, first_row: int, order: int, sums: Tensor) -> None:
        """Add |w|^order of these rows (|1 + w|^order where used so) to their cells in `sums`, in float64."""
        values = rows.double()
        if self.offset:
            values = values.add_(1) if rows.dtype != torch.float64 else values + 1
        values = values.square() if order == 2 else values.abs()
        uncut = [d for d in range(len(self.shape)) if self.counts[d] == 1]
        if uncut:
            values = values.sum(uncut, keepdim=True)
        for d in range(len(self.shape)):
            if self.counts[d] > 1:
                lines = self._line_cell[d] if d else self._line_cell[0][first_row : first_row + rows.shape[0]]
                shape = list(values.shape)
                shape[d] = self.counts[d]
                values = values.new_zeros(shape).index_add_(d, lines, values)
        sums[self.first : self.first + self.cells] += values.flatten()

    def expanded(self, multipliers: Tensor) -> Tensor:
        """The tensor's multipliers with one entry a line in every dimension but the first, ready for `scale_rows`."""
        own = multipliers[self.first : self.first + self.cells].reshape(self.counts)
        for d in range(1, len(self.shape)):
            if self.counts[d] > 1:
                own = own.index_select(d, self._line_cell[d])
        return own

    def rows_of(self, expanded: Tensor, first_row: int, count: int) -> Tensor:
        """Multipliers of `count` rows, broadcastable over them."""
        if not self.shape or self.counts[0] == 1:
            return expanded
        return expanded.index_select(0, self._line_cell[0][first_row : first_row + count])


def scale_rows(rows: Tensor, multipliers: Tensor, offset: int) -> None:
    """w -> m w, or 1 + w -> m (1 + w), in place: in float64 (float32 for 16 bits), rounded once.

    Exact for powers of two where the result is a normal number of its dtype.
    """
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else torch.float64
    values = rows.to(wide) if rows.dtype != wide else rows
    if offset:
        values.add_(1).mul_(multipliers.to(wide)).sub_(1)
    else:
        values.mul_(multipliers.to(wide))
    if values is not rows:
        rows.copy_(values)


@dataclass(frozen=True)
class Balance:
    """What `CellPlan.balance` found.

    Attributes:
        factors: float64, (pairs,); 1 where nothing is to be done.
        before, after: log2(|left| / |right|), (pairs,).
        rounded: bool, (pairs,): the factor is the nearest power of two.
        impossible: bool, (pairs,): a side has norm zero; the pair is left alone.
    """

    factors: Tensor
    before: Tensor
    after: Tensor
    rounded: Tensor
    impossible: Tensor


class CellPlan:
    """The cells of all tensors that take part in some pairs.

    Args:
        pairs: disjoint or not.
        shapes: of every tensor by name.

    Attributes:
        grids: name -> `Grid`.
        cells: how many there are in all.

    Raises:
        CheckpointError: too many cells, a tensor that is not of the pair's shape, or a pair that holds an entry twice.
    """

    def __init__(self, pairs: Sequence[ScalePair], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.pairs = list(pairs)
        parts: dict[str, list[tuple[int, ParameterSlice]]] = {}
        for index, pair in enumerate(self.pairs):
            for part in pair.slices:
                if part.shape is not None and part.shape != tuple(shapes[part.name]):
                    raise CheckpointError(f"{part.name} has shape {shapes[part.name]}, the pair expects {part.shape}")
                parts.setdefault(part.name, []).append((index, part))
        self.grids: dict[str, Grid] = {}
        self.cells = 0
        self._terms = Terms(self.pairs)
        pair_of, cell_of, exponent_of, term_of = [], [], [], []
        for name, held in parts.items():
            grid = Grid(name, tuple(shapes[name]), [part for _, part in held], self.cells)
            owner, cell = grid.members()
            pair_of.append(torch.tensor([index for index, _ in held])[owner])
            exponent_of.append(torch.tensor([part.exponent for _, part in held])[owner])
            term_of.append(torch.tensor([self._terms.number(index, part) for index, part in held])[owner])
            cell_of.append(cell)
            self.grids[name] = grid
            self.cells += grid.cells
        self._pair, self._cell = torch.cat(pair_of), torch.cat(cell_of)
        self._exponent, self._term = torch.cat(exponent_of), torch.cat(term_of)
        self._refuse_twice()

    def _refuse_twice(self) -> None:
        keys = self._pair * self.cells + self._cell
        values, counts = torch.unique(keys, return_counts=True)
        if bool((counts > 1).any()):
            pair = self.pairs[int(values[counts > 1][0]) // self.cells]
            raise CheckpointError(f"{pair} holds an entry of a tensor twice; it is no pair")

    def new_sums(self) -> Tensor:
        """Zeros for `Grid.add_sums`, float64, (cells,)."""
        return torch.zeros(self.cells, dtype=torch.float64)

    def balance(self, sums: Tensor, order: int, damping: float, rounded: Tensor, dead_zone: Tensor) -> Balance:
        """The factors that balance every pair, from the sums of its cells.

        Args:
            sums: float64, (cells,), finite.
            order: 2 for Frobenius norms, 1 for sums of absolute values.
            damping: in (0, 1]; the factors are raised to it.
            rounded: bool, (pairs,): which factors are to be powers of two.
            dead_zone: float64, (pairs,): a factor this near to 1 changes nothing but rounding, and becomes 1.
        """
        norms = self._norms(sums, order)
        shared = bool((torch.bincount(self._cell, minlength=self.cells) > 1).any())
        factors, possible = self._sweeps(sums, order) if shared else _usable(self._terms.factors(norms, order))
        if damping != 1.0:
            factors = factors**damping
        factors = torch.where((factors - 1).abs() <= dead_zone, torch.ones_like(factors), factors)
        factors = torch.where(rounded, nearest_power_of_two(factors), factors)
        after = self._norms(sums * self.multipliers(factors) ** order, order)
        return Balance(factors, self._log2_ratios(norms, order), self._log2_ratios(after, order), rounded, ~possible)

    def _log2_ratios(self, norms: Tensor, order: int) -> Tensor:
        left, right = self._terms.sides(norms, order)
        return torch.log2(left / right)

    def _norms(self, sums: Tensor, order: int) -> Tensor:
        """The norm of every term, shape (terms,), from the sums of its cells."""
        counted = self._term >= 0
        totals = sums.new_zeros(self._terms.count)
        totals.index_add_(0, self._term[counted], sums[self._cell[counted]])
        return totals.sqrt() if order == 2 else totals

    def _sweeps(self, sums: Tensor, order: int) -> tuple[Tensor, Tensor]:
        """Coordinate descent over groups of disjoint pairs, until no factor moves."""
        groups = self._disjoint_groups()
        logs, possible = sums.new_zeros(len(self.pairs)), torch.ones(len(self.pairs), dtype=torch.bool)
        moved = float("inf")
        for _ in range(_SWEEPS):
            moved = 0.0
            for group in groups:
                now = sums * self.multipliers(logs.exp()) ** order
                factors, usable = _usable(self._terms.factors(self._norms(now, order), order))
                possible &= usable | ~group
                step = torch.where(group, factors.log(), 0.0)
                logs += step
                moved = max(moved, float(step.abs().max()))
            if moved < _SETTLED:
                return logs.exp(), possible
        raise CheckpointError(
            f"pairs that share tensors did not settle in {_SWEEPS} sweeps (last step {moved:.0e}); choose fewer kinds"
        )

    def _disjoint_groups(self) -> list[Tensor]:
        """Masks of pairs that share no cell, by turns: of those left, each that is the first one at all its cells."""
        groups, open_pairs = [], torch.ones(len(self.pairs), dtype=torch.bool)
        while bool(open_pairs.any()):
            live = open_pairs[self._pair]
            pair, cell = self._pair[live], self._cell[live]
            first = torch.full((self.cells,), len(self.pairs)).scatter_reduce_(0, cell, pair, "amin")
            beaten = torch.zeros_like(open_pairs)
            beaten[pair[first[cell] != pair]] = True
            groups.append(open_pairs & ~beaten)
            open_pairs = open_pairs & beaten
        return groups

    def multipliers(self, factors: Tensor, degree: int = 1) -> Tensor:
        """What every cell is multiplied by, float64, (cells,): the product of factor ** (exponent * degree).

        By repeated multiplication, negative powers of one reciprocal: exact for powers of two.
        """
        powers = torch.empty(len(self._pair), dtype=torch.float64)
        for exponent in torch.unique(self._exponent).tolist():
            base = factors if exponent * degree > 0 else factors.reciprocal()
            power = base.clone()
            for _ in range(abs(exponent * degree) - 1):
                power *= base
            chosen = self._exponent == exponent
            powers[chosen] = power[self._pair[chosen]]
        return factors.new_ones(self.cells).scatter_reduce_(0, self._cell, powers, "prod")


def _usable(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Factors with 1 for those of pairs that have no balanced point (a side is zero), and which have one."""
    possible = torch.isfinite(factors) & (factors > 0)
    return torch.where(possible, factors, torch.ones_like(factors)), possible
