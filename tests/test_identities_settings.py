"""The scale symmetry over whole runs: with which rates, eps, decay and clipping a rule repeats its run on (c A, B / c).

Bit for bit where c is a power of two and the rule takes no eigenvectors. Each setting that has to follow is also left
behind once, and has to be missed.
"""

from __future__ import annotations

import dataclasses
from functools import partial
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
    RANK,
    ROWS,
    SPECTRAL,
    Run,
    clipping,
    distance,
    draw,
    factors,
    moved,
    relu_gradients,
    rescaled,
    start,
)
from torch import Tensor

from saggs import reference, reference_rules

STEPS = 25
SIZES = (8.0, 3.7)


def bound(name: str) -> float:
    return EIGEN if name in SPECTRAL else EXACT


def follow(run: Run, factor: float, exponent: int) -> Run:
    """The rates lr c^(1 - e) and lr c^(e - 1)."""
    power = factor ** (1 - exponent)
    run.rates = (run.rates[0] * power, run.rates[1] / power)
    return run


def both(run: Run, factor: float) -> list[tuple[dict[str, Any], float]]:
    """The settings of each side, with what its weight is multiplied by."""
    return list(zip(run.settings, (factor, 1 / factor), strict=True))


def repeats(found: Run, base: Run, factor: float, within: float = EXACT) -> bool:
    """Whether found is base at (c A, B / c): same bits for a power of two where bits can be asked for."""
    misses = [distance(*pair) for pair in zip(found.weights, rescaled(base.weights, factor), strict=True)]
    return max(misses) == 0 if factor == 8.0 and within == EXACT else max(misses) < within


def parted(found: Run, base: Run) -> bool:
    return not distance(found.product, base.product) < APART  # a diverged run has parted, too


@pytest.mark.parametrize("name", [name for name in EXPONENTS if name != "scaled_gd"])
def test_a_rule_of_exponent_e_repeats_its_run_at_the_rate_c_to_the_one_minus_e(name: str) -> None:
    """For e = 1 that is the same rate. At any other power of c (the control) the run is another one."""
    base, e = start(name).advance(STEPS), EXPONENTS[name]
    for factor in SIZES:
        other = follow(start(name, rescaled(factors(), factor)), factor, e).advance(STEPS)
        assert repeats(other, base, factor, bound(name))
        wrong = follow(start(name, rescaled(factors(), factor)), factor, e - 1 if e == 1 else e + 1).advance(STEPS)
        assert parted(wrong, base)


@pytest.mark.parametrize("name", EXPONENTS)
def test_one_shared_rate_gives_one_trajectory_exactly_for_the_rules_of_exponent_plus_one(name: str) -> None:
    """The statement of the title: the trajectory of A B^T does not see c if e = 1, and does if e is 0 or -1."""
    base = start(name).advance(STEPS)
    for factor in SIZES:
        other = start(name, rescaled(factors(), factor)).advance(STEPS)
        if name in OF[1]:
            assert distance(other.product, base.product) < bound(name)
            assert distance(other.weights[0], base.weights[0]) > APART
        else:
            assert parted(other, base)


# Per rule: a setting that stands beside something built from gradients, and the degree with which it has to follow.
DENOMINATORS = {
    "adam": ("eps", 1e-2, -1), "rmsprop": ("eps", 1e-2, -1), "adafactor": ("eps", 1e-2, -1), "lamb": ("eps", 1e-2, -1),
    "scaled_adafactor": ("eps", 1e-2, -1), "unrooted_adam": ("eps", 1e-2, -2), "muon": ("eps", 1e-1, -1),
    "shampoo": ("damping", 1e-1, -2), "shampoo_half": ("damping", 1e-1, -2),
}  # fmt: skip


@pytest.mark.parametrize("name", DENOMINATORS)
def test_eps_above_zero_breaks_the_identity_unless_it_has_the_degree_of_what_it_is_added_to(name: str) -> None:
    """eps / c beside a root of second moments, eps / c^2 beside a second moment or a Gram matrix."""
    key, value, degree = DENOMINATORS[name]
    spoiled: dict[str, Any] = {key: value}
    base, factor = start(name, **spoiled).advance(STEPS), 3.7
    fixed = follow(start(name, rescaled(factors(), factor), **spoiled), factor, EXPONENTS[name])
    scaled = fixed.copy(settings=tuple({**s, key: value * c**degree} for s, c in both(fixed, factor)))
    assert repeats(scaled.advance(STEPS), base, factor, bound(name))
    assert parted(fixed.advance(STEPS), base)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_coupled_decay_breaks_the_identity_unless_it_follows_with_c_to_the_minus_two(name: str) -> None:
    """g + decay w: the gradient has degree -1 and the weight +1, so that no c leaves their ratio as it was."""
    base = start(name, decay=0.1).advance(STEPS)
    for factor in SIZES:
        fixed = follow(start(name, rescaled(factors(), factor), decay=0.1), factor, EXPONENTS[name])
        scaled = fixed.copy(settings=tuple({**s, "decay": 0.1 * c**-2} for s, c in both(fixed, factor)))
        assert repeats(scaled.advance(STEPS), base, factor)
        assert parted(fixed.advance(STEPS), base)


def test_decoupled_decay_by_itself_commutes_with_every_rescaling() -> None:
    """(1 - lr decay) is a number: with no gradient at all, AdamW shrinks c A as it shrinks A, whatever the rate is.

    Coupled decay (the control) has no gradient either, but goes through the moments: c A then shrinks by as much as A.
    """
    weight, nothing = factors()[0], torch.zeros(ROWS, RANK, dtype=torch.float64)
    for step, commutes in (
        (partial(reference.step_adamw, decay=0.1), True),
        (partial(reference_rules.step_adam, decay=0.1, eps=0.0), False),
    ):
        ends = []
        for factor in (1.0, 8.0):
            w, state = weight * factor, reference.start_adamw(weight)
            for _ in range(5):
                w, state = step(w, nothing, state, 0.05)
            ends.append(w / factor)
        assert torch.equal(*ends) == commutes
        assert (distance(*ends) > APART) != commutes


def test_decay_of_adamw_is_equivariant_where_its_gradient_step_is_not() -> None:
    """The update at c A is the decay of A times c and the gradient step of A times 1: +1 and 0 in one rule."""
    weight, gradient, factor = factors()[0], draw(3, ROWS, RANK), 3.7

    def update(c: float, decay: float) -> Tensor:
        state = reference.start_adamw(weight)
        return reference.step_adamw(c * weight, gradient / c, state, 0.1, eps=0.0, decay=decay)[0] - c * weight

    decays = [update(c, 0.5) - update(c, 0.0) for c in (1.0, factor)]
    assert distance(decays[1], factor * decays[0]) < EXACT
    assert distance(update(factor, 0.0), update(1.0, 0.0)) < EXACT
    whole = [distance(update(factor, 0.5), factor**e * update(1.0, 0.5)) for e in (0, 1)]
    assert min(whole) > APART


@pytest.mark.parametrize("name", ["gd", "momentum", "adam"])
def test_clipping_by_the_global_norm_breaks_the_identity_unless_the_norm_is_that_of_one_representative(
    name: str,
) -> None:
    """|G_A|^2 / c^2 + c^2 |G_B|^2 depends on c: two states of one function are then clipped by two amounts."""
    base = start(name).advance(STEPS, clipping(0.5))
    assert parted(start(name).advance(STEPS), base), "the limit acts"
    for factor in SIZES:
        raw, balanced = (follow(start(name, rescaled(factors(), factor)), factor, EXPONENTS[name]) for _ in range(2))
        assert repeats(balanced.advance(STEPS, clipping(0.5, factor)), base, factor)
        assert parted(raw.advance(STEPS, clipping(0.5)), base)


def test_clipping_is_invisible_to_a_rule_that_forgets_the_scale_of_each_gradient() -> None:
    """sign(g) does not see by how much g was clipped, and Adam, which averages gradients of several steps, does."""
    for name, sees in (("sign", False), ("adam", True)):
        plain, clipped = start(name).advance(STEPS), start(name).advance(STEPS, clipping(0.5))
        assert torch.equal(plain.product, clipped.product) != sees
        assert (distance(plain.product, clipped.product) > APART) == sees


def warm_adamw(eps: float = 1e-3, decay: float = 0.1) -> Run:
    """AdamW after 20 steps: both moments hold something, and eps and decay matter."""
    return start("adamw", eps=eps, decay=decay).advance(20)


def adamw_at(run: Run, factor: float, leave: str = "") -> Run:
    """The run moved to (c A, B / c) with everything scaled that has to be, but for what is left behind."""
    moved_run = moved("adamw", run, factor, carried=leave != "moments")
    rates, settings = [], []
    for (kept, c), rate in zip(both(run, factor), run.rates, strict=True):
        scaled = reference.scale_adamw_settings(rate, kept["eps"], kept["decay"], c)
        rates.append(rate if leave == "rate" else scaled[0])
        eps, decay = kept["eps"] if leave == "eps" else scaled[1], kept["decay"] if leave == "decay" else scaled[2]
        settings.append({"eps": eps, "decay": decay})
    return moved_run.copy(rates=tuple(rates), settings=tuple(settings))


@pytest.mark.parametrize("leave", ["moments", "rate", "eps", "decay"])
def test_adamw_on_the_rescaled_pair_repeats_the_run_with_moments_rate_eps_and_decay_scaled(leave: str) -> None:
    """lr c, eps / c, decay / c on A and their inverses on B. Each of the four left behind (the controls) is missed."""
    warm = warm_adamw()
    base = warm.copy().advance(STEPS)
    for factor in SIZES:
        assert repeats(adamw_at(warm, factor).advance(STEPS), base, factor)
        assert parted(adamw_at(warm, factor, leave).advance(STEPS), base)


def test_carrying_moments_is_necessary_and_not_sufficient_at_any_shared_rate() -> None:
    """Neither carried moments at one rate for both sides, whichever, nor the right two rates with old moments do."""
    warm = warm_adamw(eps=0.0, decay=0.0)
    base = warm.copy().advance(STEPS)
    for factor in SIZES:
        assert repeats(adamw_at(warm, factor).advance(STEPS), base, factor)
        assert parted(adamw_at(warm, factor, "moments").advance(STEPS), base)
        for power in (-1, -0.5, 0, 0.5, 1):
            shared = moved("adamw", warm, factor)
            shared.rates = (0.02 * factor**power, 0.02 * factor**power)
            assert parted(shared.advance(STEPS), base)


def test_carried_moments_make_the_direction_of_the_next_adamw_step_right_and_its_length_wrong() -> None:
    """Why they are not sufficient: relative to c A the first step is c times too small, in the very same direction."""
    warm = warm_adamw(eps=0.0, decay=0.0)
    base, factor = warm.copy().advance(1), 8.0
    for carried in (True, False):
        other = moved("adamw", warm, factor, carried)
        steps = [after - before for after, before in zip(other.copy().advance(1).weights, other.weights, strict=True)]
        wanted = [after - before for after, before in zip(base.weights, warm.weights, strict=True)]
        misses = [distance(found, want) for found, want in zip(steps, wanted, strict=True)]
        assert max(misses) < EXACT if carried else min(misses) > APART
        assert distance(steps[0], factor * wanted[0]) > APART


@pytest.mark.parametrize("leave", ["moments", "rate", "decay"])
def test_sgd_on_the_rescaled_pair_repeats_the_run_with_momentum_rate_and_decay_scaled(leave: str) -> None:
    """lr c^2, coupled decay / c^2, momentum / c on A and their inverses on B; each left behind once."""
    warm = start("momentum", decay=0.1).advance(20)
    base = warm.copy().advance(STEPS)
    for factor in SIZES:
        for left, holds in (("", True), (leave, False)):
            other = moved("momentum", warm, factor, carried=left != "moments")
            scaled = [reference.scale_sgd_settings(0.02, 0.1, c) for c in (factor, 1 / factor)]
            other.rates = (0.02, 0.02) if left == "rate" else (scaled[0][0], scaled[1][0])
            settings = [{"decay": 0.1 if left == "decay" else decay} for _, decay in scaled]
            other.settings = (settings[0], settings[1])
            other.advance(STEPS)
            assert repeats(other, base, factor) if holds else parted(other, base)


@pytest.mark.parametrize(("name", "powers"), [("gd", (2, 4)), ("momentum", (2, 4)), ("adam", (1, 2))])
def test_a_squared_relu_has_the_exponents_one_and_minus_two(name: str, powers: tuple[int, int]) -> None:
    """relu(c a)^2 = c^2 relu(a)^2: A -> c A goes with B -> B / c^2, gradients c^-1 and c^2, rates c^2 and c^-4.

    The controls: B / c, the pair of a linear layer, is another function; rates of the linear pair are another run.
    """
    a, b = draw(1, ROWS, RANK), draw(2, COLUMNS, ROWS) / 10
    base = start(name, [a, b], rate=0.002)
    for step in range(STEPS):
        base.apply(relu_gradients(base.weights, step))
    before = relu_gradients([a, b], 0)
    for factor in SIZES:
        found = relu_gradients([a * factor, b / factor**2], 0)
        assert distance(found[0], before[0] / factor) < EXACT
        assert distance(found[1], before[1] * factor**2) < EXACT
        assert distance(relu_gradients([a * factor, b / factor], 0)[1], before[1] * factor**2) > APART
        for exponents, holds in ((powers, True), ((powers[0], powers[0]), False)):
            rates = (0.002 * factor ** exponents[0], 0.002 / factor ** exponents[1])
            other = dataclasses.replace(start(name, [a * factor, b / factor**2]), rates=rates)
            for step in range(STEPS):
                other.apply(relu_gradients(other.weights, step))
            misses = [distance(other.weights[0], base.weights[0] * factor)]
            misses.append(distance(other.weights[1], base.weights[1] / factor**2))
            assert max(misses) < EXACT if holds else not max(misses) < APART


def test_a_squared_relu_has_a_charge_with_the_weights_one_and_two_and_knows_positive_factors_only() -> None:
    """<A, G_A> = 2 <B, G_B>; and (-A, B) is another function, though (-1)^2 = 1."""
    a, b = draw(1, ROWS, RANK), draw(2, COLUMNS, ROWS) / 10
    found = relu_gradients([a, b], 0)
    charges = [float((w * g).sum()) for w, g in zip((a, b), found, strict=True)]
    assert abs(charges[0] / (2 * charges[1]) - 1) < EXACT
    assert abs(charges[0] / charges[1] - 1) > APART
    x = draw(300, 9, RANK)
    outputs = [torch.relu(x @ (sign * a).T).square() @ b.T for sign in (1, -1)]
    assert distance(outputs[1], outputs[0]) > APART
