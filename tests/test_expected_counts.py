"""How many hand-written pairs there are, as a closed form of the sizes, and that they do not overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from expected_layouts import EXPERT_NEURONS, KV_RANK, Q_RANK, SHARED_NEURONS, VALUE_SIZE
from expected_pairs import SIZES, Sizes, expected
from test_expectations import GRANULARITIES, bench, every_model, of_kind, slices


def _layers(attention: int, values: int, neurons: int, norms: int) -> dict[str, int]:
    return {"query_key": attention, "value_output": values, "up_down": neurons, "norm_gain": norms}


def _plain(s: Sizes, neurons: int = 0, norms: int = 2, last: int = 0) -> dict[str, int]:
    """Per layer: Q/K with rotation G (r/2 + d - r), V/O G d, one generator a neuron, the width for each norm."""
    scores = s.groups * (s.size - s.rotated // 2)
    return _layers(
        s.layers * scores,
        s.layers * s.groups * s.size,
        s.layers * neurons,
        s.layers * norms * s.width + last * s.width,
    )


def _normalised(s: Sizes, gains: int, norms: int = 2, last: int = 0) -> dict[str, int]:
    """Gains of queries and keys instead of their matrices."""
    return {**_plain(s, s.neurons, norms, last), "query_key": 0, "query_key_gain": s.layers * gains * s.rotated // 2}


def _latent(s: Sizes) -> dict[str, int]:
    """DeepSeek: one dense layer, one of experts; norms on the two latent vectors."""
    neurons = s.neurons + s.experts * EXPERT_NEURONS + SHARED_NEURONS
    norms = s.layers * (2 * s.width + Q_RANK + KV_RANK) + s.width
    scores = s.heads * s.size + s.rotated // 2
    return _layers(s.layers * scores, s.layers * s.heads * VALUE_SIZE, neurons, norms)


def _crossed(s: Sizes, neurons: int, last: int = 0) -> dict[str, int]:
    """Encoder and decoder: three attentions, two MLPs and five norms a layer, and the encoder's last norm."""
    inner = 3 * s.layers * s.heads * s.size
    return _layers(inner, inner, 2 * s.layers * neurons, (5 * s.layers + 1 + last) * s.width)


COUNTS: dict[str, Callable[[Sizes], dict[str, int]]] = {
    "gpt2": _plain,
    "llama": lambda s: _plain(s, s.neurons, last=1),
    "mistral": lambda s: _plain(s, s.neurons, last=1),
    "qwen2": lambda s: _plain(s, s.neurons, last=1),
    "qwen3": lambda s: _normalised(s, gains=1, last=1),
    "phi3": lambda s: _plain(s, s.neurons, last=1),
    "gemma2": lambda s: _plain(s, s.neurons),
    "gemma3": lambda s: _normalised(s, gains=1),
    "gpt_neox": lambda s: _plain(s, last=1),
    "opt": lambda s: _plain(s, s.neurons),
    "opt_post_norm": lambda s: _plain(s, s.neurons, norms=0),
    "falcon_7b": lambda s: _plain(s, norms=1),
    "falcon_40b": _plain,
    "olmo2": lambda s: _normalised(s, gains=s.groups, norms=0, last=1),
    "mixtral": lambda s: _plain(s, s.experts * s.neurons, last=1),
    "deepseek_v3": _latent,
    "t5": lambda s: _crossed(s, s.neurons),
    "t5_v1_1": lambda s: _crossed(s, s.neurons, last=1),
    "bert": lambda s: _plain(s, norms=0, last=1),
    "vit": lambda s: _plain(s, last=1),
    "whisper": lambda s: _crossed(s, 0),
    "braid": lambda s: _plain(s, s.neurons, last=1),
    "quarry": lambda s: _plain(s, s.neurons, norms=1, last=1),
    # one block however often it is used, and one generator for its three first norms together
    "carousel": lambda s: _normalised(replace(s, layers=1), gains=1, last=1),
}


@every_model
def test_the_number_of_finest_pairs_is_the_closed_form(name: str) -> None:
    found = expected(name, "channel")
    counts = {kind: number for kind, number in COUNTS[name](SIZES[name]).items() if number}
    assert {kind: len(of_kind(found, kind)) for kind in counts} == counts
    assert len(found) == sum(counts.values())


@every_model
def test_the_granularities_add_up_and_name_real_blocks(name: str) -> None:
    """Finest pairs of a kind do not overlap, so they are independent; their sum is that of the coarser pairs."""
    parameters = bench(name).parameters
    sums = []
    for granularity in GRANULARITIES:
        total: dict[tuple[str, str], torch.Tensor] = {}
        for pair in expected(name, granularity):
            assert all(p.exponent > 0 for p in pair.left)
            assert all(p.exponent < 0 for p in pair.right)
            for part in (*pair.left, *pair.right):
                shape = parameters[part.name].shape
                assert len(part.ranges) == len(shape)
                assert all(r is None or 0 <= r[0] < r[1] <= n for r, n in zip(part.ranges, shape, strict=True))
                assert part.bias == part.name.endswith(("bias", "_dust"))
                blocks = total.setdefault((pair.kind, part.name), torch.zeros(shape, dtype=torch.int))[slices(part)]
                assert not blocks.any(), (pair, part)
                blocks += part.exponent
        sums.append(total)
    for other in sums[1:]:
        assert other.keys() == sums[0].keys()
        assert all(torch.equal(other[key], sums[0][key]) for key in other)
