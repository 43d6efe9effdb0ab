"""The exact pairs of a model, computed from its scale charges and certified on the very model.

    charges (`saggs.charges`) -> relations among them (`saggs.relations`) -> kinds and heads (`saggs.kinds`)
    -> pairs (`saggs.assembly`) -> certificates (`saggs.certificates`)

No list of architectures stands behind it and no name of a layer is read: what the model computes decides. What cannot
be certified is left out and named in a warning, never guessed.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from saggs.assembly import GRANULARITIES, Granularity, assembled
from saggs.cache import cached
from saggs.certificates import CertificationError, examine
from saggs.copies import require_real
from saggs.inputs import Inputs, Output
from saggs.lifting import Analysis, analyse
from saggs.pairs import KINDS, ScalePair, unwrap


def find_pairs(
    model: nn.Module,
    kinds: Sequence[str] = KINDS,
    granularity: Granularity = "matrix",
    inputs: Inputs | None = None,
    output: Output | None = None,
    *,
    cache: Path | None = None,
) -> list[ScalePair]:
    """The exact pairs of a model, each certified on this very model; empty where it has none.

    Args:
        model: a module with real (not meta) weights, wrapped or not. It is not changed.
        kinds: any of "query_key", "value_output", "up_down", "norm_gain", "query_key_gain".
        granularity: "matrix": one factor a pair of matrices; "head": one a key-value group; "channel": the finest
            exact one (a rotary pair of channels, a neuron, a gain).
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.
        cache: a directory that keeps what was found for later processes (see `saggs.cache`); what is kept is certified
            anew all the same.

    Raises:
        ValueError: an unknown kind or granularity, or a model that cannot be run.

    Warns:
        UserWarning: a candidate that failed certification, with the pair's name and the change of the outputs.
    """
    chosen = _check_kinds(kinds)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r}: choose from {', '.join(GRANULARITIES)}")
    require_real(unwrap(model))
    propose = _Proposals(model, inputs, output, cache)
    results = _with_signs(model, propose.pairs("matrix", chosen), inputs, output)
    if granularity != "matrix":  # what signs are allowed is a matter of the matrices: it is asked of them
        signs = {_matrices(p): p.signs for p in results if isinstance(p, ScalePair)}
        finer = [
            dataclasses.replace(p, signs=signs.get(_matrices(p), "positive"))
            for p in propose.pairs(granularity, chosen)
        ]
        results = examine(model, finer, inputs, output)
    found: list[ScalePair] = []
    for examined in results:
        if isinstance(examined, CertificationError):
            warnings.warn(f"left out: {examined}", stacklevel=2)
        else:
            found.append(examined)
    return found


def _check_kinds(kinds: Sequence[str]) -> set[str]:
    if isinstance(kinds, str):
        kinds = (kinds,)
    unknown = [k for k in kinds if k not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds={list(kinds)!r}: choose from {', '.join(KINDS)}")
    return set(kinds)


class _Proposals:
    """Candidates of a model, analysed once, or not at all where the cache knows it."""

    def __init__(self, model: nn.Module, inputs: Inputs | None, output: Output | None, cache: Path | None) -> None:
        self._model, self._inputs, self._output, self._cache = model, inputs, output, cache
        self._analysis: Analysis | None = None

    def pairs(self, granularity: Granularity, kinds: set[str]) -> list[ScalePair]:
        """Those of some kinds, without certificates."""
        if self._inputs is None and self._output is None:
            found = cached(self._model, granularity, self._cache, lambda: self._assembled(granularity))
        else:
            found = self._assembled(granularity)
        return [pair for pair in found if pair.kind in kinds]

    def _assembled(self, granularity: Granularity) -> list[ScalePair]:
        if self._analysis is None:
            with torch.random.fork_rng(devices=[]):  # a forward pass may draw
                self._analysis = analyse(self._model, self._inputs, self._output)
            for doubt in self._analysis.found.doubts:
                warnings.warn(f"left out: {doubt}", stacklevel=5)
        return assembled(self._model, self._analysis.wiring, self._analysis.generators, granularity)


def _matrices(pair: ScalePair) -> tuple[str, frozenset[str]]:
    return pair.kind, frozenset(part.name for part in pair.slices)


def _with_signs(
    model: nn.Module, candidates: Sequence[ScalePair], inputs: Inputs | None, output: Output | None
) -> list[ScalePair | CertificationError]:
    """Certified for any sign of the factor, or for positive ones alone: charges see only what is near 1."""
    found = examine(model, candidates, inputs, output)
    again = [i for i, f in enumerate(found) if isinstance(f, CertificationError)]
    positive = [dataclasses.replace(candidates[i], signs="positive") for i in again]
    for i, result in zip(again, examine(model, positive, inputs, output), strict=True):
        found[i] = result
    return found
