"""Rescaling a pair keeps the model's function and all of the optimizer's state; what it cannot keep, it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    LANGUAGE_MODELS,
    Factors,
    ReluMlp,
    differing,
    factor_pair,
    logits_and_gradients,
    relative_distance,
    snapshot,
    square_llama,
    tiny_gpt2,
    tiny_llama,
    tokens,
    train,
)
from torch import Tensor, nn

import saggs
from saggs import ParameterSlice, ScalePair
from saggs.pairs import BALANCED_KINDS, named_parameters
from saggs.precision import float64_everywhere


def scaled_gradients(gradients: dict[str, Tensor], pairs: list[ScalePair], factor: float) -> dict[str, Tensor]:
    """What every gradient should be after the rescaling: c^-e inside the slices, as before outside."""
    expected = {name: gradient.clone() for name, gradient in gradients.items()}
    for pair in pairs:
        for part in pair.slices:
            part.view(expected[part.name]).mul_(factor**-part.exponent)
    return expected


@pytest.mark.parametrize("k", [-10, -1, 1, 4, 10])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_powers_of_two_keep_logits_and_all_gradients_bit_for_bit(name: str, k: int) -> None:
    """Exact in float32: a power of two changes exponents only, and every sum adds the same significands."""
    model = LANGUAGE_MODELS[name]()
    pairs = saggs.find_pairs(model)
    logits, gradients = logits_and_gradients(model)
    saggs.inject_imbalance(model, pairs, 2.0**k)
    after, after_gradients = logits_and_gradients(model)
    assert torch.equal(after, logits)
    assert differing(after_gradients, scaled_gradients(gradients, pairs, 2.0**k)) == []
    assert len(differing(after_gradients, gradients)) > len(pairs), "the gradients of the pairs have moved"


@pytest.mark.parametrize("factor", [3.7, 1 / 11, -2.3])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_odd_factors_keep_logits_and_gradients_to_rounding_in_float64(name: str, factor: float) -> None:
    """To 1e-12 only: 3.7 w is rounded. Gradients of GPT-2's key bias are round-off and are left out."""
    model = LANGUAGE_MODELS[name]().double()
    pairs = saggs.find_pairs(model)
    with float64_everywhere():
        logits, gradients = logits_and_gradients(model)
        saggs.inject_imbalance(model, pairs, factor)
        after, after_gradients = logits_and_gradients(model)
    assert relative_distance(after, logits) < 1e-12
    expected = scaled_gradients(gradients, pairs, factor)
    for key, gradient in after_gradients.items():
        assert relative_distance(gradient, expected[key]) < 1e-12 or key.endswith("k_proj.bias"), key


@pytest.mark.parametrize("name", ["llama", "biased_llama"])
def test_only_the_float64_mode_shows_the_true_size_of_a_small_residual(name: str) -> None:
    """Why the mode is needed: RMSNorm falls back to float32 inside a float64 model.

    A pair that is wrong by 1e-13 then shows nothing at all, and one wrong by 1e-9 shows float32 rounding. Under the
    mode the residual is proportional to the fault.
    """
    residuals: dict[bool, list[float]] = {}
    for mode in (True, False):
        residuals[mode] = []
        for fault in (1e-13, 1e-9):
            model = LANGUAGE_MODELS[name]().double()
            pair = next(p for p in saggs.find_pairs(model) if p.kind == "up_down")
            before = forward(model, mode)
            with torch.no_grad():
                named_parameters(model)[pair.left[0].name].mul_(1 + fault)
            residuals[mode].append(relative_distance(forward(model, mode), before))
    small, large = residuals[True]
    assert large / small == pytest.approx(1e4, rel=0.05)
    assert residuals[False][0] == 0.0
    assert residuals[False][1] > 10 * large


def forward(model: nn.Module, everywhere: bool = True) -> Tensor:
    with torch.no_grad():
        if not everywhere:
            return model(input_ids=tokens(7)).logits
        with float64_everywhere():
            return model(input_ids=tokens(7)).logits


def without_biases(pair: ScalePair) -> ScalePair:
    left, right = (tuple(p for p in side if not p.bias) for side in (pair.left, pair.right))
    return ScalePair(pair.kind, pair.path, left, right)


def gate_for_up(pair: ScalePair) -> ScalePair:
    left = tuple(ParameterSlice(p.name.replace("up_proj", "gate_proj"), p.ranges, 1, p.bias) for p in pair.left)
    return ScalePair(pair.kind, pair.path, left, pair.right)


def keys_unscaled(pair: ScalePair) -> ScalePair:
    """The left side against a right side of another layer: K of this layer stays."""
    right = tuple(ParameterSlice(p.name.replace("layers.0", "layers.1"), p.ranges, -1, p.bias) for p in pair.right)
    return ScalePair(pair.kind, pair.path, pair.left, right)


@pytest.mark.parametrize(
    ("name", "kind", "spoil"),
    [
        ("gpt2", "query_key", without_biases),
        ("gpt2", "value_output", without_biases),
        ("biased_llama", "query_key", without_biases),
        ("biased_llama", "up_down", without_biases),
        ("llama", "up_down", gate_for_up),
        ("llama", "query_key", keys_unscaled),
    ],
)
def test_a_forgotten_bias_gate_or_key_changes_the_function(
    name: str, kind: str, spoil: Callable[[ScalePair], ScalePair]
) -> None:
    """The controls of exactness; the unspoilt pair is exact on the same model. Powers of two do not help here."""
    model = LANGUAGE_MODELS[name]().double()
    pair = next(p for p in saggs.find_pairs(model) if p.kind == kind)
    before = forward(model)
    saggs.rescale(model, pair, 4.0)
    assert relative_distance(forward(model), before) < 1e-12
    saggs.rescale(model, pair, 0.25)
    saggs.rescale(model, spoil(pair), 4.0)
    assert relative_distance(forward(model), before) > 1e-6


def trained_gpt2() -> tuple[Any, torch.optim.Optimizer, list[ScalePair]]:
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    train(model, optimizer, 3)
    return model, optimizer, saggs.find_pairs(model, BALANCED_KINDS)


def test_only_the_slice_of_a_fused_tensor_changes_weights_and_moments() -> None:
    """Queries move by c, keys by 1 / c, values not at all; in the bias and in every moment too. Exact for c = 8."""
    model, optimizer, pairs = trained_gpt2()
    before = snapshot(model, optimizer)
    saggs.rescale(model, pairs[0], 8.0, optimizer)
    after = snapshot(model, optimizer)
    degrees = {"": 1, ".exp_avg": -1, ".exp_avg_sq": -2, ".max_exp_avg_sq": -2}
    changed = set()
    for leaf in ("weight", "bias"):
        for suffix, degree in degrees.items():
            key = f"transformer.h.0.attn.c_attn.{leaf}{suffix}"
            changed.add(key)
            old, new = (t[key].chunk(3, dim=-1) for t in (before, after))
            assert torch.equal(new[0], old[0] * 8.0**degree)
            assert torch.equal(new[1], old[1] * 8.0**-degree)
            assert torch.equal(new[2], old[2])
            assert not torch.equal(new[0], old[0])
    assert set(differing(before, after)) == changed, "step counters and all other tensors are bit-unchanged"


@pytest.mark.parametrize("k", [-12, 5, 12])
def test_rescaling_and_its_inverse_restore_every_bit_for_powers_of_two(k: int) -> None:
    """Exact for 2^k. The control: 3.7 and then 1 / 3.7 leave about one entry in fourteen in another last bit."""
    model, optimizer, pairs = trained_gpt2()
    before = snapshot(model, optimizer)
    for pair in pairs:
        saggs.rescale(model, pair, 2.0**k, optimizer)
    assert differing(before, snapshot(model, optimizer))
    for pair in pairs:
        saggs.rescale(model, pair, 2.0**-k, optimizer)
    assert differing(before, snapshot(model, optimizer)) == []
    for factor in (3.7, 1 / 3.7):
        saggs.rescale(model, pairs[0], factor, optimizer)
    assert differing(before, snapshot(model, optimizer))


@pytest.mark.parametrize("many", [False, True], ids=["rescale", "balance"])
def test_float32_moments_of_bfloat16_weights_keep_dtype_and_arithmetic(many: bool) -> None:
    """m / c in float32, not rounded to bfloat16 on the way (the control); weights are rounded once, from float32."""
    model = Factors().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(2)
    for weight in (model.left, model.right):
        moments = [torch.rand(weight.shape, generator=generator) + 0.5 for _ in range(2)]
        optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    before = snapshot(model, optimizer)
    if many:
        factor = saggs.balance(model, [factor_pair()], optimizer, factors="exact")[0]
        assert factor.dtype == torch.float32
    else:
        factor = torch.tensor(1.2345, dtype=torch.float64)
        saggs.rescale(model, factor_pair(), float(factor), optimizer)
    after = snapshot(model, optimizer)
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
    torch.testing.assert_close(after["left.exp_avg"], before["left.exp_avg"] / float(factor), rtol=2e-7, atol=0)
    torch.testing.assert_close(
        after["left.exp_avg_sq"], before["left.exp_avg_sq"] / float(factor) ** 2, rtol=4e-7, atol=0
    )
    assert torch.equal(after["left"], (before["left"].float() * float(factor)).bfloat16())
    assert float(after["left.step"]) == 3.0
    rounded = before["left.exp_avg"] / float(factor.bfloat16())
    assert relative_distance(after["left.exp_avg"], rounded) > 1e-4


def test_rescaling_before_the_first_step_with_empty_state_moves_the_weights_alone() -> None:
    """An optimizer without state has nothing to carry; the first step then makes the same state as it would have."""
    model = Factors()
    optimizer = torch.optim.AdamW(model.parameters())
    before = snapshot(model)
    saggs.rescale(model, factor_pair(), 4.0, optimizer)
    assert not optimizer.state
    assert torch.equal(model.left, 4 * before["left"])


def test_frozen_parameters_move_and_have_no_moments_to_carry() -> None:
    """Freezing a weight does not take it out of the function: left unmoved, the product changes."""
    model = Factors()
    model.right.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.left])
    model().square().sum().backward()
    optimizer.step()
    product = model().detach()
    saggs.rescale(model, factor_pair(), 4.0, optimizer)
    assert torch.equal(model(), product)
    assert not model.right.requires_grad
    assert model.right not in optimizer.state


def test_gradients_in_flight_are_carried_like_moments() -> None:
    """Between backward and step the gradient is part of the state: g / c on the left, c g on the right, exactly."""
    model = Factors()
    model().square().sum().backward()
    before = snapshot(model)
    saggs.rescale(model, factor_pair(), 8.0)
    after = snapshot(model)
    assert torch.equal(after["left.grad"], before["left.grad"] / 8)
    assert torch.equal(after["right.grad"], before["right.grad"] * 8)
    model.zero_grad()
    model().square().sum().backward()
    assert differing(after, snapshot(model)) == [], "they are the gradients of the rescaled model"


@pytest.mark.parametrize("exponent", [100, -100, 140, -140])
def test_a_factor_that_over_or_underflows_is_refused_and_nothing_is_changed(exponent: int) -> None:
    """Second moments scale by c^-2: in float32 they leave its range long before the weights do. 2^20 is allowed."""
    model, optimizer, pairs = trained_gpt2()
    saggs.rescale(model, pairs[0], 2.0**20, optimizer)
    saggs.rescale(model, pairs[0], 2.0**-20, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"query_key of transformer\.h\.0\.attn.*underflows.*nothing was changed"):
        saggs.rescale(model, pairs[0], 2.0**exponent, optimizer)
    assert differing(before, snapshot(model, optimizer)) == []


def test_a_factor_that_makes_a_moment_subnormal_is_refused_or_restores_its_bits() -> None:
    """1e-20 / 2^80 = 8e-45 is not zero in float32, but only three bits of it are left."""
    model = Factors().float()
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        moment = 1e-20 * (1 + torch.rand(weight.shape))
        optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(weight), "exp_avg_sq": moment}
    before = snapshot(model, optimizer)
    try:
        saggs.rescale(model, factor_pair(), 2.0**40, optimizer)
    except ValueError:
        return
    saggs.rescale(model, factor_pair(), 2.0**-40, optimizer)
    assert differing(before, snapshot(model, optimizer)) == []


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf"), -float("inf")])
def test_a_factor_that_is_zero_or_not_finite_is_refused(factor: float) -> None:
    model = Factors()
    before = snapshot(model)
    with pytest.raises(ValueError, match=str(factor)):
        saggs.rescale(model, factor_pair(), factor)
    assert differing(before, snapshot(model)) == []


def test_negative_factors_are_allowed_where_nothing_between_the_sides_forbids_them() -> None:
    """q . k does not see two sign flips; relu does, so that its pair allows positive factors only."""
    model = tiny_llama()
    pairs = saggs.find_pairs(model)
    logits = model(input_ids=tokens(1)).logits
    saggs.inject_imbalance(model, pairs, -4.0)
    assert torch.equal(model(input_ids=tokens(1)).logits, logits)
    relu = ReluMlp()
    x = torch.randn(8, 6)
    before, output = snapshot(relu), relu(x)
    with pytest.raises(ValueError, match=r"factor -4\.0 is negative"):
        saggs.rescale(relu, relu.pair(), -4.0)
    assert differing(before, snapshot(relu)) == []
    saggs.rescale(relu, relu.pair(), 4.0)
    assert torch.equal(relu(x), output)
    with torch.no_grad():
        for part in relu.pair().slices:
            named_parameters(relu)[part.name].neg_()
    assert relative_distance(relu(x), output) > 1e-2, "what the refused factor would have done"


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "data_parallel"])
def test_a_wrapped_model_acts_on_the_same_tensors(wrap: Callable[[Any], Any]) -> None:
    """Pairs are keyed by unwrapped names: those found through the wrapper are those of the model, and so are bits."""
    model, plain = tiny_llama(), tiny_llama()
    wrapped = wrap(model)
    pairs = saggs.find_pairs(wrapped)
    assert pairs == saggs.find_pairs(plain)
    addresses = [p.data_ptr() for p in model.parameters()]
    for target in (wrapped, plain):
        saggs.rescale(target, pairs[0], 4.0)
        saggs.balance(target, pairs)
    assert differing(snapshot(model), snapshot(plain)) == []
    assert differing(snapshot(model), snapshot(tiny_llama()))
    assert [p.data_ptr() for p in model.parameters()] == addresses


@pytest.mark.parametrize(
    ("build", "warns"),
    [
        (lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1), True),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), True),
        (lambda p: torch.optim.SGD(p, momentum=0.9), False),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.1), False),
    ],
    ids=["sgd_decay", "adam_decay", "sgd", "adamw_decay"],
)
def test_coupled_decay_warns_that_carrying_is_approximate_and_decoupled_decay_does_not(build: Any, warns: bool) -> None:
    """g + decay w is not homogeneous in the gradient, so no factor carries its moments exactly."""
    model = Factors()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saggs.rescale(model, factor_pair(), 2.0, build(model.parameters()))
    assert [("coupled weight decay 0.1" in str(w.message)) for w in caught] == [True] * warns


def test_an_optimizer_in_another_order_does_not_swap_moments_of_equal_shape() -> None:
    """State is found by parameter, not by position: q_proj and k_proj have one shape, and each keeps its own."""
    model = square_llama()
    pair = saggs.find_pairs(model, ["query_key"])[0]
    q, k = (side[0].name for side in (pair.left, pair.right))
    parameters = named_parameters(model)
    assert parameters[q].shape == parameters[k].shape
    backwards = list(model.parameters())[::-1]
    groups: list[dict[str, Any]] = [{"params": backwards[::2], "weight_decay": 0.0}, {"params": backwards[1::2]}]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer, 2)
    before = snapshot(model, optimizer)
    saggs.rescale(model, pair, 4.0, optimizer)
    after = snapshot(model, optimizer)
    assert torch.equal(after[f"{q}.exp_avg"], before[f"{q}.exp_avg"] / 4)
    assert torch.equal(after[f"{k}.exp_avg"], before[f"{k}.exp_avg"] * 4)
    assert not torch.equal(after[f"{q}.exp_avg"], before[f"{k}.exp_avg"] / 4), "a swap would be seen"
