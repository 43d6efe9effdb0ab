"""The Lie algebra of a model's exact positive rescalings: its dimension, its generators, and what is left unexplained.

Every solution a of Σ a_i q_i = 0 (see `saggs.charges`) is an infinitesimal rescaling that changes no output; together
they are a linear space. Its dimension is counted twice:

    from below   the generators that `saggs.relations` finds by their shape, one by one;
    from above   the null space of the table of charges, by a singular value decomposition, less the trivial solutions
                 (each matrix has Σ rows = Σ columns, which moves nothing).

Where the two agree, nothing was missed: the generators are a basis. Where the null space is larger, what is left over
is reported by the parameters that it moves, never given a name. The *gap* tells how sure the count is: singular values
of what is exact lie at rounding, those of what is not (a norm's eps included, which is raised for the purpose) well
above.

The null space needs more probes than there are lines, so a model that is not tiny is counted on its narrow twin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saggs.assembly import assembled
from saggs.charges import SPREADS, ChargeTable, Lines, Probing, charges_of
from saggs.inputs import Inputs, Output
from saggs.kinds import Generators, classify
from saggs.ledger import EXACT, Relation, Relations
from saggs.lifting import NARROW, analyse
from saggs.pairs import KINDS, Kind, unwrap
from saggs.relations import find_relations
from saggs.twin import small_twin

_MARGIN = 40
_MOST_LINES = 6000


@dataclass(frozen=True)
class NullSpace:
    """The count from above.

    Attributes:
        measured_on: "the model" or "its narrow twin".
        lines: how many lines the probes exercised; unknown: how many they did not, of which nothing is known.
        probes: how many losses were taken.
        nullity: dimension of the null space.
        trivial: how many of its dimensions are Σ rows = Σ columns of one matrix.
        explained: how many are trivial or spanned by the generators found by their shape.
        largest_zero: largest singular value counted as zero, relative to the largest of all.
        smallest_other: smallest singular value that is not.
        left_over: parameters moved by what is not explained.
    """

    measured_on: str
    lines: int
    unknown: int
    probes: int
    nullity: int
    trivial: int
    explained: int
    largest_zero: float
    smallest_other: float
    left_over: tuple[str, ...]
    singular_values: tuple[float, ...]

    @property
    def unexplained(self) -> int:
        """Dimensions that no generator explains."""
        return self.nullity - self.explained


@dataclass(frozen=True)
class Algebra:
    """The exact positive rescalings of a model.

    Attributes:
        generators: the finest ones, by relation.
        by_place: (module path, kind) -> how many, in the order of the model.
        null_space: the count from above.
    """

    generators: tuple[Generators, ...]
    by_place: dict[tuple[str, Kind], int]
    null_space: NullSpace

    @property
    def dimension(self) -> int:
        """How many independent generators the model has."""
        return sum(self.by_place.values())

    def by_kind(self) -> dict[Kind, int]:
        """Kind -> how many generators."""
        return {kind: sum(n for (_, k), n in self.by_place.items() if k == kind) for kind in KINDS}

    def __str__(self) -> str:
        kinds = [kind for kind, count in self.by_kind().items() if count]
        paths = list(dict.fromkeys(path for path, _ in self.by_place))
        rows = [["module", *kinds, "all"]]
        for path in paths:
            counts = [self.by_place.get((path, kind), 0) for kind in kinds]
            rows.append([path or "(the model)", *(str(c) if c else "" for c in counts), str(sum(counts))])
        rows.append(["all", *(str(self.by_kind()[kind]) for kind in kinds), str(self.dimension)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True))
            )
            for r in rows
        ]
        return "\n".join([*table, "", self.verdict()])

    def verdict(self) -> str:
        """Whether the two counts agree, in words."""
        n = self.null_space
        lines = [
            f"null space of {n.probes} probes on {n.lines} lines of {n.measured_on}: {n.nullity} dimensions, "
            f"{n.trivial} trivial; gap {n.largest_zero:.0e} | {n.smallest_other:.0e}"
        ]
        if n.unexplained:
            lines.append(
                f"{n.unexplained} dimensions are NOT explained by generators; they move {', '.join(n.left_over)}"
            )
        else:
            lines.append("every dimension is explained: no rescaling of whole rows, columns and gains was missed there")
        if n.unknown:
            lines.append(f"but {n.unknown} lines were reached by no probe: of those nothing is known")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        n = self.null_space
        return {
            "dimension": self.dimension,
            "by_kind": self.by_kind(),
            "by_place": [{"path": p, "kind": k, "generators": c} for (p, k), c in self.by_place.items()],
            "null_space": {f: getattr(n, f) for f in n.__dataclass_fields__ if f != "singular_values"}
            | {"unexplained": n.unexplained},
        }


def algebra(model: nn.Module, inputs: Inputs | None = None, output: Output | None = None) -> Algebra:
    """The Lie algebra of a model's exact positive rescalings, with the audit that nothing was missed.

    Args:
        model: any module; it is not changed.
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.

    Raises:
        ValueError: a model that cannot be run, or that is too large for a null space and has no narrow twin.
    """
    analysis = analyse(model, inputs, output)
    by_place: dict[tuple[str, Kind], int] = {}
    for pair in assembled(model, analysis.wiring, analysis.generators, "channel"):
        by_place[pair.path, pair.kind] = by_place.get((pair.path, pair.kind), 0) + 1
    return Algebra(tuple(analysis.generators), by_place, null_space(model, inputs, output))


def null_space(model: nn.Module, inputs: Inputs | None = None, output: Output | None = None) -> NullSpace:
    """The count from above, on the model itself or on its narrow twin. Errors as for `algebra`."""
    source = unwrap(model)
    twin = small_twin(source, inputs, output) if sum(p.numel() for p in source.parameters()) > NARROW else None
    probing = Probing(twin if twin is not None else source, inputs, output)
    found = find_relations(charges_of(probing))
    generators = classify(found, probing)
    families = _families(found)
    count = sum(found.lines[f].count for f in families)
    if count > _MOST_LINES:
        raise ValueError(
            f"{type(source).__name__} has {count} lines of weights and no narrow twin: a null space of more than "
            f"{_MOST_LINES} is not computed. Build the model narrower and ask again"
        )
    table = charges_of(probing, math.ceil((count + _MARGIN) / len(SPREADS)), batched=True)
    return _counted(table, found, generators, families, "its narrow twin" if twin is not None else "the model")


def _families(found: Relations) -> list[int]:
    """One family for each way to stretch a parameter: biases ride with their rows, a gain is w or 1 + w, not both."""
    riding = {lines.bias for lines in found.lines if lines.bias is not None}
    shifted = {s.lines.name for relation in found for s in relation.sides if s.lines.offset}
    return [
        f
        for f, lines in enumerate(found.lines)
        if not (lines.role == "entry" and (lines.name in riding or lines.offset != (lines.name in shifted)))
    ]


def _counted(
    table: ChargeTable, found: Relations, generators: Sequence[Generators], families: Sequence[int], measured_on: str
) -> NullSpace:
    scale = torch.stack([table.charges[f].abs().amax(dim=1) for f in families]).amax(dim=0).clamp_min(1e-300)
    start = torch.tensor([0, *(found.lines[f].count for f in families)]).cumsum(0)
    place = {found.lines[f].key: int(s) for f, s in zip(families, start, strict=False)}
    columns = torch.cat([table.charges[f] for f in families], dim=1) / scale[:, None]
    sizes = columns.norm(dim=0)
    alive = torch.cat([found.exercised[f] for f in families]) & (sizes > 0)
    triangle = torch.linalg.qr(columns[:, alive] / sizes[alive], mode="r").R
    _, values, right = torch.linalg.svd(triangle)
    values = values / values[0]
    rank = int((values > EXACT).sum())
    basis = right[rank:]

    def vector(parts: Iterable[tuple[Lines, Tensor, int]]) -> Tensor:
        whole = torch.zeros(int(start[-1]), dtype=torch.float64)
        for lines, index, exponent in parts:
            if lines.key in place:
                whole[place[lines.key] + index] += exponent
        return torch.masked_select(whole * sizes, alive)

    known = [
        vector((s.lines, s.index[g], s.exponent) for s in r.sides)
        for r in _relations(generators)
        for g in range(r.count)
    ]
    trivial = [v for v in map(vector, _trivial(found, families)) if _vanishes(triangle, v)]
    rows = [v / v.norm() for v in (*known, *trivial) if bool(v.any())]
    stack = torch.stack(rows) if rows else torch.zeros(0, int(alive.sum()), dtype=torch.float64)
    _, strengths, span = torch.linalg.svd(stack, full_matrices=False)
    span = span[strengths > 1e-9 * strengths.max()] if len(stack) else stack
    rest = basis - (basis @ span.T) @ span
    weights = rest.norm(dim=0) if len(basis) > len(span) else torch.zeros(int(alive.sum()))
    name = [found.lines[f].name for f in families for _ in range(found.lines[f].count)]
    moved = [n for n, a in zip(name, alive.tolist(), strict=True) if a]
    left_over = dict.fromkeys(n for n, w in zip(moved, weights.tolist(), strict=True) if w > 1e-6)
    return NullSpace(
        measured_on, int(alive.sum()), int((~alive).sum()), len(columns), len(basis), len(trivial), len(span),
        float(values[rank:].max()) if len(basis) else 0.0, float(values[rank - 1]), tuple(left_over),
        tuple(values.tolist()),
    )  # fmt: skip


def _relations(generators: Sequence[Generators]) -> list[Relation]:
    return [g.relation for g in generators]


def _vanishes(triangle: Tensor, vector: Tensor) -> bool:
    return bool((triangle @ vector).norm() <= EXACT * triangle.norm(dim=0).max() * vector.norm())


def _trivial(found: Relations, families: Sequence[int]) -> list[list[tuple[Lines, Tensor, int]]]:
    """Σ rows - Σ columns of every matrix; of a stack of matrices, of each."""
    by_name: dict[str, list[Lines]] = {}
    for f in families:
        if found.lines[f].role != "entry":
            by_name.setdefault(found.lines[f].name, []).append(found.lines[f])
    vectors: list[list[tuple[Lines, Tensor, int]]] = []
    for lines in by_name.values():
        if len(lines) != 2:
            continue
        stacks = lines[0].shape[lines[0].dims[0]] if len(lines[0].dims) > 1 else 1
        for e in range(stacks):
            each = [torch.arange(x.count).reshape(stacks, -1)[e] for x in lines]
            vectors.append([(lines[0], each[0], 1), (lines[1], each[1], -1)])
    return vectors


__all__ = ["Algebra", "NullSpace", "algebra", "null_space"]
