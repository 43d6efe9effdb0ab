"""Relations among scale charges: every way to stretch some lines and shrink others that changes no output.

The idea
--------
`saggs.charges` gives a table of numbers, one column a line of weights. Where Σ a_i q_i = 0 in every row of the table,
multiplying line i by c^(a_i) changes no output, for any c > 0. The solutions a are the null space of the table, and the
whole numbers in a sparse basis of it are the exponents. Most solutions have one of three shapes, and those are found at
any width, with a dozen probes, by looking for equal columns:

    two equal lines     q[i] = k[i]                          a channel of attention without rotary positions,
                        up[i] = p · down[i]                  a neuron; ReLU² has p = 2,
    equal sums (combs)  Σ_h v-reader o[h, t] = v[t]          a value channel read by the heads of its group,
                        Σ_h (q[h, i] + q[h, i + o]) = k[i] + k[i + o]
                                                             a rotary frequency: two channels that turn together,
    aligned families    gain[j] (+ bias[j]) = Σ_m W_m[:, j]  a norm's gain and the columns of all its readers,
                        the same coefficients for every j.

What a shape explains, the null space of a small model counts (`saggs.nullspace`): nothing may be left over.

A worked example, the network of `saggs.charges` with ReLU²: stretching a neuron's row by c stretches its activation by
c², so its column must shrink by c². The exponents come out as numbers, not from a rule about ReLU².

    >>> import torch
    >>> from torch import nn
    >>> from saggs.charges import scale_charges
    >>> class Squared(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(2, 3), nn.Linear(3, 2)
    ...     def forward(self, x):
    ...         return self.down(torch.relu(self.up(x)) ** 2)
    >>> def inputs(generator, count):
    ...     return {"x": torch.randn(count, 2, generator=generator)}
    >>> (neurons,) = find_relations(scale_charges(Squared(), inputs=inputs))
    >>> for side in neurons.sides:
    ...     print(side.lines.name, side.lines.role, side.index.flatten().tolist(), "exponent", side.exponent)
    up.weight out [0, 1, 2] exponent 1
    down.weight in [0, 1, 2] exponent -2
    >>> neurons.residual < 1e-12
    True

Off-diagonal charges <a, dL/db> of two lines a, b tell which lines may also be *mixed*: values and their readers by any
invertible matrix within a head (so heads show as blocks), the neurons of an MLP not at all. That tells a value-output
pair from an MLP's, and delimits heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from saggs.charges import ChargeTable, Lines

EXACT = 1e-9
_LARGEST_EXPONENT = 8
_DEAD = 1e-12
_WIDE = 512


@dataclass(frozen=True)
class Side:
    """The lines of one family that a relation's generators move, and by which power.

    Attributes:
        lines: the family.
        index: which of its lines, shape (generators, terms).
        exponent: each is multiplied by factor ** exponent.
    """

    lines: Lines
    index: Tensor
    exponent: int


@dataclass(frozen=True)
class Relation:
    """Generators of one shape: the g-th multiplies line index[g, t] of every side by factor ** exponent.

    Attributes:
        sides: positive exponents first.
        residual: largest |Σ a_i q_i| of a generator relative to its largest charge, over all probes.
        shape: "lines", "comb" or "aligned".
        heads: how many lines of a comb's many side are added a group (1 where there are as many heads as groups).
        stride: from one head's line to the next.
        offset: from one rotary channel to its partner; 0 without rotary positions.
    """

    sides: tuple[Side, ...]
    residual: float
    shape: str
    heads: int = 1
    stride: int = 0
    offset: int = 0

    @property
    def count(self) -> int:
        """How many generators."""
        return len(self.sides[0].index)


class Relations(list[Relation]):
    """The relations that were found, and what became of every line.

    Attributes:
        explained: for each family of lines, which of them take part in a relation.
        exercised: which of them have a charge at all; the others were reached by no probe, or do nothing.
    """

    def __init__(self, table: ChargeTable) -> None:
        super().__init__()
        self.lines = table.lines
        scale = torch.stack([c.abs().amax(dim=1) for c in table.charges]).amax(dim=0).clamp_min(1e-300)
        # One scale a probe for all lines: relations are kept, and no draw of the weights drowns another.
        self.charges = tuple(c / scale[:, None] for c in table.charges)
        self.norms = tuple(c.norm(dim=0) for c in self.charges)
        self.exercised = tuple(n > _DEAD for n in self.norms)
        self.explained = tuple(torch.zeros(f.count, dtype=torch.bool) for f in self.lines)
        self._position = {f.key: i for i, f in enumerate(self.lines)}

    def position(self, lines: Lines) -> int:
        """Where a family stands in `lines`."""
        return self._position[lines.key]

    def free(self, family: int) -> Tensor:
        """Lines of a family that are exercised and not explained yet, as a mask."""
        return torch.logical_and(self.exercised[family], ~self.explained[family])

    def admit(self, relation: Relation) -> None:
        """Take a relation in: its lines are explained. A gain explained as 1 + w is so as w, and the reverse."""
        self.append(relation)
        for side in relation.sides:
            for family, lines in enumerate(self.lines):
                if lines.name == side.lines.name and lines.dims == side.lines.dims:
                    self.explained[family][side.index.flatten()] = True

    def residual_of(self, sides: Iterable[tuple[int, Tensor, int]]) -> Tensor:
        """|Σ a_i q_i| / largest |a_i q_i| of every generator, shape (generators,); sides as (family, index, a)."""
        parts = [a * self.charges[f][:, index].sum(dim=-1) for f, index, a in sides]
        total = torch.stack(parts).sum(dim=0).norm(dim=0)
        size = torch.stack([p.norm(dim=0) for p in parts]).amax(dim=0)
        return torch.div(total, size.clamp_min(1e-300))


def find_relations(table: ChargeTable, summed: Callable[[Lines], bool] | None = None) -> Relations:
    """Every relation of the three shapes among the charges of a table, finest first.

    Args:
        table: from `saggs.charges.scale_charges`.
        summed: which families may take part in sums of lines; all where None.
    """
    found = Relations(table)
    _aligned_families(found)
    _equal_lines(found)
    _equal_sums(found, summed or (lambda lines: True))
    return found


# --- aligned families -------------------------------------------------------------------------------------------------


def _aligned_families(found: Relations) -> None:
    """Relations with the same coefficients for every line: Σ_m a_m q_m[j] = 0 for all j. They explain norm gains."""
    by_length: dict[int, list[int]] = {}
    for family, lines in enumerate(found.lines):
        if lines.role != "out" and lines.count > 0 and _marginal_count(lines) > 0:
            by_length.setdefault(_marginal_count(lines), []).append(family)
    for length, families in by_length.items():
        alive = [f for f in families if bool(found.exercised[f].all())]
        equations = len(found.charges[0]) * length
        if not any(found.lines[f].role == "entry" for f in alive) or equations < len(alive) + 8:
            continue  # with too few equations anything is a solution
        columns = torch.stack([_marginal(found.lines[f], found.charges[f]).flatten() for f in alive], dim=1)
        for vector in integer_null_vectors(columns):
            chosen = [i for i in range(len(alive)) if vector[i]]
            gains = [i for i in chosen if found.lines[alive[i]].role == "entry"]
            names = [found.lines[alive[i]].name for i in chosen]
            if not gains or len({vector[i] > 0 for i in chosen}) < 2 or len(set(names)) < len(names):
                continue
            sign = 1 if vector[gains[0]] > 0 else -1
            exponents = [(alive[i], sign * vector[i]) for i in chosen]
            exponents.sort(key=lambda e: (e[1] < 0, e[0]))
            sides = [Side(found.lines[f], _marginal_index(found.lines[f]), a) for f, a in exponents]
            residual = found.residual_of((f, s.index, s.exponent) for (f, _), s in zip(exponents, sides, strict=True))
            found.admit(Relation(tuple(sides), float(residual.max()), "aligned"))


def _marginal_count(lines: Lines) -> int:
    """The size of the last numbered dimension: a stack of matrices is read by one input together."""
    return lines.shape[lines.dims[-1]] if lines.dims else 1


def _marginal(lines: Lines, charges: Tensor) -> Tensor:
    return charges.reshape(len(charges), -1, _marginal_count(lines)).sum(dim=1)


def _marginal_index(lines: Lines) -> Tensor:
    return torch.arange(lines.count).reshape(-1, _marginal_count(lines)).T.contiguous()


def integer_null_vectors(columns: Tensor) -> list[list[int]]:
    """A sparse basis in small whole numbers of the null space of `columns`, shape (equations, unknowns).

    Vectors that are no multiple of whole numbers up to 8 are left out. Columns may be of very different sizes.
    """
    sizes = columns.norm(dim=0)
    if columns.shape[1] == 0 or not bool((sizes > 0).all()):
        return []
    triangle = torch.linalg.qr(columns / sizes, mode="r").R
    _, values, right = torch.linalg.svd(triangle)
    rank = int((values > EXACT * values[0]).sum())
    if rank == len(right):
        return []
    basis = _echelon(right[rank:]) / sizes
    return [whole for vector in basis if (whole := _whole_numbers(vector)) is not None]


def _echelon(basis: Tensor) -> Tensor:
    """Reduced echelon form with the largest entry of the whole as pivot: disjoint solutions come out one by one."""
    basis = basis.clone()
    rest = list(range(len(basis)))
    for _ in range(len(basis)):
        row, column = divmod(int(basis[rest].abs().argmax()), basis.shape[1])
        pivot = rest.pop(row)
        basis[pivot] = basis[pivot] / basis[pivot, column].clone()
        others = [i for i in range(len(basis)) if i != pivot]
        basis[others] -= basis[others, column, None] * basis[pivot]
    return basis


def _whole_numbers(vector: Tensor, tolerance: float = 1e-6) -> list[int] | None:
    """The vector times the smallest factor that makes all entries whole and at most 8; None where none does."""
    size = vector.abs().max()
    kept = torch.where(vector.abs() > tolerance * size, vector, torch.zeros_like(vector))
    smallest = kept.abs()[kept != 0].min()
    for factor in range(1, _LARGEST_EXPONENT + 1):
        scaled = kept / smallest * factor
        whole = scaled.round()
        if bool(((scaled - whole).abs() < tolerance * factor * 10).all()) and whole.abs().max() <= _LARGEST_EXPONENT:
            return [int(v) for v in whole.tolist()]
    return None


# --- two equal lines --------------------------------------------------------------------------------------------------


def _equal_lines(found: Relations) -> None:
    """Lines whose charges are proportional on every probe: hashed, so that the work is that of sorting them."""
    family, line = _numbered([found.free(f) for f in range(len(found.lines))])
    if not len(line):
        return
    charges = torch.cat([found.charges[f][:, found.free(f)] for f in range(len(found.lines))], dim=1).T
    norms = charges.norm(dim=1)
    label = _clusters(charges / norms[:, None])
    order = torch.argsort(label, stable=True)
    pairs: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    for members in _runs(label[order]):
        chain = order[members[0] : members[1]].tolist()
        if len(chain) > 2 and len({int(family[m]) for m in chain}) == 1:
            continue
        for a, b in itertools.pairwise(chain):
            ratio = Fraction(float(norms[a] / norms[b])).limit_denominator(_LARGEST_EXPONENT)
            if abs(float(ratio) - float(norms[a] / norms[b])) > 1e-6 or ratio.numerator > _LARGEST_EXPONENT:
                continue
            # a · q_a = b · q_b with q_a / q_b = ratio
            key = (int(family[a]), int(family[b]), ratio.denominator, ratio.numerator)
            pairs.setdefault(key, []).append((int(line[a]), int(line[b])))
    for (first, second, p, q), matches in pairs.items():
        if found.lines[first].role == "in" and found.lines[second].role != "in":
            first, second, p, q, matches = second, first, q, p, [(b, a) for a, b in matches]
        if _crosses(found.lines[first], found.lines[second]):
            continue
        index = torch.tensor(sorted(matches))
        sides = ((first, index[:, :1], p), (second, index[:, 1:], -q))
        good = found.residual_of(sides) <= EXACT
        if bool(good.any()):
            _admit(found, [(f, i[good], a) for f, i, a in sides], "lines")


def _crosses(first: Lines, second: Lines) -> bool:
    """Rows against columns of one matrix, or w against 1 + w: equal where one line alone is alive, which is trivial."""
    return first.name == second.name and first.key != second.key


def _admit(found: Relations, sides: Sequence[tuple[int, Tensor, int]], shape: str, **form: int) -> None:
    residual = float(found.residual_of(sides).max())
    found.admit(Relation(tuple(Side(found.lines[f], i, a) for f, i, a in sides), residual, shape, **form))


def _numbered(masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(family, line) of every marked line, families in order."""
    lines = [mask.nonzero().flatten() for mask in masks]
    return torch.cat([torch.full_like(line, f) for f, line in enumerate(lines)]), torch.cat(lines)


def _clusters(vectors: Tensor) -> Tensor:
    """A label for each row of `vectors`; rows within 1e-8 of each other have the same one. Sorts three projections."""
    generator = torch.Generator().manual_seed(1)
    label = torch.zeros(len(vectors), dtype=torch.int64)
    for _ in range(3):
        key = vectors @ torch.randn(vectors.shape[1], generator=generator, dtype=vectors.dtype)
        order = torch.argsort(key, stable=True)
        order = order[torch.argsort(label[order], stable=True)]
        fresh = (key[order].diff() > 1e-8) | (label[order].diff() != 0)
        label = torch.empty_like(label).scatter_(0, order, torch.cat([fresh.new_zeros(1), fresh]).cumsum(0))
    return label


def _runs(sorted_labels: Tensor) -> list[tuple[int, int]]:
    """(start, stop) of every run of equal labels that is longer than one."""
    edges = torch.cat([torch.ones(1, dtype=torch.bool), sorted_labels.diff() != 0, torch.ones(1, dtype=torch.bool)])
    bounds = edges.nonzero().flatten()
    wide = bounds.diff() > 1
    return list(zip(bounds[:-1][wide].tolist(), bounds[1:][wide].tolist(), strict=True))


# --- equal sums -------------------------------------------------------------------------------------------------------


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


def _equal_sums(found: Relations, summed: Callable[[Lines], bool]) -> None:
    """Combs: the lines of a group's heads, with their rotary partners, against those of the one head they share."""
    row = _Row(found, summed)
    counts = sorted({found.lines[f].count for f in row.families})
    strides = sorted({d for n in counts for d in range(1, n + 1) if n % d == 0})
    if max(counts, default=0) > _WIDE:
        strides = [d for d in strides if 8 <= d <= _WIDE]
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
        if not _crosses(*(row.found.lines[f] for f in families)):
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
        _admit(found, [(first, left[keep], 1), (second, right[keep], -1)], "comb", **form)
    return bool(keep)


__all__ = ["Comb", "Relation", "Relations", "Side", "find_relations", "integer_null_vectors"]
