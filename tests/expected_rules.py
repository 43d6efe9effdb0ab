"""Rules, written by hand, for the exact scaling pairs of transformer parts. Nothing here looks at a model.

A rule gives the finest generators: which rows, columns or gain entries have to be scaled together, and by which power
of one common factor, for the outputs to stay the same. `pairs` adds the generators up to the granularity asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Ranges = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class Part:
    """A contiguous block of one parameter that goes to c^exponent times itself (offset 1: 1 + w does).

    One range per dimension; None is the whole dimension.
    """

    name: str
    ranges: Ranges
    exponent: int
    bias: bool = False
    offset: int = 0


@dataclass(frozen=True)
class Pair:
    """All parts of both sides, scaled with one factor, leave the outputs as they are.

    signs: "any" for every factor but zero, "positive" where the way leads through a ReLU.
    """

    kind: str
    left: tuple[Part, ...]
    right: tuple[Part, ...]
    signs: str = "any"


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter; `expert` fixes the first index of a three-dimensional one."""

    name: str
    dims: int
    axis: int
    size: int
    expert: int | None = None


@dataclass(frozen=True)
class Block:
    """Entries along an axis, all scaled alike."""

    axis: Axis
    indices: tuple[int, ...]
    exponent: int
    bias: bool = False
    offset: int = 0

    def parts(self) -> list[Part]:
        """The same as contiguous parts, as few as possible."""
        runs: list[tuple[int, int]] = []
        for index in sorted(set(self.indices)):
            if runs and runs[-1][1] == index:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        return [self._part(run) for run in runs]

    def _part(self, run: tuple[int, int]) -> Part:
        where = self.axis
        ranges: list[tuple[int, int] | None] = [None] * where.dims
        if run != (0, where.size):
            ranges[where.axis] = run
        if where.expert is not None:
            ranges[0] = (where.expert, where.expert + 1)
        return Part(where.name, tuple(ranges), self.exponent, self.bias, self.offset)


@dataclass(frozen=True)
class Linear:
    """The parameters of a linear map, stored [out, in] or, if `in_out`, [in, out].

    dims 3: the first dimension counts experts; `expert` picks one of them, None means all.
    """

    weight: str
    outs: int
    ins: int
    bias: str | None = None
    in_out: bool = False
    dims: int = 2
    expert: int | None = None

    def rows(self, indices: Sequence[int], exponent: int) -> tuple[Block, ...]:
        """Outputs of the map: the weights that make them, and their bias."""
        axis = self.dims - 1 if self.in_out else self.dims - 2
        blocks = [Block(Axis(self.weight, self.dims, axis, self.outs, self.expert), tuple(indices), exponent)]
        if self.bias is not None:
            blocks.append(Block(Axis(self.bias, 1, 0, self.outs), tuple(indices), exponent, bias=True))
        return tuple(blocks)

    def columns(self, indices: Sequence[int], exponent: int) -> tuple[Block, ...]:
        """Inputs of the map: the weights that read them. The bias is added afterwards and has no part in it."""
        axis = self.dims - 2 if self.in_out else self.dims - 1
        return (Block(Axis(self.weight, self.dims, axis, self.ins, self.expert), tuple(indices), exponent),)


@dataclass(frozen=True)
class Gain:
    """The gain of a norm, used as offset + w, and the bias of a LayerNorm."""

    weight: str
    size: int
    bias: str | None = None
    offset: int = 0

    def entries(self, indices: Sequence[int], exponent: int) -> tuple[Block, ...]:
        """Entries of the gain, and of the bias that is added behind it."""
        blocks = [Block(Axis(self.weight, 1, 0, self.size), tuple(indices), exponent, offset=self.offset)]
        if self.bias is not None:
            blocks.append(Block(Axis(self.bias, 1, 0, self.size), tuple(indices), exponent, bias=True))
        return tuple(blocks)


@dataclass(frozen=True)
class Generator:
    """One finest exact scaling. `group` tells apart the key/value groups of an attention layer."""

    kind: str
    left: tuple[Block, ...]
    right: tuple[Block, ...]
    signs: str = "any"
    group: int | None = None


def starts(count: int, stride: int, first: int = 0) -> tuple[int, ...]:
    """First rows of `count` heads that lie `stride` rows apart."""
    return tuple(first + stride * n for n in range(count))


def frequencies(size: int, rotated: int = 0, interleaved: bool = False) -> list[tuple[int, ...]]:
    """Channels of a head that must share one factor: the two that RoPE mixes; each un-rotated channel alone."""
    half = rotated // 2
    mixed = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    return [*mixed, *((channel,) for channel in range(rotated, size))]


def _heads_of(group: int, starts_: Sequence[int], groups: int) -> Sequence[int]:
    """Query heads are assigned to key/value heads in order, equally many to each."""
    share = len(starts_) // groups
    return starts_[group * share : (group + 1) * share]


def query_key(
    query: Linear,
    query_at: Sequence[int],
    key: Linear,
    key_at: Sequence[int],
    size: int,
    rotated: int = 0,
    interleaved: bool = False,
) -> list[Generator]:
    """Scores are q . k, so q c and k / c are the same; one factor for all query heads that share the key head."""
    return [
        Generator(
            "query_key",
            query.rows([at + c for at in _heads_of(g, query_at, len(key_at)) for c in channels], 1),
            key.rows([key_at[g] + c for c in channels], -1),
            group=g,
        )
        for g in range(len(key_at))
        for channels in frequencies(size, rotated, interleaved)
    ]


def value_output(
    value: Linear, value_at: Sequence[int], output: Linear, output_at: Sequence[int], size: int
) -> list[Generator]:
    """Attention averages values linearly: a value channel against the output columns of all heads that read it."""
    return [
        Generator(
            "value_output",
            value.rows([value_at[g] + c], 1),
            output.columns([at + c for at in _heads_of(g, output_at, len(value_at))], -1),
            group=g,
        )
        for g in range(len(value_at))
        for c in range(size)
    ]


def up_down(up: Linear, up_at: int, down: Linear, degree: int = 1, signs: str = "any") -> list[Generator]:
    """The linear partner of a gate, or a ReLU (positive factors), or its power: the neuron scales by c^degree."""
    return [Generator("up_down", up.rows([up_at + n], 1), down.columns([n], -degree), signs) for n in range(down.ins)]


def norm_gain(gains: Gain | Sequence[Gain], consumers: Sequence[Linear]) -> list[Generator]:
    """A gain entry, and the bias behind it, against that column of every matrix that reads the norm.

    Several gains read by one shared matrix can only be scaled together.
    """
    gains = [gains] if isinstance(gains, Gain) else gains
    return [
        Generator(
            "norm_gain",
            tuple(block for gain in gains for block in gain.entries([i], 1)),
            tuple(block for consumer in consumers for block in consumer.columns([i], -1)),
        )
        for i in range(gains[0].size)
    ]


def query_key_gain(
    query: Gain, query_at: Sequence[int], key: Gain, key_at: Sequence[int], size: int, rotated: int
) -> list[Generator]:
    """Normalised queries and keys forget the scale of their weights, but not that of their gains."""
    return [
        Generator(
            "query_key_gain",
            query.entries([at + c for at in _heads_of(g, query_at, len(key_at)) for c in channels], 1),
            key.entries([key_at[g] + c for c in channels], -1),
            group=g,
        )
        for g in range(len(key_at))
        for channels in frequencies(size, rotated)
    ]


def _sum(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Blocks of the same axis joined."""
    joined: dict[Block, tuple[int, ...]] = {}
    for block in blocks:
        key = replace(block, indices=())
        joined[key] = joined.get(key, ()) + block.indices
    return tuple(replace(key, indices=tuple(sorted(set(indices)))) for key, indices in joined.items())


def pairs(generators: Iterable[Generator], granularity: str) -> list[Pair]:
    """Generators added up: "matrix" by the two matrices they join, "head" by key/value group too, "channel" not."""
    bins: dict[object, list[Generator]] = {}
    for number, generator in enumerate(generators):
        matrices = (generator.kind, generator.left[0].axis, generator.right[0].axis)
        keys: dict[str, object] = {"matrix": matrices, "head": (matrices, generator.group), "channel": number}
        bins.setdefault(keys[granularity], []).append(generator)
    return [
        Pair(
            together[0].kind,
            tuple(p for b in _sum(b for g in together for b in g.left) for p in b.parts()),
            tuple(p for b in _sum(b for g in together for b in g.right) for p in b.parts()),
            together[0].signs,
        )
        for together in bins.values()
    ]
