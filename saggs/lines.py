"""Multiplying many lines of one tensor, each by a power of its own pair's factor, in one broadcast product.

The slices of one parameter are *lines* along the axes that they restrict: rows, columns, entries of a gain, rows of
experts. All of them together are

    W  <-  W * m,        m[line] = c[pair of the line] ^ (exponent of the line),      m = 1 on lines of no pair,

one gather and one product, whatever their number. Multiplying by 1 changes no bit.

Arithmetic. Negative powers are powers of one reciprocal, so that powers of two stay exact. bfloat16 and float16 are
multiplied in float32 and rounded once. A gain w used as 1 + w goes to s w + (s - 1), which is s (1 + w) - 1 without
the rounding of 1 + w.

Source: ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saggs.overlaps import restricted
from saggs.pairs import ParameterSlice

NARROW = (torch.bfloat16, torch.float16)
LOSS = 8.0
"""A gain 1 + w counts as imprecise where its relative rounding is more than this many times an ordinary weight's."""


class Moving(NamedTuple):
    """A tensor that belongs to parameter `name`, whose slices of exponent e move by factor ** (degree * e).

    It has the parameter's shape; or, where `like_weight` is False, it moves as a whole, and so does the parameter.
    """

    name: str
    tensor: Tensor
    degree: int
    is_weight: bool
    like_weight: bool = True


class Constant:
    """An index tensor that is compiled on the CPU and copied to each device once."""

    def __init__(self, value: Tensor) -> None:
        self._origin = value
        self._copies = {value.device: value}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = self._origin.to(device)
        return self._copies[device]


class Powers:
    """Whole powers of every pair's factor, -highest to highest: a table of shape (2 highest + 1, pairs + 1).

    Its last column is all ones, for the lines of no pair.
    """

    def __init__(self, factors: Tensor, highest: int) -> None:
        self.highest = highest
        base = torch.cat([factors, factors.new_ones(1)])
        rising, falling = [base], [base.reciprocal()]
        for powers in (rising, falling):
            for _ in range(highest - 1):
                powers.append(powers[-1] * powers[0])
        self._table = Constant(torch.stack([*reversed(falling), torch.ones_like(base), *rising]))

    def on(self, device: torch.device) -> Tensor:
        """The table on `device`."""
        return self._table.on(device)


class CompiledLines:
    """The slices of one parameter, none overlapping, compiled.

    Args:
        parts: the slices, each with the index of its pair.
        shape: of the parameter.
        terms: for every slice the number of the norm in which its lines count; -1 for none.
        count: how many pairs there are.

    Attributes:
        terms: the same for every line, flattened.
    """

    def __init__(
        self, parts: Sequence[tuple[int, ParameterSlice]], shape: Sequence[int], terms: Sequence[int], count: int
    ) -> None:
        boxes = [restricted(part, shape) for _, part in parts]
        self._axes = tuple(sorted({axis for box in boxes for axis in box}))
        bounds = [[box.get(axis, (0, shape[axis])) for axis in self._axes] for box in boxes]
        # One cell a line, over the region that the slices span.
        self._region = [(min(b[0] for b in on), max(b[1] for b in on)) for on in zip(*bounds, strict=True)]
        self._grid = [stop - start for start, stop in self._region]
        self._across = tuple(dim for dim in range(len(shape)) if dim not in self._axes)
        self._shape = [self._grid[self._axes.index(d)] if d in self._axes else 1 for d in range(len(shape))]
        columns = [(i, part.exponent, part.offset, term) for (i, part), term in zip(parts, terms, strict=True)]
        columns.append((count, 1, 0, -1))
        of_lines = torch.tensor(columns).T[:, self._owners(bounds)]
        self._pair, self._exponent, offset, self.terms = of_lines.unbind()
        self._count = count
        self._offset = Constant(offset.view(self._shape).bool()) if bool(offset.any()) else None
        self._index: dict[tuple[int, int], Constant] = {}

    def _owners(self, bounds: list[list[tuple[int, int]]]) -> Tensor:
        """For every cell of the grid, flattened, which slice holds it; -1 for none."""
        runs: list[tuple[int, int, int]] = []
        low, last = [start for start, _ in self._region], self._grid[-1]
        for index, box in enumerate(bounds):
            *outer, (start, stop) = [(b[0] - at, b[1] - at) for b, at in zip(box, low, strict=True)]
            for where in itertools.product(*(range(*b) for b in outer)):
                row = 0
                for position, size in zip(where, self._grid[:-1], strict=True):
                    row = row * size + position
                runs.append((row * last + start, stop - start, index))
        begin, length, index_of = torch.tensor(runs).T
        first = torch.repeat_interleave(begin - (length.cumsum(0) - length), length)
        owner = torch.full((torch.Size(self._grid).numel(),), -1)
        owner[first + torch.arange(len(first))] = torch.repeat_interleave(index_of, length)
        return owner

    def region(self, tensor: Tensor) -> Tensor:
        """The part of the tensor that the slices span: a view."""
        for axis, (start, stop) in zip(self._axes, self._region, strict=True):
            tensor = tensor.narrow(axis, start, stop - start)
        return tensor

    def norms(self, tensor: Tensor, order: int, dtype: torch.dtype) -> Tensor:
        """The norm of every line of the region, flattened; a gain used as 1 + w counts as 1 + w."""
        region = self.region(tensor)
        if self._offset is not None:
            region = region.to(dtype) + self._offset.on(region.device)
        if not self._across:
            return region.abs().to(dtype).flatten()
        norms: Tensor = torch.linalg.vector_norm(region, order, dim=self._across, dtype=dtype)
        return norms.flatten()

    def multiply(self, moving: Moving, powers: Powers) -> Tensor | None:
        """Multiply every line in place. As `shift_gain`, returns how many gains became imprecise, or None."""
        region = self.region(moving.tensor)
        key = (moving.degree, powers.highest)
        if key not in self._index:
            row = self._exponent * moving.degree + powers.highest
            self._index[key] = Constant(row * (self._count + 1) + self._pair)
        index = self._index[key].on(region.device)
        scale = powers.on(region.device).flatten().index_select(0, index).view(self._shape)
        if moving.is_weight and self._offset is not None:
            return shift_gain(region, scale, (scale - 1) * self._offset.on(region.device))
        multiply(region, scale)
        return None


def multiply(view: Tensor, scale: Tensor) -> None:
    """view <- view * scale in place, `scale` broadcasting; in float32 and rounded once where the view is narrower."""
    if view.dtype in NARROW:
        view.copy_(view.float().mul_(scale.float()))
    else:
        view.mul_(scale.to(view.dtype))


def shift_gain(gain: Tensor, scale: Tensor, shift: Tensor) -> Tensor | None:
    """w -> scale w + shift in place; entries of scale 1 keep their bits. Computed as in `multiply`.

    Returns how many entries of a narrow dtype became imprecise, as a 0-dimensional tensor, and None for others. What
    the model uses, 1 + w, is rounded with w: relative to itself by |w| / |1 + w| times as much as an ordinary weight.
    Counted are entries that were scaled down and have that ratio above `LOSS` now.
    """
    wide = torch.float32 if gain.dtype in NARROW else gain.dtype
    old = gain.to(wide)
    gain.copy_(torch.where(scale == 1, old, old * scale.to(wide) + shift.to(wide)))
    if gain.dtype not in NARROW:
        return None
    new = gain.to(wide)
    return torch.sum((new.abs() > LOSS * (1 + new).abs()) & (scale.abs() < 1))
