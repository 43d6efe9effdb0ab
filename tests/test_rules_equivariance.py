"""Which symmetries of a product the update rules follow: rotations, every invertible matrix, powers of two; transport.

The literal rules are held to the same statements in `test_identities_rotation.py` and `test_identities_scale.py`; here
it is the optimizers, by `step`, and in a stack, where a run and its rotated twin are two members of one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from identities import APART, EIGEN, EXACT, RANK, distance, draw, factors, gradients, orthogonal, product
from models import Factors, differing, factor_pair, relative_distance, snapshot
from torch import Tensor, nn

import saggs
from saggs.rules import RULES

STEPS = 25
Q = orthogonal(RANK)
INVERTIBLE = draw(21, RANK, RANK)
# A rate at which a rule moves the pair by some per cent a step.
RATES = {"gd": 0.05, "momentum": 0.02, "rmsprop": 0.005, "adafactor": 0.001, "shampoo": 0.05, "scaled_gd": 0.05}

FOLLOW: list[tuple[str, dict[str, Any]]] = [
    ("gd", {}),
    ("momentum", {}),
    ("scalar_adam", {}),
    ("dial", {"precond_power": 0.0}),
    ("muon", {}),
    ("shampoo", {}),
    ("scaled_gd", {}),
    ("flow_adam", {"precond_power": 0.0, "clip": "global"}),
    ("flow_adam", {"precond_power": 0.0, "clip": "global", "clip_value": 0.1}),
]
# (rule, settings, how far the run from the rotated pair is from the rotated run).
BREAK: list[tuple[str, dict[str, Any], float]] = [
    ("adam", {}, 0.14),
    ("rmsprop", {}, 0.10),
    ("signum", {}, 0.39),
    ("lion", {}, 0.31),
    ("adafactor", {}, 0.14),
    ("dial", {"precond_power": 0.5}, 0.076),
    ("dial", {"precond_power": 0.0, "scalar": "geomean"}, 0.051),
    ("flow_adam", {"precond_power": 1.0, "clip": "global"}, 0.070),
    ("flow_adam", {"precond_power": 0.0, "clip": "coordinate", "clip_value": 0.05}, 0.0033),
]


def within(name: str) -> float:
    """Newton-Schulz steps and eigenvectors magnify rounding."""
    return EIGEN if name in ("muon", "shampoo") else EXACT


def gauged(weights: Sequence[Tensor], m: Tensor) -> list[Tensor]:
    """(U M, V M^-T); for orthogonal M that is (U M, V M)."""
    return [weights[0] @ m, torch.linalg.solve(m, weights[1].T).T]


def run(
    name: str, weights: Sequence[Tensor], rates: Sequence[float] = (1.0, 1.0), steps: int = STEPS, **settings: Any
) -> list[Tensor]:
    """The weights after so many steps of `Optimizer.step`, each at its rate in units of the rule's."""
    parameters = [nn.Parameter(w.clone()) for w in weights]
    rate = RATES.get(name, 0.02)
    groups: Any = [{"params": [p], "lr": rate * r} for p, r in zip(parameters, rates, strict=True)]
    optimizer = RULES[name](parameters if name == "scaled_gd" else groups, lr=rate, **settings)
    for step in range(steps):
        for p, g in zip(parameters, gradients([p.detach() for p in parameters], step), strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in parameters]


def run_stack(name: str, pairs: Sequence[Sequence[Tensor]], **settings: Any) -> list[list[Tensor]]:
    """The same for several pairs as the members of one stack."""
    cls, rate = RULES[name], RATES.get(name, 0.02)
    group = {**cls.DEFAULTS, **settings}
    weights = [torch.stack(each) for each in zip(*pairs, strict=True)]
    states = [cls.begin(w, group) for w in weights]
    for step in range(STEPS):
        found = [gradients([w[m] for w in weights], step) for m in range(len(pairs))]
        stacked = [torch.stack(each) for each in zip(*found, strict=True)]
        directions = cls.advance(weights, stacked, states, [group] * 2)
        weights = [w - rate * u for w, u in zip(weights, directions, strict=True)]
    return [[w[m] for w in weights] for m in range(len(pairs))]


def residual(name: str, q: Tensor, **settings: Any) -> float:
    """Relative distance of the run from (U Q, V Q) to the rotated run from (U, V), over both factors."""
    turned, base = run(name, gauged(factors(), q), **settings), run(name, factors(), **settings)
    return max(distance(*pair) for pair in zip(turned, gauged(base, q), strict=True))


@pytest.mark.parametrize(("name", "settings"), FOLLOW)
def test_rules_of_whole_matrices_follow_every_rotation(name: str, settings: dict[str, Any]) -> None:
    """By `step`, and as two members of a stack. Left where they were by the rotation (the control) they are far."""
    for q in (Q, orthogonal(RANK, 778)):
        assert residual(name, q, **settings) < within(name)
    base, turned = run_stack(name, [factors(), gauged(factors(), Q)], **settings)
    assert max(distance(*pair) for pair in zip(turned, gauged(base, Q), strict=True)) < within(name)
    assert max(distance(*pair) for pair in zip(turned, base, strict=True)) > APART


@pytest.mark.parametrize(("name", "settings", "size"), BREAK)
def test_rules_of_entries_do_not_follow_a_rotation(name: str, settings: dict[str, Any], size: float) -> None:
    """Neither does the geometric mean, by 5 per cent in 25 steps. The identity (the control) they follow to the bit.

    The sizes are given to a factor of two: what they are on this pair, and no constants of the rules.
    """
    found = residual(name, Q, **settings)
    assert found > APART
    assert size / 2 < found < 2 * size
    assert residual(name, torch.eye(RANK, dtype=torch.float64), **settings) == 0.0


def test_scaled_gd_follows_every_invertible_matrix_and_gradient_descent_only_rotations() -> None:
    """(U M, V M^-T). A damping (the other control) is seen by what is no rotation."""
    damped: dict[str, Any] = {"damping": 0.1}
    for name, settings, follows in (("scaled_gd", {}, True), ("scaled_gd", damped, False), ("gd", {}, False)):
        base, other = run(name, factors(), **settings), run(name, gauged(factors(), INVERTIBLE), **settings)
        miss = max(distance(*pair) for pair in zip(other, gauged(base, INVERTIBLE), strict=True))
        assert miss < EXACT if follows else not miss < APART


# (rule, settings, exponent e): the run of (c A, B / c) at the rates c^(1 - e) and c^(e - 1) is that of (A, B).
POWERS: list[tuple[str, dict[str, Any], int]] = [
    ("gd", {}, -1),
    ("momentum", {}, -1),
    ("adam", {"eps": 0.0}, 0),
    ("rmsprop", {"eps": 0.0}, 0),
    ("signum", {}, 0),
    ("lion", {}, 0),
    ("adafactor", {"eps": 0.0}, 0),
    ("muon", {"eps": 0.0}, 0),
    ("shampoo", {"damping": 0.0, "floor": 0.0, "every": 1, "exponent": -0.5}, 1),
    ("scaled_gd", {}, 1),
]


@pytest.mark.parametrize(("name", "settings", "exponent"), POWERS)
def test_a_pair_rescaled_by_a_power_of_two_repeats_the_run_bit_for_bit_at_rates_that_follow(
    name: str, settings: dict[str, Any], exponent: int
) -> None:
    """Every operation of these rules commutes with powers of two; at the rates as they are (the control) only where
    the exponent is 1, and with an eps (the other control) at no rates.
    """
    c = 32.0
    base = run(name, factors(), **settings)
    a, b = factors()
    other = run(name, [c * a, b / c], (c ** (1 - exponent), c ** (exponent - 1)), **settings)
    assert torch.equal(other[0] / c, base[0])
    assert torch.equal(other[1] * c, base[1])
    same_rate = run(name, [c * a, b / c], **settings)
    assert torch.equal(product(same_rate), product(base)) == (exponent == 1)
    if "eps" in settings:
        with_eps = [run(name, w, r, eps=1e-3) for w, r in (((a, b), (1, 1)), ((c * a, b / c), (c, 1 / c)))]
        assert not torch.equal(product(with_eps[0]), product(with_eps[1]))


CARRIED = ("gd", "momentum", "adam", "scalar_adam", "dial", "rmsprop", "signum", "lion", "adafactor", "muon")


@pytest.mark.parametrize("name", RULES)
def test_the_state_of_a_rule_is_carried_through_a_rescaling_exactly_or_refused_by_name(name: str) -> None:
    """By 2^5 and back every bit is there again, and in between the state is that of the rescaled run.

    A refusal (the control) leaves all as it was: Shampoo's roots go with half powers, FlowAdam's averages are of all
    weights, and ScaledGD steps pairs only, so that it cannot be rehearsed on one weight.
    """
    model, other = Factors().double(), Factors().double()
    saggs.rescale(other, factor_pair(), 32.0)
    optimizer, companion = RULES[name](model.parameters(), lr=1e-2), RULES[name](other.parameters(), lr=1e-2)
    for step in range(7):
        pairs = zip(model.parameters(), other.parameters(), (1 / 32.0, 32.0), strict=True)
        for index, (p, q, scale) in enumerate(pairs):
            p.grad = draw(10 * step + index, *p.shape) + 1
            q.grad = p.grad * scale
        optimizer.step()
        companion.step()
    before = snapshot(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name not in CARRIED:
            with pytest.raises(ValueError, match=rf"cannot carry the state of saggs\.rules\S+{RULES[name].__name__} "):
                saggs.rescale(model, factor_pair(), 32.0, optimizer)
            assert differing(before, snapshot(model, optimizer)) == []
            return
        saggs.rescale(model, factor_pair(), 32.0, optimizer)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state.get(p, {}).items():
            assert relative_distance(value, companion.state[q][key]) < EXACT, key
            assert key == "step" or not torch.equal(value, before[f"{'left' if p is model.left else 'right'}.{key}"])
    saggs.rescale(model, factor_pair(), 1 / 32.0, optimizer)
    assert differing(before, snapshot(model, optimizer)) == []
