"""The model that a checkpoint belongs to: its class from the installed transformers, its weights loaded strictly.

A checkpoint names its class and may bring code of its own. Only classes of the installed transformers are built;
a checkpoint's code is never imported, and configuration entries that could fetch some (attention kernels by name,
other weight files) are dropped. What is loaded has to fit exactly: a missing, left-over or misshapen tensor is refused,
for a model with a random matrix in it would be certified just as happily.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from saggs.assembly import Granularity
from saggs.certificates import CertificationError, certify, examine
from saggs.checkpoints.layout import Layout, open_checkpoint
from saggs.checkpoints.pieces import Pieces, pieces_of
from saggs.checkpoints.shards import CheckpointError
from saggs.discovery import find_pairs
from saggs.explanation import Explanation, explain
from saggs.nullspace import Algebra, algebra
from saggs.pairs import BALANCED_KINDS, ScalePair

T = TypeVar("T")

_DROPPED = re.compile(r"(auto_map|transformers_weights|kernel_config|use_kernels|fusion_config|.*implementation.*)$")


def skeleton(layout: Layout) -> nn.Module:
    """The model on the meta device: names, shapes, tying, and no memory."""
    cls, config = _class_and_config(layout)
    with _quiet(), torch.device("meta"):
        try:
            model = cls(config)
        except Exception as error:  # whatever a configuration can make a constructor do
            raise _not_described(layout, cls, error) from error
    assert isinstance(model, nn.Module)
    return model


def load_model(layout: Layout) -> nn.Module:
    """The model with the checkpoint's weights, in the widest dtype of the files, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: an unknown class, weights that do not fit it, or weights that are not finite, by name.
    """
    pieces = pieces_of(layout, skeleton(layout))
    weights = {name: shard.read(name) for name, shard in layout.shard_of.items()}
    _require_finite(weights, pieces)
    _require_equal_copies(weights, pieces)
    floating = {t.dtype for t in weights.values() if t.is_floating_point()}
    widest = max(floating, key=lambda dtype: dtype.itemsize)
    if widest.itemsize == 2 and len(floating) > 1:
        widest = torch.float32
    cls, config = _class_and_config(layout)
    with _quiet():
        try:
            model, report = cls.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=widest,
                attn_implementation="eager",
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:
            raise _not_described(layout, cls, error) from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report[what]:
            raise CheckpointError(
                f"{layout.path} does not fit a {cls.__name__}: {what} {sorted(map(str, report[what]))[:5]}"
            )
    assert isinstance(model, nn.Module)
    return model.eval()


def pairs_of_checkpoint(
    checkpoint: Layout | Path, kinds: Sequence[str] = BALANCED_KINDS, granularity: Granularity = "matrix"
) -> list[ScalePair]:
    """The exact pairs of a checkpoint's model, each certified on the checkpoint's own weights.

    The one place where balancing a checkpoint holds a whole model in memory.

    Args:
        checkpoint: its directory, or what `open_checkpoint` returned.
        kinds, granularity: as for `saggs.find_pairs`.

    Raises:
        CheckpointError: an unknown class, weights that do not fit or are not finite, or a model that cannot be run.
        ValueError: an unknown kind or granularity.
    """
    layout = open_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    model = load_model(layout)
    pairs = _running(layout, lambda: find_pairs(model, kinds, granularity))
    bare = [pair for pair in pairs if pair.certificate is None]
    if bare:
        proven = iter(_running(layout, lambda: certify(model, bare)))
        pairs = [pair if pair.certificate is not None else next(proven) for pair in pairs]
    return pairs


def examine_checkpoint(
    layout: Layout, kinds: Sequence[str] = BALANCED_KINDS, granularity: Granularity = "matrix"
) -> list[tuple[ScalePair, CertificationError | None]]:
    """Every pair that discovery proposes, proven anew on the loaded weights: with its certificate, or with the error.

    Raises:
        CheckpointError, ValueError: as `pairs_of_checkpoint`.
    """
    model = load_model(layout)
    pairs = _running(layout, lambda: find_pairs(model, kinds, granularity))
    results = _running(layout, lambda: examine(model, pairs))
    return [
        (pair, result) if isinstance(result, CertificationError) else (result, None)
        for pair, result in zip(pairs, results, strict=True)
    ]


def explain_checkpoint(path: Path) -> Explanation:
    """For every matrix and gain of a checkpoint's model: in which kinds of pairs it is, or why in none.

    Raises:
        CheckpointError, ValueError: as `pairs_of_checkpoint`.
    """
    layout = open_checkpoint(path)
    model = load_model(layout)
    return _running(layout, lambda: explain(model))


def algebra_of_checkpoint(path: Path) -> Algebra:
    """The exact positive rescalings of a checkpoint's model, counted from below and from above.

    Raises:
        CheckpointError, ValueError: as `pairs_of_checkpoint`.
    """
    layout = open_checkpoint(path)
    model = load_model(layout)
    return _running(layout, lambda: algebra(model))


def _running(layout: Layout, call: Callable[[], T]) -> T:
    """Run discovery or certification; what it refuses is refused as a CheckpointError."""
    with _quiet():
        try:
            return call()
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{layout.path}: {error}") from error


# --- weights ---------------------------------------------------------------------------------------------------------


def _require_finite(weights: Mapping[str, Tensor], pieces: Pieces) -> None:
    held = [piece.tensor for own in pieces.values() for piece in own]
    wrong = [tensor for tensor in held if not bool(torch.isfinite(weights[tensor]).all())]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors hold NaN or infinite entries: {', '.join(wrong[:5])}; use a checkpoint from before"
        )


def _require_equal_copies(weights: Mapping[str, Tensor], pieces: Pieces) -> None:
    for piece in (piece for own in pieces.values() for piece in own):
        for copy in piece.copies:
            if not torch.equal(weights[piece.tensor], weights[copy]):
                raise CheckpointError(
                    f"{piece.tensor} and {copy} differ, though the configuration ties them; correct "
                    "tie_word_embeddings in config.json"
                )


# --- classes ---------------------------------------------------------------------------------------------------------


def _class_and_config(layout: Layout) -> tuple[Any, Any]:
    """transformers' class of the checkpoint and its configuration."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError("reading a checkpoint needs transformers: pip install 'saggs[transformers]'") from None

    architectures = layout.config.get("architectures") or []
    if not architectures:
        raise CheckpointError(f"{layout.path / 'config.json'} names no class under 'architectures'; add it")
    name = str(architectures[0])
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        why = "its class is code in the checkpoint, which is never run" if layout.config.get("auto_map") else ""
        raise CheckpointError(
            f"{layout.path}: {name!r} is no model of transformers {transformers.__version__}{why and '; '}{why}. Build "
            "the model yourself and use `saggs.find_pairs` and `saggs.balance`"
        )
    config_class: Any = cls.config_class
    if layout.config.get("model_type") != config_class.model_type:
        raise CheckpointError(
            f"{layout.path / 'config.json'}: model_type {layout.config.get('model_type')!r} does not belong to {name}, "
            f"whose is {config_class.model_type!r}"
        )
    with _quiet():
        try:
            config = config_class.from_dict(_without_code(layout.config))
            config._attn_implementation = "eager"
            config._experts_implementation = "eager"
        except Exception as error:
            raise _not_described(layout, cls, error) from error
    return cls, config


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_code(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not _DROPPED.match(key)
    }


def _not_described(layout: Layout, cls: type, error: Exception) -> CheckpointError:
    return CheckpointError(f"{layout.path}: no {cls.__name__} can be built of it: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings and progress bars: what matters of them is raised."""
    import logging as levels

    from transformers.utils import logging

    transformers_log: Any = logging
    verbosity, bars = transformers_log.get_verbosity(), transformers_log.is_progress_bar_enabled()
    transformers_log.set_verbosity(levels.ERROR)
    transformers_log.disable_progress_bar()
    try:
        yield
    finally:
        transformers_log.set_verbosity(verbosity)
        if bars:
            transformers_log.enable_progress_bar()
