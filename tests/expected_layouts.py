"""Sizes of the tiny models, and the ways in which their matrices are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expected_rules import Gain, Generator, Linear, norm_gain, query_key, starts, value_output


@dataclass(frozen=True)
class Sizes:
    """Shapes of a tiny model; distinct wherever the architecture allows, so that no equality hides a mistake."""

    width: int
    size: int
    """Channels of a head; `heads * size` differs from `width` where the architecture allows."""
    neurons: int
    heads: int = 4
    groups: int = 4
    """Key/value heads."""
    layers: int = 2
    rotated: int = 0
    """Channels of a head that RoPE rotates."""
    experts: int = 0
    vocabulary: int = 50


SIZES = {
    "gpt2": Sizes(width=28, size=7, neurons=22),
    "llama": Sizes(width=36, size=8, neurons=22, groups=2, rotated=8),
    "mistral": Sizes(width=28, size=6, neurons=21, groups=2, rotated=6),
    "qwen2": Sizes(width=36, size=6, neurons=22, groups=2, rotated=6),
    "qwen3": Sizes(width=28, size=8, neurons=22, groups=2, rotated=8),
    "phi3": Sizes(width=36, size=8, neurons=21, groups=2, rotated=4),
    "gemma2": Sizes(width=36, size=6, neurons=20, groups=2, rotated=6),
    "gemma3": Sizes(width=28, size=8, neurons=22, groups=2, rotated=8),
    "gpt_neox": Sizes(width=32, size=8, neurons=22, rotated=4),
    "opt": Sizes(width=24, size=6, neurons=20),
    "opt_post_norm": Sizes(width=28, size=7, neurons=20),
    "falcon_7b": Sizes(width=32, size=8, neurons=22, groups=1, rotated=8),
    "falcon_40b": Sizes(width=24, size=6, neurons=22, groups=2, rotated=6),
    "olmo2": Sizes(width=36, size=6, neurons=22, groups=2, rotated=6),
    "mixtral": Sizes(width=28, size=6, neurons=20, groups=2, rotated=6, experts=3),
    "deepseek_v3": Sizes(width=36, size=6, neurons=22, rotated=4, experts=4),
    "t5": Sizes(width=28, size=6, neurons=22),
    "t5_v1_1": Sizes(width=28, size=6, neurons=22),
    "bert": Sizes(width=28, size=7, neurons=22),
    "vit": Sizes(width=24, size=6, neurons=22, vocabulary=10),
    "whisper": Sizes(width=28, size=7, neurons=22),
    "braid": Sizes(width=30, size=8, neurons=21, groups=2, rotated=6),
    "quarry": Sizes(width=26, size=7, neurons=20),
    "carousel": Sizes(width=28, size=8, neurons=22, groups=2, layers=3, rotated=8),
}

# DeepSeek's latent attention: ranks of the query's and the key/value's latent vectors, channels of a value head,
# and the neurons of a routed and of the shared experts. `size` are the un-rotated channels, `rotated` come on top.
Q_RANK, KV_RANK, VALUE_SIZE, EXPERT_NEURONS, SHARED_NEURONS = 14, 10, 7, 12, 24


def linear(name: str, outs: int, ins: int, bias: bool = False, in_out: bool = False) -> Linear:
    return Linear(f"{name}.weight", outs, ins, f"{name}.bias" if bias else None, in_out)


def gain(name: str, s: Sizes, bias: bool = False, offset: int = 0) -> Gain:
    return Gain(f"{name}.weight", s.width, f"{name}.bias" if bias else None, offset)


def final(name: str, s: Sizes, bias: bool = False, head: str = "lm_head", head_bias: bool = False) -> list[Generator]:
    """The last norm against an untied head."""
    return norm_gain(gain(name, s, bias), [linear(head, s.vocabulary, s.width, head_bias)])


def projections(prefix: str, names: Sequence[str], s: Sizes, biases: str = "") -> tuple[Linear, Linear, Linear, Linear]:
    """Four separate matrices for query, key, value and output; `biases` holds the letters of those with one."""
    query, key, value, output = (f"{prefix}.{name}" for name in names)
    return (
        linear(query, s.heads * s.size, s.width, "q" in biases),
        linear(key, s.groups * s.size, s.width, "k" in biases),
        linear(value, s.groups * s.size, s.width, "v" in biases),
        linear(output, s.width, s.heads * s.size, "o" in biases),
    )


def separate(q: Linear, k: Linear, v: Linear, o: Linear, s: Sizes, exact_query_key: bool = True) -> list[Generator]:
    """Attention with heads one after the other in every matrix."""
    of_heads, of_groups = starts(s.heads, s.size), starts(s.groups, s.size)
    found = value_output(v, of_groups, o, of_heads, s.size)
    return [*query_key(q, of_heads, k, of_groups, s.size, s.rotated), *found] if exact_query_key else found


def fused(
    qkv: Linear, o: Linear, s: Sizes, at: tuple[Sequence[int], Sequence[int], Sequence[int]], interleaved: bool = False
) -> list[Generator]:
    """Attention with one matrix for queries, keys and values, whose heads begin at the rows given."""
    query_at, key_at, value_at = at
    return [
        *query_key(qkv, query_at, qkv, key_at, s.size, s.rotated, interleaved),
        *value_output(qkv, value_at, o, starts(s.heads, s.size), s.size),
    ]


def gated(
    prefix: str, width: int, neurons: int, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Linear, Linear, Linear]:
    """Gate, up and down of a gated MLP without biases."""
    gate, up, down = (f"{prefix}.{name}" for name in names)
    return linear(gate, neurons, width), linear(up, neurons, width), linear(down, width, neurons)
