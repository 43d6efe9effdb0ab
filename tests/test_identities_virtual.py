"""Balancing before every step without moving a weight: which settings do the same to rule after rule, and which do not.

The explicit run balances weights and states, then takes gradients and a step. The virtual one leaves the weights where
they are and, from the current norms, takes c = (|A| / |B|)^(1/2) into its rates, eps and decay. Both start uneven.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from identities import (
    APART,
    EIGEN,
    EXACT,
    EXPONENTS,
    OF,
    SPECTRAL,
    Edit,
    Run,
    balanced,
    clipping,
    distance,
    factors,
    gradients,
    rescaled,
    start,
)

STEPS = 30
# The degree of each setting that has to follow: eps stands beside a root, decay beside the rate or beside gradients.
FOLLOWING = {
    "adamw": {"eps": -1, "decay": -1},
    "adam": {"eps": -1, "decay": -2},
    "momentum": {"decay": -2},
}
DEGREES = {**EXPONENTS, "adamw": 0}


def bound(name: str) -> float:
    return EIGEN if name in SPECTRAL else EXACT


def uneven(name: str, at: float = 5.0, **settings: Any) -> Run:
    """A run from (5 A, B / 5), or from elsewhere on the orbit."""
    return start(name, rescaled(factors(), at), **settings)


def schedule(step: int) -> float:
    """What the rate is multiplied by: down to a third over the run."""
    return 1 - 2 * step / (3 * STEPS)


def explicit(
    name: str,
    *,
    every: int = 1,
    damping: float = 1.0,
    clip: float | None = None,
    scheduled: bool = False,
    **settings: Any,
) -> Run:
    """Balance, with the state carried, before forward and backward of every so many steps, the first one too."""
    run = uneven(name, **settings)
    rate = run.rates[0]
    for step in range(STEPS):
        if step % every == 0:
            run = balanced(name, run, damping)
        if scheduled:
            run.rates = (rate * schedule(step), rate * schedule(step))
        run.advance(1, None if clip is None else clipping(clip))
    return run


def virtual(
    name: str,
    *,
    every: int = 1,
    damping: float = 1.0,
    clip: float | None = None,
    scheduled: bool = False,
    leave: str = "",
    at: float = 5.0,
    **settings: Any,
) -> tuple[Run, float]:
    """The weights stay where they are; the factor of the last event is returned beside the run.

    `leave` names what is done wrongly: a setting that does not follow, `clip` on the raw gradients, `late` norms of one
    step before, `rate` not scaled, `memory` where a damped factor forgets what it was.
    """
    run, c = uneven(name, at, **settings), 1.0
    rate, kept = run.rates[0], run.settings[0]
    last = run.weights
    for step in range(STEPS):
        if step % every == 0:
            a, b = last if leave == "late" else run.weights
            ratio = float(a.norm() / b.norm())
            before = 1.0 if leave == "memory" else c
            c = before * (ratio / before**2) ** (damping / 2)
        last = run.weights
        here = rate * schedule(step) if scheduled else rate
        power = 1.0 if leave == "rate" else c ** (1 - DEGREES[name])
        run.rates = (here * power, here / power)
        run.settings = (follow(name, kept, c, leave), follow(name, kept, 1 / c, leave))
        edit: Edit | None = None if clip is None else clipping(clip, 1.0 if leave == "clip" else c)
        run.advance(1, edit)
    return run, c


def follow(name: str, settings: dict[str, Any], factor: float, leave: str) -> dict[str, Any]:
    """The settings of a weight that stands at `factor` times where the balanced one would."""
    degrees = FOLLOWING.get(name, {})
    return {
        key: value * factor ** degrees[key] if key in degrees and key != leave else value
        for key, value in settings.items()
    }


def miss(found: tuple[Run, float], wanted: Run) -> float:
    """How far the virtual run, moved by its factor, is from the explicit one, over both weights."""
    run, c = found
    return max(distance(*pair) for pair in zip(rescaled(run.weights, 1 / c), wanted.weights, strict=True))


@pytest.mark.parametrize("settings", [{"eps": 0.0}, {"eps": 1e-3}, {"eps": 1e-3, "amsgrad": True}], ids=str)
@pytest.mark.parametrize("scheduled", [False, True])
def test_adamw_with_followed_rates_eps_and_decay_repeats_balancing_before_every_step(
    settings: dict[str, Any], scheduled: bool
) -> None:
    """lr c, eps / c, decay / c on A and the inverses on B; moments are not touched. Without balancing: another run."""
    options = {"decay": 0.1, "scheduled": scheduled, **settings}
    wanted = explicit("adamw", **options)
    found = virtual("adamw", **options)
    assert miss(found, wanted) < EXACT
    assert distance(found[0].weights[0], wanted.weights[0]) > APART, "the weights are where they were"
    plain = uneven("adamw", decay=0.1, **settings).advance(STEPS)
    assert distance(plain.product, wanted.product) > APART


@pytest.mark.parametrize("leave", ["rate", "eps", "decay", "late"])
def test_every_ingredient_of_virtual_balancing_is_needed_by_adamw(leave: str) -> None:
    """Each one left behind (the controls) is missed, and so are norms taken one step late."""
    wanted = explicit("adamw", eps=1e-2, decay=0.1)
    assert miss(virtual("adamw", eps=1e-2, decay=0.1), wanted) < EXACT
    assert miss(virtual("adamw", eps=1e-2, decay=0.1, leave=leave), wanted) > APART


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_coupled_decay_is_divided_by_the_square_of_the_factor(name: str) -> None:
    """lr c^2 for momentum and lr c for Adam, coupled decay / c^2 for both; unscaled decay is the control."""
    wanted = explicit(name, decay=0.1)
    assert miss(virtual(name, decay=0.1), wanted) < EXACT
    assert not miss(virtual(name, decay=0.1, leave="decay"), wanted) < APART


@pytest.mark.parametrize("name", [name for name in EXPONENTS if name != "scaled_gd"])
def test_a_rate_times_c_to_the_one_minus_e_does_it_for_a_rule_of_exponent_e(name: str) -> None:
    """Literal rules without eps; for e = 1 no rate changes, and the virtual run is the plain one bit for bit.

    For the others the rate left behind is the control.
    """
    wanted, found = explicit(name), virtual(name)
    assert miss(found, wanted) < bound(name)
    if name in OF[1]:
        assert torch.equal(found[0].product, uneven(name).advance(STEPS).product)
        assert distance(found[0].weights[0], wanted.weights[0]) > APART
    else:
        assert not miss(virtual(name, leave="rate"), wanted) < APART


@pytest.mark.parametrize("every", [2, 7])
def test_between_two_events_the_factor_is_held(every: int) -> None:
    """With a period of k the explicit run drifts off balance for k steps; a factor renewed at each is another run."""
    wanted = explicit("adamw", every=every, eps=1e-3, decay=0.1)
    assert miss(virtual("adamw", every=every, eps=1e-3, decay=0.1), wanted) < EXACT
    assert miss(virtual("adamw", eps=1e-3, decay=0.1), wanted) > APART


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_damped_balancing_keeps_a_factor_that_remembers(alpha: float) -> None:
    """c <- c ((|A| / |B|) / c^2)^(alpha / 2): what is damped is the imbalance that the last factor has left.

    (|A| / |B|)^(alpha / 2) anew each time (the control) never gets further than the first step did.
    """
    wanted = explicit("adamw", damping=alpha, eps=1e-3, decay=0.1)
    assert miss(virtual("adamw", damping=alpha, eps=1e-3, decay=0.1), wanted) < EXACT
    assert miss(virtual("adamw", damping=alpha, eps=1e-3, decay=0.1, leave="memory"), wanted) > APART


@pytest.mark.parametrize("name", ["gd", "momentum", "adamw"])
@pytest.mark.parametrize("damping", [1.0, 0.3])
def test_clipping_by_the_global_norm_is_that_of_the_balanced_gradients(name: str, damping: float) -> None:
    """|(c G_A, G_B / c)|, with the factor of the moment, damped or not. That of the raw gradients is the control."""
    wanted = explicit(name, clip=0.3, damping=damping)
    assert miss(virtual(name, clip=0.3, damping=damping), wanted) < EXACT
    assert miss(virtual(name, clip=0.3, damping=damping, leave="clip"), wanted) > APART
    assert distance(explicit(name, damping=damping).product, wanted.product) > APART, "the limit acts"


def test_the_first_step_has_to_be_balanced_too() -> None:
    """Norms of the very start count: a run whose first step is taken unbalanced (the control) is another one."""
    wanted = explicit("adamw", eps=1e-3)
    late = uneven("adamw", eps=1e-3).advance(1)
    for _ in range(STEPS - 1):
        late = balanced("adamw", late).advance(1)
    assert miss(virtual("adamw", eps=1e-3), wanted) < EXACT
    assert distance(late.product, wanted.product) > APART


def between(name: str, carry_gradient: bool) -> Run:
    """Balance after the backward pass and before the step, the gradients moved like first moments or left alone."""
    run = uneven(name)
    for step in range(STEPS):
        found, before = gradients(run.weights, step), run.weights
        run = balanced(name, run)
        if carry_gradient:
            found = [g * float(w.norm() / n.norm()) for g, w, n in zip(found, before, run.weights, strict=True)]
        run.apply(found)
    return run


@pytest.mark.parametrize("name", ["gd", "momentum", "adam", "lion"])
def test_balancing_between_backward_and_step_is_the_same_if_the_gradients_move_along(name: str) -> None:
    """g / c where the weight goes to c w, as the gradient of the moved model would be; left alone it is stale."""
    wanted = explicit(name)
    assert distance(between(name, carry_gradient=True).weights[0], wanted.weights[0]) < EXACT
    assert not distance(between(name, carry_gradient=False).weights[0], wanted.weights[0]) < APART


def test_the_virtual_run_does_not_depend_on_where_on_the_orbit_it_starts() -> None:
    """What all of this is for: from (s A, B / s) the product's trajectory is one, and plain AdamW's is not."""
    options: dict[str, Any] = {"eps": 1e-3, "decay": 0.1}
    first, *others = (virtual("adamw", at=s, **options)[0].product for s in (1.0, 3.7, 1 / 11))
    assert max(distance(other, first) for other in others) < EXACT
    first, *others = (uneven("adamw", s, **options).advance(STEPS).product for s in (1.0, 3.7, 1 / 11))
    assert min(distance(other, first) for other in others) > APART
