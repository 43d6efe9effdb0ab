"""Which tensors of the files hold which part of which parameter.

Mostly a parameter is one tensor of the same name. But files written from a bare backbone lack its prefix, tied weights
may stand there twice, and transformers stores some models in another shape than it computes in: renamed matrices, or
the experts of a layer one by one though the model holds them in a single three-dimensional parameter. What
`save_pretrained` would do to a parameter is asked of transformers itself, by handing it tensors that hold their own
coordinates; a result that is no rectangle of the parameter is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saggs.checkpoints.layout import Layout
from saggs.checkpoints.shards import CheckpointError
from saggs.pairs import ParameterSlice, ScalePair, canonical_names, named_parameters

_OLD_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """A tensor of the files, and the rectangle of a parameter that it holds.

    Attributes:
        tensor: its name in the files.
        bounds: (start, stop) in every dimension of the parameter.
        kept: the parameter's dimensions that the tensor has; the others are of length 1.
        copies: further tensors that hold the same, where the files have a tied weight twice.
    """

    tensor: str
    bounds: Bounds
    kept: tuple[int, ...]
    copies: tuple[str, ...] = ()

    def part_of(self, part: ParameterSlice, shape: tuple[int, ...]) -> ParameterSlice | None:
        """What `part` of the parameter takes of this tensor, which has `shape`; None where that is nothing."""
        ranges: list[tuple[int, int] | None] = []
        for dim, (own, taken) in enumerate(zip(self.bounds, part.ranges, strict=True)):
            low, high = (own[0], own[1]) if taken is None else (max(own[0], taken[0]), min(own[1], taken[1]))
            if low >= high:
                return None
            if dim in self.kept:
                ranges.append(None if (low, high) == own else (low - own[0], high - own[0]))
        return dataclasses.replace(part, name=self.tensor, ranges=tuple(ranges), shape=shape)


Pieces = Mapping[str, tuple[Piece, ...]]


def pieces_of(layout: Layout, model: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """Parameter, by the first of its names -> the tensors that hold it.

    Args:
        layout: of the checkpoint.
        model: of its class; may be on the meta device.

    Raises:
        CheckpointError: a parameter that no file holds, a tensor of another shape, or one that belongs to nothing.
    """
    canonical, parameters = canonical_names(model), named_parameters(model)
    shapes, buffers = layout.shapes, {name for name, _ in model.named_buffers()}
    whole: dict[str, list[str]] = {name: [] for name in parameters}
    rest = []
    for tensor in layout.shard_of:
        name = next((n for n in _spellings(tensor, model) if n in canonical or n in buffers), None)
        if name in canonical:
            whole[canonical[name]].append(tensor)
        elif name is None:
            rest.append(tensor)
    found: dict[str, tuple[Piece, ...]] = {}
    conversion = _Conversion(model)
    for name, tensors in whole.items():
        shape = tuple(parameters[name].shape)
        if tensors:
            bounds = tuple((0, n) for n in shape)
            found[name] = (Piece(tensors[0], bounds, tuple(range(len(shape))), tuple(tensors[1:])),)
        else:
            found[name] = conversion.pieces(name, shape, set(rest))
        for piece in found[name]:
            expected = tuple(piece.bounds[d][1] - piece.bounds[d][0] for d in piece.kept)
            for tensor in (piece.tensor, *piece.copies):
                if shapes[tensor] != expected:
                    raise CheckpointError(
                        f"{layout.path}: {tensor} has shape {shapes[tensor]}, the model's {name} needs {expected}"
                    )
    held = {piece.tensor for pieces in found.values() for piece in pieces}
    missing = [name for name, pieces in found.items() if not pieces]
    leftover = [t for t in rest if t not in held and not _may_be_left_over(t, model)]
    if missing or leftover:
        raise CheckpointError(
            f"{layout.path} does not fit a {type(model).__name__}: missing {missing[:5]}, left over {leftover[:5]} "
            f"({len(missing)} and {len(leftover)} in all)"
        )
    return found


def on_files(pairs: Sequence[ScalePair], pieces: Pieces, layout: Layout) -> list[ScalePair]:
    """The same pairs, their slices named by the tensors of the files."""
    by_first = {name: _ByFirstDimension(held) for name, held in pieces.items()}
    shapes = layout.shapes

    def moved(part: ParameterSlice) -> Iterator[ParameterSlice]:
        for piece in by_first[part.name].near(part):
            found = piece.part_of(part, shapes[piece.tensor])
            if found is not None:
                yield found

    return [
        dataclasses.replace(
            pair,
            left=tuple(found for part in pair.left for found in moved(part)),
            right=tuple(found for part in pair.right for found in moved(part)),
        )
        for pair in pairs
    ]


class _ByFirstDimension:
    """Pieces by what they hold of the first dimension: a layer may have hundreds of experts, a slice one."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._groups: dict[tuple[int, int] | None, list[Piece]] = {}
        for piece in pieces:
            self._groups.setdefault(piece.bounds[0] if piece.bounds else None, []).append(piece)
        self._single = all(bounds is not None and bounds[1] - bounds[0] == 1 for bounds in self._groups)

    def near(self, part: ParameterSlice) -> Iterator[Piece]:
        taken = part.ranges[0] if part.ranges else None
        if taken is not None and self._single:
            for index in range(*taken):
                yield from self._groups.get((index, index + 1), ())
        else:
            for group in self._groups.values():
                yield from group


class _Conversion:
    """How transformers stores the parameters of a model: the pieces it would save each one as."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[tuple[str, tuple[int, ...]], list[tuple[Bounds, tuple[int, ...]]]] = {}

    def pieces(self, name: str, shape: tuple[int, ...], present: set[str]) -> tuple[Piece, ...]:
        """The pieces of a parameter, all of them `present`; none where that cannot be."""
        names = list(self._saved(name, torch.empty(shape, device="meta")))
        if not names or not present.issuperset(names):
            return ()
        key = re.sub(r"\d+", "#", name), shape  # alike in all layers
        if key not in self._known:
            self._known[key] = self._rectangles(name, shape)
        if len(self._known[key]) != len(names):
            return ()
        return tuple(Piece(n, bounds, kept) for n, (bounds, kept) in zip(names, self._known[key], strict=True))

    def _rectangles(self, name: str, shape: tuple[int, ...]) -> list[tuple[Bounds, tuple[int, ...]]]:
        """What each saved tensor holds, read off coordinates that were saved in the parameter's place."""
        by_dim = []
        for dim, length in enumerate(shape):
            line = torch.arange(length, dtype=torch.int32).view([-1 if d == dim else 1 for d in range(len(shape))])
            by_dim.append(list(self._saved(name, line.expand(shape)).values()))
        found = []
        for coordinates in zip(*by_dim, strict=True):
            bounds = tuple((int(c.flatten()[0]), int(c.flatten()[-1]) + 1) for c in coordinates)
            sizes = [stop - start for start, stop in bounds]
            kept = tuple(range(len(shape)))
            if coordinates[0].dim() == len(shape) - 1 and 1 in sizes:
                kept = tuple(d for d in kept if d != sizes.index(1))
            for dim, (start, stop) in enumerate(bounds):
                line = torch.arange(start, stop, dtype=torch.int32)
                expected = line.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(sizes)
                if coordinates[dim].numel() != expected.numel() or not torch.equal(
                    coordinates[dim], expected.reshape([sizes[d] for d in kept])
                ):
                    return []
            found.append((bounds, kept))
        return found

    def _saved(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError:  # an older transformers, which stores what it computes with
            return {}
        revert: Callable[..., dict[str, Any]] = revert_weight_conversion
        try:
            saved = revert(self._model, {name: tensor})
        except Exception:  # a conversion that needs more than this one parameter
            return {}
        return saved if all(isinstance(value, Tensor) for value in saved.values()) else {}


def _spellings(tensor: str, model: nn.Module) -> Iterator[str]:
    """A tensor's name as it may stand in the model: saved from the bare backbone, it lacks its prefix."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    yield tensor
    if prefix:
        yield f"{prefix}.{tensor}"
        yield tensor.removeprefix(f"{prefix}.")


def _may_be_left_over(tensor: str, model: nn.Module) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return bool(_OLD_BUFFERS.search(tensor)) or any(re.search(pattern, tensor) for pattern in patterns)
