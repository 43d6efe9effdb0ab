"""The literal update rules are those of PyTorch where it has them, and worked out by hand where it has not.

And `ReferenceOptimizer` makes the same runs of them as the pure functions do.
"""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from identities import (
    APART,
    EXACT,
    PURE,
    RATES,
    ROWS,
    Run,
    batch_loss,
    distance,
    draw,
    factors,
    gradients,
    product,
    start,
)
from torch import Tensor, nn

from saggs import reference_rules
from saggs.reference_optimizer import RULES, ReferenceOptimizer, Rule
from saggs.reference_rules import matrix_power, polar_factor


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: int = 6) -> Tensor:
    for step in range(steps):
        weight.grad = draw(40 + step, *weight.shape)
        optimizer.step()
    return weight.detach()


def stepped(name: str, rate: float, steps: int = 6, **settings: Any) -> Tensor:
    weight, state = draw(1, ROWS, 3), None
    for step in range(steps):
        weight, state = RULES[name].step(weight, draw(40 + step, ROWS, 3), state, rate, **settings)
    return weight


@pytest.mark.parametrize(
    ("name", "build", "settings"),
    [
        ("gd", lambda w: torch.optim.SGD([w], lr=0.1), {}),
        ("momentum", lambda w: torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.1), {"decay": 0.1}),
        ("adam", lambda w: torch.optim.Adam([w], lr=0.1, weight_decay=0.1, eps=1e-3), {"decay": 0.1, "eps": 1e-3}),
        ("rmsprop", lambda w: torch.optim.RMSprop([w], lr=0.1, alpha=0.9, eps=1e-3), {"rho": 0.9, "eps": 1e-3}),
    ],
    ids=["gd", "momentum", "adam", "rmsprop"],
)
def test_a_literal_rule_equals_that_of_pytorch_to_rounding(name: str, build: Any, settings: dict[str, Any]) -> None:
    """Over six steps; with its defaults in place of the settings given (the control) it ends elsewhere."""
    weight = nn.Parameter(draw(1, ROWS, 3))
    wanted = trained(build(weight), weight)
    assert distance(stepped(name, 0.1, **settings), wanted) < EXACT
    assert distance(stepped(name, 0.1 if settings else 0.11), wanted) > APART


def test_the_first_step_of_parameter_scaled_adafactor_equals_that_of_pytorch() -> None:
    """PyTorch lets the averages' constant grow from 0 at the first step, so that later steps are other rules."""
    weight = nn.Parameter(draw(1, ROWS, 3))
    wanted = trained(torch.optim.Adafactor([weight], lr=0.1), weight, 1)
    assert distance(stepped("scaled_adafactor", 0.1, 1, rho=0.0, eps=0.0), wanted) < EXACT
    assert distance(stepped("scaled_adafactor", 0.1, 1, rho=0.0, eps=0.0, clip=0.5), wanted) > APART
    assert distance(stepped("adafactor", 0.1, 1, rho=0.0, eps=0.0), wanted) > APART


def test_muon_equals_that_of_pytorch_to_the_rounding_of_its_bfloat16_iteration() -> None:
    """PyTorch averages where we sum, which normalising forgets, and multiplies the rate by sqrt(rows / columns)."""
    weight = nn.Parameter(draw(1, ROWS, 3))
    wanted = trained(torch.optim.Muon([weight], lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.0), weight)
    moved = wanted - draw(1, ROWS, 3)
    assert distance(stepped("muon", 0.1 * math.sqrt(ROWS / 3)) - draw(1, ROWS, 3), moved) < 2e-2
    assert distance(stepped("muon", 0.1) - draw(1, ROWS, 3), moved) > 0.1


def five_quintic_steps_from_one() -> float:
    """What Newton-Schulz makes of the number 1, in exact fractions."""
    x = Fraction(1)
    for _ in range(5):
        x = Fraction("3.4445") * x - Fraction("4.7750") * x**3 + Fraction("2.0315") * x**5
    return float(x)


# One entry, w = 2, gradients 4 and then 1, rate 0.1, constants as in the second column: the two updates by hand.
BY_HAND: dict[str, tuple[dict[str, Any], float, float]] = {
    "sign": ({}, 0.1, 0.1),
    "signum": ({"beta": 0.5}, 0.1, 0.1),  # m = 2, 1.5
    "lion": ({"betas": (0.5, 0.5), "decay": 0.5}, 0.1 * (1 + 1), 0.1 * (1 + 0.9)),
    "rmsprop": ({"rho": 0.75, "eps": 1.0}, 0.1 * 4 / (2 + 1), 0.1 / (math.sqrt(3.25) + 1)),
    "adafactor": ({"rho": 0.75, "eps": 1.0}, 0.1 * 4 / (2 + 1), 0.1 / (math.sqrt(3.25) + 1)),
    "unrooted_adam": ({"betas": (0.5, 0.5), "eps": 1.0}, 0.4 / 17, 0.1 * 2 / (4.5 / 0.75 + 1)),
    "muon": ({"momentum": 0.5, "eps": 0.0}, 0.1 * five_quintic_steps_from_one(), 0.1 * five_quintic_steps_from_one()),
    "polar": ({"momentum": 0.5}, 0.1, 0.1),
    "shampoo": ({"damping": 9.0, "every": 1, "floor": 0.0}, 0.4 / 5, 0.1 / math.sqrt(26)),
    "shampoo_half": ({"damping": 9.0, "every": 2, "floor": 0.0}, 0.4 / 25, 0.1 / 25),
    "lars": ({"momentum": 0.5, "decay": 1.0}, 0.1 * 2 / 6 * 6, 0.5 * 0.2 + 0.1 * 1.8 / 2.8 * 2.8),
    "lamb": ({"eps": 0.0, "decay": 0.5}, 0.1 * 2, 0.1 * 1.8),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_two_steps_of_a_rule_on_one_number_are_what_is_worked_out_by_hand(name: str) -> None:
    """To rounding. Another rate (the control) makes another step."""
    settings, *updates = BY_HAND[name]
    weight, state = torch.full((1, 1), 2.0, dtype=torch.float64), None
    for gradient, update in zip((4.0, 1.0), updates, strict=True):
        before, held = weight, state
        weight, state = RULES[name].step(before, torch.full((1, 1), gradient), held, 0.1, **settings)
        assert float(before - weight) == pytest.approx(update, abs=EXACT)
        other, _ = RULES[name].step(before, torch.full((1, 1), gradient), held, 0.2, **settings)
        assert abs(float(before - other) - update) > APART


# After the same two gradients: what is kept, under its name. Constants that are used twice differ.
KEPT: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "signum": ({"beta": 0.5}, {"first": 1.5}),
    "lion": ({"betas": (0.5, 0.2)}, {"first": 0.2 * 3.2 + 0.8}),
    "muon": ({"momentum": 0.5}, {"first": 3.0}),
    "rmsprop": ({"rho": 0.75}, {"second": 3.25}),
    "adafactor": ({"rho": 0.75}, {"rows": 3.25, "columns": 3.25}),
    "unrooted_adam": ({"betas": (0.5, 0.75)}, {"first": 1.5, "second": 3.25}),
    "lamb": ({"betas": (0.5, 0.75)}, {"first": 1.5, "second": 3.25}),
    "shampoo": ({"damping": 9.0, "every": 2}, {"left": 17.0, "right": 17.0, "left_root": 25**-0.25}),
    "lars": ({"momentum": 0.5}, {"velocity": 0.5 * 0.2 + 0.1 * 1.8}),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_rule_keeps_after_two_steps_is_what_is_worked_out_by_hand(name: str) -> None:
    """Averages from zero, sums of gradients or of their squares, a sum of updates. After one step it is another."""
    settings, wanted = KEPT[name]
    weight, state = torch.full((1, 1), 2.0, dtype=torch.float64), None
    for gradient in (4.0, 1.0):
        before = state
        weight, state = RULES[name].step(weight, torch.full((1, 1), gradient), state, 0.1, **settings)
    for key, value in wanted.items():
        assert float(getattr(state, key)) == pytest.approx(value, abs=EXACT)
        assert key == "left_root" or abs(float(getattr(before, key)) - value) > APART


def test_scaled_gd_solves_with_the_gram_matrix_of_the_other_side() -> None:
    """G_A = D B gives D B (B^T B)^-1; with its own Gram matrix (the control) the step is another."""
    a, b = factors()
    found = gradients([a, b])
    (new_a, new_b), _ = reference_rules.step_scaled_gd([a, b], found, None, 1.0)
    assert distance(a - new_a, found[0] @ torch.linalg.inv(b.T @ b)) < EXACT
    assert distance(b - new_b, found[1] @ torch.linalg.inv(a.T @ a)) < EXACT
    assert distance(a - new_a, found[0] @ torch.linalg.inv(a.T @ a)) > APART


def test_powers_and_polar_factors_of_a_matrix_without_full_rank_leave_its_kernel_alone() -> None:
    """Zero singular values stay zero; a floor (the control) makes something of them."""
    g = draw(3, 6, 2) @ draw(4, 2, 3)
    polar = polar_factor(g)
    assert torch.linalg.svdvals(polar).tolist() == pytest.approx([1, 1, 0], abs=EXACT)
    gram = g @ g.T
    assert distance(matrix_power(gram, -1.0), torch.linalg.pinv(gram, hermitian=True)) < 1e-9
    assert distance(matrix_power(gram, -0.25) @ g @ matrix_power(g.T @ g, -0.25), polar) < 1e-9
    assert distance(matrix_power(gram, -1.0, floor=1e-3), matrix_power(gram, -1.0)) > APART
    assert distance(matrix_power(gram, 0.5) @ matrix_power(gram, 0.5), gram) < EXACT


@pytest.mark.parametrize("every", [1, 4])
def test_shampoo_takes_its_roots_every_so_many_steps(every: int) -> None:
    """At steps 1, 1 + every, ...: in between they are those of before. Sums grow at each step, whatever the period."""
    weight, state, roots = draw(1, ROWS, 3), None, []
    for step in range(9):
        weight, state = reference_rules.step_shampoo(weight, draw(step, ROWS, 3), state, 0.1, every=every)
        roots.append(state.left_root)
    taken = [step for step in range(1, 9) if not torch.equal(roots[step], roots[step - 1])]
    assert taken == list(range(every, 9, every))
    assert state is not None
    gradients_side_by_side = torch.cat([draw(step, ROWS, 3) for step in range(9)], dim=1)
    assert distance(state.left, gradients_side_by_side @ gradients_side_by_side.T) < EXACT
    assert distance(roots[every], roots[0]) > APART


class Pair(nn.Module):
    """A B^T as a module, in any dtype."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(w.to(dtype)) for w in factors())

    def backward(self, step: int) -> None:
        self.zero_grad()
        batch_loss(self.a.double() @ self.b.double().T, step).backward()


def wrapped(name: str, dtype: torch.dtype = torch.float64) -> tuple[Pair, ReferenceOptimizer]:
    model = Pair(dtype)
    return model, ReferenceOptimizer(model.parameters(), RULES[name], RATES[name], **PURE[name])


def continued(model: Pair, optimizer: torch.optim.Optimizer, first: int, steps: int) -> Tensor:
    for step in range(first, first + steps):
        model.backward(step)
        optimizer.step()
    return (model.a @ model.b.T).detach()


@pytest.mark.parametrize("name", RULES)
def test_the_optimizer_repeats_the_run_of_the_pure_function_bit_for_bit(name: str) -> None:
    """Through a deep copy and through `state_dict` too. A copy that lost its state (the control) goes elsewhere."""
    wanted = start(name).advance(20).product
    model, optimizer = wrapped(name)
    continued(model, optimizer, 0, 10)
    middle = product([model.a.detach(), model.b.detach()])
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    loaded = copy.deepcopy(model)
    fresh = ReferenceOptimizer(loaded.parameters(), RULES[name], RATES[name], **PURE[name])
    fresh.load_state_dict(optimizer.state_dict())
    for pair in ((model, optimizer), (copied, copied_optimizer), (loaded, fresh)):
        assert torch.equal(continued(*pair, 10, 10), wanted)
    assert distance(middle, wanted) > APART
    if RULES[name].state is not None:
        lost, optimizer = wrapped(name)
        continued(lost, optimizer, 0, 10)
        optimizer.state.clear()
        assert distance(continued(lost, optimizer, 10, 10), wanted) > APART


def test_the_optimizer_shows_what_a_rule_keeps_by_name_and_its_settings_in_the_groups() -> None:
    """So that code which scales state entries or settings by name finds them; a changed setting is used."""
    model, optimizer = wrapped("adam")
    continued(model, optimizer, 0, 3)
    assert set(optimizer.state[model.a]) == {"step", "first", "second"}
    assert optimizer.param_groups[0]["eps"] == 0.0
    other, other_optimizer = copy.deepcopy((model, optimizer))
    other_optimizer.param_groups[0]["eps"] = 0.5
    assert distance(continued(other, other_optimizer, 3, 3), continued(model, optimizer, 3, 3)) > APART
    model, optimizer = wrapped("momentum")
    continued(model, optimizer, 0, 1)
    assert set(optimizer.state[model.a]) == {"momentum_buffer"}


def test_the_optimizer_keeps_dtypes_skips_frozen_weights_and_returns_the_closure_s_loss() -> None:
    model, optimizer = wrapped("adam", torch.float32)
    model.b.requires_grad_(False)
    before = model.b.clone()

    def closure() -> float:
        model.backward(0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert model.a.dtype == torch.float32
    assert optimizer.state[model.a]["second"].dtype == torch.float64
    assert torch.equal(model.b, before)
    assert model.b not in optimizer.state
    assert distance(model.a.detach(), factors()[0].float()) > APART


def test_groups_have_rates_of_their_own_and_joint_rules_act_on_each_group() -> None:
    """One group of both factors is the run of one denominator; two groups (the control) have one each."""
    wanted = start("scalar_adam").advance(5).product
    one, two = Pair(), Pair()
    together = ReferenceOptimizer(one.parameters(), RULES["scalar_adam"], 0.02, eps=0.0)
    apart = ReferenceOptimizer([{"params": [p]} for p in two.parameters()], RULES["scalar_adam"], 0.02, eps=0.0)
    assert torch.equal(continued(one, together, 0, 5), wanted)
    assert distance(continued(two, apart, 0, 5), wanted) > APART
    model = Pair()
    rates = ReferenceOptimizer([{"params": [model.a], "lr": 0.05}, {"params": [model.b]}], RULES["gd"], 0.02)
    run: Run = start("gd")
    run.rates = (0.05, 0.02)
    assert torch.equal(continued(model, rates, 0, 5), run.advance(5).product)


def test_a_joint_rule_with_a_weight_that_has_no_gradient_or_no_state_is_refused() -> None:
    model, optimizer = wrapped("scalar_adam")
    model.backward(0)
    model.b.grad = None
    before = model.a.clone()
    with pytest.raises(ValueError, match="gradient of every weight"):
        optimizer.step()
    continued(model, optimizer, 0, 1)
    optimizer.state.pop(model.b)
    after = model.a.clone()
    with pytest.raises(ValueError, match="state of every weight"):
        continued(model, optimizer, 1, 1)
    assert torch.equal(model.a, after)
    assert distance(after.detach(), before.detach()) > APART


def test_a_broken_rule_of_a_test_is_wrapped_as_well() -> None:
    """Adam that forgets to square: whatever measures optimizers has to tell it from Adam."""

    def step(weight: Tensor, gradient: Tensor, state: Any, learning_rate: float) -> tuple[Tensor, Any]:
        moved, new = reference_rules.step_adam(weight, gradient, state, learning_rate, eps=0.0)
        return moved + learning_rate * 0.1 * gradient, new

    model, (wanted, adam) = Pair(), wrapped("adam")
    broken = ReferenceOptimizer(model.parameters(), Rule(step, RULES["adam"].state), RATES["adam"])
    assert distance(continued(model, broken, 0, 5), continued(wanted, adam, 0, 5)) > APART
