"""Models of real size: how many pairs, how much memory, how long; and what is proved on a model too big to clone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import differing, snapshot
from torch import nn

import saggs
from saggs import CertificationError, ScalePair, cache, certificates, discovery
from saggs.lifting import SMALL, Analysis, analyse
from saggs.trials import InPlaceTrial

GIB = 1024**3
ROOT = Path(__file__).resolve().parents[1]

# Prints one line of JSON: pairs by kind for each granularity, seconds for all of them, and the peak of the process.
PROGRAM = """
import json, resource, sys, time
import torch
import saggs
{build}
torch.manual_seed(0)
model = built()
size = sum(p.numel() for p in model.parameters())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found, started = {{}}, time.monotonic()
for granularity in {granularities!r}:
    pairs = saggs.find_pairs(model, granularity=granularity)
    assert all(p.certificate is not None for p in pairs)
    found[granularity] = {{kind: sum(p.kind == kind for p in pairs) for kind in saggs.KINDS}}
    found[granularity]["all"] = len(pairs)
seconds = time.monotonic() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({{"found": found, "seconds": seconds, "peak": peak, "before": before, "size": size}}))
"""

GPT2 = """
def built():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config())
"""

LLAMA = """
def built():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048,
    ))
"""


def measured(build: str, *granularities: str) -> Any:
    """What the program prints, run in a process of its own with one thread."""
    code = PROGRAM.format(build=build, granularities=granularities)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error::UserWarning"}
    environment.pop(cache.DIRECTORY, None)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{result['size']:,} parameters: {result['seconds']:.1f} s, peak {result['peak'] / GIB:.2f} GiB")
    return result


@pytest.mark.slow
def test_gpt2_has_its_48_pairs_of_matrices_in_seconds_and_in_little_memory() -> None:
    result = measured(GPT2, "matrix")
    assert result["size"] == 124_439_808
    kinds = {"query_key": 12, "value_output": 12, "up_down": 0, "norm_gain": 24, "query_key_gain": 0, "all": 48}
    assert result["found"] == {"matrix": kinds}
    assert result["before"] < result["peak"] < 4 * GIB
    assert result["seconds"] < 120


@pytest.mark.slow
def test_gpt2_has_its_312_pairs_of_heads() -> None:
    result = measured(GPT2, "head")
    kinds = {"query_key": 144, "value_output": 144, "up_down": 0, "norm_gain": 24, "query_key_gain": 0, "all": 312}
    assert result["found"] == {"head": kinds}
    assert result["peak"] < 4 * GIB
    assert result["seconds"] < 240


@pytest.mark.slow
def test_a_llama_of_a_billion_parameters_has_its_111_pairs_of_matrices() -> None:
    """22 layers of five pairs, and the last norm against the head: proved on the model itself, for no clone fits."""
    result = measured(LLAMA, "matrix")
    assert 1_099_000_000 < result["size"] < 1_101_000_000
    kinds = {"query_key": 22, "value_output": 22, "up_down": 22, "norm_gain": 45, "query_key_gain": 0, "all": 111}
    assert result["found"] == {"matrix": kinds}
    assert result["peak"] < 8 * GIB
    assert result["seconds"] < 240


# --- the same paths, small --------------------------------------------------------------------------------------------


def _gpt2(layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=500, n_positions=64, n_embd=width, n_layer=layers, n_head=8, bos_token_id=1,
                        eos_token_id=2)  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama(layers: int, width: int, **changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_modern(layers, width), **changes))


def _gemma(layers: int, width: int) -> nn.Module:
    """Gains used as 1 + w, and a head of its own."""
    from transformers import GemmaConfig, GemmaForCausalLM

    settings = _modern(layers, width)
    return GemmaForCausalLM(GemmaConfig(**settings, head_dim=width // 8, tie_word_embeddings=False))


def _opt(layers: int, width: int) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=500, hidden_size=width, num_hidden_layers=layers, ffn_dim=4 * width, num_attention_heads=8,
            max_position_embeddings=64, word_embed_proj_dim=width, dropout=0.0,
        )
    )  # fmt: skip


def _modern(layers: int, width: int) -> dict[str, Any]:
    return {
        "vocab_size": 500, "hidden_size": width, "intermediate_size": 2 * width + 16, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip


SMALLER: dict[str, tuple[Callable[[int, int], nn.Module], dict[str, int]]] = {
    "gpt2": (_gpt2, {"query_key": 6, "value_output": 6, "norm_gain": 12}),
    "llama": (_llama, {"query_key": 6, "value_output": 6, "up_down": 6, "norm_gain": 13}),
    "opt": (_opt, {"query_key": 6, "value_output": 6, "up_down": 6, "norm_gain": 12}),
}


@pytest.mark.parametrize("name", SMALLER)
def test_a_model_above_the_limit_goes_through_its_twins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six layers of width 256: the pairs of every layer, from a model of two, in seconds."""
    ways: list[str] = []

    def watching(*arguments: Any) -> Analysis:
        analysis = analyse(*arguments)
        ways.append(analysis.through)
        return analysis

    monkeypatch.setattr(discovery, "analyse", watching)
    torch.manual_seed(0)
    build, kinds = SMALLER[name]
    model = build(6, 256)
    assert sum(p.numel() for p in model.parameters()) > SMALL
    cache.clear()
    started = time.monotonic()
    found = saggs.find_pairs(model)
    print(f"{name}: {time.monotonic() - started:.1f} s")
    assert ways == ["a shallow twin"]
    assert Counter(pair.kind for pair in found) == kinds
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_relu_of_real_width_keeps_its_neurons_together() -> None:
    """OPT-125M's widths: one pair of whole matrices a layer, though a few of 3072 neurons are dead on all samples."""
    torch.manual_seed(0)
    found = saggs.find_pairs(_opt(4, 768))
    kinds = {"query_key": 4, "value_output": 4, "up_down": 4, "norm_gain": 8}
    assert Counter(pair.kind for pair in found) == kinds
    assert all(part.is_whole() for pair in found for part in pair.slices if pair.kind == "up_down")


# --- certificates of a model that cannot be cloned --------------------------------------------------------------------


@pytest.fixture
def as_large(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every model counts as too large to clone; the homes of what was tried in place."""
    tried: list[str] = []

    class Watched(InPlaceTrial):
        def __init__(self, model: nn.Module, arguments: Any, output: Any, pairs: Any) -> None:
            tried.extend(str(pair.left[0]) for pair in pairs)
            super().__init__(model, arguments, output, pairs)

    monkeypatch.setattr(certificates, "LARGE", 0)
    monkeypatch.setattr(certificates, "InPlaceTrial", Watched)
    return tried


IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _llama(2, 32),
    "gemma": lambda: _gemma(2, 32),
    "llama_bfloat16": lambda: _llama(2, 32).bfloat16(),
}


def drawn(name: str) -> nn.Module:
    """A model in training mode with gains that are not one, and a gradient on one parameter."""
    torch.manual_seed(0)
    model = IN_PLACE[name]().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter).mul_(0.3))
    norm = model.get_parameter("model.norm.weight")
    norm.grad = torch.ones_like(norm)
    return model


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_only_the_whole_model_holds_is_proved_in_place_and_put_back_bit_by_bit(
    name: str, as_large: list[str]
) -> None:
    """The last norm against the head, in the model's own precision; its blocks' pairs in float64 clones as always."""
    model = drawn(name)
    before, state = snapshot(model), torch.get_rng_state()
    found = saggs.find_pairs(model)
    assert {part.partition("[")[0] for part in as_large} == {"model.norm.weight"}
    assert differing(before, snapshot(model)) == []
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert Counter(p.kind for p in found) == {"query_key": 2, "value_output": 2, "up_down": 2, "norm_gain": 5}
    (last,) = [p for p in found if p.left[0].name == "model.norm.weight"]
    proof = last.certificate
    assert proof is not None
    assert last.left[0].offset == int(name == "gemma")
    assert last.right[0].name == "lm_head.weight"
    assert proof.factors == (64.0, 1 / 64, -2.0)  # powers of two change no bit
    assert proof.residual <= proof.tolerance < 1e-2
    assert proof.control > 100 * proof.tolerance
    assert name == "gemma" or proof.residual == 0.0
    for pair in found:
        assert pair is last or (pair.certificate is not None and pair.certificate.tolerance == 1e-10)


def _half(pair: ScalePair) -> ScalePair:
    """The head's columns without the last one."""
    right = [dataclasses.replace(p, ranges=(None, (0, 31))) for p in pair.right]
    return dataclasses.replace(pair, right=tuple(right))


def _squared(pair: ScalePair) -> ScalePair:
    return dataclasses.replace(pair, right=tuple(dataclasses.replace(p, exponent=-2) for p in pair.right))


def _other_offset(pair: ScalePair) -> ScalePair:
    return dataclasses.replace(pair, left=tuple(dataclasses.replace(p, offset=1 - p.offset) for p in pair.left))


def _other_gain(pair: ScalePair) -> ScalePair:
    name = "model.layers.1.input_layernorm.weight"
    return dataclasses.replace(pair, left=tuple(dataclasses.replace(p, name=name) for p in pair.left))


@pytest.mark.parametrize("fault", [_half, _squared, _other_offset, _other_gain])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_wrong_pair_is_refused_in_place_and_the_weights_are_put_back(
    name: str, fault: Callable[[ScalePair], ScalePair], as_large: list[str]
) -> None:
    model = drawn(name)
    (last,) = [p for p in saggs.find_pairs(model, ["norm_gain"]) if p.left[0].name == "model.norm.weight"]
    before = snapshot(model)
    as_large.clear()
    with pytest.raises(CertificationError, match="norm_gain of the model is not exact: factor 64 changes the outputs"):
        saggs.certify(model, [fault(last)])
    assert len(as_large) == 1
    assert differing(before, snapshot(model)) == []
    assert saggs.certify(model, [last])[0].certificate is not None
    assert differing(before, snapshot(model)) == []


def test_of_alike_blocks_only_the_first_is_asked_at_wider_weights(as_large: list[str]) -> None:
    """Those do not depend on the block; every block is asked at its own weights."""
    torch.manual_seed(0)
    model = _llama(3, 32)
    found = saggs.find_pairs(model, ["query_key", "up_down"])
    spreads = {p.path: p.certificate.spreads for p in found if p.certificate is not None}
    assert spreads.pop("model.layers.0.self_attn") == spreads.pop("model.layers.0.mlp") == (0.4, 2.0)
    assert len(spreads) == 4
    assert set(spreads.values()) == {()}
    wrong = dataclasses.replace(found[-1], right=found[0].right)
    with pytest.raises(CertificationError):
        saggs.certify(model, [wrong])
    assert as_large == []
