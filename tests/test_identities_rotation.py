"""The rotation symmetry (U, V) -> (U Q, V Q), Q orthogonal, of the product U V^T: which literal rules follow it.

A rule follows if its run from (U Q, V Q) is its run from (U, V), rotated. Rescalings are another symmetry, with the
opposite verdicts: `test_identities_scale.py`. Source of the statements: Singh (2026), unless said otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from identities import (
    APART,
    COLUMNS,
    EIGEN,
    EXACT,
    PURE,
    RANK,
    ROWS,
    Run,
    distance,
    draw,
    factors,
    gradients,
    orthogonal,
    product,
    start,
    tensors,
)
from torch import Tensor

from saggs import reference_rules

EQUIVARIANT = ("gd", "momentum", "scalar_adam", "dial", "muon", "polar", "shampoo", "shampoo_half", "lars", "scaled_gd")
BY_EIGENVECTORS = ("muon", "polar", "shampoo", "shampoo_half")
BROKEN = tuple(name for name in PURE if name not in EQUIVARIANT)
STEPS = 20
Q = orthogonal(RANK)
INVERTIBLE = {
    "random": draw(21, RANK, RANK),
    "shear": torch.eye(RANK, dtype=torch.float64) + torch.diag(torch.ones(RANK - 1, dtype=torch.float64), 1),
    "diagonal": torch.diag(torch.tensor([0.01, 1.0, 100.0], dtype=torch.float64)),
    "scalar": 3.7 * torch.eye(RANK, dtype=torch.float64),
}


def gauged(weights: Sequence[Tensor], m: Tensor) -> list[Tensor]:
    """(U M, V M^-T)."""
    return [weights[0] @ m, torch.linalg.solve(m, weights[1].T).T]


def rotated(weights: Sequence[Tensor], q: Tensor = Q) -> list[Tensor]:
    """(U Q, V Q)."""
    return [w @ q for w in weights]


def rotation(angle: float) -> Tensor:
    """Of the plane, with rows (cos, sin) and (-sin, cos): it turns row vectors to the left."""
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, s], [-s, c]], dtype=torch.float64)


def first_update(name: str, gradient: Tensor, **settings: Any) -> Tensor:
    """What the first step at rate 1 subtracts from a weight of ones, which matters to rules that measure the weight."""
    run = start(name, [torch.ones_like(gradient), torch.ones_like(gradient)], rate=1.0, **settings)
    run.apply([gradient, gradient])
    return torch.ones_like(gradient) - run.weights[0]


def defect(name: str, gradient: Tensor, q: Tensor, **settings: Any) -> Tensor:
    """Phi(G Q) - Phi(G) Q at the first step: zero for all G and Q if the rule follows rotations."""
    return first_update(name, gradient @ q, **settings) - first_update(name, gradient, **settings) @ q


@pytest.mark.parametrize("name", INVERTIBLE)
def test_gauge_keeps_the_product_for_every_invertible_matrix(name: str) -> None:
    """U M (V M^-T)^T = U V^T. Moving V by M or by M^-1 (the controls) keeps it for special M only."""
    m, weights = INVERTIBLE[name], factors()
    assert distance(product(gauged(weights, m)), product(weights)) < EXACT
    assert distance(product([weights[0] @ m, weights[1] @ m]), product(weights)) > APART
    inverse = product([weights[0] @ m, weights[1] @ torch.linalg.inv(m)])
    assert (distance(inverse, product(weights)) > APART) != torch.allclose(m, m.T)


@pytest.mark.parametrize("name", INVERTIBLE)
def test_of_all_gauges_only_the_orthogonal_ones_are_isometries(name: str) -> None:
    """|U M|^2 + |V M^-T|^2 is |U|^2 + |V|^2 for all U and V only if M M^T = I.

    For any other M the unit eigenvector of M M^T with the eigenvalue furthest from 1, as a row of U beside V = 0, has
    that eigenvalue as its squared norm. For Q every such pair keeps its norm, and so do inner products.
    """

    def squares(weights: Sequence[Tensor]) -> float:
        return float(sum(w.square().sum() for w in weights))

    m, weights = INVERTIBLE[name], factors()
    values, vectors = torch.linalg.eigh(m @ m.T)
    worst = int((values.log().abs()).argmax())
    witness = [vectors[:, worst][None], torch.zeros(1, RANK, dtype=torch.float64)]
    assert squares(witness) == pytest.approx(1, abs=EXACT)
    assert squares(gauged(witness, m)) == pytest.approx(float(values[worst]), rel=EXACT)
    assert abs(squares(gauged(witness, m)) - 1) > APART
    for pair in (witness, weights):
        assert squares(gauged(pair, Q)) == pytest.approx(squares(pair), rel=EXACT)
    assert distance(gauged(weights, Q)[1], rotated(weights)[1]) < EXACT, "for Q the inverse transpose is Q itself"


@pytest.mark.parametrize("name", [*INVERTIBLE, "orthogonal"])
def test_gradients_of_a_gauged_pair_answer_with_the_inverse_transpose(name: str) -> None:
    """G_U -> G_U M^-T and G_V -> G_V M: for Q that is Q on both. Answering like the weights (the control) is wrong."""
    m, weights = {**INVERTIBLE, "orthogonal": Q}[name], factors()
    base, found = gradients(weights, 4), gradients(gauged(weights, m), 4)
    wanted = [torch.linalg.solve(m, base[0].T).T, base[1] @ m]
    assert max(distance(f, w) for f, w in zip(found, wanted, strict=True)) < EXACT
    if name == "orthogonal":
        assert distance(found[0], base[0] @ Q) < EXACT
        assert distance(found[0], base[0] @ Q.T) > APART
    else:
        assert distance(found[0], base[0] @ m) > APART


def residual(name: str, q: Tensor, steps: int = STEPS, **settings: Any) -> float:
    """Relative distance of the run from (U Q, V Q) to the rotated run from (U, V), over both factors."""
    base = start(name, **settings).advance(steps)
    other = start(name, rotated(factors(), q), **settings).advance(steps)
    return max(distance(*pair) for pair in zip(other.weights, rotated(base.weights, q), strict=True))


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_rules_of_whole_matrices_follow_every_rotation_over_many_steps(name: str) -> None:
    """GD, momentum, scalar Adam, the dial at 0, Muon, Shampoo; LARS and ScaledGD by the same algebra (ours).

    Rules by eigenvectors or Newton-Schulz steps magnify rounding, hence 1e-9. Adam on the same batches is the control.
    """
    within = EIGEN if name in BY_EIGENVECTORS else EXACT
    for seed in (777, 778):
        assert residual(name, orthogonal(RANK, seed)) < within
        assert residual("adam", orthogonal(RANK, seed)) > APART


@pytest.mark.parametrize("name", ["scalar_adam", "dial", "muon", "shampoo"])
def test_eps_and_damping_as_published_do_not_break_rotation_equivariance(name: str) -> None:
    """They are added to numbers and to multiples of the identity, which no rotation sees. Adam's eps does not help."""
    published: dict[str, Any] = {
        "muon": {"eps": 1e-7},
        "shampoo": {"damping": 1.0, "floor": 1e-6, "every": 20},
    }.get(name, {"eps": 1e-8})
    assert residual(name, Q, 25, **published) < EIGEN
    assert residual("adam", Q, 25, eps=1e-8) > APART


def test_scaled_gd_follows_the_whole_general_linear_group_and_gradient_descent_does_not() -> None:
    """G_U (V^T V)^-1 is covariant for every M. Source: Tong, Ma and Chi (2021)."""
    for m in (INVERTIBLE["random"], INVERTIBLE["shear"]):
        for name, follows in (("scaled_gd", True), ("gd", False), ("polar", False)):
            base, other = start(name).advance(STEPS), start(name, gauged(factors(), m)).advance(STEPS)
            miss = distance(other.product, base.product)
            assert miss < EXACT if follows else not miss < APART


@pytest.mark.parametrize("name", BROKEN)
def test_rules_of_entries_break_at_the_first_step_and_keep_signed_permutations_of_the_columns(name: str) -> None:
    """Adam, RMSProp, sign, signum, Lion, Adafactor, and of our positive controls those that look at entries."""
    gradient = draw(31, ROWS, RANK)
    scale = float(first_update(name, gradient).norm())
    assert float(defect(name, gradient, Q).norm()) / scale > APART
    permutation = torch.tensor([[0, 0, -1], [1, 0, 0], [0, -1, 0]], dtype=torch.float64)
    assert float(defect(name, gradient, permutation).norm()) / scale < EXACT
    assert residual(name, Q) > APART


@pytest.mark.parametrize("name", ["sign", "signum", "lion", "adam", "rmsprop"])
def test_a_unit_vector_turned_by_an_eighth_is_a_witness_against_every_sign_like_rule(name: str) -> None:
    """sign(e1 Q) = (1, 1), and sign(e1) Q = (1, 1) / sqrt 2: a defect of sqrt 2 - 1. A quarter turn shows none.

    Without its eps the first step of Adam is a sign, that of RMSProp one over sqrt(1 - rho), once 0 / 0 is 0: hence the
    tiny eps.
    """
    e1, eps = torch.tensor([[1.0, 0.0]], dtype=torch.float64), {"eps": 1e-300} if "eps" in PURE[name] else {}
    size = 10.0 if name == "rmsprop" else 1.0
    turned = first_update(name, e1 @ rotation(math.pi / 4), **eps) / size
    assert distance(turned, torch.ones(1, 2, dtype=torch.float64)) < EXACT
    assert float(defect(name, e1, rotation(math.pi / 4), **eps).norm()) / size == pytest.approx(
        math.sqrt(2) - 1, abs=EXACT
    )
    # A quarter turn leaves 6e-17 in the first entry, whose sign is 1: the exact matrix has to be written down.
    quarter = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert float(defect(name, e1, quarter, **eps).norm()) == 0.0


def test_a_diagonal_two_by_two_gradient_is_a_witness_against_adafactor() -> None:
    """G = diag(2, 1): V = r c^T / mean(r) is diag-wise (16/5, 1/5), so Phi(G) = diag(sqrt(5)/2, sqrt(5)).

    Turned by an eighth, the squares are (2, 2; 1/2, 1/2), of rank one: Phi(G Q) = sqrt(2) Q. The identity matrix, with
    rows and columns of one size before and after, shows nothing (the control).
    """
    q, size = rotation(math.pi / 4), math.sqrt(1000)  # the first average is 1 - 0.999 of the squares
    gradient = torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64))
    phi = torch.diag(torch.tensor([math.sqrt(5) / 2, math.sqrt(5)], dtype=torch.float64))
    assert distance(first_update("adafactor", gradient) / size, phi) < EXACT
    assert distance(first_update("adafactor", gradient @ q) / size, math.sqrt(2) * q) < EXACT
    wanted = math.hypot(math.sqrt(5) / 2 - math.sqrt(2), math.sqrt(5) - math.sqrt(2))
    assert float(defect("adafactor", gradient, q).norm()) / size == pytest.approx(wanted, abs=EXACT)
    assert wanted > APART
    assert float(defect("adafactor", torch.eye(2, dtype=torch.float64), q).norm()) / size < EXACT


def test_the_first_step_defect_of_adam_in_the_plane_has_a_closed_form() -> None:
    """A row at angle p turned by t: 2 sqrt(2) |sin((d(p + t) - d(p) - t) / 2)|, d the diagonal of an angle's quadrant.

    sign((cos p, sin p)) is sqrt(2) times the unit vector at d(p) = 45 + 90 floor(p / 90) degrees, and two unit vectors
    at an angle x are 2 |sin(x / 2)| apart. It is independent of the row's length, zero at quarter turns only, and for
    scalar Adam, the control, zero everywhere.
    """

    def diagonal(angle: float) -> float:
        return math.pi / 4 + math.pi / 2 * math.floor(angle / (math.pi / 2))

    for p, t, length in itertools.product((0.3, 1.1, 2.0, 3.9, 5.5), (0.2, 0.8, math.pi / 2, 2.5), (1e-3, 1.0, 40.0)):
        row = length * torch.tensor([[math.cos(p), math.sin(p)]], dtype=torch.float64)
        wanted = 2 * math.sqrt(2) * abs(math.sin((diagonal(p + t) - diagonal(p) - t) / 2))
        assert float(defect("adam", row, rotation(t)).norm()) == pytest.approx(wanted, abs=EXACT)
        assert (wanted < EXACT) if t == math.pi / 2 else (wanted > APART)
        assert float(defect("scalar_adam", row, rotation(t)).norm()) < EXACT


def test_the_first_step_defect_of_adam_on_a_matrix_is_what_the_signs_do_not_share() -> None:
    """|sign(G Q) - sign(G) Q|^2 = 2 n k - 2 <sign(G Q), sign(G) Q>, since both have n k ones under an isometry.

    For polar factors, also of one norm, the two terms cancel (the control).
    """
    gradient = draw(31, ROWS, RANK)
    shared = float(((gradient @ Q).sign() * (gradient.sign() @ Q)).sum())
    square = float(defect("adam", gradient, Q).square().sum())
    assert square == pytest.approx(2 * ROWS * RANK - 2 * shared, abs=1e-10)
    assert square > APART
    turned, direction = first_update("polar", gradient @ Q), first_update("polar", gradient) @ Q
    assert 2 * RANK - 2 * float((turned * direction).sum()) < EXACT


def test_signed_permutations_are_all_the_rotations_that_signs_commute_with() -> None:
    """All 48 of size 3 do. Any other Q has a row with two non-zero entries: that unit vector is a witness."""
    unit, gradient = torch.eye(3, dtype=torch.float64), draw(31, ROWS, 3)
    for order in itertools.permutations(range(3)):
        for signs in itertools.product((1.0, -1.0), repeat=3):
            q = unit[list(order)] * torch.tensor(signs, dtype=torch.float64)
            assert torch.equal(defect("sign", gradient, q), torch.zeros_like(gradient))
            assert float(defect("sign", unit, q).norm()) == 0.0
    householder = unit - 2 * torch.full((3, 3), 1 / 3, dtype=torch.float64)
    block = torch.block_diag(rotation(0.1), torch.ones(1, 1, dtype=torch.float64))
    for q in (Q, householder, block):
        assert float(defect("sign", unit, q).norm()) > APART


def fed(name: str, q: Tensor, **settings: Any) -> dict[str, Tensor]:
    """What a rule keeps of U after five given gradients, each turned by q."""
    run: Run = start(name, **settings)
    for step in range(5):
        run.apply([draw(80 + step, ROWS, RANK) @ q, draw(90 + step, COLUMNS, RANK) @ q])
    return tensors(run.states[0])


def test_what_is_linear_or_a_gram_matrix_can_be_carried_through_a_rotation() -> None:
    """m -> m Q, G G^T stays, G^T G -> Q^T G^T G Q, Adafactor's row means stay. Left alone (the control) m is wrong."""
    unit = torch.eye(RANK, dtype=torch.float64)
    for name, key in (("momentum", "momentum_buffer"), ("lion", "first"), ("adam", "first")):
        assert distance(fed(name, Q)[key], fed(name, unit)[key] @ Q) < EXACT
        assert distance(fed(name, Q)[key], fed(name, unit)[key]) > APART
    base, turned = fed("shampoo", unit), fed("shampoo", Q)
    assert distance(turned["left"], base["left"]) < EXACT
    assert distance(turned["right"], Q.T @ base["right"] @ Q) < EXACT
    assert distance(turned["right"], base["right"]) > APART
    assert distance(fed("adafactor", Q)["rows"], fed("adafactor", unit)["rows"]) < EXACT
    assert distance(fed("adafactor", Q)["columns"], fed("adafactor", unit)["columns"]) > APART


def test_no_map_carries_second_moments_of_entries_through_a_rotation() -> None:
    """(1, 1) and (1, -1) leave one second moment behind; turned by an eighth, they leave (0, 2) and (2, 0).

    So v of the turned run is no function of v. Its mean, all that scalar Adam uses, is one: it stays.
    """
    ones = [torch.tensor([[1.0, sign]], dtype=torch.float64) for sign in (1.0, -1.0)]
    seconds = []
    for q in (torch.eye(2, dtype=torch.float64), rotation(math.pi / 4)):
        states = [reference_rules.step_adam(g, g @ q, None, 1.0)[1] for g in ones]
        seconds.append([state.second for state in states])
    assert torch.equal(*seconds[0])
    assert distance(*seconds[1]) > APART
    means = [float(second.mean()) for pair in seconds for second in pair]
    assert max(means) - min(means) < EXACT


def test_scalar_adam_may_have_one_denominator_a_factor_and_stay_equivariant() -> None:
    """|g Q| = |g| for each factor: equivariance does not need one scalar for both. (Conservation does.) Adam is none.

    Source: ours.
    """

    def run(weights: Sequence[Tensor]) -> list[Tensor]:
        ends: list[Tensor] = list(weights)
        states: list[Any] = [None, None]
        for step in range(STEPS):
            found = gradients(ends, step)
            for i in range(2):
                moved, states[i] = reference_rules.step_scalar_adam([ends[i]], [found[i]], states[i], 0.02)
                ends[i] = moved[0]
        return ends

    base, turned = run(factors()), run(rotated(factors()))
    assert max(distance(*pair) for pair in zip(turned, rotated(base), strict=True)) < EXACT
    assert distance(base[0], start("scalar_adam").advance(STEPS).weights[0]) > APART
    assert residual("adam", Q) > APART


@pytest.mark.parametrize("power", [0.25, 0.5, 0.75, 1.0])
def test_the_dial_is_exactly_equivariant_at_zero_with_the_root_mean_square_only(power: float) -> None:
    """sqrt(mean s^2) is a norm of the gradients; exp(mean log s) is a product of entries, and no rotation keeps it."""
    assert residual("dial", Q, precond_power=0.0, mean="rms") < EXACT
    assert residual("dial", Q, precond_power=0.0, mean="geometric") > APART
    assert residual("dial", Q, precond_power=power, mean="rms") > APART


def test_the_ends_of_the_dial_are_scalar_adam_and_adam() -> None:
    """Exactly so for eps = 0; with it, the dial adds eps a second time. In between it is neither."""
    for power, name in ((0.0, "scalar_adam"), (1.0, "adam")):
        end = start("dial", precond_power=power).advance(STEPS)
        assert distance(end.product, start(name).advance(STEPS).product) < EXACT
        other = start("dial", precond_power=0.5).advance(STEPS)
        assert distance(other.product, start(name).advance(STEPS).product) > APART
        twice = start("dial", precond_power=power, eps=0.1).advance(STEPS)
        assert distance(twice.product, start(name, eps=0.1).advance(STEPS).product) > APART


@pytest.mark.parametrize("name", ["gd", "momentum", "polar", "adam"])
def test_every_interface_of_a_deep_linear_network_has_a_gauge_of_its_own(name: str) -> None:
    """W3 W2 W1 does not see W1 -> P W1, W2 -> Q W2 P^T, W3 -> W3 Q^T; the middle matrix is turned on both sides.

    GD, momentum and Muon's polar factor follow; Adam, the control, does not.
    """
    p, q = orthogonal(4, 5), orthogonal(RANK, 6)
    layers = [draw(1, 4, COLUMNS), draw(2, RANK, 4), draw(3, ROWS, RANK)]

    def turned(ws: Sequence[Tensor]) -> list[Tensor]:
        return [p @ ws[0], q @ ws[1] @ p.T, ws[2] @ q.T]

    def train(ws: Sequence[Tensor]) -> list[Tensor]:
        ends, states = list(ws), [None, None, None]
        run = start(name)
        for step in range(STEPS):
            leaves = [w.detach().requires_grad_() for w in ends]
            x, y = draw(2 * step, 8, COLUMNS), draw(2 * step + 1, 8, ROWS)
            loss = (x @ (leaves[2] @ leaves[1] @ leaves[0]).T - y).square().mean()
            found = torch.autograd.grad(loss, leaves)
            for i, gradient in enumerate(found):
                ends[i], states[i] = run.rule.step(ends[i], gradient, states[i], 0.005, **run.settings[0])
        return ends

    miss = max(distance(*pair) for pair in zip(train(turned(layers)), turned(train(layers)), strict=True))
    assert miss > APART if name == "adam" else miss < (EIGEN if name == "polar" else EXACT)
