"""A certificate is a proof on this very model: exact pairs pass, each kind of wrong pair fails by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from declared import declared_pairs
from models import (
    LANGUAGE_MODELS,
    GatedMlp,
    ReluMlp,
    biased_llama,
    differing,
    snapshot,
    tiny_gpt2,
    tiny_llama,
    vectors,
)
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import saggs
from saggs import CertificationError, ParameterSlice, ScalePair


def edited(pair: ScalePair, edit: Callable[[ParameterSlice], ParameterSlice | None], side: str = "both") -> ScalePair:
    """The pair with every slice of a side edited; None drops it."""

    def of(parts: tuple[ParameterSlice, ...], name: str) -> tuple[ParameterSlice, ...]:
        return tuple(p for p in map(edit, parts) if p is not None) if side in (name, "both") else parts

    return dataclasses.replace(pair, left=of(pair.left, "left"), right=of(pair.right, "right"), certificate=None)


def drop_bias(part: ParameterSlice) -> ParameterSlice | None:
    return None if part.bias else part


def gate_for_up(part: ParameterSlice) -> ParameterSlice:
    return dataclasses.replace(part, name=part.name.replace("up_proj", "gate_proj"))


def shift_by_one(part: ParameterSlice) -> ParameterSlice:
    """GPT-2's thirds, one column off."""
    ranges = tuple(r and (r[0] + 1, min(r[1] + 1, 96)) for r in part.ranges)
    return dataclasses.replace(part, ranges=ranges)


def whole_tensor(part: ParameterSlice) -> ParameterSlice:
    """The whole fused bias along with one third of the weight."""
    return dataclasses.replace(part, ranges=(None,)) if part.bias else part


def square(part: ParameterSlice) -> ParameterSlice:
    return dataclasses.replace(part, exponent=2 * part.exponent)


WRONG = {
    "query_bias_forgotten": (tiny_gpt2, "query_key", drop_bias, "left"),
    "value_bias_forgotten": (tiny_gpt2, "value_output", drop_bias, "left"),
    "llama_query_bias_forgotten": (biased_llama, "query_key", drop_bias, "left"),
    "up_bias_forgotten": (biased_llama, "up_down", drop_bias, "left"),
    "gate_for_up": (tiny_llama, "up_down", gate_for_up, "left"),
    "thirds_shifted": (tiny_gpt2, "query_key", shift_by_one, "both"),
    "values_shifted": (tiny_gpt2, "value_output", lambda p: shift_by_one(p) if "c_attn" in p.name else p, "left"),
    "whole_fused_bias": (tiny_gpt2, "value_output", whole_tensor, "left"),
    "wrong_exponent": (tiny_llama, "value_output", square, "right"),
}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_declared_pairs_certify_with_a_residual_at_rounding_and_a_control_that_fails(name: str) -> None:
    """Exact to 1e-12 in float64, odd and negative factors too; the control is twelve orders of magnitude larger."""
    model = LANGUAGE_MODELS[name]()
    before = snapshot(model)
    for pair in saggs.certify(model, declared_pairs(model)):
        assert pair.certificate is not None
        assert pair.certificate.residual < 1e-12
        assert pair.certificate.control > 1e-3
        assert set(pair.certificate.factors) == {64.0, 1 / 64, 3.7, -1.5}
    assert differing(before, snapshot(model)) == []


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_pair_fails_by_name_and_the_model_is_bit_unchanged(fault: str) -> None:
    """The right pair of the same kind passes on the same model."""
    build, kind, edit, side = WRONG[fault]
    model = build()
    right = next(p for p in declared_pairs(model) if p.kind == kind)
    before, training = snapshot(model), model.training
    with pytest.raises(
        CertificationError, match=rf"{kind} of {right.path} is not exact: factor .* changes the outputs"
    ):
        saggs.certify(model, [edited(right, edit, side)])
    assert saggs.certify(model, [right])[0].certificate is not None
    assert differing(before, snapshot(model)) == []
    assert model.training == training


def test_a_forgotten_bias_is_caught_on_a_fresh_model_whose_biases_are_zero() -> None:
    """Zero biases hide the fault, so the clone's are drawn at random; the model keeps its own."""
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=32, n_layer=1, n_head=4))
    assert not bool(model.transformer.h[0].attn.c_attn.bias.any())
    pair = declared_pairs(model)[0]
    with pytest.raises(CertificationError, match=r"query_key of transformer\.h\.0\.attn"):
        saggs.certify(model, [edited(pair, drop_bias, "left")])
    assert not bool(model.transformer.h[0].attn.c_attn.bias.any())


def test_a_pair_that_forgets_the_key_bias_is_exact_all_the_same() -> None:
    """softmax does not see q . b_k, one number a query: forgetting a key bias without rotation changes nothing."""
    model = tiny_gpt2()
    pair = declared_pairs(model)[0]
    assert saggs.certify(model, [edited(pair, drop_bias, "right")])[0].certificate is not None
    with pytest.raises(CertificationError):
        saggs.certify(biased_llama(), [edited(declared_pairs(biased_llama())[0], drop_bias, "right")])


class DeadMlp(ReluMlp):
    """relu(-x^2): whatever the inputs, the hidden layer is silent."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(-(self.up(x) ** 2)))


def test_a_control_that_does_not_change_the_outputs_is_refused() -> None:
    """A check that cannot fail proves nothing: with a silent hidden layer every pair would pass."""
    with pytest.raises(CertificationError, match=r"up_down of the model proves nothing: .*pass other inputs="):
        saggs.certify(DeadMlp(), [DeadMlp().pair()], inputs=vectors)
    assert saggs.certify(ReluMlp(), [ReluMlp().pair()], inputs=vectors)[0].certificate is not None


def test_inputs_that_do_not_exercise_a_pair_are_refused() -> None:
    """A one-token sequence attends to itself whatever the scores: query_key cannot be told from a wrong pair."""
    model = tiny_llama()
    pair = declared_pairs(model)[0]

    def one_token(generator: torch.Generator, count: int) -> Mapping[str, Tensor]:
        return {"input_ids": torch.randint(0, 61, (count, 1), generator=generator)}

    with pytest.raises(CertificationError, match=r"query_key of model\.layers\.0\.self_attn proves nothing"):
        saggs.certify(model, [pair], inputs=one_token)
    assert saggs.certify(model, [pair])[0].certificate is not None


@pytest.mark.parametrize("signs", ["any", "positive"])
def test_a_relu_pair_that_claims_any_sign_is_refused(signs: Any) -> None:
    """relu(-x) is not -relu(x); with positive factors alone the same slices are exact."""
    model = ReluMlp()
    pair = dataclasses.replace(model.pair(), signs=signs)
    if signs == "any":
        with pytest.raises(CertificationError, match=r"factor -1\.5"):
            saggs.certify(model, [pair], inputs=vectors)
    else:
        assert saggs.certify(model, [pair], inputs=vectors)[0].certificate is not None


def test_a_squared_relu_needs_the_exponent_minus_two() -> None:
    model = ReluMlp(power=2)
    assert saggs.certify(model, [model.pair()], inputs=vectors)[0].certificate is not None
    with pytest.raises(CertificationError, match="is not exact"):
        saggs.certify(model, [ReluMlp(power=1).pair()], inputs=vectors)


class GemmaGain(nn.Module):
    """A gain used as 1 + w before a linear layer: exact only where the offset is known."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.out = nn.Parameter(torch.linspace(-0.5, 0.5, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((1 + self.gain) * x)


@pytest.mark.parametrize("offset", [1, 0])
def test_a_gain_used_as_one_plus_w_is_exact_with_its_offset_and_wrong_without(offset: int) -> None:
    model = GemmaGain()
    left = (ParameterSlice("gain", (None,), 1, offset=offset),)
    pair = ScalePair("value_output", "", left, (ParameterSlice("out.weight", (None, None), -1),))
    if not offset:
        with pytest.raises(CertificationError, match="is not exact"):
            saggs.certify(model, [pair], inputs=vectors)
        return
    saggs.certify(model, [pair], inputs=vectors)
    x = vectors(torch.Generator().manual_seed(0), 4)["x"].float()
    before = model(x)
    for move in (lambda: saggs.rescale(model, pair, 3.7), lambda: saggs.balance(model, [pair])):
        move()
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    assert abs(float(saggs.log2_norm_ratios(model, [pair]))) < 1e-5


def test_meta_tensors_integer_tensors_and_plain_modules_are_refused_with_the_remedy() -> None:
    with torch.device("meta"):
        meta = GatedMlp.__new__(GatedMlp)
        nn.Module.__init__(meta)
        meta.gate_proj, meta.up_proj, meta.down_proj = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)
    with pytest.raises(ValueError, match=r"'gate_proj\.weight' is on the meta device; load real weights"):
        saggs.certify(meta, declared_pairs(meta), inputs=vectors)
    quantised = GatedMlp()
    quantised.up_proj.weight = nn.Parameter(torch.ones(9, 6, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"'up_proj.weight' is torch\.int8: quantised"):
        saggs.certify(quantised, declared_pairs(quantised), inputs=vectors)
    with pytest.raises(ValueError, match=r"GatedMlp .*pass inputs=, a callable of"):
        saggs.certify(GatedMlp(), declared_pairs(GatedMlp()))
    assert len(saggs.certify(GatedMlp(), declared_pairs(GatedMlp()), inputs=vectors)) == 1


def test_outputs_that_are_not_finite_or_not_a_tensor_are_refused() -> None:
    broken = GatedMlp()
    with torch.no_grad():
        broken.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="GatedMlp's outputs are not finite"):
        saggs.certify(broken, declared_pairs(broken), inputs=vectors)
    with pytest.raises(ValueError, match="dict has no logits; pass output="):
        saggs.certify(Wrapped(), declared_pairs(Wrapped()), inputs=vectors)
    found = saggs.certify(Wrapped(), declared_pairs(Wrapped()), inputs=vectors, output=lambda result: result["y"])
    assert len(found) == 1


class Wrapped(nn.Module):
    """Returns a dictionary, of which only the caller knows what counts."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = GatedMlp()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.mlp(x)}


def test_a_pair_of_another_model_is_refused_with_the_nearest_name() -> None:
    part = ParameterSlice("up_projj.weight", (None, None), 1)
    pair = ScalePair("up_down", "", (part,), (ParameterSlice("down_proj.weight", (None, None), -1),))
    with pytest.raises(ValueError, match=r"no parameter 'up_projj\.weight'; the nearest is 'up_proj\.weight'"):
        saggs.certify(GatedMlp(), [pair], inputs=vectors)
    shape = dataclasses.replace(pair, left=(ParameterSlice("up_proj.weight", (None, (4, 99)), 1),))
    with pytest.raises(ValueError, match=r"range 4:99 lies outside dimension 1 of \(9, 6\)"):
        saggs.certify(GatedMlp(), [shape], inputs=vectors)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_pair_survives_json_with_its_certificate(name: str) -> None:
    """Equal as a value after a round trip through text; a changed exponent (the control) is not equal."""
    for pair in saggs.find_pairs(LANGUAGE_MODELS[name]()):
        again = ScalePair.from_json(json.loads(json.dumps(pair.to_json())))
        assert again == pair
        assert again.certificate == pair.certificate is not None
        assert hash(again) == hash(pair)
        spoilt = pair.to_json()
        spoilt["left"][0]["exponent"] = 2
        assert ScalePair.from_json(spoilt) != pair


@pytest.mark.parametrize("wrong", ["left", "right", "zero", "offset"])
def test_a_pair_that_makes_no_sense_cannot_be_built(wrong: str) -> None:
    good = ReluMlp().pair()
    bias = tuple(p for p in good.left if p.bias)
    attempts: dict[str, tuple[Callable[[], object], str]] = {
        "left": (lambda: dataclasses.replace(good, left=bias), "the left side holds no weight"),
        "right": (lambda: dataclasses.replace(good, right=()), "the right side holds no weight"),
        "zero": (lambda: ParameterSlice("w", (None,), 0), "exponent 0"),
        "offset": (lambda: ParameterSlice("w", (None,), 1, offset=2), "offset 2"),
    }
    attempt, message = attempts[wrong]
    with pytest.raises(ValueError, match=message):
        attempt()


def test_certifying_leaves_the_default_dtype_and_the_random_state_alone() -> None:
    """Finding pairs in the middle of a run must not change the run's random numbers."""
    model = tiny_llama()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    saggs.find_pairs(model)
    assert torch.equal(torch.rand(4), expected)
    assert torch.get_default_dtype() == torch.float32
