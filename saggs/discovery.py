"""The one door to a model's exact pairs: `find_pairs`.

Candidates come from a short declaration of two wirings, recognised by the modules they are made of (not by a class):
GPT-2's fused `c_attn`, stored transposed as [in, out] with the query, key and value columns in thirds; and the
separate projections of Llama-like models. Every candidate is then certified on the model itself, so a declaration that
does not hold (a norm on the queries, another consumer of the values) is refused by name and never used.

    query_key     (W_Q, b_Q, W_K, b_K):  scores are q . k, so  q -> c q, k -> k / c
    value_output  (W_V, b_V, W_O):       outputs are W_O v,   so  v -> c v, W_O -> W_O / c    (b_O stays)
    up_down       (W_up, b_up, W_down):  act(gate) * up,      so  up -> c up, W_down -> W_down / c

A plain MLP with a GELU has no pair: gelu(c x) is not c gelu(x).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from saggs.certificates import CertificationError, Certifier
from saggs.inputs import Inputs, Output
from saggs.pairs import (
    KINDS,
    Kind,
    ParameterSlice,
    ScalePair,
    canonical_names,
    named_parameters,
    unwrap,
    unwrapped_name,
)


def find_pairs(
    model: nn.Module,
    kinds: Sequence[str] = KINDS,
    granularity: str = "matrix",
    inputs: Inputs | None = None,
    output: Output | None = None,
) -> list[ScalePair]:
    """The exact pairs of a model, each certified on this very model; empty where it has none.

    Args:
        model: a module with real (not meta) weights, wrapped or not. It is not changed.
        kinds: any of "query_key", "value_output", "up_down".
        granularity: "matrix": one factor a pair of matrices.
        inputs: callable (generator, count) -> keyword arguments; random tokens for a causal language model.
        output: callable (result) -> tensor; the logits by default.

    Raises:
        ValueError: an unknown kind or granularity, or a model that cannot be run.

    Warns:
        UserWarning: a candidate that failed certification, with the pair's name and the change of the outputs.
    """
    chosen = _check_kinds(kinds)
    if granularity != "matrix":
        raise ValueError(f"granularity={granularity!r} is not available; use granularity='matrix'")
    candidates = [pair for pair in declared_pairs(model) if pair.kind in chosen]
    if not candidates:
        return []
    found: list[ScalePair] = []
    for examined in Certifier(model, inputs, output).examine(candidates):
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


def declared_pairs(model: nn.Module) -> list[ScalePair]:
    """Candidates by wiring alone, none of them certified. Works on meta tensors: no weight is read."""
    found = [
        pair for path, module in unwrap(model).named_modules() for pair in _of_module(unwrapped_name(path), module)
    ]
    canonical, parameters = canonical_names(model), named_parameters(model)
    return [_settled(pair, canonical, parameters) for pair in found]


def _settled(pair: ScalePair, canonical: Mapping[str, str], parameters: Mapping[str, nn.Parameter]) -> ScalePair:
    """With shapes; and a tied weight stands under the first of its names, wherever in the model a pair met it."""

    def settle(part: ParameterSlice) -> ParameterSlice:
        name = canonical[part.name]
        return dataclasses.replace(part, name=name, shape=tuple(parameters[name].shape))

    left, right = (tuple(map(settle, side)) for side in (pair.left, pair.right))
    return dataclasses.replace(pair, left=left, right=right)


def _of_module(path: str, module: nn.Module) -> Iterator[ScalePair]:
    part = {name: child for name, child in module.named_children() if _has_plain_weight(path, name, child)}
    if {"c_attn", "c_proj"} <= part.keys():
        width_in, width_out = _weight_shape(part["c_attn"])
        if width_out == 3 * width_in:
            yield from _fused_attention(path, part["c_attn"], width_in)
    for kind, left, right, right_side in _LINEAR:
        if {left, right} <= part.keys():
            yield _linear_pair(kind, path, part, left=left, right=right, right_side=right_side)


_LINEAR: tuple[tuple[Kind, str, str, str], ...] = (
    ("query_key", "q_proj", "k_proj", "rows"),
    ("value_output", "v_proj", "o_proj", "columns"),
    ("up_down", "up_proj", "down_proj", "columns"),
)
_NAMES = {"c_attn", "c_proj"}.union(*((left, right) for _, left, right, _ in _LINEAR))


def _has_plain_weight(path: str, name: str, module: nn.Module) -> bool:
    """Whether the layer's weight is a matrix of its own; one that a wrapper or a parametrisation makes is left out."""
    if name not in _NAMES:
        return False
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is not None and weight.dim() == 2:
        return True
    where = f"{path}.{name}" if path else name
    warnings.warn(
        f"left out: {where} is a {type(module).__name__} whose weight is no plain matrix (wrapped, parametrised or "
        "quantised); merge or unwrap it to rescale it",
        stacklevel=5,
    )
    return False


def _weight_shape(module: nn.Module) -> tuple[int, int]:
    rows, columns = dict(module.named_parameters(recurse=False))["weight"].shape
    return rows, columns


def _fused_attention(path: str, c_attn: nn.Module, width: int) -> Iterator[ScalePair]:
    """GPT-2: columns [0, w) of c_attn are the queries, [w, 2w) the keys, [2w, 3w) the values; rows are inputs."""
    prefix = f"{path}." if path else ""

    def third(index: int, exponent: int) -> tuple[ParameterSlice, ...]:
        columns = (index * width, (index + 1) * width)
        weight = ParameterSlice(f"{prefix}c_attn.weight", (None, columns), exponent)
        if getattr(c_attn, "bias", None) is None:
            return (weight,)
        return (weight, ParameterSlice(f"{prefix}c_attn.bias", (columns,), exponent, bias=True))

    yield ScalePair("query_key", path, left=third(0, 1), right=third(1, -1))
    output = ParameterSlice(f"{prefix}c_proj.weight", (None, None), -1)
    yield ScalePair("value_output", path, left=third(2, 1), right=(output,))


def _linear_pair(
    kind: Kind, path: str, part: dict[str, nn.Module], *, left: str, right: str, right_side: str
) -> ScalePair:
    """Two `nn.Linear` layers, whole. A side whose rows are scaled takes its bias along, one whose columns are, not."""

    def whole(name: str, exponent: int, with_bias: bool) -> tuple[ParameterSlice, ...]:
        prefix = f"{path}.{name}" if path else name
        weight = ParameterSlice(f"{prefix}.weight", (None, None), exponent)
        if not with_bias or getattr(part[name], "bias", None) is None:
            return (weight,)
        return (weight, ParameterSlice(f"{prefix}.bias", (None,), exponent, bias=True))

    return ScalePair(kind, path, whole(left, 1, True), whole(right, -1, right_side == "rows"))
