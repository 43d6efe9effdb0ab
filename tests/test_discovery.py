"""`find_pairs` returns what is exact on this model, leaves out the rest by name, and what uses pairs checks them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from models import (
    LANGUAGE_MODELS,
    Factors,
    GatedMlp,
    ReluMlp,
    differing,
    factor_pair,
    logits_and_gradients,
    relative_distance,
    snapshot,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
    train,
    vectors,
)
from torch import nn

import saggs
from saggs import ParameterSlice, Rebalancer, ScalePair
from saggs.discovery import declared_pairs
from saggs.pairs import named_parameters


def names(pairs: list[ScalePair]) -> list[str]:
    return [str(pair) for pair in pairs]


def test_gpt2_has_two_pairs_a_layer_and_none_in_its_gelu_mlp() -> None:
    """Queries and keys, values and output; gelu(c x) is not c gelu(x)."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = saggs.find_pairs(tiny_gpt2())
    assert names(pairs) == [
        f"{kind} of transformer.h.{layer}.attn" for layer in (0, 1) for kind in ("query_key", "value_output")
    ]
    assert [str(part) for part in pairs[0].slices] == [
        f"transformer.h.0.attn.c_attn.{leaf}"
        for leaf in ("weight[:, 0:32]", "bias[0:32]", "weight[:, 32:64]", "bias[32:64]")
    ]
    assert all(pair.certificate is not None for pair in pairs)


@pytest.mark.parametrize("name", ["llama", "biased_llama"])
def test_llama_has_three_pairs_a_layer_with_biases_where_it_has_them(name: str) -> None:
    """Biases of the scaled rows ride along: q, k, v, up. Those of o_proj and down_proj stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = saggs.find_pairs(LANGUAGE_MODELS[name]())
    assert sorted(names(pairs)) == sorted(
        f"{kind} of model.layers.{layer}.{module}"
        for layer in (0, 1)
        for kind, module in (("query_key", "self_attn"), ("value_output", "self_attn"), ("up_down", "mlp"))
    )
    biased = {part.name.split(".")[-2] for pair in pairs for part in pair.slices if part.bias}
    assert biased == (set() if name == "llama" else {"q_proj", "k_proj", "v_proj", "up_proj"})


def test_normalised_queries_and_keys_are_left_out_by_name_with_a_warning() -> None:
    """QK-norm makes each of W_Q and W_K free up to eps: approximate, hence refused. The other pairs stay."""
    with pytest.warns(
        UserWarning, match=r"left out: query_key of model\.layers\.[01]\.self_attn is not exact"
    ) as caught:
        pairs = saggs.find_pairs(tiny_qwen3())
    assert len([w for w in caught if "left out" in str(w.message)]) == 2
    assert {pair.kind for pair in pairs} == {"value_output", "up_down"}
    assert len(pairs) == 4


def test_a_model_whose_values_have_another_consumer_loses_that_pair_only() -> None:
    """The declaration recognises the wiring; the certificate sees the consumer that the wiring does not show."""

    class Leaky(GatedMlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.up_proj(x).sum(-1, keepdim=True)

    with pytest.warns(UserWarning, match="left out: up_down of the model is not exact"):
        assert saggs.find_pairs(Leaky(), inputs=vectors) == []
    assert len(saggs.find_pairs(GatedMlp(), inputs=vectors)) == 1


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), ReluMlp(), nn.Linear(3, 3), nn.Identity()],
    ids=["gelu_mlp", "relu_mlp", "linear", "nothing"],
)
def test_a_model_without_declared_wiring_has_no_pairs_and_needs_no_inputs(model: nn.Module) -> None:
    """[] and no error; balancing such a model is refused with a reason."""
    assert saggs.find_pairs(model) == []
    with pytest.raises(ValueError, match="no exact pair to balance"):
        saggs.balance(model)
    with pytest.raises(ValueError, match="no pairs to unbalance"):
        saggs.inject_imbalance(model, [], 2.0)


def test_a_gated_mlp_outside_a_language_model_is_found_once_it_has_inputs() -> None:
    with pytest.raises(ValueError, match=r"GatedMlp is not a causal language model.*pass inputs="):
        saggs.find_pairs(GatedMlp())
    assert names(saggs.find_pairs(GatedMlp(), inputs=vectors)) == ["up_down of the model"]


@pytest.mark.parametrize("kinds", [("query_key",), ("up_down", "value_output"), "query_key"])
def test_kinds_choose_among_the_pairs(kinds: Any) -> None:
    chosen = {kinds} if isinstance(kinds, str) else set(kinds)
    everything = saggs.find_pairs(tiny_llama())
    assert saggs.find_pairs(tiny_llama(), kinds) == [pair for pair in everything if pair.kind in chosen]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": ("qk",)}, r"kinds=\['qk'\]: choose from query_key, value_output, up_down"),
        ({"kinds": ()}, r"kinds=\[\]: choose from"),
        ({"granularity": "head"}, "granularity='head' is not available; use granularity='matrix'"),
    ],
)
def test_an_unknown_kind_or_granularity_is_refused_with_the_choices(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        saggs.find_pairs(tiny_llama(), **arguments)


def test_candidates_are_declared_on_meta_tensors_and_never_certified_there() -> None:
    """No weight is read to declare; to certify on meta tensors is refused."""
    model: nn.Module = tiny_llama()
    meta = model.to("meta")
    certified = saggs.find_pairs(tiny_llama())
    assert declared_pairs(meta) == [dataclasses.replace(pair, certificate=None) for pair in certified]
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


def test_a_weight_shared_between_layers_leaves_its_pairs_out_by_name() -> None:
    """down_proj of both layers is one tensor: neither up_down pair is exact, the four others are."""
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    with pytest.warns(UserWarning, match="left out: up_down"):
        assert {pair.kind for pair in saggs.find_pairs(model)} == {"query_key", "value_output"}


def test_pairs_that_share_entries_are_refused_and_neighbouring_slices_are_not() -> None:
    """One pass cannot balance both. The thirds of one fused tensor do not overlap."""
    whole = (None, None)
    other = ScalePair(
        "value_output", "", (ParameterSlice("left", (None, (1, 3)), 1),), (ParameterSlice("right", whole, -1),)
    )
    with pytest.raises(ValueError, match=r"share left\[:, 1:3\]; balance them one at a time"):
        Rebalancer(Factors(), None, [factor_pair(), other], transport=False)
    columns = [((None, (0, 2)), (None, (0, 2))), ((None, (2, 4)), (None, (2, 4)))]
    apart = [
        ScalePair("value_output", "", (ParameterSlice("left", a, 1),), (ParameterSlice("right", b, -1),))
        for a, b in columns
    ]
    model = Factors()
    product = model().detach()
    Rebalancer(model, None, apart, transport=False).step()
    assert relative_distance(model(), product) < 1e-14
    assert saggs.log2_norm_ratios(model, apart).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every=0 must be a whole number of steps, at least 1"),
        ({"every": -3}, "every=-3"),
        ({"every": 2.5}, r"every=2\.5"),
        ({"every": True}, "every=True"),
        ({"damping": 0.0}, r"damping=0\.0 must lie in \(0, 1\]: 1 is hard balancing"),
        ({"damping": 1.5}, r"damping=1\.5"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"pairs": []}, "no exact pair to balance"),
    ],
    ids=str,
)
def test_a_rebalancer_refuses_a_bad_setting_with_its_value(arguments: dict[str, Any], message: str) -> None:
    model = Factors()
    with pytest.raises(ValueError, match=message):
        Rebalancer(model, torch.optim.AdamW(model.parameters()), **{"pairs": [factor_pair()], **arguments})


def test_a_rebalancer_refuses_no_optimizer_and_pairs_of_another_model() -> None:
    with pytest.raises(ValueError, match="transport=True needs the optimizer; pass it, or transport=False"):
        Rebalancer(Factors(), None, [factor_pair()])
    with pytest.raises(ValueError, match="no parameter 'lef'; the nearest is 'left'"):
        Rebalancer(Factors(), None, [factor_pair("lef")], transport=False)
    sliced = ScalePair(
        "value_output", "", (ParameterSlice("left", (None, (0, 9)), 1),), (ParameterSlice("right", (None, None), -1),)
    )
    with pytest.raises(ValueError, match="range 0:9 lies outside dimension 1"):
        Rebalancer(Factors(rank=4), None, [sliced], transport=False)


@pytest.mark.parametrize("every", [1, 3])
def test_a_rebalancer_balances_at_its_first_call_and_every_so_many_after(every: int) -> None:
    model = Factors()
    rebalancer = Rebalancer(model, None, [factor_pair()], every=every, transport=False)
    assert [rebalancer.step() for _ in range(7)] == [step % every == 0 for step in range(7)]
    assert rebalancer.steps == 7


def test_a_restored_rebalancer_continues_the_count_and_the_run_bit_for_bit() -> None:
    """Exact: what it keeps is a counter. A new one in its place (the control) balances out of turn."""
    ends = []
    for resume in ("none", "restored", "new"):
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        pairs = saggs.find_pairs(model)
        saggs.inject_imbalance(model, pairs, 8.0)
        rebalancer = Rebalancer(model, optimizer, pairs, every=5)
        train(model, optimizer, 3, before=rebalancer.step)
        if resume != "none":
            state = rebalancer.state_dict()
            rebalancer = Rebalancer(model, optimizer, pairs, every=5)
            if resume == "restored":
                rebalancer.load_state_dict(state)
        train(model, optimizer, 5, first_seed=900, before=rebalancer.step)
        ends.append(snapshot(model, optimizer))
    assert differing(ends[0], ends[1]) == []
    assert differing(ends[0], ends[2])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"every": 7}, "has every=10, this one 7"),
        ({"damping": 0.5}, "has damping=1.0, this one 0.5"),
        ({"transport": False}, "has transport=True, this one False"),
        ({"pairs": "fewer"}, "has pairs=.*query_key:model"),
    ],
    ids=str,
)
def test_the_state_of_a_rebalancer_with_other_settings_is_refused(other: dict[str, Any], message: str) -> None:
    model = tiny_llama()
    optimizer, pairs = torch.optim.AdamW(model.parameters()), saggs.find_pairs(model)
    state = Rebalancer(model, optimizer, pairs).state_dict()
    chosen = pairs[1:] if other.pop("pairs", None) else pairs
    rebalancer = Rebalancer(model, optimizer, chosen, **other)
    with pytest.raises(ValueError, match=message):
        rebalancer.load_state_dict(state)
    assert rebalancer.steps == 0
    Rebalancer(model, optimizer, pairs).load_state_dict(state)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pair_with_a_zero_or_non_finite_norm_is_counted_and_all_others_are_balanced(side: str, value: float) -> None:
    """Such a pair has no balanced point: it keeps its bits, the others end at equal norms."""
    model = tiny_llama()
    pairs = saggs.find_pairs(model)
    dead = getattr(pairs[1], side)[0].name
    with torch.no_grad():
        named_parameters(model)[dead].fill_(value)
    before = snapshot(model)
    rebalancer = Rebalancer(model, None, pairs, transport=False)
    assert int(rebalancer.unbalanced) == 0
    factors = rebalancer.rebalance()
    assert int(rebalancer.unbalanced) == 1
    assert float(factors[1]) == 1.0
    after = snapshot(model)
    for part in pairs[1].slices:
        assert torch.equal(after[part.name].nan_to_num(7.0), before[part.name].nan_to_num(7.0))
    alive = [pair for i, pair in enumerate(pairs) if i != 1]
    assert saggs.log2_norm_ratios(model, alive).abs().max() < 1e-5
    assert all(not torch.equal(after[p.left[0].name], before[p.left[0].name]) for p in alive)


def test_injection_multiplies_every_pair_by_its_own_factor_and_keeps_the_function() -> None:
    """Factor c moves log2(|A| / |B|) by 2 log2 c, exactly for powers of two; the logits keep every bit."""
    model = tiny_llama()
    pairs = saggs.find_pairs(model)
    logits, _ = logits_and_gradients(model)
    gaps = saggs.log2_norm_ratios(model.double(), pairs)
    factors = [2.0, 0.5, 8.0, 1.0, 4.0, 0.25]
    saggs.inject_imbalance(model, pairs, factors)
    moved = saggs.log2_norm_ratios(model, pairs) - gaps
    torch.testing.assert_close(moved, 2 * torch.tensor(factors, dtype=moved.dtype).log2(), rtol=0, atol=1e-12)
    assert torch.equal(logits_and_gradients(model.float())[0], logits)


@pytest.mark.parametrize(
    ("factor", "message"),
    [([2.0, 2.0], "2 factors for 6 pairs; give one, or one a pair"), ([2.0] * 5 + [0.0], r"factor 0\.0")],
)
def test_injection_with_a_wrong_list_of_factors_changes_nothing(factor: list[float], message: str) -> None:
    model = tiny_llama()
    pairs, before = saggs.find_pairs(model), snapshot(model)
    with pytest.raises(ValueError, match=message):
        saggs.inject_imbalance(model, pairs, factor)
    assert differing(before, snapshot(model)) == []


def test_log_uniform_factors_depend_on_the_seed_alone_and_span_the_range() -> None:
    """The same for the same seed, others for another; uniform in the logarithm over [1 / 32, 32]."""
    drawn = saggs.log_uniform_factors(2000, 32.0, seed=5)
    torch.manual_seed(123)
    assert saggs.log_uniform_factors(2000, 32.0, seed=5) == drawn
    assert not set(saggs.log_uniform_factors(2000, 32.0, seed=6)) & set(drawn)
    assert saggs.log_uniform_factors(10, 32.0, seed=5) == drawn[:10]
    logs = torch.tensor(drawn, dtype=torch.float64).log2()
    assert logs.abs().max() <= 5
    assert logs.min() < -4.9
    assert logs.max() > 4.9
    assert abs(float(logs.mean())) < 0.2
    assert float(logs.std()) == pytest.approx(10 / 12**0.5, rel=0.05)
    assert min(drawn) >= 1 / 32
    assert max(drawn) <= 32


@pytest.mark.parametrize("factor", [1.0, 0.5, -2.0, float("inf"), float("nan")])
def test_log_uniform_factors_need_a_finite_range_above_one(factor: float) -> None:
    with pytest.raises(ValueError, match="must be finite and above 1"):
        saggs.log_uniform_factors(3, factor, seed=0)


@pytest.mark.parametrize("statement", ["import saggs", "import saggs, saggs.reference, saggs.precision"])
def test_the_library_imports_torch_alone(statement: str) -> None:
    """In a fresh interpreter, which sees the same check fail once something else is imported."""
    check = "assert not {'transformers', 'hydra', 'experiments', 'wandb', 'datasets'} & set(sys.modules)"

    def run(code: str) -> int:
        return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode

    assert run(f"import sys; {statement}; {check}") == 0
    assert run(f"import sys; {statement}; sys.modules['wandb'] = sys; {check}") == 1
