"""Pairs by a declared list of layer names, for two families: the cross-check of what is computed from charges."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping

from torch import nn

from saggs.pairs import (
    Kind,
    ParameterSlice,
    ScalePair,
    canonical_names,
    named_parameters,
    unwrap,
    unwrapped_name,
)


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
