"""Equal sums of lines: heads that share a key or a value head, and channels that a rotary position turns together.

    Σ_h o[h, t] = v[t]                                     a value channel and its readers in the heads of its group
    Σ_h (q[h, i] + q[h, i + o]) = k[i] + k[i + o]          a rotary frequency of a group: o is the partner's distance

The lines of heads stand a stride apart, so a hypothesis is three numbers (heads a group, stride, partner's distance),
and it is tried on all lines of all matrices at once: no head size is read from a configuration, and the order of blocks
in a fused matrix does not matter. The smallest hypothesis that holds is the finest generator.

Source: the identities follow from the code of grouped queries and rotary positions; the search is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saggs.charges import Lines
from saggs.ledger import EXACT, Relations, admit, crosses

_WIDE = 512


@dataclass(frozen=True)
class Comb:
    """A hypothesis: `heads` lines, `stride` apart, each with a rotary partner `offset` away (0: none), against one."""

    heads: int
    stride: int
    offset: int

    def teeth(self) -> list[int]:
        """Where the lines of the many side stand, counted from the first."""
        return [h * self.stride + p for h in range(self.heads) for p in self.single()]

    def single(self) -> list[int]:
        """Where those of the one head stand that the many share."""
        return [0, self.offset] if self.offset else [0]


class _Row:
    """The free lines of all families in one row of numbers: a sum of charges becomes a sum of their projections.

    Two equal sums are two equal numbers, so that a hypothesis is tried on all lines of all families by adding the row
    to itself, shifted, and by sorting. What agrees in one projection is then compared on every probe.
    """

    def __init__(self, found: Relations, summed: Callable[[Lines], bool]) -> None:
        self.found = found
        self.families = [
            f for f, lines in enumerate(found.lines) if lines.count > 1 and bool(found.free(f).any()) and summed(lines)
        ]
        generator = torch.Generator().manual_seed(2)
        direction = torch.randn(found.charges[0].shape[0], generator=generator, dtype=torch.float64)
        counts = torch.tensor([found.lines[f].count for f in self.families], dtype=torch.int64)
        self.family = torch.repeat_interleave(torch.arange(len(counts)), counts)
        self.line = torch.cat([torch.arange(n) for n in counts.tolist()]) if len(counts) else counts
        self.left_over = torch.repeat_interleave(counts, counts) - self.line  # lines to the family's end, this included
        self.key = torch.cat([direction @ found.charges[f] for f in self.families]) if len(counts) else counts.double()
        self.refresh()
        alive = self.key[self.free].abs()
        self.tolerance = 1e-9 * max(float(alive.median()) if len(alive) else 0.0, 1e-300)

    def refresh(self) -> None:
        """After lines were explained."""
        free = [self.found.free(f) for f in self.families]
        self.free = torch.cat(free) if free else torch.zeros(0, dtype=torch.bool)

    def pairs(self, offset: int) -> tuple[Tensor, Tensor]:
        """(sum, whether it exists) of every line with its partner `offset` further."""
        if not offset:
            return self.key, self.free
        return self.key + _shifted(self.key, offset), self.free & _shifted(self.free, offset) & (
            self.left_over > offset
        )


def _shifted(row: Tensor, by: int) -> Tensor:
    """`row` moved to the left; zeros (False) come in."""
    return torch.cat([row[by:], torch.zeros(min(by, len(row)), dtype=row.dtype)])


def find_equal_sums(found: Relations, summed: Callable[[Lines], bool]) -> None:
    """Combs: the lines of a group's heads, with their rotary partners, against those of the one head they share."""
    row = _Row(found, summed)
    counts = sorted({found.lines[f].count for f in row.families})
    strides = sorted({d for n in counts for d in range(1, n + 1) if n % d == 0})
    if max(counts, default=0) > _WIDE:
        strides = [d for d in strides if 4 <= d <= _WIDE]
    for offset in _offsets(counts, strides):
        if not bool(row.free.any()):
            break
        # Without partners first: a rotary pair is only what no single channel explains.
        if offset:
            _try_comb(row, Comb(1, 0, offset), *row.pairs(offset))
        for stride in strides:
            if 2 * offset > stride:
                continue
            total, exists = row.pairs(offset)
            single, single_exists = total, exists
            for heads in range(2, max(counts) // stride + 1):
                by = (heads - 1) * stride
                total = total + _shifted(single, by)
                exists = exists & _shifted(single_exists, by) & (row.left_over > by + offset)
                if not bool(exists.any()):
                    break
                if _try_comb(row, Comb(heads, stride, offset), total, exists):
                    exists = exists & row.free
                    single_exists = row.pairs(offset)[1]


def _offsets(counts: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Distances of rotary partners, 0 (none) first: all of them, or in wide models those that are in use.

    Those are 1 (interleaved) and half of a head's rotated channels (half-split): all of them, or of the head a multiple
    of an eighth.
    """
    widest = max(counts, default=0)
    if widest <= _WIDE:
        return list(range(widest // 2 + 1))
    halves = [d // 2 for d in strides if d % 2 == 0]
    parts = [d * j // 16 for d in strides if d % 16 == 0 for j in range(1, 8)]
    return list(dict.fromkeys([0, 1, *halves, *parts]))


def _try_comb(row: _Row, comb: Comb, many: Tensor, exists: Tensor) -> bool:
    """Admit every match of one hypothesis, between any two families; whether there was one."""
    few, few_exists = row.pairs(comb.offset)
    left, right = exists.nonzero().flatten(), few_exists.nonzero().flatten()
    if not len(left) or not len(right):
        return False
    order = torch.argsort(few[right])
    right = right[order]
    keys = few[right]
    low = torch.searchsorted(keys, many[left] - row.tolerance)
    high = torch.searchsorted(keys, many[left] + row.tolerance)
    matches: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for hit in (high - low > (1 if comb.heads == 1 else 0)).nonzero().flatten().tolist():
        x = int(left[hit])
        for y in right[low[hit] : high[hit]].tolist():
            if x != y and (comb.heads > 1 or x < y):
                families = row.families[int(row.family[x])], row.families[int(row.family[y])]
                matches.setdefault(families, []).append((int(row.line[x]), int(row.line[y])))
    admitted = False
    for families, places in matches.items():
        if not crosses(*(row.found.lines[f] for f in families)):
            admitted |= _admit_comb(row.found, comb, families, places)
    if admitted:
        row.refresh()
    return admitted


def _admit_comb(found: Relations, comb: Comb, families: tuple[int, int], places: list[tuple[int, int]]) -> bool:
    """Admit those matches that hold on every probe, each line once; whether there was one."""
    first, second = families
    starts = torch.tensor(sorted(places))
    left, right = starts[:, :1] + torch.tensor(comb.teeth()), starts[:, 1:] + torch.tensor(comb.single())
    good = found.residual_of(((first, left, 1), (second, right, -1))) <= EXACT
    keep: list[int] = []
    taken: set[tuple[int, int]] = set()
    for place in good.nonzero().flatten().tolist():
        uses = [(first, i) for i in left[place].tolist()] + [(second, i) for i in right[place].tolist()]
        if len(set(uses)) == len(uses) and taken.isdisjoint(uses) and all(bool(found.free(f)[i]) for f, i in uses):
            keep.append(place)
            taken.update(uses)
    if keep:
        form = {"heads": comb.heads, "stride": comb.stride, "offset": comb.offset}
        admit(found, [(first, left[keep], 1), (second, right[keep], -1)], "comb", **form)
    return bool(keep)


__all__ = ["Comb", "find_equal_sums"]
