"""The hand-written pairs proved by finite rescaling in float64, and what they leave out shown to change the outputs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from expected_layouts import KV_RANK
from expected_pairs import SIZES, Pair, Part, expected
from families import FAMILIES
from odd_models import ODD

from saggs.precision import float64_everywhere

MODELS = {**FAMILIES, **ODD}
EXACT, CHANGED, APPROXIMATE = 1e-12, 1e-6, 1e-9
GRANULARITIES = ("matrix", "head", "channel")

# A norm right behind these matrices undoes a common factor but for its eps: such a rescaling is nearly exact, never is.
SCALE_FREE = {
    "qwen3": ("q_proj", "k_proj"),
    "gemma2": ("v_proj", "o_proj", "up_proj", "down_proj"),
    "gemma3": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "olmo2": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("q_a_proj",),
    "carousel": ("mane", "brass"),
}

Move = tuple[Sequence[Part], float]


class Bench:
    """A float64 model on fixed inputs; `distance` is how far its logits go under some rescalings."""

    def __init__(self, name: str) -> None:
        family = MODELS[name]
        self.name, self.sizes, self.output = name, SIZES[name], family.output
        self.model = family.build().double()
        self.parameters = dict(self.model.named_parameters())
        with float64_everywhere():
            self.inputs = family.inputs(torch.Generator().manual_seed(5), 16 if self.sizes.experts else 6)
        self.logits = self._forward()

    @torch.no_grad()
    def _forward(self) -> torch.Tensor:
        with float64_everywhere():
            return self.output(self.model(**self.inputs))

    @torch.no_grad()
    def distance(self, *moves: Move) -> float:
        """Largest change of a logit relative to the largest logit; the weights are put back."""
        before = {part.name: self.parameters[part.name].clone() for parts, _ in moves for part in parts}
        for parts, factor in moves:
            for part in parts:
                block = self.parameters[part.name][slices(part)]
                block.copy_((part.offset + block) * factor**part.exponent - part.offset)
        change = (self._forward() - self.logits).abs().max() / self.logits.abs().max()
        for name, value in before.items():
            self.parameters[name].copy_(value)
        return float(change)

    def nearly_free(self, parts: Iterable[Part]) -> bool:
        """Whether a common factor on these whole matrices is undone up to eps."""
        hidden = SCALE_FREE.get(self.name, ())
        return all(not any(part.ranges) and not {*part.name.split(".")}.isdisjoint(hidden) for part in parts)

    def least(self, parts: Iterable[Part]) -> float:
        """How far the logits must go at least when only these parts are scaled."""
        return APPROXIMATE if self.nearly_free(parts) else CHANGED

    def linear(self, name: str, exponent: int, rows: tuple[int, int] | None = None, bias: bool = False) -> list[Part]:
        """A linear map by hand, for rescalings that no pair lists."""
        parts = [Part(f"{name}.weight", (rows, *(None,) * (self.parameters[f"{name}.weight"].dim() - 1)), exponent)]
        if bias and f"{name}.bias" in self.parameters:
            parts.append(Part(f"{name}.bias", (rows,), exponent, bias=True))
        return parts


@functools.cache
def bench(name: str) -> Bench:
    """One bench a family for all tests: they leave it as they found it."""
    return Bench(name)


def slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(None) if r is None else slice(*r) for r in part.ranges)


def units(parts: Iterable[Part]) -> list[Part]:
    """Weights and biases of single rows, columns or entries, in order; for parts with exactly one range."""
    found = []
    for part in parts:
        axis = next(i for i, r in enumerate(part.ranges) if r)
        begin, end = part.ranges[axis] or (0, 0)
        for index in range(begin, end):
            ranges = (*part.ranges[:axis], (index, index + 1), *part.ranges[axis + 1 :])
            found.append(replace(part, ranges=ranges))
    return found


def factor(seed: int) -> float:
    """A factor from 1/3 to 3 that is not close to one."""
    generator = torch.Generator().manual_seed(seed)
    size = math.exp(0.2 + 0.8 * float(torch.rand((), generator=generator, dtype=torch.float64)))
    return size if torch.rand((), generator=generator) < 0.5 else 1 / size


def both(pair: Pair, by: float) -> list[Move]:
    return [(pair.left, by), (pair.right, by)]


def of_kind(pairs: Iterable[Pair], *kinds: str) -> list[Pair]:
    return [pair for pair in pairs if pair.kind in kinds]


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@pytest.mark.parametrize("granularity", ["matrix", "head"])
def test_a_pair_keeps_the_outputs_for_any_allowed_factor(name: str, granularity: str) -> None:
    for seed, pair in enumerate(expected(name, granularity)):
        by = factor(seed)
        assert bench(name).distance(*both(pair, by)) < EXACT, pair
        turned = bench(name).distance(*both(pair, -by))
        assert turned < EXACT if pair.signs == "any" else turned > CHANGED, pair


@every_model
def test_the_finest_pairs_keep_the_outputs_under_independent_factors(name: str) -> None:
    pairs = expected(name, "channel")
    for kind in sorted({pair.kind for pair in pairs}):
        moves = []
        for seed, pair in enumerate(of_kind(pairs, kind)):
            moves += both(pair, factor(seed) * (-1 if pair.signs == "any" and seed % 3 == 0 else 1))
        assert bench(name).distance(*moves) < EXACT, kind


@every_model
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_one_side_alone_changes_the_outputs(name: str, granularity: str) -> None:
    here = bench(name)
    pairs = expected(name, granularity)
    some = [pair for i, pair in enumerate(pairs) if granularity != "channel" or i % 9 == 0 or pair.signs == "positive"]
    for pair in some:
        # a gain whose readers all are scale-free is so too, at the granularity of whole matrices
        readers = pair.right if pair.kind == "norm_gain" else pair.left
        assert here.distance((pair.left, 2.5)) > here.least(readers), pair


@every_model
@pytest.mark.parametrize("granularity", ["matrix", "head"])
def test_sides_of_different_pairs_do_not_match(name: str, granularity: str) -> None:
    """Another group, layer, expert or norm; queries with output columns, values with keys."""
    here, pairs = bench(name), expected(name, granularity)
    for kind in sorted({pair.kind for pair in pairs}):
        same = of_kind(pairs, kind)
        for pair, other in zip(same, same[1:] + same[:1], strict=True):
            if pair is not other:
                touched = [*(pair.right if kind == "norm_gain" else pair.left), *other.right]
                assert here.distance((pair.left, 2.5), (other.right, 2.5)) > here.least(touched), (pair, other)
    for first, second in (("query_key", "value_output"), ("value_output", "query_key")):
        for pair, other in zip(of_kind(pairs, first), of_kind(pairs, second), strict=False):
            assert here.distance((pair.left, 2.5), (other.right, 2.5)) > CHANGED, (pair, other)
    for scores, values in zip(of_kind(pairs, "query_key"), of_kind(pairs, "value_output"), strict=False):
        raised = [replace(part, exponent=1) for part in scores.right]
        assert here.distance((raised, 2.5), (values.right, 2.5)) > CHANGED, scores


@every_model
def test_no_part_of_a_pair_can_be_left_out(name: str) -> None:
    """Biases, consumers of a norm, gains that share a matrix, the exponent of a squared ReLU."""
    here = bench(name)
    for pair in expected(name, "matrix"):
        # without rotation a key's bias adds the same to all scores of a query: it is dead, and so may be left out
        dead = pair.kind == "query_key" and here.sizes.rotated == 0
        for side, other in ((pair.left, pair.right), (pair.right, pair.left)):
            for part in {part.name: part for part in side}.values():
                rest = [p for p in side if p.name != part.name]
                change = here.distance((rest, 2.5), (other, 2.5))
                if dead and part.bias and side is pair.right:
                    assert change < EXACT, part
                elif rest:
                    assert change > here.least([part]), (pair, part)
        if any(part.exponent == -2 for part in pair.right):
            right = [replace(part, exponent=-1) for part in pair.right]
            assert here.distance((pair.left, 2.5), (right, 2.5)) > CHANGED, pair


@every_model
def test_a_gain_scales_only_with_its_own_offset(name: str) -> None:
    for pair in of_kind(expected(name, "matrix"), "norm_gain", "query_key_gain"):
        sides = ([p if p.bias else replace(p, offset=1 - p.offset) for p in pair.left], pair.right)
        assert bench(name).distance((sides[0], 2.5), (sides[1], 2.5)) > CHANGED, pair


ROTATED = [name for name, s in SIZES.items() if s.rotated]


@pytest.mark.parametrize("name", ROTATED)
def test_rope_ties_two_channels_and_only_those(name: str) -> None:
    here = bench(name)
    pairs = [
        (units(pair.left), units(pair.right))
        for pair in of_kind(expected(name, "channel"), "query_key", "query_key_gain")
    ]
    rotated = [(left, right) for left, right in pairs if sum(not part.bias for part in right) == 2]
    assert rotated
    for left, right in rotated:
        assert here.distance((left[::2], 2.5), (right[::2], 2.5)) > CHANGED, right
        assert here.distance((left[1::2], 2.5), (right[1::2], 2.5)) > CHANGED, right
    # the channels of two frequencies of one head, paired otherwise: half-split for interleaved and the reverse
    (left, right), (left_2, right_2) = rotated[:2]
    for which in (0, 1):
        wrong = [*left[::2], *left_2[which::2]], [*right[::2], *right_2[which::2]]
        assert here.distance((wrong[0], 2.5), (wrong[1], 2.5)) > CHANGED, wrong


GROUPED = [name for name, s in SIZES.items() if s.groups < s.heads]


@pytest.mark.parametrize("name", GROUPED)
def test_heads_of_a_group_scale_together(name: str) -> None:
    here, shared = bench(name), name in ("qwen3", "gemma3", "carousel")
    for pair in expected(name, "channel"):
        if pair.kind in ("query_key", "query_key_gain") and not (shared and pair.kind == "query_key_gain"):
            left = units(pair.left)
            few = [part for bias in (False, True) for part in _first_half([p for p in left if p.bias == bias])]
            assert here.distance((few, 2.5), (pair.right, 2.5)) > CHANGED, pair
        elif pair.kind == "value_output":
            assert here.distance((pair.left, 2.5), (_first_half(units(pair.right)), 2.5)) > CHANGED, pair


def _first_half(parts: Sequence[Part]) -> Sequence[Part]:
    return parts[: len(parts) // 2]


GATED = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmo2", "mixtral", "deepseek_v3", "t5_v1_1"]


@pytest.mark.parametrize("name", [*GATED, "braid"])
def test_the_gate_does_not_scale(name: str) -> None:
    here = bench(name)
    for pair in of_kind(expected(name, "matrix"), "up_down"):
        gate = [_gate(part) for part in pair.left]
        assert all(part.name in here.parameters for part in gate)
        assert gate != list(pair.left)
        assert here.distance((gate, 2.5), (pair.right, 2.5)) > CHANGED, pair


def _gate(part: Part) -> Part:
    """The gate's rows for the up rows: a matrix of its own, or the other half."""
    name = part.name.replace(".up_proj", ".gate_proj").replace("wi_1", "wi_0")
    neurons = {r[1] - r[0] for r in part.ranges[-2:] if r}
    half = {(0, n): (n, 2 * n) for n in neurons} | {(n, 2 * n): (0, n) for n in neurons}
    return replace(part, name=name, ranges=tuple(half.get(r, r) if r else None for r in part.ranges))


GELU = {
    "gpt2": ["transformer.h.{}.mlp.c_fc transformer.h.{}.mlp.c_proj"],
    "gpt_neox": ["gpt_neox.layers.{}.mlp.dense_h_to_4h gpt_neox.layers.{}.mlp.dense_4h_to_h"],
    "falcon_7b": ["transformer.h.{}.mlp.dense_h_to_4h transformer.h.{}.mlp.dense_4h_to_h"],
    "falcon_40b": ["transformer.h.{}.mlp.dense_h_to_4h transformer.h.{}.mlp.dense_4h_to_h"],
    "bert": ["bert.encoder.layer.{}.intermediate.dense bert.encoder.layer.{}.output.dense"],
    "vit": ["vit.layers.{}.mlp.fc1 vit.layers.{}.mlp.fc2"],
    "whisper": [f"model.{part}.layers.{{}}.fc1 model.{part}.layers.{{}}.fc2" for part in ("encoder", "decoder")],
}


@pytest.mark.parametrize("name", GELU)
def test_a_gelu_does_not_scale(name: str) -> None:
    here = bench(name)
    for names, layer in itertools.product(GELU[name], range(here.sizes.layers)):
        up, down = names.replace("{}", str(layer)).split()
        moves = (here.linear(up, 1, bias=True), 2.5), (here.linear(down, -1), 2.5)
        assert here.distance(*moves) > CHANGED, up


# The last norm and the tied matrix that reads it, which is the embedding too.
TIED = {
    "gpt2": "transformer.ln_f transformer.wte", "gemma2": "model.norm model.embed_tokens",
    "gemma3": "model.norm model.embed_tokens", "opt": "model.decoder.final_layer_norm model.decoder.embed_tokens",
    "falcon_7b": "transformer.ln_f transformer.word_embeddings",
    "falcon_40b": "transformer.ln_f transformer.word_embeddings", "t5": "decoder.final_layer_norm shared",
    "bert": "cls.predictions.transform.LayerNorm bert.embeddings.word_embeddings",
    "whisper": "model.decoder.layer_norm model.decoder.embed_tokens",
    "opt_post_norm": "model.decoder.layers.1.final_layer_norm model.decoder.embed_tokens",
}  # fmt: skip

# Norms behind a block: their output is the residual stream as well, or nothing but that.
POST_NORM = {
    "opt_post_norm": "model.decoder.layers.0.self_attn_layer_norm model.decoder.layers.0.fc1",
    "bert": "bert.encoder.layer.0.attention.output.LayerNorm bert.encoder.layer.0.intermediate.dense",
    "gemma2": "model.layers.0.post_attention_layernorm model.layers.0.mlp.gate_proj model.layers.0.mlp.up_proj",
    "gemma3": "model.layers.0.post_attention_layernorm model.layers.0.mlp.gate_proj model.layers.0.mlp.up_proj",
    "olmo2": "model.layers.0.post_attention_layernorm model.layers.0.mlp.gate_proj model.layers.0.mlp.up_proj",
}


@pytest.mark.parametrize(("name", "modules"), [*TIED.items(), *POST_NORM.items()])
def test_a_norm_that_feeds_the_residual_or_a_tied_head_does_not_scale(name: str, modules: str) -> None:
    here = bench(name)
    norm, *readers = modules.split()
    gain = [replace(p, offset=int("gemma" in name and not p.bias)) for p in here.linear(norm, 1, bias=True)]
    for columns in ([part for reader in readers for part in here.linear(reader, -1)], []):
        assert here.distance((gain, 2.5), (columns, 2.5)) > CHANGED


@pytest.mark.parametrize("name", SCALE_FREE)
def test_a_norm_hides_the_scale_of_the_matrix_before_it_only_nearly(name: str) -> None:
    here = bench(name)
    matrices = [n.removesuffix(".weight") for n in here.parameters if n.split(".")[-2] in SCALE_FREE[name]]
    assert matrices
    for matrix in matrices:
        assert APPROXIMATE < here.distance((here.linear(matrix, 1), 2.5)) < 1e-3, matrix
        # a norm over one head hides whole heads; a norm over everything does not hide the half of it
        by_head = name in ("qwen3", "gemma3", "carousel") and matrix.endswith(("q_proj", "k_proj", "mane", "brass"))
        half = here.linear(matrix, 1, rows=(0, here.parameters[f"{matrix}.weight"].shape[0] // 2))
        assert here.distance((half, 2.5)) > (APPROXIMATE if by_head else CHANGED), matrix
    for query, key in (("q_proj", "k_proj"), ("mane", "brass")):
        queries, keys = ([m for m in matrices if m.endswith(end)] for end in (query, key))
        for q, k in zip(queries, keys, strict=True):
            assert here.distance((here.linear(q, 1), 2.5), (here.linear(k, -1), 2.5)) > APPROXIMATE


def test_the_latent_rows_of_deepseek_are_scale_free_only_nearly() -> None:
    here = bench("deepseek_v3")
    latent = here.linear("model.layers.0.self_attn.kv_a_proj_with_mqa", 1, rows=(0, KV_RANK))
    assert APPROXIMATE < here.distance((latent, 2.5)) < 1e-3


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value"),
        ("falcon_40b", "transformer.h.0.self_attention.query_key_value"),
        ("braid", "strands.0.plait.skein"),
    ],
)
def test_heads_in_turn_are_not_contiguous_blocks(name: str, fused: str) -> None:
    here = bench(name)
    queries, keys = here.sizes.heads * here.sizes.size, here.sizes.groups * here.sizes.size
    left = here.linear(fused, 1, (0, queries), bias=True)
    right = here.linear(fused, -1, (queries, queries + keys), bias=True)
    assert here.distance((left, 2.5), (right, 2.5)) > CHANGED
