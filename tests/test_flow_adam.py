"""FlowAdam: when it takes which step, what a step of flow does, and that groups and members see each other as said."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from identities import APART, EXACT, distance, draw
from torch import Tensor, nn

from saggs.reference_flow_adam import FlowAdamState, clip_gradient, joint_norm, step_flow_adam
from saggs.rules import Adam, Dial, FlowAdam

SAME = 1e-12
SHAPES = ((6, 3), (5, 3), (4,))
NEVER = {"norm_ratio": 0.0, "change_ratio": float("inf")}
"""Thresholds that no gradient passes."""
MIXED = ("short steps", "tight coordinates", "by shortness alone", "by change alone")
"""Settings with steps of both kinds after the warm-up; with the published ones nearly all are of flow."""

SETTINGS: dict[str, dict[str, Any]] = {
    "as published, by coordinates": {},
    "by the norm": {"clip": "global"},
    "one denominator": {"clip": "global", "precond_power": 0.0},
    "geometric mean": {"precond_power": 0.5, "scalar": "geomean", "eps": 1e-3},
    "short steps": {
        "clip": "global",
        "clip_value": 0.5,
        "flow_rate": 0.3,
        "moment_limit": 0.1,
        "mix": 0.8,
        "change_ratio": 1.0,
    },
    "tight coordinates": {"clip_value": 0.2, "betas": (0.8, 0.95), "decay": 0.5, "warmup": 2, "change_ratio": 0.8},
    "by shortness alone": {"change_ratio": float("inf"), "warmup": 0},
    "by change alone": {"norm_ratio": 0.0, "change_ratio": 1.0},
}


def gradients(step: int, member: int = 0) -> list[Tensor]:
    """Of sizes that come and go, so that some steps are of one kind and some of the other."""
    size = (1.0, 1.2, 0.4, 1.1, 2.5, 0.9, 1.0)[(step + member) % 7]
    common = [draw(i, *s) for i, s in enumerate(SHAPES)]
    return [size * (c + 0.2 * draw(1000 + 10 * step + i + 333 * member, *c.shape)) for i, c in enumerate(common)]


def start() -> list[Tensor]:
    return [draw(50 + i, *s) for i, s in enumerate(SHAPES)]


def literal_run(steps: int, member: int = 0, **settings: Any) -> tuple[list[Tensor], list[FlowAdamState], list[bool]]:
    """Weights, states, and which steps were of flow, told by the count of Adam's steps."""
    weights, states, flows = start(), None, []
    for step in range(steps):
        before = 0 if states is None else states[0].step
        weights, states = step_flow_adam(weights, gradients(step, member), states, 0.02, **settings)
        flows.append(states[0].step == before)
    assert states is not None
    return weights, states, flows


def stepped(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], first: int, last: int
) -> list[Tensor]:
    for step in range(first, last):
        for p, g in zip(parameters, gradients(step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def fresh() -> list[nn.Parameter]:
    return [nn.Parameter(w) for w in start()]


def run(steps: int = 40, **settings: Any) -> tuple[list[Tensor], FlowAdam]:
    parameters = fresh()
    optimizer = FlowAdam(parameters, lr=0.02, **settings)
    return stepped(optimizer, parameters, 0, steps), optimizer


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_the_literal_rule_on_weights_and_state_and_takes_steps_of_both_kinds(name: str) -> None:
    """Also in a stack whose members take the two kinds at different steps.

    Thresholds that no gradient passes (the control) give the dial, of which this is something else; that to 1e-12, for
    the sums of the first moment are taken in another order.
    """
    settings, steps = SETTINGS[name], 50
    wanted, states, flows = literal_run(steps, **settings)
    warmup = settings.get("warmup", 10)
    assert not any(flows[: warmup + 1])
    assert any(flows)
    assert all(flows[warmup + 1 :]) == (name not in MIXED)
    weights, optimizer = run(steps, **settings)
    assert max(distance(*pair) for pair in zip(weights, wanted, strict=True)) < SAME
    for kept, state in zip(optimizer.state.values(), states, strict=True):
        compare(kept, state)
    parameters, others = fresh(), fresh()
    dial = {n: settings[n] for n in ("scalar", "betas", "eps") if n in settings}
    power = settings.get("precond_power", 1.0)
    plain = stepped(Dial(parameters, lr=0.02, precond_power=power, **dial), parameters, 0, steps)
    never = stepped(FlowAdam(others, lr=0.02, **{**settings, **NEVER}), others, 0, steps)
    assert max(distance(*pair) for pair in zip(never, plain, strict=True)) < SAME
    assert max(distance(*pair) for pair in zip(weights, plain, strict=True)) > APART


def compare(kept: Mapping[str, Tensor], state: FlowAdamState, member: int | None = None) -> None:
    """Every entry of the literal state, and no other."""
    assert set(kept) == set(vars(state))
    for key, wanted in vars(state).items():
        value = kept[key] if member is None else kept[key][member]
        assert distance(value, torch.as_tensor(wanted, dtype=torch.float64)) < SAME, key


@pytest.mark.parametrize("name", SETTINGS)
def test_members_of_a_stack_choose_by_themselves(name: str) -> None:
    """Each is a literal run; where thresholds allow it no two choose alike. Its neighbour (the control) is another."""
    settings, members, steps = SETTINGS[name], 4, 30
    group = {**FlowAdam.DEFAULTS, **settings}
    runs = [literal_run(steps, m, **settings) for m in range(members)]
    weights = [torch.stack([w] * members) for w in start()]
    states = [FlowAdam.begin(w, group) for w in weights]
    for step in range(steps):
        stacked = [torch.stack(each) for each in zip(*(gradients(step, m) for m in range(members)), strict=True)]
        directions = FlowAdam.advance(weights, stacked, states, [group] * len(weights))
        weights = [w - 0.02 * u for w, u in zip(weights, directions, strict=True)]
    for m, (wanted, literal_states, _) in enumerate(runs):
        assert max(distance(w[m], v) for w, v in zip(weights, wanted, strict=True)) < SAME
        assert max(distance(w[m - 1], v) for w, v in zip(weights, wanted, strict=True)) > APART
        for state, literal in zip(states, literal_states, strict=True):
            compare(state, literal, m)
    if name in MIXED:
        assert len({tuple(flows) for _, _, flows in runs}) == members


def test_norms_are_of_all_groups_together() -> None:
    """Three groups are one, bit for bit. Three optimizers (the control) choose by their own gradients and do not."""
    for name, settings in SETTINGS.items():
        one, _ = run(25, **settings)
        parameters, apart = fresh(), fresh()
        three = stepped(FlowAdam([{"params": [p]} for p in parameters], lr=0.02, **settings), parameters, 0, 25)
        assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
        if name not in MIXED:
            continue
        optimizers = [FlowAdam([p], lr=0.02, **settings) for p in apart]
        for step in range(25):
            for p, g, optimizer in zip(apart, gradients(step), optimizers, strict=True):
                p.grad = g
                optimizer.step()
        assert max(distance(p.detach(), w) for p, w in zip(apart, one, strict=True)) > 1e-4


def test_a_group_has_its_own_thresholds_for_the_joint_norm() -> None:
    """One group that never flows beside one that does: the counts of Adam's steps part."""
    parameters = fresh()
    groups: Any = [{"params": parameters[:1], **NEVER}, {"params": parameters[1:]}]
    optimizer = FlowAdam(groups, lr=0.02)
    stepped(optimizer, parameters, 0, 30)
    counts = [float(optimizer.state[p]["step"]) for p in parameters]
    assert counts == [30.0, 11.0, 11.0]


def test_a_step_of_flow_is_what_is_worked_out_by_hand() -> None:
    """Two weights, gradients 1 and 1 and then 0.5 and 3: of flow, for the change is sqrt(0.25 + 4).

    Clipped by coordinates to 1 the directions are 0.25 and 0.5; by the norm 1, each over sqrt(0.25 + 9), halved. First
    moments were 0.1 and 0.1: to half of them comes half the direction, cut to 0.5 of the moment's length by the limit.
    """
    for clip, directions in (("coordinate", (0.25, 0.5)), ("global", (0.25 / 9.25**0.5, 1.5 / 9.25**0.5))):
        weights = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
        settings: dict[str, Any] = {"clip": clip, "clip_value": 1.0, "warmup": 0, "moment_limit": 0.5}
        optimizer = FlowAdam(weights, lr=0.1, **settings)
        for first, second in ((1.0, 1.0), (0.5, 3.0)):
            before = [w.detach().clone() for w in weights]
            for w, g in zip(weights, (first, second), strict=True):
                w.grad = torch.full_like(w, g)
            optimizer.step()
        for w, old, u in zip(weights, before, directions, strict=True):
            kept = optimizer.state[w]
            assert float((old - w).detach()) == pytest.approx(0.1 * u, abs=1e-15)
            share = min(1.0, 0.5 * 0.1 / u)
            assert share < 1
            assert float(kept["first"]) == pytest.approx(0.5 * 0.1 + 0.5 * share * u, abs=1e-15)
            assert float(kept["second"]) == pytest.approx(0.001, abs=1e-15), "untouched"
            assert float(kept["step"]) == 1.0, "untouched"
            assert float(kept["gradient_norm"]) == pytest.approx(0.9 * 2**0.5 + 0.1 * 9.25**0.5, abs=EXACT)
            assert float(kept["change_norm"]) == pytest.approx(0.9 * 2**0.5 + 0.1 * 4.25**0.5, abs=EXACT)


@pytest.mark.parametrize("warmup", [0, 3, 10])
def test_the_steps_before_the_first_of_flow_are_one_more_than_the_warmup(warmup: int) -> None:
    """With gradients that change at every step; 11 as published. They are Adam's; the next (the control) is not."""
    settings = {"change_ratio": 0.0, "warmup": warmup}
    for steps, same in ((warmup + 1, True), (warmup + 2, False)):
        parameters = fresh()
        plain = stepped(Adam(parameters, lr=0.02), parameters, 0, steps)
        found, optimizer = run(steps, **settings)
        assert (max(distance(*pair) for pair in zip(found, plain, strict=True)) < SAME) == same
        assert {float(kept["step"]) for kept in optimizer.state.values()} == {float(warmup + 1)}


def test_a_gradient_that_vanishes_is_a_step_of_flow_that_goes_nowhere() -> None:
    """Norms of zero divide nothing. A gradient there (the control) moves."""
    for settings in SETTINGS.values():
        parameters = fresh()
        optimizer = FlowAdam(parameters, lr=0.02, **settings)
        before = stepped(optimizer, parameters, 0, 20)
        counts = [float(kept["step"]) for kept in optimizer.state.values()]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        if counts == [float(kept["step"]) for kept in optimizer.state.values()]:  # of flow
            assert all(torch.equal(p.detach(), w) for p, w in zip(parameters, before, strict=True))
        assert all(bool(value.isfinite().all()) for kept in optimizer.state.values() for value in kept.values())
        after = stepped(optimizer, parameters, 21, 22)
        assert min(distance(*pair) for pair in zip(after, before, strict=True)) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MIXED)
def test_a_run_goes_on_from_its_state_dictionary_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """Averages and the last gradient go along. Without the state (the control) the run is another."""
    parameters = [nn.Parameter(w.to(dtype)) for w in start()]
    optimizer = FlowAdam(parameters, lr=0.02, **SETTINGS[name])
    stepped(optimizer, parameters, 0, 17)
    copies, lost = copy.deepcopy(parameters), copy.deepcopy(parameters)
    loaded, without = FlowAdam(copies, lr=0.3), FlowAdam(lost, lr=0.02, **SETTINGS[name])
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    wanted = stepped(optimizer, parameters, 17, 40)
    assert all(torch.equal(a, b) for a, b in zip(stepped(loaded, copies, 17, 40), wanted, strict=True))
    bare = stepped(without, lost, 17, 40)
    assert max(distance(*pair) for pair in zip(bare, wanted, strict=True)) > APART


def test_the_clip_of_the_literal_rule_by_coordinates_and_by_the_norm() -> None:
    """What is within the limit keeps its bits."""
    g = torch.tensor([3.0, -4.0, 0.5], dtype=torch.float64)
    assert clip_gradient(g, 99.0, "coordinate").tolist() == [1.0, -1.0, 0.5]
    assert clip_gradient(g, joint_norm([g]), "global", 1.0).norm().item() == pytest.approx(1.0, abs=EXACT)
    assert torch.equal(clip_gradient(g, joint_norm([g]), "global"), g)
    assert not torch.equal(clip_gradient(g, 20.0, "global"), g)
