"""Which pairs share entries, and how to take them in rounds that share none.

Pairs act as one commutative group: pair i multiplies an entry by c_i^(e_i), and an entry that two pairs hold by the
product, in whatever order. So pairs that overlap (a norm's gain and the columns of all its readers; a gain, a
neuron's row, its column) may be applied one after the other, in *rounds* of pairs that share no entry: within a round
every entry is written once, which is what a vectorised call needs.

Two slices of one parameter share an entry where they meet in every dimension that both restrict: a row and a column
always do, two rows where they are the same. A round therefore keeps, for each set of restricted dimensions, a map of
those dimensions alone: 4096 rows and 4096 columns are two maps of 4096 cells, not one of 16 million.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from saggs.pairs import ParameterSlice, ScalePair

Box = dict[int, tuple[int, int]]
"""dimension -> (start, stop), for the dimensions that a slice restricts."""


def restricted(part: ParameterSlice, shape: Sequence[int]) -> Box:
    """The dimensions of which `part` takes less than all, with their bounds."""
    bounds = zip(part.ranges, shape, strict=True)
    return {dim: r for dim, (r, size) in enumerate(bounds) if r is not None and r != (0, size)}


def disjoint_rounds(pairs: Sequence[ScalePair], shapes: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """Indices of the pairs in rounds, none of which holds two pairs with a common entry.

    One round where no pairs overlap. A pair goes into the first round that has room for it, so that the rounds are few
    and depend on the order of the pairs alone.

    Args:
        pairs: any pairs of one model.
        shapes: of every parameter that they name.

    Raises:
        ValueError: a pair two of whose own slices share an entry.
    """
    boxes = [[(part, restricted(part, shapes[part.name])) for part in pair.slices] for pair in pairs]
    by_name: dict[str, list[Box]] = {}
    for listed in boxes:
        for part, box in listed:
            by_name.setdefault(part.name, []).append(box)
    contested = {name for name, found in by_name.items() if not _surely_disjoint(found, shapes[name])}
    if not contested:
        return [list(range(len(pairs)))]
    rounds: list[_Occupied] = []
    for index, listed in enumerate(boxes):
        listed = [(part, box) for part, box in listed if part.name in contested]
        free = (r for r in rounds if not any(r.holds(part.name, box) for part, box in listed))
        room = next(free, None)
        if room is None:
            room = _Occupied(shapes)
            rounds.append(room)
        room.members.append(index)
        for part, box in listed:
            if room.holds(part.name, box):
                raise ValueError(f"{pairs[index]} holds {part} twice; list every entry once, with its total exponent")
            room.take(part.name, box)
    return [r.members for r in rounds]


def _surely_disjoint(boxes: list[Box], shape: Sequence[int]) -> bool:
    """False also where it would take a closer look: slices that restrict different dimensions."""
    if len(boxes) == 1:
        return True
    dims = {tuple(box) for box in boxes}
    if len(dims) > 1 or not next(iter(dims)):
        return False
    if len(next(iter(dims))) == 1:
        bounds = sorted(next(iter(box.values())) for box in boxes)
        return all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))
    count = torch.zeros([shape[dim] for dim in boxes[0]], dtype=torch.int32)
    for box in boxes:
        count[_index(box, tuple(box))] += 1
    return int(count.max()) <= 1


def _index(box: Box, dims: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(*box[dim]) if dim in box else slice(None) for dim in dims)


class _Occupied:
    """One round: its members, and a map of taken entries for every parameter and every set of dimensions."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.members: list[int] = []
        self._shapes = shapes
        self._maps: dict[str, dict[tuple[int, ...], Tensor]] = {}

    def holds(self, name: str, box: Box) -> bool:
        """True where an entry of the box is taken."""
        maps = self._maps.get(name, {})
        return any(bool(taken[_index(box, dims)].any()) for dims, taken in maps.items())

    def take(self, name: str, box: Box) -> None:
        maps = self._maps.setdefault(name, {})
        dims = tuple(box)
        if dims not in maps:
            maps[dims] = torch.zeros([self._shapes[name][dim] for dim in dims], dtype=torch.bool)
        maps[dims][_index(box, dims)] = True
