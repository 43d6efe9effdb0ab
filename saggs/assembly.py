"""From generators to pairs: the slices that a channel, a head or a matrix scales together.

A generator is the finest rescaling there is: one neuron, one rotary frequency, one gain. Sums of generators are
rescalings too, so a head's pair is the sum of its channels' and a matrix's the sum of its heads'. What is summed here
are sets of lines, written as few rectangles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from saggs.charges import Lines
from saggs.kinds import Generators
from saggs.ledger import Side
from saggs.pairs import KINDS, Kind, ParameterSlice, ScalePair, named_parameters, unwrap, unwrapped_name
from saggs.wiring import Wiring

Granularity = Literal["matrix", "head", "channel"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)


@dataclass
class _Members:
    """Lines that go into one pair: (family, exponent) -> numbers of its lines."""

    kind: Kind
    lines: dict[tuple[Lines, int], list[int]] = field(default_factory=dict)

    def add(self, sides: Iterable[Side], generator: int) -> None:
        for side in sides:
            self.lines.setdefault((side.lines, side.exponent), []).extend(side.index[generator].tolist())


def assembled(
    model: nn.Module, wiring: Wiring, generators: Sequence[Generators], granularity: Granularity
) -> list[ScalePair]:
    """The pairs of a granularity, without certificates, in the order of the model's modules.

    Args:
        model: the model that the names belong to.
        wiring: how it uses its parameters.
        generators: from `saggs.kinds.classify`.
        granularity: "matrix": all generators that join the same matrices; "head": those of one key-value group;
            "channel": each by itself.
    """
    groups: dict[tuple[object, ...], _Members] = {}
    for number, part in enumerate(generators):
        for g in range(part.relation.count):
            key = _key(part, g, granularity, number)
            groups.setdefault(key, _Members(part.kind)).add(part.relation.sides, g)
    modules = [unwrapped_name(name) for name, _ in unwrap(model).named_modules()]
    order = {name: position for position, name in enumerate(modules)}
    layers = _single_layers(model)
    pairs = [_pair(members, wiring, layers, order) for members in groups.values()]
    place = {name: position for position, name in enumerate(named_parameters(model))}
    return sorted(
        pairs,
        key=lambda p: (order.get(p.path, -1), KINDS.index(p.kind), place.get(p.left[0].name, -1), _first(p)),
    )


def _key(part: Generators, g: int, granularity: Granularity, number: int) -> tuple[object, ...]:
    names = tuple((s.lines.name, s.lines.dims, s.exponent) for s in part.relation.sides)
    if granularity == "channel":
        return part.kind, number, g
    first = part.relation.sides[0]
    if part.kind == "up_down" and len(first.lines.dims) > 1:  # a stack of matrices, one an expert
        return part.kind, names, int(first.index[g, 0]) // first.lines.shape[first.lines.dims[1]]
    if granularity == "head" and part.kind in ("query_key", "value_output", "query_key_gain") and part.head is not None:
        return part.kind, names, int(part.head[g])
    return part.kind, names


def _first(pair: ScalePair) -> tuple[int, ...]:
    return tuple(-1 if r is None else r[0] for r in pair.left[0].ranges)


def _pair(members: _Members, wiring: Wiring, layers: set[str], order: dict[str, int]) -> ScalePair:
    sides: dict[bool, list[ParameterSlice]] = {True: [], False: []}
    for (lines, exponent), index in members.lines.items():
        numbers = sorted(set(index))
        entry_bias = lines.role == "entry" and lines.offset == 0 and lines.name in wiring.additive
        parts = [ParameterSlice(
            lines.name, ranges, exponent, bias=entry_bias, offset=lines.offset, shape=lines.shape
        ) for ranges in rectangles(lines, numbers)]  # fmt: skip
        if lines.bias is not None:
            shape = tuple(lines.shape[d] for d in lines.dims)
            flat = Lines(lines.bias, shape, tuple(range(len(shape))), "entry")
            parts += [
                ParameterSlice(lines.bias, r, exponent, bias=True, shape=shape) for r in rectangles(flat, numbers)
            ]
        sides[exponent > 0] += parts
    left, right = (tuple(sorted(side, key=lambda s: s.bias)) for side in (sides[True], sides[False]))
    return ScalePair(members.kind, _path([s.name for s in left + right], layers, order), left, right)


def rectangles(lines: Lines, numbers: Sequence[int]) -> list[tuple[tuple[int, int] | None, ...]]:
    """The lines of these numbers (sorted) as few rectangles: one range a dimension, None for all of it."""
    if len(lines.dims) < 2:
        blocks: list[tuple[list[tuple[int, int]], ...]] = [(_ranges(numbers),)]
    else:
        inner = lines.count // lines.shape[lines.dims[0]]
        stacks: dict[tuple[int, ...], list[int]] = {}
        for outer in sorted({n // inner for n in numbers}):
            stacks.setdefault(tuple(n % inner for n in numbers if n // inner == outer), []).append(outer)
        blocks = [(_ranges(outers), _ranges(inners)) for inners, outers in stacks.items()]
    found = []
    for block in blocks:
        for outer_range in block[0]:
            for inner_range in block[1] if len(block) > 1 else [None]:
                ranges: list[tuple[int, int] | None] = [None] * len(lines.shape)
                for dim, bounds in zip(lines.dims, (outer_range, inner_range), strict=False):
                    if bounds is not None and bounds != (0, lines.shape[dim]):
                        ranges[dim] = bounds
                found.append(tuple(ranges))
    return found


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for n in numbers:
        if found and found[-1][1] == n:
            found[-1] = (found[-1][0], n + 1)
        else:
            found.append((n, n + 1))
    return found


def _single_layers(model: nn.Module) -> set[str]:
    """Modules of one matrix and no children: a pair within one of them belongs to the module around it."""
    return {
        unwrapped_name(name)
        for name, module in unwrap(model).named_modules()
        if not any(module.children()) and sum(p.dim() > 1 for p in module.parameters(recurse=False)) <= 1
    }


def _path(names: Sequence[str], layers: set[str], order: dict[str, int]) -> str:
    """The innermost module that holds all the parameters; of one layer's parameters, the module around the layer."""
    split = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for level in zip(*split, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    while common and ".".join(common) not in order:
        common.pop()
    if ".".join(common) in layers:
        common.pop()
    return ".".join(common)


__all__ = ["GRANULARITIES", "Granularity", "assembled", "rectangles"]
