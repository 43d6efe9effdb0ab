"""Architectures drawn at random: one plain module for every recipe, and its exact pairs in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from expected_rules import Gain, Generator, Linear, frequencies, norm_gain, query_key, starts, up_down, value_output
from families import randomised
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

Storage = Literal["separate", "fused", "interleaved"]
Rotary = Literal["none", "halves", "neighbours"]
Activation = Literal["relu", "relu2", "gelu", "gated"]
Mixture = Literal["dense", "soft", "top2"]
Norm = Literal["layer", "rms", "rms1"]
VOCABULARY, LENGTH = 60, 40


@dataclass(frozen=True)
class Recipe:
    """What a random architecture is made of.

    share: query heads on one key head. rotated: channels of a head that positions turn, of `size`. parallel: one norm
    for attention and neurons, side by side. rounds: how often the layers are gone through.
    """

    groups: int = 2
    share: int = 1
    size: int = 4
    width: int = 9
    neurons: int = 7
    layers: int = 1
    attention_bias: bool = True
    mlp_bias: bool = True
    storage: Storage = "separate"
    keys_first: bool = False
    rotary: Rotary = "none"
    rotated: int = 0
    activation: Activation = "relu"
    gate_in_one: bool = False
    mixture: Mixture = "dense"
    stacked: bool = False
    norm: Norm = "layer"
    norm_first: bool = True
    parallel: bool = False
    rounds: int = 1
    normalised: bool = False
    tied: bool = False

    @property
    def heads(self) -> int:
        return self.groups * self.share

    @property
    def experts(self) -> int:
        return 1 if self.mixture == "dense" else 3

    @property
    def gated(self) -> bool:
        return self.activation == "gated"


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Small recipes of every combination. A head has two channels at least: one alone is a neuron like any other."""
    size = draw(st.integers(2, 6))
    rotary: Rotary = draw(st.sampled_from(["none", "halves", "neighbours"]))
    names = ("attention_bias", "mlp_bias", "keys_first", "gate_in_one", "stacked", "norm_first", "parallel")
    flags = {name: draw(st.booleans()) for name in (*names, "normalised", "tied")}
    return Recipe(
        groups=draw(st.integers(1, 3)),
        share=draw(st.integers(1, 3)),
        size=size,
        width=draw(st.integers(6, 13)),
        neurons=draw(st.integers(3, 8)),
        layers=draw(st.integers(1, 2)),
        storage=draw(st.sampled_from(["separate", "fused", "interleaved"])),
        rotary=rotary,
        rotated=0 if rotary == "none" else 2 * draw(st.integers(1, size // 2)),
        activation=draw(st.sampled_from(["relu", "relu2", "gelu", "gated"])),
        mixture=draw(st.sampled_from(["dense", "soft", "top2"])),
        norm=draw(st.sampled_from(["layer", "rms", "rms1"])),
        rounds=draw(st.sampled_from([1, 1, 2])),
        **flags,
    )


# --- the module -------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """x / rms(x), times w or 1 + w."""

    def __init__(self, size: int, offset: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.offset, self.eps = offset, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        normal = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return normal * (1 + self.weight) if self.offset else normal * self.weight


def norm_of(r: Recipe, size: int) -> nn.Module:
    return nn.LayerNorm(size) if r.norm == "layer" else Scale(size, int(r.norm == "rms1"))


def turned(x: Tensor, r: Recipe) -> Tensor:
    """Rotary positions on the first channels of x [batch, heads, length, size]."""
    if r.rotary == "none":
        return x
    half = r.rotated // 2
    speed = 30.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * speed
    cos, sin = angle.cos(), angle.sin()
    first, rest = x[..., : r.rotated], x[..., r.rotated :]
    a, b = first.chunk(2, -1) if r.rotary == "halves" else (first[..., 0::2], first[..., 1::2])
    c, d = a * cos - b * sin, b * cos + a * sin
    mixed = torch.cat((c, d), -1) if r.rotary == "halves" else torch.stack((c, d), -1).flatten(-2)
    return torch.cat((mixed, rest), -1)


class Attention(nn.Module):
    """Causal attention from one, three or interleaved matrices."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.r = r
        rows = {"query": r.heads * r.size, "key": r.groups * r.size, "value": r.groups * r.size}
        if r.storage == "separate":
            for name in sorted(rows, key=lambda n: (n == "query") == r.keys_first):
                self.add_module(name, nn.Linear(r.width, rows[name], bias=r.attention_bias))
        else:
            self.whole = nn.Linear(r.width, sum(rows.values()), bias=r.attention_bias)
        self.out = nn.Linear(r.heads * r.size, r.width, bias=r.attention_bias)
        if r.normalised:
            kind = 1 if r.norm == "rms1" else 0
            self.query_norm, self.key_norm = Scale(r.size, kind), Scale(r.size, kind)

    def forward(self, x: Tensor) -> Tensor:
        r = self.r
        if r.storage == "separate":
            parts = (self.get_submodule(name)(x) for name in ("query", "key", "value"))
            q, k, v = (part.unflatten(-1, (-1, r.size)) for part in parts)
        elif r.storage == "fused":
            every = self.whole(x).unflatten(-1, (-1, r.size))
            q, k, v = (
                every[:, :, at : at + n] for at, n in zip(offsets(r), (r.heads, r.groups, r.groups), strict=True)
            )
        else:
            every = self.whole(x).unflatten(-1, (r.groups, r.share + 2, r.size))
            first, second = offsets(r)[:2]
            q, k, v = every[..., first : first + r.share, :].flatten(2, 3), every[..., second, :], every[..., -1, :]
        if r.normalised:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        q = turned(q, r)
        k, v = (part.repeat_interleave(r.share, 1) for part in (turned(k, r), v))
        scores = q @ k.mT / r.size**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def offsets(r: Recipe) -> tuple[int, int, int]:
    """At which head of the one matrix (interleaved: of each group) queries, keys and values begin."""
    many, one = (r.heads, r.groups) if r.storage == "fused" else (r.share, 1)
    return (one, 0, one + many) if r.keys_first else (0, many, many + one)


class Neurons(nn.Module):
    """One MLP."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.r = r
        if r.gated and not r.gate_in_one:
            self.gate = nn.Linear(r.width, r.neurons, bias=r.mlp_bias)
        both = 2 if r.gated and r.gate_in_one else 1
        self.up = nn.Linear(r.width, both * r.neurons, bias=r.mlp_bias)
        self.down = nn.Linear(r.neurons, r.width, bias=r.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.r.gated:
            gate, up = up.chunk(2, -1) if self.r.gate_in_one else (self.gate(x), up)
            return self.down(functional.silu(gate) * up)
        return self.down(activated(up, self.r))


def activated(x: Tensor, r: Recipe) -> Tensor:
    if r.activation == "gelu":
        return functional.gelu(x)
    return functional.relu(x) if r.activation == "relu" else functional.relu(x).square()


class Experts(nn.Module):
    """Three MLPs behind a router: all of them weighted, or the two best a token. Stacked: one tensor for all."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.r = r
        self.router = nn.Linear(r.width, r.experts, bias=False)
        if r.stacked:
            both = 2 if r.gated else 1
            self.ups = nn.Parameter(torch.zeros(r.experts, both * r.neurons, r.width))
            self.downs = nn.Parameter(torch.zeros(r.experts, r.width, r.neurons))
        else:
            self.each = nn.ModuleList(Neurons(r) for _ in range(r.experts))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        if self.r.mixture == "top2":
            best = share.topk(2, -1)
            share = torch.zeros_like(share).scatter(-1, best.indices, best.values)
        outputs = [share[..., e : e + 1] * self._expert(e, x) for e in range(self.r.experts)]
        return torch.stack(outputs).sum(0)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        if not self.r.stacked:
            result: Tensor = self.each[e](x)
            return result
        up = functional.linear(x, self.ups[e])
        if self.r.gated:
            gate, up = up.chunk(2, -1)
            return functional.linear(functional.silu(gate) * up, self.downs[e])
        return functional.linear(activated(up, self.r), self.downs[e])


class Layer(nn.Module):
    """Attention and neurons with a residual stream, norms in front or behind."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.r = r
        self.attention, self.norm_1 = Attention(r), norm_of(r, r.width)
        self.mlp = Neurons(r) if r.mixture == "dense" else Experts(r)
        if not r.parallel:
            self.norm_2 = norm_of(r, r.width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor
        if self.r.parallel:
            clean = self.norm_1(x) if self.r.norm_first else x
            result = x + self.attention(clean) + self.mlp(clean)
            return result if self.r.norm_first else self.norm_1(result)
        if self.r.norm_first:
            x = x + self.attention(self.norm_1(x))
            return x + self.mlp(self.norm_2(x))
        x = self.norm_1(x + self.attention(x))
        result = self.norm_2(x + self.mlp(x))
        return result


class Random(nn.Module):
    """The language model of a recipe."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, r.width)
        self.layers, self.rounds = nn.ModuleList(Layer(r) for _ in range(r.layers)), r.rounds
        self.last = norm_of(r, r.width) if r.norm_first else nn.Identity()
        self.head = nn.Linear(r.width, VOCABULARY, bias=False)
        if r.tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in [*self.layers] * self.rounds:
            x = layer(x)
        result: Tensor = self.head(self.last(x))
        return result


def built(recipe: Recipe) -> nn.Module:
    """The model, weights, biases and gains at random; tokens, neurons and experts differ so much that none is dead."""
    model = randomised(Random(recipe), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("table.weight", ".router.weight", ".ups", ".up.weight")):
                parameter.mul_(4)
            elif name.endswith("bias") and "norm" not in name:
                parameter.mul_(0.3)
    return model


def ids(generator: torch.Generator, count: int) -> Mapping[str, Any]:
    """Random tokens."""
    return {"ids": torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)}


# --- its exact pairs --------------------------------------------------------------------------------------------------


def generators(r: Recipe) -> list[Generator]:
    """What is exact in `Random(r)`, by the rules of `expected_rules.py`."""
    found: list[Generator] = []
    for i in range(r.layers):
        at = f"layers.{i}"
        of_attention, attention_reads = _attention(r, f"{at}.attention")
        of_mlp, mlp_reads = _neurons(r, f"{at}.mlp") if r.mixture == "dense" else _experts(r, f"{at}.mlp")
        found += of_attention + of_mlp
        if r.norm_first and r.parallel:
            found += norm_gain(_gain(r, f"{at}.norm_1"), [*attention_reads, *mlp_reads])
        elif r.norm_first:
            found += norm_gain(_gain(r, f"{at}.norm_1"), attention_reads)
            found += norm_gain(_gain(r, f"{at}.norm_2"), mlp_reads)
    behind = f"layers.{r.layers - 1}.norm_{1 if r.parallel else 2}"
    if not r.tied and (r.norm_first or r.rounds == 1):  # a norm behind its block feeds the next round's residual
        final = "last" if r.norm_first else behind
        found += norm_gain(_gain(r, final), [Linear("head.weight", VOCABULARY, r.width)])
    return found


def _gain(r: Recipe, name: str) -> Gain:
    return Gain(f"{name}.weight", r.width, f"{name}.bias" if r.norm == "layer" else None, int(r.norm == "rms1"))


def _linear(name: str, outs: int, ins: int, bias: bool) -> Linear:
    return Linear(f"{name}.weight", outs, ins, f"{name}.bias" if bias else None)


def _attention(r: Recipe, at: str) -> tuple[list[Generator], list[Linear]]:
    o = _linear(f"{at}.out", r.width, r.heads * r.size, r.attention_bias)
    if r.storage == "separate":
        rows = (r.heads * r.size, r.groups * r.size, r.groups * r.size)
        q, k, v = (_linear(f"{at}.{name}", n, r.width, r.attention_bias)
                   for name, n in zip(("query", "key", "value"), rows, strict=True))  # fmt: skip
        at_q, at_k, at_v = starts(r.heads, r.size), starts(r.groups, r.size), starts(r.groups, r.size)
    else:
        q = k = v = _linear(f"{at}.whole", (r.heads + 2 * r.groups) * r.size, r.width, r.attention_bias)
        first, second, third = (n * r.size for n in offsets(r))
        if r.storage == "fused":
            at_q, at_k, at_v = (
                starts(n, r.size, begin) for n, begin in ((r.heads, first), (r.groups, second), (r.groups, third))
            )
        else:
            turn = (r.share + 2) * r.size
            at_q = tuple(row for g in range(r.groups) for row in starts(r.share, r.size, g * turn + first))
            at_k, at_v = starts(r.groups, turn, second), starts(r.groups, turn, third)
    found = value_output(v, at_v, o, starts(r.heads, r.size), r.size)
    interleaved = r.rotary == "neighbours"
    if not r.normalised:
        found += query_key(q, at_q, k, at_k, r.size, r.rotated, interleaved)
    else:
        query, key = (Gain(f"{at}.{n}.weight", r.size, None, int(r.norm == "rms1")) for n in ("query_norm", "key_norm"))
        found += [Generator("query_key_gain", query.entries(c, 1), key.entries(c, -1), group=0)
                  for c in frequencies(r.size, r.rotated, interleaved)]  # fmt: skip
    return found, list({matrix.weight: matrix for matrix in (q, k, v)}.values())


def _neurons(r: Recipe, at: str) -> tuple[list[Generator], list[Linear]]:
    both = 2 if r.gated and r.gate_in_one else 1
    up = _linear(f"{at}.up", both * r.neurons, r.width, r.mlp_bias)
    readers = [up] if both == 2 or not r.gated else [_linear(f"{at}.gate", r.neurons, r.width, r.mlp_bias), up]
    return _pairs_of(r, up, (both - 1) * r.neurons, _linear(f"{at}.down", r.width, r.neurons, r.mlp_bias)), readers


def _pairs_of(r: Recipe, up: Linear, up_at: int, down: Linear) -> list[Generator]:
    if r.activation == "gelu":
        return []
    degree = 2 if r.activation == "relu2" else 1
    return up_down(up, up_at, down, degree, signs="any" if r.gated else "positive")


def _experts(r: Recipe, at: str) -> tuple[list[Generator], list[Linear]]:
    found: list[Generator] = []
    readers = [_linear(f"{at}.router", r.experts, r.width, bias=False)]
    rows = (2 if r.gated else 1) * r.neurons
    for e in range(r.experts):
        if r.stacked:
            up = Linear(f"{at}.ups", rows, r.width, dims=3, expert=e)
            found += _pairs_of(r, up, rows - r.neurons, Linear(f"{at}.downs", r.width, r.neurons, dims=3, expert=e))
        else:
            own, reads = _neurons(r, f"{at}.each.{e}")
            found, readers = found + own, readers + reads
    return found, [*readers, Linear(f"{at}.ups", rows, r.width, dims=3)] if r.stacked else readers
