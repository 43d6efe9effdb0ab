"""`find_pairs` returns what is exact on this model, computed from what it does, and leaves out the rest."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from declared import declared_pairs
from models import (
    LANGUAGE_MODELS,
    GatedMlp,
    ReluMlp,
    differing,
    logits_and_gradients,
    snapshot,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
    vectors,
)
from torch import nn

import saggs
from saggs import ScalePair
from saggs.pairs import BALANCED_KINDS, KINDS, named_parameters


def names(pairs: list[ScalePair]) -> list[str]:
    return [str(pair) for pair in pairs]


def uncertified(pairs: list[ScalePair]) -> list[ScalePair]:
    return [dataclasses.replace(pair, certificate=None) for pair in pairs]


def quietly(model: nn.Module, *arguments: Any, **settings: Any) -> list[ScalePair]:
    """`find_pairs`, where a candidate that is left out is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return saggs.find_pairs(model, *arguments, **settings)


def test_gpt2_has_four_pairs_a_layer_and_none_in_its_gelu_mlp() -> None:
    """Queries and keys, values and output, two gains; gelu(c x) is not c gelu(x), and the head is tied."""
    pairs = quietly(tiny_gpt2())
    assert sorted(names(pairs)) == sorted(
        f"{kind} of transformer.h.{layer}{inside}"
        for layer in (0, 1)
        for kind, inside in (("query_key", ".attn"), ("value_output", ".attn"), ("norm_gain", ""), ("norm_gain", ""))
    )
    assert [str(part) for part in next(p for p in pairs if p.kind == "query_key").slices] == [
        f"transformer.h.0.attn.c_attn.{leaf}"
        for leaf in ("weight[:, 0:32]", "bias[0:32]", "weight[:, 32:64]", "bias[32:64]")
    ]
    gain = next(p for p in pairs if p.kind == "norm_gain" and "ln_1" in p.left[0].name)
    assert [(part.name.removeprefix("transformer.h.0."), part.bias) for part in gain.slices] == [
        ("ln_1.weight", False), ("ln_1.bias", True), ("attn.c_attn.weight", False)]  # fmt: skip
    assert all(pair.certificate is not None for pair in pairs)


@pytest.mark.parametrize("name", ["llama", "biased_llama"])
def test_llama_has_five_pairs_a_layer_with_biases_where_it_has_them(name: str) -> None:
    """Biases of the scaled rows ride along: q, k, v, up. Those of o_proj and down_proj stay. The head is untied."""
    pairs = quietly(LANGUAGE_MODELS[name]())
    assert sorted(names(pairs)) == sorted(
        ["norm_gain of the model"]
        + [
            f"{kind} of model.layers.{layer}{inside}"
            for layer in (0, 1)
            for kind, inside in (
                ("query_key", ".self_attn"), ("value_output", ".self_attn"), ("up_down", ".mlp"),
                ("norm_gain", ""), ("norm_gain", ""),
            )
        ]
    )  # fmt: skip
    biased = {part.name.split(".")[-2] for pair in pairs for part in pair.slices if part.bias}
    assert biased == (set() if name == "llama" else {"q_proj", "k_proj", "v_proj", "up_proj"})


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_balanced_kinds_are_what_was_once_declared_by_name_in_the_same_order(name: str) -> None:
    """Computed without a name: the identity of every training run rests on this list, order and paths included."""
    model = LANGUAGE_MODELS[name]()
    found = quietly(model, BALANCED_KINDS)
    assert uncertified(found) == declared_pairs(model)
    assert uncertified(found)[::-1] != declared_pairs(model)
    assert {pair.kind for pair in quietly(model)} - set(BALANCED_KINDS) == {"norm_gain"}


def test_normalised_queries_and_keys_are_left_out_and_their_gains_take_their_place() -> None:
    """QK-norm makes each of W_Q and W_K free up to eps: approximate, hence no candidate. The other pairs stay."""
    pairs = quietly(tiny_qwen3())
    assert {pair.kind for pair in pairs} == set(KINDS) - {"query_key"}
    assert len([p for p in pairs if p.kind in BALANCED_KINDS]) == 4
    gains = [[part.name.split(".")[-2] for part in p.slices] for p in pairs if p.kind == "query_key_gain"]
    assert gains == [["q_norm", "k_norm"]] * 2


def test_a_model_whose_neurons_have_another_consumer_loses_that_pair() -> None:
    """What a second reader takes up is not undone: no equation between the charges, hence no candidate."""

    class Leaky(GatedMlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.up_proj(x).sum(-1, keepdim=True)

    assert quietly(Leaky(), inputs=vectors) == []
    assert len(quietly(GatedMlp(), inputs=vectors)) == 1


def features(width: int) -> Any:
    """`inputs` for a module whose argument is called input."""
    return lambda generator, count: {"input": torch.randn(count, width, generator=generator)}


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Linear(4, 3), nn.Embedding(9, 4)],
    ids=["gelu_mlp", "linear", "embedding"],
)
def test_a_model_without_a_symmetry_has_no_pairs_and_is_not_balanced(model: nn.Module) -> None:
    """[] and no error; balancing such a model is refused with a reason."""
    tokens_ = {"input": torch.tensor([[0, 3, 8], [1, 2, 5]])}
    assert quietly(model, inputs=(lambda g, n: tokens_) if isinstance(model, nn.Embedding) else features(4)) == []
    with pytest.raises(ValueError, match="no exact pair to balance"):
        saggs.balance(model, [])
    with pytest.raises(ValueError, match="no pairs to unbalance"):
        saggs.inject_imbalance(model, [], 2.0)


def test_a_relu_mlp_under_names_that_say_nothing_is_found() -> None:
    """What once needed up_proj and down_proj is computed; exponents and signs as the pair written by hand."""
    sequential = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    (pair,) = quietly(sequential, inputs=features(4))
    assert (str(pair), pair.signs) == ("up_down of the model", "positive")
    assert [str(part) for part in pair.slices] == ["0.weight", "0.bias", "2.weight"]
    for power in (1, 2):
        model = ReluMlp(power)
        (found,) = quietly(model, inputs=vectors)
        shapes = {name: tuple(p.shape) for name, p in named_parameters(model).items()}
        by_hand = dataclasses.replace(
            model.pair(),
            left=tuple(dataclasses.replace(part, shape=shapes[part.name]) for part in model.pair().left),
            right=tuple(dataclasses.replace(part, shape=shapes[part.name]) for part in model.pair().right),
        )
        assert uncertified([found]) == [by_hand]


def test_a_module_without_parameters_or_without_inputs_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="Identity's output depends on no parameter"):
        saggs.find_pairs(nn.Identity(), inputs=features(4))
    with pytest.raises(ValueError, match="pass inputs=, a callable of"):
        saggs.find_pairs(nn.Identity())


def test_a_gated_mlp_outside_a_language_model_is_found_once_it_has_inputs() -> None:
    with pytest.raises(ValueError, match=r"GatedMlp .*pass inputs=, a callable of"):
        saggs.find_pairs(GatedMlp())
    assert names(saggs.find_pairs(GatedMlp(), inputs=vectors)) == ["up_down of the model"]


@pytest.mark.parametrize("kinds", [("query_key",), ("up_down", "value_output"), "query_key", ("norm_gain",)])
def test_kinds_choose_among_the_pairs(kinds: Any) -> None:
    """The same slices and order; a certificate's residual is that of the pairs that were rescaled together."""
    chosen = {kinds} if isinstance(kinds, str) else set(kinds)
    everything = saggs.find_pairs(tiny_llama())
    some = saggs.find_pairs(tiny_llama(), kinds)
    assert uncertified(some) == uncertified([pair for pair in everything if pair.kind in chosen])
    assert some
    assert {pair.kind for pair in everything} == set(KINDS) - {"query_key_gain"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"kinds": ("qk",)},
            r"kinds=\['qk'\]: choose from query_key, value_output, up_down, norm_gain, query_key_gain",
        ),
        ({"kinds": ()}, r"kinds=\[\]: choose from"),
        ({"granularity": "heads"}, "granularity='heads': choose from matrix, head, channel"),
    ],
)
def test_an_unknown_kind_or_granularity_is_refused_with_the_choices(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        saggs.find_pairs(tiny_llama(), **arguments)


def test_meta_tensors_are_refused() -> None:
    """Names can be read off them, symmetries cannot."""
    model: nn.Module = tiny_llama()
    meta = model.to("meta")
    assert len(declared_pairs(meta)) == 6
    with pytest.raises(ValueError, match="on the meta device; load real weights"):
        saggs.find_pairs(meta)


def test_finding_pairs_changes_no_bit_of_the_model_its_gradients_or_its_mode() -> None:
    model = tiny_gpt2().train()
    logits_and_gradients(model)
    model.transformer.wte.weight.grad = torch.ones_like(model.transformer.wte.weight)
    before = snapshot(model)
    saggs.find_pairs(model)
    assert differing(before, snapshot(model)) == []
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_a_weight_shared_between_layers_leaves_its_pairs_out() -> None:
    """down_proj of both layers is one tensor: neither up_down pair is exact, all others are."""
    model = tiny_llama()
    apart = [pair for pair in quietly(model) if pair.kind != "up_down"]
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    found = quietly(model)
    assert {str(p.left[0]) for p in found} == {str(p.left[0]) for p in apart}
    assert {pair.kind for pair in found} == {"query_key", "value_output", "norm_gain"}


@pytest.mark.parametrize("statement", ["import saggs", "import saggs, saggs.reference, saggs.precision"])
def test_the_library_imports_torch_alone(statement: str) -> None:
    """In a fresh interpreter, which sees the same check fail once something else is imported."""
    check = "assert not {'transformers', 'hydra', 'experiments', 'wandb', 'datasets'} & set(sys.modules)"

    def run(code: str) -> int:
        return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode

    assert run(f"import sys; {statement}; {check}") == 0
    assert run(f"import sys; {statement}; sys.modules['wandb'] = sys; {check}") == 1
