"""Rules that follow rotations are functions of the Gram matrix G G^T: what that says of their updates and their flows.

Phi(G) = H(G G^T) G. Update rules as first steps from nothing, float64, damping and eps 0 unless said. Source of the
statements: Singh (2026), unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from identities import (
    APART,
    EIGEN,
    EXACT,
    Run,
    distance,
    draw,
    factors,
    gradients,
    orthogonal,
    product,
    start,
    whole_loss,
)
from torch import Tensor

from saggs import reference_rules
from saggs.reference_rules import matrix_power, newton_schulz, polar_factor

WIDE, TALL = draw(11, 3, 6), draw(12, 6, 3)
DAMPING = 0.7


def shampoo(gradient: Tensor, exponent: float = -0.25, damping: float = 0.0) -> Tensor:
    """The first update of Shampoo."""
    zero = torch.zeros_like(gradient)
    return -reference_rules.step_shampoo(zero, gradient, None, 1.0, exponent, damping, floor=0.0)[0]


def newton_schulz_of_gram(gram: Tensor) -> Tensor:
    """The matrix that five Newton-Schulz steps multiply G with, made from K = G G^T alone.

    With X = p G, each step multiplies p by a I + b p K p + c (p K p)^2; everything commutes with K.
    """
    left = torch.eye(len(gram), dtype=torch.float64) / gram.trace().sqrt()
    for _ in range(5):
        here = left @ gram @ left
        left = (3.4445 * torch.eye(len(gram), dtype=torch.float64) - 4.7750 * here + 2.0315 * here @ here) @ left
    return left


Map = Callable[[Tensor], Tensor]
MEMORYLESS: dict[str, tuple[Map, Map]] = {
    "gd": (lambda g: g, lambda k: torch.eye(len(k), dtype=torch.float64)),
    "normalised": (lambda g: g / g.norm(), lambda k: torch.eye(len(k), dtype=torch.float64) / k.trace().sqrt()),
    "polar": (polar_factor, lambda k: matrix_power(k, -0.5)),
    "newton_schulz": (lambda g: newton_schulz(g, eps=0.0), newton_schulz_of_gram),
    "shampoo": (shampoo, lambda k: matrix_power(k, -0.5)),
    "shampoo_half": (lambda g: shampoo(g, -0.5), lambda k: matrix_power(k, -1.0)),
    "damped_shampoo": (
        lambda g: shampoo(g, -0.25, DAMPING),
        lambda k: matrix_power(k + DAMPING * torch.eye(len(k), dtype=torch.float64), -0.5),
    ),
}
"""Rules without memory, each with the H of its closed form Phi(G) = H(G G^T) G."""


@pytest.mark.parametrize("name", MEMORYLESS)
def test_rows_of_an_equivariant_update_lie_in_the_row_space_of_the_gradient(name: str) -> None:
    """Of a wide G: a rotation that fixes the rows of G fixes Phi(G), so that Phi(G) = (Phi(G) G^+) G.

    And Phi(G) G^+ depends on G G^T alone: it is the same for G Q. The update of sign (the control) leaves the row
    space, which a rotation that fixes G then moves.
    """
    phi, _ = MEMORYLESS[name]
    inverse = torch.linalg.pinv(WIDE)
    assert distance(phi(WIDE) @ inverse @ WIDE, phi(WIDE)) < EIGEN
    q = orthogonal(6)
    assert distance(phi(WIDE @ q) @ torch.linalg.pinv(WIDE @ q), phi(WIDE) @ inverse) < EIGEN
    assert distance(WIDE.sign() @ inverse @ WIDE, WIDE.sign()) > APART


@pytest.mark.parametrize("gradient", [WIDE, TALL], ids=["wide", "tall"])
@pytest.mark.parametrize("name", MEMORYLESS)
def test_each_equivariant_rule_is_its_own_function_of_the_gram_matrix(name: str, gradient: Tensor) -> None:
    """The right factor of Shampoo moves to the left, G f(G^T G) = f(G G^T) G: its H has the exponents' sum.

    Each other rule's H, where it is another function, is the control.
    """
    phi, h = MEMORYLESS[name]
    gram = gradient @ gradient.T
    assert distance(h(gram) @ gradient, phi(gradient)) < EIGEN
    same = {"polar", "shampoo"}
    others = [other for other in MEMORYLESS if other != name and not {other, name} <= same]
    assert min(distance(MEMORYLESS[other][1](gram) @ gradient, phi(gradient)) for other in others) > APART


OF_THE_GRAM: dict[str, Map] = {
    "exponential": lambda k: torch.linalg.matrix_exp(-k),
    "row_lengths": lambda k: torch.diag(k.diagonal().rsqrt()),
    "lower_triangle": torch.tril,
    "one_entry": lambda k: k[0, 0] * torch.ones_like(k),
    "signs": torch.sign,
}


@pytest.mark.parametrize("name", OF_THE_GRAM)
def test_every_function_of_the_gram_matrix_makes_an_equivariant_rule(name: str) -> None:
    """H(G G^T) G, H spectral or not, symmetric or not, continuous or not.

    G H(G^T G), from the right (the control), is equivariant for the spectral one only, where it is the same rule.
    """
    h, q = OF_THE_GRAM[name], orthogonal(6)
    for gradient, turn in ((WIDE, q), (TALL, orthogonal(3))):
        turned = gradient @ turn
        assert distance(h(turned @ turned.T) @ turned, h(gradient @ gradient.T) @ gradient @ turn) < EXACT
    turned = WIDE @ q
    miss = distance(turned @ h(turned.T @ turned), WIDE @ h(WIDE.T @ WIDE) @ q)
    assert miss < EXACT if name == "exponential" else miss > APART


def test_a_rule_that_treats_rows_follows_rotations_and_one_that_treats_columns_does_not() -> None:
    """Rows of G lengthen under no rotation; columns are what it mixes. So Adafactor's row means alone would do."""
    for dim, follows in ((1, True), (0, False)):
        normalised, turned = (g / g.norm(dim=dim, keepdim=True) for g in (TALL, TALL @ orthogonal(3)))
        miss = distance(turned, normalised @ orthogonal(3))
        assert miss < EXACT if follows else miss > APART


TRANSFER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gd": lambda s, norm: s,
    "normalised": lambda s, norm: s / norm,
    "polar": lambda s, norm: torch.ones_like(s),
    "newton_schulz": lambda s, norm: quintic(s / norm),
    "shampoo": lambda s, norm: torch.ones_like(s),
    "shampoo_half": lambda s, norm: 1 / s,
    "damped_shampoo": lambda s, norm: s / (s.square() + DAMPING).sqrt(),
}


def quintic(x: Tensor) -> Tensor:
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


@pytest.mark.parametrize("name", TRANSFER)
def test_an_equivariant_spectral_rule_keeps_singular_vectors_and_transfers_singular_values(name: str) -> None:
    """U S V^T goes to U f(S) V^T, with f(s) = s, 1, s / sqrt(s^2 + damping), 1 / s, a polynomial. Sign has none."""
    left, values, right = torch.linalg.svd(TALL, full_matrices=False)
    wanted = torch.diag(TRANSFER[name](values, values.norm()))
    found = left.T @ MEMORYLESS[name][0](TALL) @ right.T
    assert distance(found, wanted) < EIGEN
    signs = left.T @ TALL.sign() @ right.T
    assert distance(signs, torch.diag(signs.diagonal())) > APART


@pytest.mark.parametrize("gradient", [WIDE, TALL], ids=["wide", "tall"])
def test_one_undamped_step_of_shampoo_is_the_polar_factor(gradient: Tensor) -> None:
    """(G G^T)^-1/4 G (G^T G)^-1/4 = U V^T. Damped, or with a second gradient in the sums, it is not (the controls)."""
    assert distance(shampoo(gradient), polar_factor(gradient)) < EIGEN
    assert distance(shampoo(gradient, damping=1.0), polar_factor(gradient)) > APART
    run = start("shampoo", [torch.zeros_like(gradient)] * 2, rate=1.0)
    run.apply([gradient, gradient])
    first = run.weights[0]
    second = draw(13, *gradient.shape)
    run.apply([second, second])
    assert distance(first - run.weights[0], polar_factor(second)) > APART


def test_newton_schulz_is_near_the_polar_factor_and_not_equal_to_it() -> None:
    """Its polynomial takes singular values above 0.002 of the norm to between 0.68 and 1.21; below, they stay small."""
    values = torch.logspace(math.log10(2e-3), 0, 4001, dtype=torch.float64)
    assert 0.68 < float(quintic(values).min()) < 1 - APART
    assert 1 + APART < float(quintic(values).max()) < 1.21
    assert float(quintic(torch.tensor(1e-5, dtype=torch.float64))) < 0.1
    found = torch.linalg.svdvals(newton_schulz(TALL, eps=0.0))
    assert 0.68 < float(found.min()) <= float(found.max()) < 1.21
    assert distance(newton_schulz(TALL, eps=0.0), polar_factor(TALL)) > APART


@pytest.mark.parametrize("power", [2, 4, 6, 8])
def test_the_polar_map_is_not_lipschitz_near_a_loss_of_rank(power: int) -> None:
    """diag(1, x) and diag(1, -x) are 2 x apart, and their polar factors 2: a ratio of 1 / x, without bound.

    Damping bounds it: the map s / sqrt(s^2 + damping) has the slope damping^-1/2 at most, and so has the matrix map.
    """
    x, damping = 10.0**-power, 0.01
    pair = [torch.diag(torch.tensor([1.0, sign * x], dtype=torch.float64)) for sign in (1.0, -1.0)]
    apart = float((pair[0] - pair[1]).norm())
    ratio = float((polar_factor(pair[0]) - polar_factor(pair[1])).norm()) / apart
    assert ratio == pytest.approx(1 / x, rel=EXACT)
    damped = float((shampoo(pair[0], damping=damping) - shampoo(pair[1], damping=damping)).norm()) / apart
    assert damped <= damping**-0.5 * (1 + EXACT)
    assert ratio > damping**-0.5 * (1 + APART)


def test_away_from_a_loss_of_rank_the_polar_map_has_the_known_lipschitz_bound() -> None:
    """|P(A) - P(B)| <= 2 / (s_min(A) + s_min(B)) |A - B|, square; the witness of the test above attains it.

    With the largest singular values in place of the smallest (the control) the bound fails. Source: R.-C. Li (1995).
    """
    failed = 0.0
    for seed in range(40):
        a = draw(200 + seed, 4, 4)
        b = a + 0.3 * draw(300 + seed, 4, 4)
        values = [torch.linalg.svdvals(m) for m in (a, b)]
        ratio = float((polar_factor(a) - polar_factor(b)).norm() / (a - b).norm())
        assert ratio <= 2 / float(values[0][-1] + values[1][-1]) * (1 + EXACT)
        failed = max(failed, ratio / (2 / float(values[0][0] + values[1][0])))
    assert failed > 1 + APART


Field = Callable[[Sequence[Tensor]], list[Tensor]]


def integrate(field: Field, duration: float, steps: int) -> list[list[Tensor]]:
    """Runge-Kutta of the fourth order from (U, V, clock = 0); all points."""
    point = [*factors(), torch.zeros((), dtype=torch.float64)]
    points, h = [point], duration / steps
    for _ in range(steps):
        k1 = field(point)
        k2 = field([x + h / 2 * k for x, k in zip(point, k1, strict=True)])
        k3 = field([x + h / 2 * k for x, k in zip(point, k2, strict=True)])
        k4 = field([x + h * k for x, k in zip(point, k3, strict=True)])
        slopes = zip(point, k1, k2, k3, k4, strict=True)
        point = [x + h / 6 * (a + 2 * b + 2 * c + d) for x, a, b, c, d in slopes]
        points.append(point)
    return points


def flow(scales: Callable[[list[Tensor]], list[Tensor]]) -> Field:
    """-scale * gradient for each factor, and as the clock's speed the first scale (one number)."""

    def field(point: Sequence[Tensor]) -> list[Tensor]:
        found = gradients(point[:2], 0, whole_loss)
        u, v = scales(found)
        return [-u * found[0], -v * found[1], u.mean()]

    return field


def test_a_flow_preconditioned_by_one_scalar_is_gradient_flow_in_another_time() -> None:
    """theta' = -s g runs the path of theta' = -g, at the time that integrates s. To the integrator's error, 1e-9.

    One scalar a factor, and one a coordinate (both with the same mean), leave the path: the nearest of its points is
    further than 1e-3.
    """

    def one(found: list[Tensor]) -> list[Tensor]:
        scale = 1 / torch.sqrt(torch.cat([g.flatten() for g in found]).square().mean() + 0.01)
        return [scale, scale]

    def one_a_factor(found: list[Tensor]) -> list[Tensor]:
        return [1 / torch.sqrt(g.square().mean() + 0.01) for g in found]

    def one_a_coordinate(found: list[Tensor]) -> list[Tensor]:
        return [1 / torch.sqrt(g.square() + 0.01) for g in found]

    def plain(found: list[Tensor]) -> list[Tensor]:
        return [torch.ones((), dtype=torch.float64)] * 2

    end = integrate(flow(one), 1.0, 500)[-1]
    there = integrate(flow(plain), float(end[2]), 800)
    assert max(distance(*pair) for pair in zip(end[:2], there[-1][:2], strict=True)) < 1e-9
    assert abs(float(end[2]) - 1.0) > APART, "the time is another one"
    path = [torch.cat([p[0], p[1]]) for p in integrate(flow(plain), 6.0, 600)]
    for scales in (one_a_factor, one_a_coordinate):
        other = integrate(flow(scales), 1.0, 100)[-1]
        nearest = min(range(len(path)), key=lambda i: distance(path[i], torch.cat(other[:2])))
        assert distance(path[nearest], torch.cat(other[:2])) > APART
        assert 0 < nearest < len(path) - 1, "the path is long enough to be near it"


def test_steps_of_one_scalar_rule_are_gradient_steps_with_other_rates_bit_for_bit() -> None:
    """The same in discrete time, without any error: w - (lr s_t) g_t. With one scalar a factor, no rates do it."""
    rates = []
    scalar, gd = start("gd"), start("gd")
    for step in range(20):
        found = gradients(scalar.weights, step)
        scale = 1 / float(torch.cat([g.flatten() for g in found]).norm())
        rates.append(0.1 * scale)
        scalar.weights = [w - (0.1 * scale) * g for w, g in zip(scalar.weights, found, strict=True)]
    for step, rate in enumerate(rates):
        gd.rates = (rate, rate)
        gd.apply(gradients(gd.weights, step))
    assert torch.equal(gd.product, scalar.product)
    found = gradients(factors(), 0)
    by_factor = torch.cat([(g / g.norm()).flatten() for g in found])
    both = torch.cat([g.flatten() for g in found])
    best = (by_factor @ both) / (both @ both)
    assert distance(best * both, by_factor) > APART


def gram_imbalance(weights: Sequence[Tensor]) -> Tensor:
    """U^T U - V^T V."""
    return weights[0].T @ weights[0] - weights[1].T @ weights[1]


def test_a_gradient_step_changes_the_gram_imbalance_by_the_squared_rate_only() -> None:
    """By lr^2 (G_U^T G_U - G_V^T G_V): U^T G_U = U^T G V is the transpose of V^T G_V, so the first order cancels.

    Any common scalar in place of lr is the same statement; two scalars (the control) leave a first-order term.
    """
    weights, found = factors(), gradients(factors())
    assert distance(weights[0].T @ found[0], found[1].T @ weights[1]) < EXACT
    for rates, holds in (((0.05, 0.05), True), ((0.05, 0.04), False)):
        run = start("gd")
        run.rates = rates
        run.apply(found)
        change = gram_imbalance(run.weights) - gram_imbalance(weights)
        second = rates[0] ** 2 * found[0].T @ found[0] - rates[1] ** 2 * found[1].T @ found[1]
        error = float((change - second).norm())
        assert error < EXACT if holds else error > APART


NOT_COMMON: dict[str, Callable[[Tensor], Tensor]] = {
    "factor_scalars": lambda g: g / g.norm(),
    "polar": polar_factor,
    "sign": torch.sign,
}


@pytest.mark.parametrize("name", NOT_COMMON)
def test_the_flow_of_a_common_scalar_alone_conserves_the_gram_imbalance(name: str) -> None:
    """The drift over one unit of time halves with the step for g and for g / |(g_U, g_V)|, extrapolating to nothing.

    For other maps it does not: not for one scalar a factor, nor for polar factors, although both follow rotations.
    """

    def drift(maps: Callable[[list[Tensor]], list[Tensor]], steps: int) -> Tensor:
        run: Run = start("gd", rate=1 / steps)
        for _ in range(steps):
            run.apply(maps(gradients(run.weights, 0, whole_loss)))
        return gram_imbalance(run.weights) - gram_imbalance(factors())

    def common(found: list[Tensor]) -> list[Tensor]:
        size = torch.cat([g.flatten() for g in found]).norm()
        return [g / size for g in found]

    for maps in (list, common):
        coarse, fine = drift(maps, 200), drift(maps, 400)
        assert float(coarse.norm() / fine.norm()) == pytest.approx(2, abs=0.05)
        assert float((2 * fine - coarse).norm()) < float(fine.norm()) / 30
    other = [drift(lambda found: [NOT_COMMON[name](g) for g in found], steps) for steps in (200, 400)]
    assert float(other[0].norm() / other[1].norm()) == pytest.approx(1, abs=0.05)
    assert float(other[1].norm()) > 10 * float(fine.norm())


def test_gradient_descent_fits_large_singular_values_first_and_polar_steps_fit_all_at_one_rate() -> None:
    """From U = V = x I towards diag(1, 1/2, 1/4): while small, u_i grows by 1 + lr s_i a step, or by lr, whatever s_i.

    In closed form, to the square of x; each closed form is wrong for the other rule.
    """
    target, x, rate, steps = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64), 1e-7, 0.02, 20

    def run(name: str) -> Tensor:
        weights = [x * torch.eye(3, dtype=torch.float64)] * 2
        moved: Run = start(name, weights, rate, **({"momentum": 0.0} if name == "polar" else {}))
        for _ in range(steps):
            residual = product(moved.weights) - torch.diag(target)
            moved.apply([residual @ moved.weights[1], residual.T @ moved.weights[0]])
        assert distance(moved.weights[0], torch.diag(moved.weights[0].diagonal())) < EXACT
        return moved.weights[0].diagonal()

    greedy, equal = x * (1 + rate * target) ** steps, x + rate * steps * torch.ones(3, dtype=torch.float64)
    assert distance(run("gd"), greedy) < EXACT
    assert distance(run("polar"), equal) < EXACT
    assert distance(run("gd"), equal) > APART
    assert distance(run("polar"), greedy) > APART


def test_twice_the_nuclear_norm_is_the_least_sum_of_squares_over_all_gauges() -> None:
    """|U|^2 + |V|^2 >= 2 |U V^T|_*, equal where U^T U = V^T V. Equal traces alone (the control) are not enough.

    Source: Srebro, Rennie and Jaakkola (2005); the zero of the conserved matrix is the point of least norm.
    """
    u, v = factors()
    nuclear = 2 * float(torch.linalg.svdvals(product([u, v])).sum())
    left, values, right = torch.linalg.svd(product([u, v]), full_matrices=False)
    roots = torch.diag(values[:3].sqrt())
    balanced = [left[:, :3] @ roots, right[:3].T @ roots]
    assert distance(product(balanced), product([u, v])) < EXACT
    assert float(gram_imbalance(balanced).norm()) < EXACT * nuclear
    assert float(sum(w.square().sum() for w in balanced)) == pytest.approx(nuclear, rel=EXACT)
    c = float((v.norm() / u.norm()).sqrt())
    equal_traces = [c * u, v / c]
    assert abs(float(gram_imbalance(equal_traces).trace())) < EXACT * nuclear
    assert float(sum(w.square().sum() for w in equal_traces)) > nuclear * (1 + APART)
