"""Ten rows about AdamW on a rescaled pair: which changes of a training state it follows exactly, and which it does not.

One factor problem throughout: loss of A B^T against a target on fresh random minibatches, float64, eps = 0, decay 0.1.
After 50 warm steps the state is moved along the orbit with c = 8, and both states train for 50 more on the same
batches. The distance is |A B^T - A' B'^T| / |A B^T| at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import Factors, factor_pair
from torch import Tensor

import saggs
from saggs import reference

ROWS, COLUMNS, RANK = 12, 10, 4
RATE, DECAY, FACTOR = 0.05, 0.1, 8.0
WARM, MORE = 50, 50
PAIR = factor_pair()
ORDER, SIGNS = (2, 0, 3, 1), (1, -1, -1, 1)

State = tuple[Factors, torch.optim.Optimizer]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Eight random rows of inputs and noisy targets: a pure function of the step."""
    generator = torch.Generator().manual_seed(1000 + step)
    fixed = torch.Generator().manual_seed(1)
    truth = torch.randn(ROWS, COLUMNS, generator=fixed, dtype=torch.float64)
    x = torch.randn(8, ROWS, generator=generator, dtype=torch.float64)
    noise = torch.randn(8, COLUMNS, generator=generator, dtype=torch.float64)
    return x, x @ truth + noise


def advance(state: State, first: int, steps: int, before: Callable[[], object] = lambda: None) -> None:
    model, optimizer = state
    for step in range(first, first + steps):
        before()
        x, y = batch(step)
        optimizer.zero_grad()
        (x @ model() - y).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def warm(eps: float = 0.0, rule: str = "adamw", **settings: Any) -> State:
    """A state after 50 steps; each factor has a parameter group of its own."""
    model = Factors(ROWS, COLUMNS, RANK)
    groups = [{"params": [model.left]}, {"params": [model.right]}]
    optimizer: torch.optim.Optimizer
    if rule == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY, eps=eps, **settings)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    state = (model, optimizer)
    advance(state, 0, WARM)
    return state


def rescaled(state: State, carry: bool) -> State:
    model, optimizer = copy.deepcopy(state)
    saggs.rescale(model, PAIR, FACTOR, optimizer if carry else None)
    return model, optimizer


def balanced(state: State, carry: bool) -> State:
    model, optimizer = copy.deepcopy(state)
    saggs.balance(model, [PAIR], optimizer if carry else None)
    return model, optimizer


def follow(state: State, scale_eps: bool = True) -> State:
    """Set every group's learning rate, eps and decay to what the reference says for its factor."""
    _, optimizer = state
    for group, factor in zip(optimizer.param_groups, (FACTOR, 1 / FACTOR), strict=True):
        rate, eps, decay = reference.scale_adamw_settings(group["lr"], group["eps"], group["weight_decay"], factor)
        group.update(lr=rate, weight_decay=decay, eps=eps if scale_eps else group["eps"])
    return state


def distance(base: State, other: State) -> float:
    """Train copies of both for 50 more steps; relative distance of the products."""
    ends = [copy.deepcopy(state) for state in (base, other)]
    for end in ends:
        advance(end, WARM, MORE)
    first, second = (end[0]().detach() for end in ends)
    return 0.0 if torch.equal(first, second) else float((first - second).norm() / first.norm())


def apart(value: float, printed: float) -> bool:
    """Different, and by about the printed distance: within a factor of three, since the problem is not the same."""
    return printed / 3 < value < printed * 3


@pytest.fixture(scope="module")
def base() -> State:
    return warm()


def test_the_rescaled_state_holds_the_same_product_but_other_factors(base: State) -> None:
    """All rows below start at one function: c = 8 keeps every bit of A B^T."""
    other = rescaled(base, carry=True)
    assert torch.equal(base[0](), other[0]())
    assert torch.equal(8 * base[0].left, other[0].left)


def test_an_untouched_copy_repeats_the_base_run_bit_for_bit(base: State) -> None:
    """The zero of the measure: copying a state is not what makes runs part."""
    assert distance(base, copy.deepcopy(base)) == 0.0


def test_carrying_the_moments_alone_does_not_make_adamw_follow_a_rescaling(base: State) -> None:
    """Row 1: c A moves by as much as A, where it would have to move by c times as much."""
    assert apart(distance(base, rescaled(base, carry=True)), 0.469)


def test_rescaling_without_carrying_the_moments_parts_from_the_base_run(base: State) -> None:
    """Row 2: moments of the old scale on weights of the new one."""
    assert apart(distance(base, rescaled(base, carry=False)), 0.859)


def test_adamw_with_moments_rates_eps_and_decay_scaled_equals_the_base_run(base: State) -> None:
    """Row 3, exactly 0: lr c, decay / c (lr * decay kept), moments carried; powers of two multiply exactly."""
    assert distance(base, follow(rescaled(base, carry=True))) == 0.0


@pytest.mark.parametrize("missing", ["moments", "decay"])
def test_leaving_the_moments_or_the_decay_unscaled_breaks_the_exact_identity(base: State, missing: str) -> None:
    """Controls of row 3: each ingredient is needed."""
    other = follow(rescaled(base, carry=missing != "moments"))
    if missing == "decay":
        for group in other[1].param_groups:
            group["weight_decay"] = DECAY
    assert distance(base, other) > 1e-2


def test_an_unscaled_eps_breaks_the_identity_and_a_scaled_one_restores_it() -> None:
    """Row 4: eps = 1e-3 beside sqrt(v) has the degree of v's root; with eps / c the runs are equal again, exactly."""
    state = warm(eps=1e-3)
    assert apart(distance(state, follow(rescaled(state, carry=True), scale_eps=False)), 1.2e-3)
    assert distance(state, follow(rescaled(state, carry=True))) == 0.0


def test_balancing_and_carrying_both_states_brings_them_to_one_trajectory(base: State) -> None:
    """Row 5, exactly 0: balance(8 A, B / 8) gives the very bits of balance(A, B), moments too."""
    first, second = balanced(base, carry=True), balanced(rescaled(base, carry=True), carry=True)
    assert torch.equal(first[0].left, second[0].left)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(first[1].state[first[0].left][key], second[1].state[second[0].left][key])
    assert distance(first, second) == 0.0


def test_balancing_both_states_without_ever_carrying_leaves_them_apart(base: State) -> None:
    """Row 6: one set of weights, two sets of moments."""
    other = balanced(rescaled(base, carry=True), carry=False)
    assert torch.equal(balanced(base, carry=False)[0].left, other[0].left)
    assert apart(distance(balanced(base, carry=False), other), 0.280)


def test_moments_lost_in_the_rescaling_are_not_repaired_by_balancing_with_them(base: State) -> None:
    """Row 7: carrying later moves the wrong moments rightly."""
    other = balanced(rescaled(base, carry=False), carry=True)
    assert apart(distance(balanced(base, carry=True), other), 0.263)


def test_moments_moved_like_weights_part_from_the_base_run(base: State) -> None:
    """Row 8: c and c^2 in place of 1 / c and 1 / c^2."""
    other = rescaled(base, carry=False)
    for weight, factor in ((other[0].left, FACTOR), (other[0].right, 1 / FACTOR)):
        other[1].state[weight]["exp_avg"].mul_(factor)
        other[1].state[weight]["exp_avg_sq"].mul_(factor**2)
    assert apart(distance(base, other), 1.03)


def permuted(state: State, moment_signs: Sequence[int]) -> State:
    """A P and B P for a signed permutation P of the columns, moments moved along; second moments have no sign."""
    model, optimizer = copy.deepcopy(state)
    with torch.no_grad():
        for weight in (model.left, model.right):
            kept = optimizer.state[weight]
            weight.copy_(reference.permute_columns(weight, ORDER, SIGNS))
            kept["exp_avg"] = reference.permute_columns(kept["exp_avg"], ORDER, moment_signs)
            kept["exp_avg_sq"] = reference.permute_columns(kept["exp_avg_sq"], ORDER, (1, 1, 1, 1))
    return model, optimizer


def test_adamw_follows_a_signed_permutation_with_signed_moments(base: State) -> None:
    """Row 9, at round-off: the rule works entry by entry, only the order of the sums in A B^T is another."""
    assert distance(base, permuted(base, SIGNS)) < 1e-12


def test_adamw_does_not_follow_a_signed_permutation_with_unsigned_moments(base: State) -> None:
    """Row 10: a first moment is as signed as its weight."""
    assert apart(distance(base, permuted(base, (1, 1, 1, 1))), 0.095)


@pytest.mark.parametrize("settings", [{"amsgrad": True}, {"foreach": True}, {"fused": True}], ids=str)
def test_the_two_exact_zeros_hold_in_every_variant_of_adamw(settings: dict[str, Any]) -> None:
    """Each variant multiplies by powers of two somewhere else; none rounds. The control is row 1."""
    state = warm(**settings)
    assert distance(state, follow(rescaled(state, carry=True))) == 0.0
    assert distance(balanced(state, carry=True), balanced(rescaled(state, carry=True), carry=True)) == 0.0
    assert distance(state, rescaled(state, carry=True)) > 1e-2


@pytest.mark.parametrize("carry", [True, False])
def test_sgd_with_momentum_carried_and_rates_scaled_by_the_square_equals_the_base_run(carry: bool) -> None:
    """Exactly 0: the update of SGD has degree -1, so its rate takes c^2. Without carrying (the control) it parts."""
    state = warm(rule="sgd")
    other = rescaled(state, carry=carry)
    for group, factor in zip(other[1].param_groups, (FACTOR, 1 / FACTOR), strict=True):
        group["lr"], _ = reference.scale_sgd_settings(group["lr"], 0.0, factor)
    assert (distance(state, other) == 0.0) == carry
    if carry:
        assert not distance(state, rescaled(state, carry=True)) < 1e-2, "at one rate for both, SGD leaves or diverges"


def test_adamw_as_the_reference_writes_it_gives_the_same_verdicts(base: State) -> None:
    """The identity is one of the formula, not of PyTorch's arithmetic: equal to rounding in the literal steps."""
    ends = []
    for factors, scaled in (((1.0, 1.0), True), ((FACTOR, 1 / FACTOR), True), ((FACTOR, 1 / FACTOR), False)):
        weights = [base[0].left.detach() * factors[0], base[0].right.detach() * factors[1]]
        states = []
        for weight, factor in zip((base[0].left, base[0].right), factors, strict=True):
            kept = base[1].state[weight]
            first = reference.carry_first_moment(kept["exp_avg"], factor)
            second = reference.carry_second_moment(kept["exp_avg_sq"], factor)
            states.append(reference.AdamWState(int(kept["step"]), first, second))
        for step in range(WARM, WARM + MORE):
            x, y = batch(step)
            residual = 2 * (x @ weights[0] @ weights[1].T - y) / y.numel()
            gradients = [x.T @ residual @ weights[1], residual.T @ x @ weights[0]]
            for i, factor in enumerate(factors):
                rate, eps, decay = reference.scale_adamw_settings(RATE, 0.0, DECAY, factor if scaled else 1.0)
                weights[i], states[i] = reference.step_adamw(
                    weights[i], gradients[i], states[i], rate, eps=eps, decay=decay
                )
        ends.append(weights[0] @ weights[1].T)
    torch_end = copy.deepcopy(base)
    advance(torch_end, WARM, MORE)
    norm = ends[0].norm()
    assert float((ends[0] - torch_end[0]().detach()).norm() / norm) < 1e-10
    assert float((ends[1] - ends[0]).norm() / norm) < 1e-10
    assert float((ends[2] - ends[0]).norm() / norm) > 1e-2
