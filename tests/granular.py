"""Hand-made pairs at every granularity on small models, each with a fault that has to show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from models import WIDTH, ReluMlp, randomised, tiny_gpt2, tiny_llama, tokens
from torch import Tensor, nn

from saggs import ParameterSlice, ScalePair
from saggs.pairs import Kind, Signs

Bounds = tuple[int, int] | None
HEADS, SIZE = 4, WIDTH // 4


def entries(name: str, *ranges: Bounds | int, exponent: int = 1, offset: int = 0) -> ParameterSlice:
    """A slice; a number stands for the one index. A tensor of one dimension named `bias` is a bias."""
    bounds = tuple((r, r + 1) if isinstance(r, int) else r for r in ranges)
    return ParameterSlice(name, bounds, exponent, bias=name.endswith("bias"), offset=offset)


def pair(kind: Kind, left: list[ParameterSlice], right: list[ParameterSlice], signs: Signs = "positive") -> ScalePair:
    """Slices of the right side come with positive exponents, and leave with negative ones."""
    return ScalePair(kind, "", tuple(left), tuple(dataclasses.replace(p, exponent=-p.exponent) for p in right), signs)


class Bag(nn.Module):
    """Named tensors, for pairs of which no function is asked."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def __getitem__(self, name: str) -> Tensor:
        """The parameter, detached: writes go through."""
        return self.get_parameter(name).detach()


class InterleavedAttention(nn.Module):
    """Query, key and value rows of one fused matrix stand head by head, as in GPT-NeoX; no rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        randomised(self, 5)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.query_key_value(x).view(*x.shape[:-1], HEADS, 3, SIZE).transpose(1, 2)
        query, key, value = fused.unbind(-2)
        mixed = torch.softmax(query @ key.transpose(-1, -2) / SIZE**0.5, -1) @ value
        result: Tensor = self.dense(mixed.transpose(1, 2).flatten(-2))
        return result


class Experts(nn.Module):
    """Three experts in 3-D tensors, as in Mixtral's fused layout: every token goes to all, weighted by a router."""

    def __init__(self, experts: int = 3, hidden: int = 7) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.zeros(WIDTH, experts))
        self.gate_up = nn.Parameter(torch.zeros(experts, WIDTH, 2 * hidden))
        self.down = nn.Parameter(torch.zeros(experts, hidden, WIDTH))
        randomised(self, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("btd,edh->ebth", x, self.gate_up).chunk(2, -1)
        each = torch.einsum("ebth,ehd->ebtd", torch.nn.functional.silu(gate) * up, self.down)
        return torch.einsum("ebtd,bte->btd", each, torch.softmax(x @ self.router, -1))


class OffsetNorm(nn.Module):
    """Gemma's norm, whose gain is used as 1 + w, before two readers of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(WIDTH))
        self.first, self.second = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 9)
        randomised(self, 7)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.01) * (1 + self.gain)
        return torch.cat([self.first(normed), self.second(normed)], -1)


class SharedUp(nn.Module):
    """One up projection, tied, read by two down projections: each neuron's row has two columns to answer it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.up_again, self.other = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.up_again.weight, self.up_again.bias = self.up.weight, self.up.bias
        randomised(self, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        result: Tensor = x + self.other(torch.relu(self.up_again(x)))
        return result


def gpt2_pairs(size: int = 1) -> list[ScalePair]:
    """Columns of c_attn, `size` channels a pair: 1 for channels, 8 for heads, 32 for matrices."""
    found = []
    for layer in (0, 1):
        prefix = f"transformer.h.{layer}.attn."

        def third(index: int, start: int, prefix: str = prefix) -> list[ParameterSlice]:
            at = (index * WIDTH + start, index * WIDTH + start + size)
            return [entries(f"{prefix}c_attn.weight", None, at), entries(f"{prefix}c_attn.bias", at)]

        for start in range(0, WIDTH, size):
            found.append(pair("query_key", third(0, start), third(1, start), "any"))
            out = entries(f"{prefix}c_proj.weight", (start, start + size), None)
            found.append(pair("value_output", third(2, start), [out], "any"))
    return found


def llama_pairs(rotary: int = SIZE // 2) -> list[ScalePair]:
    """Channels: rotary frequencies (i, i + 4) of a key head and its two query heads; value channels; neurons."""
    found = []
    for layer in (0, 1):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        for group in (0, 1):
            readers = (2 * group, 2 * group + 1)
            for i in range(SIZE // 2):
                both = (i, (i + rotary) % SIZE)
                queries = [entries(f"{attention}q_proj.weight", h * SIZE + j, None) for h in readers for j in both]
                keys = [entries(f"{attention}k_proj.weight", group * SIZE + j, None) for j in both]
                found.append(pair("query_key", queries, keys, "any"))
            for i in range(SIZE):
                out = [entries(f"{attention}o_proj.weight", None, h * SIZE + i) for h in readers]
                value = [entries(f"{attention}v_proj.weight", group * SIZE + i, None)]
                found.append(pair("value_output", value, out, "any"))
        for i in range(48):
            up, down = entries(f"{mlp}up_proj.weight", i, None), entries(f"{mlp}down_proj.weight", None, i)
            found.append(pair("up_down", [up], [down], "any"))
    return found


def interleaved_pairs(size: int = 1, heads: int = HEADS) -> list[ScalePair]:
    """Row ((head * 3) + role) * SIZE + channel. With `heads` = 1 the rows are read as in GPT-2: the fault."""
    found = []
    for head in range(HEADS):
        for start in range(0, SIZE, size):

            def rows(role: int, head: int = head, start: int = start) -> list[ParameterSlice]:
                at = (head * 3 + role) * SIZE + start if heads > 1 else role * WIDTH + head * SIZE + start
                bounds = (at, at + size)
                return [entries("query_key_value.weight", bounds, None), entries("query_key_value.bias", bounds)]

            column = (head * SIZE + start, head * SIZE + start + size)
            found.append(pair("query_key", rows(0), rows(1), "any"))
            found.append(pair("value_output", rows(2), [entries("dense.weight", None, column)], "any"))
    return found


def expert_pairs(gate: bool = False, shift: int = 0) -> list[ScalePair]:
    """A neuron of an expert: a column of its up half and a row of its down; with `gate` of its gate half, wrongly."""
    return [
        pair(
            "up_down",
            [entries("gate_up", e, None, i if gate else 7 + i)],
            [entries("down", (e + shift) % 3, i, None)],
            "any",
        )
        for e in range(3)
        for i in range(7)
    ]


def gain_pairs(offset: int = 1, readers: tuple[str, ...] = ("first", "second")) -> list[ScalePair]:
    return [
        pair(
            "norm_gain", [entries("gain", j, offset=offset)], [entries(f"{r}.weight", None, j) for r in readers], "any"
        )
        for j in range(WIDTH)
    ]


def relu_pairs(exponent: int = 2, biases: bool = True) -> list[ScalePair]:
    return [
        pair(
            "up_down",
            [entries("up.weight", i, None), *([entries("up.bias", i)] if biases else [])],
            [entries("down.weight", None, i, exponent=exponent)],
        )
        for i in range(9)
    ]


def shared_pairs(readers: tuple[str, ...] = ("down", "other")) -> list[ScalePair]:
    return [
        pair(
            "up_down",
            [entries("up.weight", i, None), entries("up.bias", i)],
            [entries(f"{r}.weight", None, i) for r in readers],
        )
        for i in range(9)
    ]


def without_biases(pairs: list[ScalePair]) -> list[ScalePair]:
    return [
        dataclasses.replace(
            p, left=tuple(x for x in p.left if not x.bias), right=tuple(x for x in p.right if not x.bias)
        )
        for p in pairs
    ]


def of_ids(model: nn.Module) -> Tensor:
    logits: Tensor = model(input_ids=tokens(7), use_cache=False).logits
    return logits


def of_vectors(model: nn.Module) -> Tensor:
    """Outputs for random inputs, drawn in float32 so that every dtype has the same."""
    parameter = next(iter(model.parameters()))
    width = 6 if isinstance(model, ReluMlp) else WIDTH
    x = torch.randn(2, 6, width, generator=torch.Generator().manual_seed(9))
    outputs: Tensor = model(x.to(parameter.dtype))
    return outputs


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its exact pairs, what it computes, and pairs that are wrong."""

    make: Callable[[], Any]
    run: Callable[[nn.Module], Tensor]
    pairs: list[ScalePair]
    spoilt: list[ScalePair]

    def build(self) -> Any:
        """The model, the same each time: biases start from torch's own draw."""
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return self.make()


CASES = {
    "gpt2 matrices": Case(tiny_gpt2, of_ids, gpt2_pairs(WIDTH), without_biases(gpt2_pairs(WIDTH))),
    "gpt2 heads": Case(tiny_gpt2, of_ids, gpt2_pairs(SIZE), without_biases(gpt2_pairs(SIZE))),
    "gpt2 channels": Case(tiny_gpt2, of_ids, gpt2_pairs(), without_biases(gpt2_pairs())),
    "llama channels": Case(tiny_llama, of_ids, llama_pairs(), llama_pairs(rotary=SIZE // 2 + 1)),
    "interleaved heads": Case(
        InterleavedAttention, of_vectors, interleaved_pairs(SIZE), interleaved_pairs(SIZE, heads=1)
    ),
    "interleaved channels": Case(InterleavedAttention, of_vectors, interleaved_pairs(), interleaved_pairs(heads=1)),
    "experts": Case(Experts, of_vectors, expert_pairs(), expert_pairs(shift=1)),
    "experts by their gates": Case(Experts, of_vectors, expert_pairs(), expert_pairs(gate=True)),
    "gains 1 + w": Case(OffsetNorm, of_vectors, gain_pairs(), gain_pairs(offset=0)),
    "gains with one reader": Case(OffsetNorm, of_vectors, gain_pairs(), gain_pairs(readers=("first",))),
    "relu squared": Case(lambda: ReluMlp(2), of_vectors, relu_pairs(), relu_pairs(1)),
    "relu squared without biases": Case(lambda: ReluMlp(2), of_vectors, relu_pairs(), relu_pairs(2, biases=False)),
    "tied": Case(SharedUp, of_vectors, shared_pairs(), shared_pairs(("down",))),
}
