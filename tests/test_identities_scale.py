"""The scale symmetry (A, B) -> (c A, B / c): how gradients, updates and states of each literal rule answer to it.

The scaling exponent e of a rule says that the update of c A is c^e times that of A. Weight and update go together at
e = +1 only. Rotations of the factors are another symmetry, with the opposite verdicts: `test_identities_rotation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from identities import (
    APART,
    COLUMNS,
    EIGEN,
    EXACT,
    EXPONENTS,
    OF,
    PURE,
    RANK,
    ROWS,
    SPECTRAL,
    batch_loss,
    carry,
    distance,
    draw,
    factors,
    gradients,
    product,
    rescaled,
    start,
    tensors,
    whole_loss,
)
from torch import Tensor

from saggs import reference_rules

# Settings under which a rule has no exponent at all. Rules that know no such setting are not listed.
SPOILED: dict[str, dict[str, Any]] = {
    "momentum": {"decay": 0.1}, "adam": {"eps": 0.1}, "rmsprop": {"eps": 0.1}, "lion": {"decay": 0.1},
    "adafactor": {"eps": 0.1}, "muon": {"eps": 1.0}, "shampoo": {"damping": 1.0}, "lars": {"decay": 0.1},
    "lamb": {"decay": 0.1}, "scaled_adafactor": {"floor": 2.0}, "unrooted_adam": {"eps": 0.1},
    "shampoo_half": {"damping": 1.0}, "scaled_gd": {"damping": 1.0},
}  # fmt: skip
SIZES = (8.0, 3.7, 1 / 11)


def bound(name: str) -> float:
    return EIGEN if name in SPECTRAL else EXACT


def updates(name: str, factor: float, **settings: Any) -> list[Tensor]:
    """The sixth updates of c A and B / c, all at one rate, where weights and gradients of every step are given.

    Given weights, because a rule would not stay on the orbit by itself; what it keeps, it makes by itself.
    """
    run = start(name, rate=0.5, **settings)
    for step in range(6):
        run.weights = rescaled(factors(50 + 2 * step), factor)
        before = run.weights
        run.apply([draw(80 + step, ROWS, RANK) / factor, draw(90 + step, COLUMNS, RANK) * factor])
    return [after - w for after, w in zip(run.weights, before, strict=True)]


def miss(name: str, factor: float, e: float, **settings: Any) -> float:
    """How far both sides are from scaling with the exponent e: c^e on the left, c^-e on the right."""
    base, scaled = updates(name, 1.0, **settings), updates(name, factor, **settings)
    return max(distance(scaled[0], base[0] * factor**e), distance(scaled[1], base[1] * factor**-e))


LOSSES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "minibatch": batch_loss,
    "log_sum_exp": lambda w, _: torch.logsumexp(w.flatten(), 0),
    "nuclear_norm": lambda w, _: torch.linalg.svdvals(w)[:RANK].sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_a_pair_answer_inversely_for_every_loss_of_the_product(name: str) -> None:
    """G_A -> G_A / c and G_B -> c G_B, negative c too. The control carries them like weights."""
    weights, loss = factors(), LOSSES[name]
    base = gradients(weights, 3, loss)
    for factor in (*SIZES, -2.3):
        found = gradients(rescaled(weights, factor), 3, loss)
        assert distance(found[0], base[0] / factor) < EXACT
        assert distance(found[1], base[1] * factor) < EXACT
        assert distance(found[0], base[0] * factor) > APART
        if name != "nuclear_norm":  # a power of two changes no bit of the product, nor of what is made of it
            assert factor != 8.0 or torch.equal(found[0], base[0] / 8)


def test_both_sides_of_a_pair_have_the_same_charge() -> None:
    """<A, G_A> = <B, G_B>, the derivative of L(c A, B / c) at c = 1. A penalty on A alone (the control) ends that."""
    a, b = factors()
    grad_a, grad_b = gradients([a, b])
    charge = float((b * grad_b).sum())
    assert abs(float((a * grad_a).sum()) / charge - 1) < EXACT
    penalised = grad_a + 0.1 * a
    assert abs(float((a * penalised).sum()) - charge) > APART
    assert abs(float((a * penalised).sum()) - charge - 0.1 * float(a.square().sum())) < EXACT * abs(charge)


def squared_imbalance(weights: list[Tensor]) -> float:
    return float(weights[0].square().sum() - weights[1].square().sum())


def test_a_gradient_step_changes_the_imbalance_of_squares_by_the_squared_rate_only() -> None:
    """|A|^2 - |B|^2 changes by lr^2 (|G_A|^2 - |G_B|^2): the charges cancel in first order.

    A step along the signs (the control) has a term of first order beside its own squares.
    """
    weights, rate = factors(), 0.05
    found = gradients(weights)
    for name, directions in (("gd", found), ("sign", [g.sign() for g in found])):
        run = start(name, weights, rate)
        run.apply(found)
        change = squared_imbalance(run.weights) - squared_imbalance(weights)
        first_order = change - rate**2 * squared_imbalance(directions)
        assert abs(first_order) < EXACT if name == "gd" else abs(first_order) > APART


def test_gradient_flow_conserves_the_imbalance_of_squares_and_the_flow_of_signs_does_not() -> None:
    """The drift over one unit of time halves with the step, and Richardson's extrapolation of it vanishes faster."""

    def drift(name: str, steps: int) -> float:
        run = start(name, rate=1 / steps).advance(steps, loss=whole_loss)
        return squared_imbalance(run.weights) - squared_imbalance(factors())

    coarse, fine = drift("gd", 400), drift("gd", 800)
    assert coarse / fine == pytest.approx(2, abs=0.02)
    assert abs(2 * fine - coarse) < abs(fine) / 100
    assert drift("sign", 400) / drift("sign", 800) == pytest.approx(1, abs=0.05)
    assert abs(drift("sign", 800)) > 100 * abs(fine)


@pytest.mark.parametrize("name", OF[-1])
def test_gradient_descent_and_momentum_have_the_exponent_minus_one(name: str) -> None:
    """The update is linear in the gradients, which answer with c^-1."""
    for factor in SIZES:
        assert miss(name, factor, -1) < EXACT
        assert miss(name, factor, 0) > APART
        if name in SPOILED:
            assert miss(name, factor, -1, **SPOILED[name]) > APART


@pytest.mark.parametrize("name", OF[0])
def test_normalised_rules_have_the_exponent_zero(name: str) -> None:
    """A ratio of two things of one degree, or a sign, or a polar factor: c A moves by as much as A."""
    for factor in SIZES:
        assert miss(name, factor, 0) < bound(name)
        assert miss(name, factor, 1) > APART
        if name in SPOILED:
            assert miss(name, factor, 0, **SPOILED[name]) > APART


@pytest.mark.parametrize("name", OF[1])
def test_rules_that_measure_the_weight_or_divide_twice_have_the_exponent_plus_one(name: str) -> None:
    """These are equivariant: LARS, LAMB and Adafactor multiply by a norm of the weight, m / v and Shampoo(-1/2) have
    degree -1 in the gradient, ScaledGD multiplies by the inverse Gram matrix of the other side.
    """
    for factor in SIZES:
        assert miss(name, factor, 1) < bound(name)
        assert miss(name, factor, 0) > APART
        assert miss(name, factor, 1, **SPOILED[name]) > APART


@pytest.mark.parametrize("name", [name for name in EXPONENTS if name != "scaled_gd"])
def test_the_exponent_is_the_degree_in_the_weight_less_the_degree_in_the_gradient(name: str) -> None:
    """Both degrees are measured apart, each by doubling one argument. ScaledGD reads another weight: no such split."""

    def last(weight: float, gradient: float, **settings: Any) -> Tensor:
        run = start(name, rate=0.5, **settings)
        for step in range(4):
            run.weights = [weight * w for w in factors(50 + 2 * step)]
            before = run.weights[0]
            run.apply([gradient * draw(80 + step, ROWS, RANK), gradient * draw(90 + step, COLUMNS, RANK)])
        return run.weights[0] - before

    base = last(1, 1)
    in_weight = math.log2(float(last(2, 1).norm() / base.norm()))
    in_gradient = math.log2(float(last(1, 2).norm() / base.norm()))
    assert abs(in_weight - in_gradient - EXPONENTS[name]) < bound(name)
    assert distance(last(2, 1), base * 2 ** round(in_weight)) < bound(name)
    assert distance(last(1, 2), base * 2 ** round(in_gradient)) < bound(name)
    if name in SPOILED:
        spoiled = last(1, 1, **SPOILED[name])
        both = max(
            distance(last(2, 1, **SPOILED[name]), spoiled * 2 ** round(in_weight)),
            distance(last(1, 2, **SPOILED[name]), spoiled * 2 ** round(in_gradient)),
        )
        assert both > APART


@pytest.mark.parametrize("s", [0.0, 0.125, 0.25, 0.375, 0.5])
def test_shampoo_with_power_minus_s_on_both_sides_has_the_exponent_four_s_less_one(s: float) -> None:
    """L and R have degree 2 in the gradient, so L^-s G R^-s has 1 - 4 s: from SGD's -1 at s = 0 to +1 at 1/2."""
    for factor in SIZES:
        assert miss("shampoo", factor, 4 * s - 1, exponent=-s) < EIGEN
        assert miss("shampoo", factor, 4 * s, exponent=-s) > APART


def test_scalar_adam_has_no_exponent_since_one_denominator_serves_both_sides() -> None:
    """c^-1 m_A over the root of c^-2 a + c^2 b: the update of A goes from degree 0 to -2 as c goes from 0 to infinity.

    Adam, with a denominator for each entry (the control), has degree 0 throughout.
    """

    def local(name: str, factor: float) -> float:
        moves = []
        for c in (factor, 2 * factor):
            run = start(name, [torch.zeros(ROWS, RANK), torch.zeros(COLUMNS, RANK)], rate=1.0)
            run.apply([draw(80, ROWS, RANK) / c, draw(90, COLUMNS, RANK) * c])
            moves.append(run.weights[0].norm())
        return math.log2(float(moves[1] / moves[0]))

    assert abs(local("scalar_adam", 2.0**-20)) < EXACT
    assert abs(local("scalar_adam", 2.0**20) + 2) < EXACT
    assert -2 + APART < local("scalar_adam", 1.0) < -APART
    assert max(abs(local("adam", c)) for c in (2.0**-20, 1.0, 2.0**20)) < EXACT


def test_adafactor_with_parameter_scaled_steps_is_equivariant_above_its_floor_only() -> None:
    """Where RMS(w) is under the floor the rate is a constant again, and with it the exponent zero."""
    for side, exponent in (("above", 1), ("under", 0)):
        floor = {"above": 1e-3, "under": 1e3}[side]
        assert miss("scaled_adafactor", 3.7, exponent, floor=floor) < EXACT
        assert miss("scaled_adafactor", 3.7, 1 - exponent, floor=floor) > APART


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_decay_inside_a_trust_ratio_breaks_the_exponent_and_a_rate_of_decay_that_follows_restores_it(name: str) -> None:
    """g + decay w is homogeneous where decay answers with c^-2 (LARS), m / sqrt(v) + decay w with c^-1 (LAMB)."""
    degree, factor = {"lars": -2, "lamb": -1}[name], 3.7
    base = updates(name, 1.0, decay=0.1)[0]
    assert distance(updates(name, factor, decay=0.1 * factor**degree)[0], factor * base) < EXACT
    assert distance(updates(name, factor, decay=0.1)[0], factor * base) > APART


@pytest.mark.parametrize("name", EXPONENTS)
def test_a_step_of_the_product_trades_its_two_halves_by_c_to_the_exponent_less_one(name: str) -> None:
    """A B^T moves by c^(e-1) dA B^T + c^(1-e) A dB^T + dA dB^T, exactly: independent of c at e = 1 only."""
    e, weights, factor = EXPONENTS[name], factors(), 3.7
    base = start(name, weights).advance(1)
    da, db = (after - before for after, before in zip(base.weights, weights, strict=True))

    def predicted(e: int) -> Tensor:
        a, b = weights
        return factor ** (e - 1) * da @ b.T + factor ** (1 - e) * a @ db.T + da @ db.T

    step = start(name, rescaled(weights, factor)).advance(1).product - product(weights)
    assert distance(step, predicted(e)) < bound(name)
    assert distance(step, predicted(e - 1)) > APART
    assert (distance(step, base.product - product(weights)) < bound(name)) == (e == 1)


@pytest.mark.parametrize("name", PURE)
def test_a_carried_state_is_the_state_of_the_gradients_that_the_rescaled_weight_would_have_had(name: str) -> None:
    """m / c, v / c^2, L / c^2, and LARS's velocity times c, for it is a sum of updates and not of gradients.

    Bit for bit for c = 4, roots of spectral rules aside: every entry is a homogeneous polynomial of the gradients.
    """
    ends = {}
    for factor in (1.0, 4.0, 3.7):
        settings: dict[str, Any] = {"every": 3} if "shampoo" in name else {}
        run = start(name, **settings)
        for step in range(5):
            run.weights = [factor * w for w in factors(50 + 2 * step)]
            run.apply([draw(80 + step, ROWS, RANK) / factor, draw(90 + step, COLUMNS, RANK) / factor])
        ends[factor] = run.states[0]
    if ends[1.0] is None:
        assert name in ("gd", "sign", "scaled_gd")
        return
    for factor in (4.0, 3.7):
        found, wanted = tensors(ends[factor]), tensors(carry(name, ends[1.0], factor))
        for key, tensor in found.items():
            assert distance(tensor, wanted[key]) < bound(name)
            assert torch.equal(tensor, wanted[key]) or factor == 3.7 or "root" in key
            assert distance(tensor, tensors(ends[1.0])[key]) > APART


@pytest.mark.parametrize("name", EXPONENTS)
def test_flipping_the_signs_of_both_sides_is_followed_bit_for_bit(name: str) -> None:
    """c = -1: every rule is odd, so the runs are mirror images; spectral rules to the rounding of their eigenvectors.

    Flipping one side alone (the control) is no symmetry.
    """
    base = start(name).advance(12)
    mirror = start(name, rescaled(factors(), -1.0)).advance(12)
    one_side = start(name, [-factors()[0], factors()[1]]).advance(12)
    for found, wanted in zip(mirror.weights, base.weights, strict=True):
        assert torch.equal(found, -wanted) or (name in SPECTRAL and distance(found, -wanted) < EIGEN)
    assert distance(one_side.product, base.product) > APART


def test_a_rule_that_is_not_homogeneous_has_no_exponent_at_any_scale() -> None:
    """The measure is not blind: g + 0.1 |g| g has degree 1 for small and 2 for large gradients, and none between."""

    def broken(weight: Tensor, gradient: Tensor, state: None, learning_rate: float) -> tuple[Tensor, None]:
        return weight - learning_rate * (gradient + 0.1 * gradient.abs() * gradient), None

    def measured(step: Callable[..., Any], factor: float) -> float:
        w, g = factors()[0], draw(3, ROWS, RANK)
        moves = [step(c * w, g / c, None, 0.5)[0] - c * w for c in (1.0, factor)]
        return math.log(float(moves[1].norm() / moves[0].norm())) / math.log(factor)

    assert abs(measured(reference_rules.step_gd, 8.0) + 1) < EXACT
    assert abs(measured(broken, 8.0) - measured(broken, 0.5)) > APART
