"""The fast code computes what the literal, float64 reference says, on weights and on optimizer state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Factors, ReluMlp, factor_pair, randomised, relative_distance, tiny_gpt2, tiny_llama, tokens, train
from torch import Tensor

import saggs
from saggs import ParameterSlice, ScalePair, reference
from saggs.balancing import balanced_factors
from saggs.pairs import named_parameters

ADAMW_VARIANTS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
SGD_VARIANTS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
DEGREES = {"exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2, "momentum_buffer": -1}


def trained(build: Any, optimizer_of: Any) -> tuple[Any, Any]:
    """A float64 model after three steps, so that every state tensor holds something."""
    model = build().double()
    optimizer = optimizer_of(model.parameters())
    train(model, optimizer, 3)
    return model, optimizer


def literal_rescaling(model: Any, optimizer: Any, pair: ScalePair, factor: float) -> dict[str, Tensor]:
    """Every weight and state tensor after the rescaling, entry by entry, as the reference writes it."""
    parameters = named_parameters(model)
    expected = {}
    for name, parameter in parameters.items():
        expected[name] = parameter.detach().double()
        for key in DEGREES.keys() & optimizer.state[parameter].keys():
            expected[f"{name}.{key}"] = optimizer.state[parameter][key].double()
    for part in pair.slices:
        multiplier = math.pow(factor, part.exponent)
        for key in [part.name, *(k for k in expected if k.startswith(f"{part.name}."))]:
            degree = DEGREES.get(key.removeprefix(f"{part.name}."), 1)
            expected[key] = reference.rescale_entries(expected[key], part.ranges, math.pow(multiplier, degree))
    return expected


def actual_state(model: Any, optimizer: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in named_parameters(model).items():
        found[name] = parameter.detach().clone()
        for key in DEGREES.keys() & optimizer.state[parameter].keys():
            found[f"{name}.{key}"] = optimizer.state[parameter][key].clone()
    return found


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
@pytest.mark.parametrize("kind", saggs.pairs.BALANCED_KINDS)
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    ],
    ids=["amsgrad", "fused", "momentum"],
)
def test_rescale_equals_the_literal_rescaling_on_weights_and_state(build: Any, kind: str, optimizer_of: Any) -> None:
    """Equal to rounding: c^-2 is one product here and another there. Tensors outside the pair stay as they are."""
    model, optimizer = trained(build, optimizer_of)
    pairs = [p for p in saggs.find_pairs(model) if p.kind == kind]
    if not pairs:
        assert (build, kind) == (tiny_gpt2, "up_down")
        return
    expected = literal_rescaling(model, optimizer, pairs[0], 3.7)
    before = actual_state(model, optimizer)
    saggs.rescale(model, pairs[0], 3.7, optimizer)
    after = actual_state(model, optimizer)
    touched = {part.name for part in pairs[0].slices}
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-14, atol=0)
        assert torch.equal(tensor, before[name]) != any(name == t or name.startswith(f"{t}.") for t in touched)


def test_a_wrong_degree_is_told_from_the_right_one() -> None:
    """The control of the test above: second moments divided by c, not by c^2, are not what `rescale` computes."""
    model, optimizer = trained(tiny_llama, lambda p: torch.optim.AdamW(p))
    pair = saggs.find_pairs(model)[0]
    name = pair.left[0].name
    second = optimizer.state[named_parameters(model)[name]]["exp_avg_sq"].clone()
    saggs.rescale(model, pair, 3.7, optimizer)
    carried = optimizer.state[named_parameters(model)[name]]["exp_avg_sq"]
    assert relative_distance(carried, reference.carry_second_moment(second, 3.7)) < 1e-14
    assert relative_distance(carried, reference.carry_first_moment(second, 3.7)) > 0.1


@settings(max_examples=25, deadline=None)
@given(factor=st.floats(1e-3, 1e3), damping=st.floats(0.05, 1.0), seed=st.integers(0, 2**16), rank=st.integers(1, 5))
def test_balance_equals_the_literal_balanced_factor(factor: float, damping: float, seed: int, rank: int) -> None:
    """Equal to rounding: the reference sums squares in another order."""
    model = Factors(rank=rank, seed=seed)
    with torch.no_grad():
        model.left.mul_(factor)
    left, right = model.left.detach().clone(), model.right.detach().clone()
    expected = reference.find_balanced_factor(left, right, damping)
    found = saggs.balance(model, [factor_pair()], damping=damping)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    expected_left, expected_right = reference.rescale_pair(left, right, expected)
    torch.testing.assert_close(model.left.detach(), expected_left, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.right.detach(), expected_right, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("spread", [0.05, 1.0, 30.0])
def test_balancing_finds_the_least_squared_norm_on_the_orbit(p: int, q: int, spread: float) -> None:
    """Against a golden-section search, which knows no closed form; a flat minimum is found to about 1e-8."""
    generator = torch.Generator().manual_seed(p + 10 * q)
    a = spread * torch.randn(7, 3, generator=generator, dtype=torch.float64)
    b = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    whole = (None, None)
    pair = ScalePair("up_down", "", (ParameterSlice("a", whole, p),), (ParameterSlice("b", whole, -q),))
    found, possible = balanced_factors([pair], a.norm()[None], b.norm()[None])
    assert bool(possible.all())
    assert float(found) == pytest.approx(reference.search_balanced_factor(a, b, p, q), rel=1e-6)
    if (p, q) != (1, 1):
        equal_norms = float((b.norm() / a.norm()) ** (1 / (p + q)))
        if p != q:
            assert abs(equal_norms / float(found) - 1) > 0.02, "with other exponents the minimum is not equal norms"


def test_balancing_a_squared_relu_minimises_and_keeps_the_function() -> None:
    """relu(c x)^2 = c^2 relu(x)^2: exponents 1 and -2, minimised rather than equalised."""
    model = ReluMlp(power=2).double()
    pair, x = model.pair(), torch.randn(8, 6, dtype=torch.float64)
    before, parameters = model(x), named_parameters(model)
    up, down = parameters["up.weight"].detach().clone(), parameters["down.weight"].detach().clone()
    factor = float(saggs.balance(model, [pair]))
    assert factor == pytest.approx(reference.search_balanced_factor(up, down, 1, 2), rel=1e-6)
    assert relative_distance(model(x), before) < 1e-12
    assert float(saggs.balance(model, [pair])) == pytest.approx(1.0, rel=1e-12)
    up_norm, down_norm = (float(w.detach().norm()) for w in (model.up.weight, model.down.weight))
    assert not math.isclose(up_norm, down_norm, rel_tol=0.02)


def noisy_gradients(steps: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(6, 4, generator=generator, dtype=torch.float64) * (1 + step % 3) for step in range(steps)]


@pytest.mark.parametrize("variant", ADAMW_VARIANTS, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_adamw_takes_the_literal_step(variant: dict[str, bool], amsgrad: bool, eps: float) -> None:
    """Equal to rounding on weight and state: PyTorch divides by sqrt(1 - b2^t) where the reference divides v first."""
    weight = torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    settings_ = {"betas": (0.9, 0.95), "eps": eps}
    optimizer = torch.optim.AdamW([weight], lr=0.02, weight_decay=0.1, amsgrad=amsgrad, **settings_, **variant)  # type: ignore[arg-type]
    literal, state = weight.detach().clone(), reference.start_adamw(weight, amsgrad)
    for gradient in noisy_gradients():
        weight.grad = gradient.clone()
        optimizer.step()
        literal, state = reference.step_adamw(literal, gradient, state, 0.02, decay=0.1, **settings_)  # type: ignore[arg-type]
    kept = optimizer.state[weight]
    torch.testing.assert_close(weight.detach(), literal, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(kept["exp_avg"], state.first, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(kept["exp_avg_sq"], state.second, rtol=1e-12, atol=1e-14)
    assert int(kept["step"]) == state.step
    if amsgrad:
        torch.testing.assert_close(kept["max_exp_avg_sq"], state.maximum, rtol=1e-12, atol=1e-14)


def test_adamw_with_decay_not_multiplied_by_the_learning_rate_is_another_rule() -> None:
    """The control of the literal step: lr * decay is what shrinks the weight, not decay."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    weight.grad = torch.ones(3, dtype=torch.float64)
    torch.optim.AdamW([weight], lr=0.02, weight_decay=0.1).step()
    start = torch.ones(3, dtype=torch.float64)
    right, _ = reference.step_adamw(start, weight.grad, reference.start_adamw(start), 0.02, decay=0.1)
    wrong, _ = reference.step_adamw(start, weight.grad, reference.start_adamw(start), 0.02, decay=0.1 / 0.02)
    assert relative_distance(weight.detach(), right) < 1e-14
    assert relative_distance(weight.detach(), wrong) > 1e-2


@pytest.mark.parametrize("variant", SGD_VARIANTS, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_takes_the_literal_step(variant: dict[str, bool], decay: float) -> None:
    """Equal to rounding on weight and momentum; without the momentum (the control) the weight ends elsewhere."""
    weight = torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.02, momentum=0.9, weight_decay=decay, **variant)
    literal, buffer = weight.detach().clone(), None
    plain = literal.clone()
    for gradient in noisy_gradients():
        weight.grad = gradient.clone()
        optimizer.step()
        literal, buffer = reference.step_sgd(literal, gradient, buffer, 0.02, 0.9, decay)
        plain, _ = reference.step_sgd(plain, gradient, None, 0.02, 0.9, decay)
    torch.testing.assert_close(weight.detach(), literal, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], buffer, rtol=1e-12, atol=1e-14)
    assert relative_distance(plain, literal) > 1e-2


@pytest.mark.parametrize("variant", ADAMW_VARIANTS, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("degree_zero", [True, False])
def test_the_update_of_adamw_does_not_follow_the_scale_of_its_weight(
    variant: dict[str, bool], degree_zero: bool
) -> None:
    """With the moments carried and no decay, c A moves by as much as A: exact for a power of two and eps = 0.

    The control has eps = 0.1, which is not scaled along, and moves by something else.
    """
    moves = []
    for factor in (1.0, 8.0):
        weight = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
        eps = 0.0 if degree_zero else 0.1
        optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0, eps=eps, **variant)  # type: ignore[arg-type]
        for gradient in noisy_gradients(4):
            weight.grad = gradient / factor
            optimizer.step()
        moves.append(weight.detach())
    assert torch.equal(*moves) == degree_zero


def test_the_first_gradients_of_a_rescaled_pair_answer_inversely() -> None:
    """G_A -> G_A / c and G_B -> c G_B: exact for a power of two, since the loss is the same number."""
    base, moved = Factors(), Factors()
    saggs.rescale(moved, factor_pair(), 8.0)
    target = torch.randn(12, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for model in (base, moved):
        (model() - target).square().sum().backward()
    assert base.left.grad is not None
    assert base.right.grad is not None
    assert torch.equal(moved.left.grad, base.left.grad / 8)  # type: ignore[arg-type]
    assert torch.equal(moved.right.grad, base.right.grad * 8)  # type: ignore[arg-type]


def test_balancing_a_language_model_equals_the_literal_factors() -> None:
    """Every factor of a Llama at once, from weights alone, against norms summed one entry at a time."""
    model = randomised(tiny_llama(), 9).double()
    pairs, parameters = saggs.find_pairs(model, saggs.pairs.BALANCED_KINDS), named_parameters(model)
    logits = model(input_ids=tokens(1)).logits.detach()
    expected = [
        reference.find_balanced_factor(parameters[pair.left[0].name].detach(), parameters[pair.right[0].name].detach())
        for pair in pairs
    ]
    found = saggs.balance(model, pairs)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.tolist() != pytest.approx(expected[::-1], rel=1e-3)
    assert relative_distance(model(input_ids=tokens(1)).logits.detach(), logits) < 1e-5
    assert saggs.log2_norm_ratios(model, pairs).abs().max() < 1e-12
