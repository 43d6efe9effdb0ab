"""Which kind a relation is, and which of its generators belong to one head: read off the off-diagonal charges.

Let L_a be the lines of a relation's left side and R_a those of its right side, so that stretching L_a and shrinking R_a
changes nothing. Where a and b belong to one attention head, they may also be mixed: with E_ab the matrix unit,

    L -> (1 + s E_ab) L,   R -> R (1 - s E_ab)      moves the loss by   s (<L_b, dL/dL_a> - <R_a, dL/dR_b>) = 0.

So equal off-diagonal charges mean one head (GL(d) acts on the channels of a head, for values and their readers always,
for queries and keys without rotary positions), and an MLP's neurons show none: between them stands a non-linearity or
an elementwise product. No name is looked at.

    kind              left side                      right side
    query_key         rows (query)                   rows (key)
    value_output      rows (value)                   columns of its readers, mixed within a head
    up_down           rows (up)                      columns (down), not mixed
    norm_gain         a gain, with its bias          columns of all its readers
    query_key_gain    a gain on the queries          a gain on the keys

Source: the group actions are well known (see `saggs.relations`); to tell kinds and heads by off-diagonal charges is
ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saggs.charges import SPREADS, Probing
from saggs.ledger import Relation, Relations, Side
from saggs.pairs import Kind

_MIXED = 1e-7


@dataclass(frozen=True)
class Generators:
    """Generators of one kind, left side first.

    Attributes:
        kind: one of `saggs.pairs.KINDS`.
        relation: their lines and exponents.
        head: which key-value group each belongs to, shape (generators,), counted from 0; None where the charges cannot
            tell (interleaved rotary positions with as many key heads as query heads).
    """

    kind: Kind
    relation: Relation
    head: Tensor | None

    @property
    def left(self) -> tuple[Side, ...]:
        """Sides of positive exponent."""
        return tuple(s for s in self.relation.sides if s.exponent > 0)

    @property
    def right(self) -> tuple[Side, ...]:
        """Sides of negative exponent."""
        return tuple(s for s in self.relation.sides if s.exponent < 0)


def classify(found: Relations, probing: Probing, probes_per_draw: int = 2) -> list[Generators]:
    """The kind and the heads of every relation; relations of no known kind are left out.

    Args:
        found: from `saggs.relations.find_relations`.
        probing: the copy of the model that the charges were measured on.
        probes_per_draw: losses for each of the three draws of the weights. (At one draw a neuron may be active on all
            samples, and pass for a channel.)
    """
    queries = _queries(found)
    oriented = [_oriented(found, relation, queries) for relation in found]
    channels = [r for r in oriented if r.shape in ("lines", "chain") and _roles(r) in (("out", "out"), ("out", "in"))]
    blocks = dict(zip(map(id, channels), _blocks(probing, channels, probes_per_draw), strict=True))
    result: list[Generators] = []
    for relation in oriented:
        if id(relation) in blocks:
            result.extend(_of_channels(relation, blocks[id(relation)]))
        elif (kind := _kind(relation)) is not None:
            result.append(Generators(kind, relation, _heads_of(relation, kind)))
    return _with_missing_heads(result)


def _roles(relation: Relation) -> tuple[str, str]:
    return relation.sides[0].lines.role, relation.sides[-1].lines.role


def _kind(relation: Relation) -> Kind | None:
    roles = {s.lines.role for s in relation.sides}
    if roles == {"entry"}:
        return "query_key_gain"
    if "entry" in roles:
        return "norm_gain"
    if _roles(relation) == ("out", "out"):
        return "query_key"
    if _roles(relation) == ("out", "in"):
        return "value_output" if not relation.offset else None
    return None


def _of_channels(relation: Relation, block: Tensor) -> list[Generators]:
    """Channels that mix belong to attention; those that do not are neurons.

    But two rows that nothing but each other equals are a query's and a key's even alone in their head: a neuron's row
    has a column to it.
    """
    size = torch.bincount(block)[block]
    if 10 * int((size > 1).sum()) < len(size):  # a few neurons that are active on all samples mix, by accident
        block = torch.arange(len(block))
        size = torch.ones_like(block)
    result = []
    for mixed in (True, False):
        chosen = (size > 1) == mixed
        if not bool(chosen.any()):
            continue
        rows_alone = _roles(relation) == ("out", "out") and (mixed or relation.shape == "lines")
        kind: Kind = "query_key" if rows_alone else "value_output" if mixed else "up_down"
        in_heads = mixed or rows_alone
        head = torch.unique(block[chosen], return_inverse=True)[1] if in_heads else torch.zeros_like(block[chosen])
        result.append(Generators(kind, _subset(relation, chosen), head))
    return result


def _subset(relation: Relation, chosen: Tensor) -> Relation:
    return replace(relation, sides=tuple(replace(s, index=s.index[chosen]) for s in relation.sides))


# --- left and right ---------------------------------------------------------------------------------------------------


def _queries(found: Relations) -> dict[frozenset[object], tuple[object, bool]]:
    """Where a bias tells the query from the key: families of a relation -> (the query's, whether its rows come later).

    What un-rotated channels tell holds for the rotated ones of the same matrices, whose biases tell nothing.
    """
    told: dict[frozenset[object], tuple[object, bool]] = {}
    for relation in found:
        first, last = relation.sides[0], relation.sides[-1]
        if len(relation.sides) == 2 and relation.heads == 1 and _roles(relation) == ("out", "out"):
            before, after = _liveness(found, first), _liveness(found, last)
            if before != after:
                query, key = (first, last) if before > after else (last, first)
                later = int(query.index[0, 0]) > int(key.index[0, 0])
                told[frozenset((first.lines.key, last.lines.key))] = query.lines.key, later
    return told


def _is_query(side: Side, other: Side, told: tuple[object, bool]) -> bool:
    family, later = told
    if side.lines.key != other.lines.key:
        return side.lines.key == family
    return (int(side.index[0, 0]) > int(other.index[0, 0])) == later


def _oriented(
    found: Relations, relation: Relation, queries: Mapping[frozenset[object], tuple[object, bool]]
) -> Relation:
    """With the query, the value, the up-projection or the gain on the left, and generators in its lines' order."""
    first, last = relation.sides[0], relation.sides[-1]
    rank = {"entry": 0, "out": 1, "in": 2}
    swap = False
    if len(relation.sides) == 2:
        if rank[first.lines.role] != rank[last.lines.role]:
            swap = rank[first.lines.role] > rank[last.lines.role]
        elif relation.heads == 1:
            told = queries.get(frozenset((first.lines.key, last.lines.key)))
            if told is not None and _roles(relation) == ("out", "out"):
                swap = _is_query(last, first, told)
            else:
                swap = _query_likeness(found, last) > _query_likeness(found, first)
    if swap:
        relation = replace(relation, sides=(_flipped(last), _flipped(first)))
    order = torch.argsort(relation.sides[0].index[:, 0], stable=True)
    return _subset(relation, order)


def _query_likeness(found: Relations, side: Side) -> tuple[int, int, int]:
    """Larger for the query: by what its bias does; where that cannot tell, the query is taken to come first."""
    return _liveness(found, side), -found.position(side.lines), -int(side.index[0, 0])


def _flipped(side: Side) -> Side:
    return replace(side, exponent=-side.exponent)


def _liveness(found: Relations, side: Side) -> int:
    """2 with a bias that matters, 1 without any, 0 with a dead one: softmax does not see a bias of the keys."""
    if side.lines.bias is None:
        return 1
    for family, lines in enumerate(found.lines):
        if lines.name == side.lines.bias and lines.offset == 0:
            exercised = found.exercised[family].flatten()
            norm = found.norms[family].flatten()[side.index.flatten()]
            own = found.norms[found.position(side.lines)][side.index.flatten()]
            return 2 if bool(exercised.any()) and bool((norm > 1e-9 * own).any()) else 0
    return 1


# --- heads ------------------------------------------------------------------------------------------------------------


def _heads_of(relation: Relation, kind: Kind) -> Tensor | None:
    """Heads of a comb: a group's teeth follow each other, and the next group's are a stride away."""
    if relation.shape != "comb":
        return torch.zeros(relation.count, dtype=torch.int64)
    single_head_gain = kind == "query_key_gain" and relation.heads == 1
    many = (
        relation.sides[0]
        if relation.sides[0].index.shape[1] >= relation.sides[-1].index.shape[1]
        else relation.sides[-1]
    )
    starts = many.index[:, 0]
    step = 2 if relation.offset == 1 else 1
    if relation.heads == 1 and relation.offset == 1:
        return torch.zeros(relation.count, dtype=torch.int64) if single_head_gain else None
    fresh = starts.diff() != step
    return torch.cat([fresh.new_zeros(1), fresh]).cumsum(0)


def _with_missing_heads(generators: list[Generators]) -> list[Generators]:
    """Interleaved rotary channels of many key heads: split as the values of the same tensors are."""
    result = []
    for g in generators:
        if g.head is None:
            names = {s.lines.name.rpartition(".")[0].rpartition(".")[0] for s in g.relation.sides}
            counts = {
                int(o.head.max()) + 1
                for o in generators
                if o.kind == "value_output" and o.head is not None and _parents(o) & names
            }
            heads = counts.pop() if len(counts) == 1 else 1
            per_head = g.relation.count // heads if g.relation.count % heads == 0 else g.relation.count
            g = replace(g, head=torch.arange(g.relation.count) // per_head)
        result.append(g)
    return result


def _parents(generators: Generators) -> set[str]:
    return {s.lines.name.rpartition(".")[0].rpartition(".")[0] for s in generators.relation.sides}


def _blocks(probing: Probing, channels: Sequence[Relation], probes_per_draw: int) -> list[Tensor]:
    """For each relation, which channels mix: a block number for each, shape (generators,)."""
    found = _mixing(probing, channels, probes_per_draw)
    return [torch.cat([torch.zeros(1, dtype=torch.int64), (~mixed).cumsum(0)]) for mixed in found]


def _mixing(probing: Probing, channels: Sequence[Relation], probes_per_draw: int) -> list[Tensor]:
    """Whether channel k and channel k + 1 of each relation mix, shape (generators - 1,) each."""
    pairs = [_OffDiagonal(relation) for relation in channels]
    wanted: dict[str, list[_OffDiagonal]] = {}
    for pair in pairs:
        for name in pair.names():
            wanted.setdefault(name, []).append(pair)

    def consume(probe: int, name: str, weight: Tensor, gradient: Tensor) -> None:
        for pair in wanted.get(name, ()):
            pair.add(probe, name, weight, gradient)

    for spread in SPREADS if pairs else ():
        probing.draw(spread)
        probing.probes(probes_per_draw, consume)
        for pair in pairs:
            pair.compare()
    return [pair.mixed() for pair in pairs]


class _OffDiagonal:
    """<L_(k+1), dL/dL_k> and <R_k, dL/dR_(k+1)> of neighbouring channels, over some probes."""

    def __init__(self, relation: Relation) -> None:
        self._left, self._right = relation.sides[0], relation.sides[-1]
        self._sums: dict[tuple[int, bool], Tensor] = {}
        self._differences: list[Tensor] = []
        self._sizes: list[Tensor] = []
        self._count = relation.count

    def names(self) -> set[str]:
        """The parameters that take part."""
        sides = (self._left.lines, self._right.lines)
        return {name for lines in sides for name in (lines.name, lines.bias) if name is not None}

    def add(self, probe: int, name: str, weight: Tensor, gradient: Tensor) -> None:
        """What one parameter contributes."""
        for side, forward in ((self._left, True), (self._right, False)):
            lines, index = side.lines, side.index[:, 0]
            if name == lines.name:
                w, g = lines.rows(weight)[index], lines.rows(gradient)[index]
            elif name == lines.bias:
                w, g = weight.flatten()[index, None], gradient.flatten()[index, None]
            else:
                continue
            product = (g[:-1] * w[1:] if forward else g[1:] * w[:-1]).sum(dim=1)
            key = (probe, forward)
            self._sums[key] = self._sums[key] + product if key in self._sums else product

    def compare(self) -> None:
        """Keep left against right of the present draw, each probe to its own scale."""
        for probe in sorted({probe for probe, _ in self._sums}):
            a, b = self._sums[probe, True], self._sums[probe, False]
            size = torch.maximum(a.abs(), b.abs())
            scale = size.max().clamp_min(1e-300) if len(size) else torch.ones(())
            self._differences.append((a - b) / scale)
            self._sizes.append(size / scale)
        self._sums.clear()

    def mixed(self) -> Tensor:
        """Which neighbours mix."""
        if not self._sizes:
            return torch.zeros(max(self._count - 1, 0), dtype=torch.bool)
        size = torch.stack(self._sizes).norm(dim=0)
        return torch.logical_and(torch.stack(self._differences).norm(dim=0) <= _MIXED * size, size > 0)


__all__ = ["Generators", "classify"]
