"""Inspect, certify and rebalance a checkpoint on disk: weights and the optimizer's state, in bounded memory.

    inspect_checkpoint(path)           how far from balance every exact pair is
    certify_checkpoint(path)           which pairs are exact on these very weights
    rebalance_checkpoint(path, out)    the same function, balanced; `path` is not changed

Finding and certifying the pairs needs the model in memory once (`pairs_of_checkpoint`). Balancing does not: one pass
over the weight files sums the squares of every cell (`cells`), the factors follow from the sums, and a second
pass copies the files with the weights of the pairs multiplied on the way (`shards`). Everything else is copied
byte for byte. No code of a checkpoint's is run, no pickle is opened but weights and optimizer state, and those as plain
tensors only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from saggs.assembly import Granularity
from saggs.certificates import CertificationError
from saggs.checkpoints.cells import Balance, CellPlan, Grid, scale_rows
from saggs.checkpoints.layout import MARKER, OPTIMIZER, Layout, digest, names, open_checkpoint
from saggs.checkpoints.model import examine_checkpoint, pairs_of_checkpoint, skeleton
from saggs.checkpoints.output_directory import appearing, check_output, leftovers
from saggs.checkpoints.pieces import on_files, pieces_of
from saggs.checkpoints.shards import CheckpointError, Edit, copy_file, save_plain
from saggs.checkpoints.trainer_state import OptimizerState
from saggs.objective import Norm, order_of
from saggs.pairs import BALANCED_KINDS, ScalePair, named_parameters

Factors = Literal["auto", "exact", "power_of_two"]
Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)."""


def _silent(what: str, done: int, total: int) -> None:
    """The `Progress` of nobody watching."""


@dataclass(frozen=True)
class PairReport:
    """How far one pair is from balance.

    Attributes:
        pair: with its certificate.
        log2_ratio: log2(|left| / |right|); None where a norm is zero.
        log2_ratio_after: the same once the factors of all pairs are applied.
        factor: what the left side is to be multiplied by (the right one divided) to balance it.
        rounded: the factor is the nearest power of two.
    """

    pair: ScalePair
    log2_ratio: float | None
    log2_ratio_after: float | None
    factor: float
    rounded: bool


@dataclass(frozen=True)
class Rebalanced:
    """What `rebalance_checkpoint` did.

    Attributes:
        pairs: every pair before, with the factor that was applied.
        optimizer: "carried", "left out", "empty" or "absent".
        notes: what a user should know: rounding, pairs left alone, files that were only copied.
    """

    pairs: tuple[PairReport, ...]
    optimizer: str
    notes: tuple[str, ...] = field(default=())


def inspect_checkpoint(
    path: Path,
    kinds: Sequence[str] = BALANCED_KINDS,
    granularity: Granularity = "matrix",
    norm: Norm = "l2",
    progress: Progress = _silent,
) -> list[PairReport]:
    """Every exact pair of a checkpoint with its norm ratio, in the order of the model.

    Args:
        path: the checkpoint's directory.
        kinds, granularity: as for `saggs.find_pairs`.
        norm: "l2" (Frobenius), or "l1" for sums of absolute values.
        progress: called as bytes are read.

    Raises:
        CheckpointError: see `saggs.checkpoints.layout.open_checkpoint` and `pairs_of_checkpoint`.
        ValueError: an unknown kind, granularity or norm.
    """
    return list(_measure(open_checkpoint(path), kinds, granularity, 1.0, norm, "exact", progress).reports)


def certify_checkpoint(
    path: Path, kinds: Sequence[str] = BALANCED_KINDS, granularity: Granularity = "matrix"
) -> list[tuple[ScalePair, CertificationError | None]]:
    """Every pair that discovery proposes, proven anew on the checkpoint's weights: with its certificate or an error.

    Args and raises as `inspect_checkpoint`.
    """
    return examine_checkpoint(open_checkpoint(path), kinds, granularity)


def rebalance_checkpoint(
    path: Path,
    out: Path,
    *,
    kinds: Sequence[str] = BALANCED_KINDS,
    granularity: Granularity = "matrix",
    damping: float = 1.0,
    norm: Norm = "l2",
    factors: Factors = "auto",
    optimizer: Path | None = None,
    without_optimizer: bool = False,
    progress: Progress = _silent,
) -> Rebalanced:
    """Write a balanced copy of a checkpoint to `out`, which appears whole or not at all.

    Args:
        path: the checkpoint's directory; it is not changed.
        out: must not exist.
        kinds, granularity: as for `saggs.find_pairs`.
        damping: alpha in (0, 1]; 1 equalises the norms, less closes that share of the log-gap.
        norm: "l2" (Frobenius), or "l1" for sums of absolute values.
        factors: "power_of_two": rounded to the nearest one, so that the outputs stay the same to the bit in bfloat16,
            float32 and float64; "exact": computed in float32 or float64, each weight rounded once; "auto": powers of
            two for pairs that hold bfloat16 tensors, exact ones for all others.
        optimizer: the optimizer's state where it is not `optimizer.pt` in `path`.
        without_optimizer: leave the optimizer's state out. It is never left out otherwise.
        progress: called as bytes are read and written.

    Raises:
        CheckpointError: a checkpoint or an optimizer's state that cannot be handled; nothing is written.
        ValueError: a setting out of range.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    path, out = Path(path), Path(out)
    if isinstance(damping, bool) or not 0.0 < damping <= 1.0:
        raise ValueError(f"damping={damping!r} must lie in (0, 1]: 1 is hard balancing")
    check_output(out, path)
    notes = [f"{old} was left by an interrupted call; remove it" for old in leftovers(out)]
    layout = _with_optimizer(open_checkpoint(path), optimizer, without_optimizer)
    check_output(out, layout.path)
    measured = _measure(layout, kinds, granularity, damping, norm, factors, progress)
    plan, found = measured.plan, measured.balance
    state = None if layout.optimizer is None else OptimizerState(layout.optimizer, measured.model)
    moved = bool((found.factors != 1).any())  # or everything is only copied
    contents = None
    if state is not None and state.entries and moved:
        shapes = {name: tuple(p.shape) for name, p in named_parameters(measured.model).items()}
        contents = state.rescale(CellPlan([r.pair for r in measured.reports], shapes), found.factors)
    edits = _edits(plan, plan.multipliers(found.factors), measured.copies)
    with appearing(out) as temporary:
        _write(layout, temporary, edits, contents, progress)
    notes += [*layout.notes, *measured.notes, *(state.notes if state else ())]
    if without_optimizer:
        gone = names([*([path / OPTIMIZER] if (path / OPTIMIZER).exists() else []), *layout.sharded_optimizer])
        outcome = "left out" if gone else "absent"
        notes += [f"the optimizer's state ({gone}) was left out, as asked"] if gone else []
    else:
        outcome = "absent" if state is None else "carried" if state.entries else "empty"
    return Rebalanced(measured.reports, outcome, tuple(notes))


def _with_optimizer(layout: Layout, optimizer: Path | None, without: bool) -> Layout:
    """The layout with the optimizer's state that is to be carried; a CheckpointError where that is not clear."""
    if without:
        if optimizer is not None:
            raise CheckpointError("an optimizer's state to carry, and none to be carried: choose one")
        if layout.manifest is not None:
            raise CheckpointError(f"{layout.path} is a run's checkpoint, which is none without its {OPTIMIZER}")
        return dataclasses.replace(layout, optimizer=None)
    if layout.sharded_optimizer:
        raise CheckpointError(
            f"{layout.path} holds an optimizer's state that cannot be carried ({names(layout.sharded_optimizer)}: "
            "sharded, or of another framework). Leave it out knowingly with --without-optimizer, or rebalance inside "
            "the training loop (saggs.Rebalancer)"
        )
    if optimizer is None:
        return layout
    if not optimizer.is_file():
        raise CheckpointError(f"{optimizer} is no file; name the optimizer's state")
    if layout.optimizer is not None and not layout.optimizer.samefile(optimizer):
        raise CheckpointError(f"{layout.optimizer} is there too; remove the one of the two that is not meant")
    return dataclasses.replace(layout, optimizer=optimizer)


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    model: nn.Module
    plan: CellPlan
    balance: Balance
    copies: Mapping[str, tuple[str, ...]]
    reports: tuple[PairReport, ...]
    notes: tuple[str, ...]


def _measure(
    layout: Layout,
    kinds: Sequence[str],
    granularity: Granularity,
    damping: float,
    norm: Norm,
    factors: Factors,
    progress: Progress,
) -> _Measured:
    """Pairs, what balances them, and the cells of the files' tensors. `model` is on the meta device."""
    order = order_of(norm)
    if factors not in ("auto", "exact", "power_of_two"):
        raise ValueError(f"factors={factors!r}: choose auto, exact or power_of_two")
    progress("finding and certifying the pairs", 0, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pairs = pairs_of_checkpoint(layout, kinds, granularity)
    notes = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    if not pairs:
        raise CheckpointError(f"{layout.path}: the model has no exact pair of the kinds {', '.join(kinds)}")
    model = skeleton(layout)
    pieces = pieces_of(layout, model)
    moved = on_files(pairs, pieces, layout)
    plan = CellPlan(moved, layout.shapes)
    sums = _sums(layout, plan, order, progress)
    dtypes = {name: layout.dtype(name) for name in plan.grids}
    rounded = [
        factors == "power_of_two"
        or (factors == "auto" and any(dtypes[part.name] == torch.bfloat16 for part in pair.slices))
        for pair in moved
    ]
    widest_step = [max(torch.finfo(dtypes[part.name]).eps for part in pair.slices) for pair in moved]
    balance = plan.balance(sums, order, damping, torch.tensor(rounded), torch.tensor(widest_step, dtype=torch.float64))
    notes += _rounding_notes(set(dtypes.values()), all(rounded))
    columns = (balance.before, balance.after, balance.factors, balance.impossible)
    reports = tuple(
        PairReport(pair, None if zero else before, None if zero else after, factor, power_of_two)
        for pair, power_of_two, before, after, factor, zero in zip(
            pairs, rounded, *(column.tolist() for column in columns), strict=True
        )
    )
    notes += [f"{r.pair} was left alone: a side of it is zero" for r in reports if r.log2_ratio is None]
    copies = {piece.tensor: piece.copies for own in pieces.values() for piece in own}
    return _Measured(model, plan, balance, copies, reports, tuple(notes))


def _sums(layout: Layout, plan: CellPlan, order: int, progress: Progress) -> Tensor:
    sums = plan.new_sums()
    total = sum(
        layout.shard_of[name].entries[name].stop - layout.shard_of[name].entries[name].start for name in plan.grids
    )
    done = 0
    for shard in layout.shards:  # file by file, each from its beginning
        own = [name for name in plan.grids if layout.shard_of[name] is shard]
        for name in sorted(own, key=lambda name: shard.entries[name].start):
            grid = plan.grids[name]
            for first, rows in shard.rows(name):
                grid.add_sums(rows, first, order, sums)
                done += rows.nbytes
                progress("measuring", done, total)
            if not bool(torch.isfinite(sums[grid.first : grid.first + grid.cells]).all()):
                raise CheckpointError(f"{shard.path}: {name} holds NaN or infinite entries; use one from before")
    return sums


def _rounding_notes(dtypes: set[torch.dtype], all_rounded: bool) -> list[str]:
    notes = []
    if torch.float16 in dtypes:
        notes.append(
            "float16 weights are multiplied in float32 and rounded to float16: the outputs change by its rounding, "
            "about 1e-3, and with powers of two where entries fall below 6e-5"
        )
    if torch.bfloat16 in dtypes and not all_rounded:
        notes.append("bfloat16 weights are rounded after exact factors: the outputs change by about 1e-2")
    return notes


# --- writing ---------------------------------------------------------------------------------------------------------


def _edits(plan: CellPlan, multipliers: Tensor, copies: Mapping[str, tuple[str, ...]]) -> dict[str, Edit]:
    """What to do with each tensor of the files; those that nothing multiplies are absent."""
    edits: dict[str, Edit] = {}
    for name, grid in plan.grids.items():
        own = multipliers[grid.first : grid.first + grid.cells]
        if not bool((own == 1).all()):
            edits |= dict.fromkeys((name, *copies[name]), partial(_scale, name, grid, grid.expanded(multipliers)))
    return edits


def _scale(name: str, grid: Grid, expanded: Tensor, rows: Tensor, first: int) -> None:
    scale_rows(rows, grid.rows_of(expanded, first, len(rows) if rows.dim() else 1), grid.offset)
    if rows.dtype == torch.float16 and not bool(torch.isfinite(rows).all()):
        raise CheckpointError(f"{name} overflows in float16; use a smaller damping, or save it in bfloat16 or float32")


def _write(
    layout: Layout, temporary: Path, edits: Mapping[str, Edit], contents: object | None, progress: Progress
) -> None:
    """Every file of the checkpoint into `temporary`: weights changed, optimizer state replaced, the rest copied."""
    shards = {shard.path: shard for shard in layout.shards}
    skipped = {layout.path / OPTIMIZER, *layout.sharded_optimizer} if layout.optimizer is None else set()
    carried = layout.optimizer if contents is not None else None
    files = [(p, p.relative_to(layout.path)) for p in _files(layout.path, skipped)]
    if layout.optimizer is not None and not layout.optimizer.resolve().is_relative_to(layout.path.resolve()):
        files.append((layout.optimizer, Path(OPTIMIZER)))
    if layout.manifest is not None and layout.manifest.parent != layout.path:
        files.append((layout.manifest, Path("manifest.json")))  # it describes the model
    total, done = sum(p.stat().st_size for p, _ in files), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("writing", done, total)

    for source, relative in files:
        target = temporary / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if source in shards:
            shard = shards[source]
            shard.rewrite(target, {t: e for t, e in edits.items() if layout.shard_of[t] is shard}, advance)
        elif carried is not None and source.samefile(carried):
            save_plain(contents, target)
            advance(source.stat().st_size)
        elif layout.manifest is None or relative.name != MARKER:
            copy_file(source, target, advance)
        else:
            continue  # the marker: written last, below
        shutil.copymode(source, target)
    if layout.manifest is not None:
        written = json.loads((layout.path / MARKER).read_bytes())
        hashes = {name: digest(temporary / name) for name in written}
        with open(temporary / MARKER, "x") as stream:
            json.dump(hashes, stream)
            stream.flush()
            os.fsync(stream.fileno())


def _files(path: Path, skipped: set[Path]) -> list[Path]:
    """Every file under `path`, links followed to what they name; a CheckpointError for one that leads nowhere."""
    found = []
    for entry in sorted(path.iterdir()):
        if entry in skipped:
            continue
        if entry.is_symlink() and not entry.is_file():
            raise CheckpointError(f"{entry} is a link to a directory or to nothing; remove it")
        if entry.is_dir():
            found += _files(entry, skipped)
        elif entry.is_file():
            found.append(entry)
    return found


__all__ = [
    "CheckpointError",
    "PairReport",
    "Rebalanced",
    "certify_checkpoint",
    "inspect_checkpoint",
    "open_checkpoint",
    "pairs_of_checkpoint",
    "rebalance_checkpoint",
]
