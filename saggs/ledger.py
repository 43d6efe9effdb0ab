"""What is known of a table of charges so far: the relations that were found, and which lines they explain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saggs.charges import ChargeTable, Lines

EXACT = 1e-9
_DEAD = 1e-12


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
        shape: "lines", "chain" (lines that equal more than one other), "comb" or "aligned".
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
        doubts: what was not taken for a relation since a matrix that may belong to it was reached by no probe.
        exercised: which of them have a charge at all; the others were reached by no probe, or do nothing.
    """

    def __init__(self, table: ChargeTable) -> None:
        super().__init__()
        self.lines = table.lines
        self.wiring = table.wiring
        self.doubts: list[str] = []
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


def admit(found: Relations, sides: Sequence[tuple[int, Tensor, int]], shape: str, **form: int) -> None:
    """Take in a relation given by (family, index, exponent)."""
    residual = float(found.residual_of(sides).max())
    found.admit(Relation(tuple(Side(found.lines[f], i, a) for f, i, a in sides), residual, shape, **form))


def crosses(first: Lines, second: Lines) -> bool:
    """Rows against columns of one matrix, or w against 1 + w: equal where one line alone is alive, which is trivial."""
    return first.name == second.name and first.key != second.key


__all__ = ["EXACT", "Relation", "Relations", "Side", "admit", "crosses"]
