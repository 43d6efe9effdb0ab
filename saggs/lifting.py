"""From a shallow twin to the real model: the same generators in every block of the same kind.

A tiny model is analysed as it is. For any other a narrow twin (`saggs.twin`), where every hypothesis about heads and
rotary positions can be tried, tells which matrices take part in sums of lines; the model itself, or of a large one a
shallow twin at the real widths, tells which lines those are. What holds in a block of the twin then stands for every
block of the model with the same parameters, shapes and switches, and what joins blocks (an encoder's last norm and the
cross-attention of all decoder blocks) joins all of them. This is a proposal: every pair is certified on the real model
afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from saggs.charges import Lines, Probing, charges_of
from saggs.inputs import Inputs, Output
from saggs.kinds import Generators, classify
from saggs.ledger import Relations, Side
from saggs.pairs import named_parameters, unwrap
from saggs.relations import find_relations
from saggs.twin import blocks_of, indexless, shallow_twin, signatures_of, small_twin
from saggs.wiring import Wiring

NARROW = 60_000
SMALL = 2_000_000
_TOKENS_TIMES_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Analysis:
    """What the charges of a model say.

    Attributes:
        generators: its finest rescalings, under the model's own names.
        wiring: how it uses its parameters.
        found: the relations and lines of the model that was measured (the model itself or its twin).
        probing: the float64 copy that they were measured on.
        through: "itself" or "a shallow twin".
    """

    generators: list[Generators]
    wiring: Wiring
    found: Relations
    probing: Probing
    through: str


def analyse(model: nn.Module, inputs: Inputs | None = None, output: Output | None = None) -> Analysis:
    """The generators of a model, from its own charges or from those of a shallow twin.

    Args:
        model: any module; it is not changed.
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.

    Raises:
        ValueError: a model that cannot be run.
    """
    source = unwrap(model)
    size = sum(p.numel() for p in source.parameters())
    sums = _sums_of_narrow_twin(source, inputs, output) if size > NARROW else None
    twin = shallow_twin(source, inputs, output) if size > SMALL else None
    if twin is None:
        found, probing, generators = _measured(source, inputs, output, size, sums)
        return Analysis(generators, probing.wiring, found, probing, "itself")
    found, probing, generators = _measured(twin, inputs, output, sum(p.numel() for p in twin.parameters()), sums)
    lifted = _Lift(twin, source).all(generators)
    additive = {indexless(name) for name in probing.wiring.additive}
    wiring = Wiring(additive={name for name in named_parameters(source) if indexless(name) in additive})
    return Analysis(lifted, wiring, found, probing, "a shallow twin")


def _measured(
    model: nn.Module, inputs: Inputs | None, output: Output | None, size: int, sums: set[tuple[str, str]] | None
) -> tuple[Relations, Probing, list[Generators]]:
    """Charges, relations and kinds; of a large model from fewer samples and losses."""
    large = size > SMALL
    probing = Probing(model, inputs, output, samples=max(2, min(16, _TOKENS_TIMES_PARAMETERS // max(size, 1))))
    table = charges_of(probing, 2 if large else 4)
    found = find_relations(table, None if sums is None else lambda lines: (indexless(lines.name), lines.role) in sums)
    return found, probing, classify(found, probing, 1 if large else 2)


def _sums_of_narrow_twin(model: nn.Module, inputs: Inputs | None, output: Output | None) -> set[tuple[str, str]] | None:
    """Names (layer indices aside) and roles of what takes part in sums of lines; None where no narrow twin is found."""
    twin = small_twin(model, inputs, output)
    if twin is None:
        return None
    # Lines that are equal in the twin may be sums in the model, should the twin have lost its grouped heads.
    found = find_relations(charges_of(Probing(twin, inputs, output)))
    return {(indexless(s.lines.name), s.lines.role) for r in found if r.shape != "aligned" for s in r.sides}


class _Lift:
    """Names of a twin's parameters -> those of the model, block by block."""

    def __init__(self, twin: nn.Module, model: nn.Module) -> None:
        self._parameters = named_parameters(model)
        self._blocks = {b for members in blocks_of(twin).values() for b in members}
        # Blocks of one kind, the twin's and the model's, in order.
        self._kind: dict[str, tuple[list[str], list[str]]] = {}
        real, own, theirs = blocks_of(model), signatures_of(twin), signatures_of(model)
        for name, members in blocks_of(twin).items():
            for block in members:
                same = own[block]
                self._kind[block] = (
                    [b for b in members if own[b] == same],
                    [b for b in real.get(name, []) if theirs[b] == same],
                )

    def all(self, generators: Sequence[Generators]) -> list[Generators]:
        """Every generator under the model's names, as often as it has blocks."""
        return [lifted for g in generators for lifted in self._one(g)]

    def _one(self, generators: Generators) -> list[Generators]:
        sides = generators.relation.sides
        blocks = {self._block(s.lines.name) for s in sides}
        if len(blocks) == 1 and (block := blocks.pop()) is not None:
            twins, reals = self._kind[block]
            targets = [r for i, r in enumerate(reals) if self._stand_in(twins, len(reals), i) == block]
            return [self._renamed(generators, {block: [target]}) for target in targets]
        used = {b for b in blocks if b is not None}
        targets_of: dict[str, list[str]] = {}
        for block in used:
            twins, reals = self._kind[block]
            if set(twins) <= used:
                share = [r for i, r in enumerate(reals) if twins[min(i, len(twins) - 1)] == block]
            else:
                share = [reals[-1] if block == twins[-1] else reals[twins.index(block)]]
            targets_of[block] = share
        return [self._renamed(generators, targets_of)]

    @staticmethod
    def _stand_in(twins: Sequence[str], count: int, position: int) -> str:
        """Which of the twin's blocks stands for a block of the model: the last for the last, the first for others."""
        return twins[-1] if position == count - 1 else twins[min(position, max(len(twins) - 2, 0))]

    def _block(self, name: str) -> str | None:
        return next((b for b in self._blocks if name.startswith(f"{b}.")), None)

    def _renamed(self, generators: Generators, targets: Mapping[str, Sequence[str]]) -> Generators:
        sides: list[Side] = []
        for side in generators.relation.sides:
            block = self._block(side.lines.name)
            for target in [""] if block is None else targets[block]:
                sides.append(replace(side, lines=self._lines(side.lines, block, target)))
        return replace(generators, relation=replace(generators.relation, sides=tuple(sides)))

    def _lines(self, lines: Lines, block: str | None, target: str) -> Lines:
        def moved(name: str | None) -> str | None:
            return name if name is None or block is None else f"{target}{name.removeprefix(block)}"

        name = moved(lines.name) or lines.name
        return replace(lines, name=name, bias=moved(lines.bias), shape=tuple(self._parameters[name].shape))


__all__ = ["Analysis", "analyse"]
