"""The update rules as optimizers: the literal ones on weights and on state, in groups, in stacks, saved and loaded."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from identities import APART, distance, draw
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from saggs.reference_flow_adam import FlowAdamState, step_flow_adam
from saggs.reference_optimizer import RULES as LITERAL
from saggs.reference_optimizer import Rule as Literal
from saggs.rules import RULES, Adam, Dial, Momentum, RMSProp, Rule, ScalarAdam, Shampoo

SAME = 1e-12
STEPS = 50
MATRIX_RULES = ("adafactor", "muon", "shampoo", "scaled_gd")

# The constants of the papers, and others.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in RULES),
    ("gd", {"momentum": 0.7}),
    ("adam", {"betas": (0.8, 0.99), "eps": 1e-3}),
    ("scalar_adam", {"betas": (0.0, 0.9), "eps": 0.1}),
    *(("dial", {"precond_power": p, "eps": 1e-3}) for p in (0.0, 0.25, 0.4, 0.5, 0.75, 1.0)),
    *(("dial", {"precond_power": p, "eps": 1e-3, "scalar": "geomean"}) for p in (0.0, 0.5)),
    ("rmsprop", {"rho": 0.5, "eps": 0.1}),
    ("signum", {"beta": 0.3}),
    ("lion", {"betas": (0.5, 0.7)}),
    ("adafactor", {"rho": 0.9, "eps": 0.1}),
    ("muon", {"momentum": 0.5, "eps": 0.1}),
    ("shampoo", {"exponent": -0.5, "damping": 0.1, "every": 7, "floor": 0.5}),
    ("shampoo", {"damping": 1e-3, "floor": 0.0}),
    ("scaled_gd", {"damping": 0.5}),
    ("flow_adam", {"clip": "global", "precond_power": 0.0}),
]
STACKED = [(name, own) for name, own in CASES if not own or name in ("dial", "flow_adam")]
LITERAL_RULES: Mapping[str, Literal] = {**LITERAL, "flow_adam": Literal(step_flow_adam, FlowAdamState, joint=True)}


def label(value: Any) -> str:
    """Of a case: the rule, and what its settings are."""
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def literal_of(name: str, settings: Mapping[str, Any]) -> tuple[Literal, dict[str, Any]]:
    """The literal rule and its settings: at p = 1 the dial is Adam, and its mean has another name."""
    own = dict(settings)
    if name == "gd" and own:
        return LITERAL_RULES["momentum"], own
    if name == "dial" and own.get("precond_power") == 1.0:
        return LITERAL_RULES["adam"], {"eps": own["eps"]}
    if name == "dial" and own.pop("scalar", "rms") == "geomean":
        own["mean"] = "geometric"
    return LITERAL_RULES[name], own


OTHER_NAMES = {"muon": {"momentum_buffer": "first"}}  # what a rule calls otherwise than its literal form


def shapes_of(name: str) -> list[list[tuple[int, ...]]]:
    """Of two groups: a pair of matrices, and of what the rule takes."""
    if name == "scaled_gd":
        return [[(6, 3), (5, 3)], [(4, 2), (7, 2)]]
    return [[(6, 3), (5, 3)], [(4, 2)]] if name in MATRIX_RULES else [[(6, 3), (5, 3)], [(4,), ()]]


def drawn(seed: int, shape: Sequence[int]) -> Tensor:
    """Standard normal entries in any shape, also of a number."""
    return draw(seed, 1, *shape)[0]


def gradient_of(weight: Tensor, step: int, index: int) -> Tensor:
    """Of a quadratic loss that changes at every step; small at some, so that averages see both."""
    size = 0.05 if step % 7 == 3 else 1.0
    return size * (drawn(100 * step + index, weight.shape) + 0.3 * weight.double() + 0.5).to(weight.dtype)


class Reference:
    """The literal rule on a list of weights, each with its rate and its group."""

    def __init__(
        self, rule: Literal, settings: Mapping[str, Any], weights: Sequence[Tensor], rates: Sequence[float],
        groups: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.rule, self.settings, self.weights, self.rates = rule, settings, list(weights), rates
        self.groups = groups or [0] * len(weights)
        self.states: list[Any] = [None] * len(weights)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step. Of a joint rule at rate 1 from zero the directions come, for each weight to follow at its rate."""
        if not self.rule.joint:
            for i, g in enumerate(gradients):
                self.weights[i], self.states[i] = self.rule.step(
                    self.weights[i], g, self.states[i], self.rates[i], **self.settings
                )
            return
        pairs = self.rule.state is None  # ScaledGD: by groups, and the weights themselves count
        for of_group in sorted(set(self.groups)) if pairs else [None]:
            own = [i for i, group in enumerate(self.groups) if of_group in (None, group)]
            weights, states = [self.weights[i] for i in own], [self.states[i] for i in own]
            starts = weights if pairs else [torch.zeros_like(w) for w in weights]
            rate = self.rates[own[0]] if pairs else 1.0
            moved, states = self.rule.step(
                starts, [gradients[i] for i in own], None if states[0] is None else states, rate, **self.settings
            )
            for i, w, state in zip(own, moved, states, strict=True):
                self.weights[i], self.states[i] = w if pairs else self.weights[i] + self.rates[i] * w, state


def compare_states(name: str, kept: Mapping[str, Tensor], literal: Any) -> None:
    """Entry by entry; every entry of the literal state is there, and nothing else."""
    held = {} if literal is None else {"momentum_buffer": literal} if isinstance(literal, Tensor) else vars(literal)
    wanted = {key: torch.as_tensor(value, dtype=torch.float64) for key, value in held.items() if value is not None}
    names = {key: OTHER_NAMES.get(name, {}).get(key, key) for key in kept}
    assert set(names.values()) == set(wanted)
    for key, value in kept.items():
        assert value.shape == wanted[names[key]].shape
        assert distance(value.double(), wanted[names[key]]) < SAME, key


@pytest.mark.parametrize(("name", "settings"), CASES, ids=label)
def test_fifty_steps_on_two_groups_are_those_of_the_literal_rule_on_weights_and_on_state(
    name: str, settings: dict[str, Any]
) -> None:
    """To 1e-12 and not to the bit: sums and products are taken in another order. One step less is far (the control)."""
    shapes = shapes_of(name)
    parameters = [[nn.Parameter(drawn(7 * k + i, s)) for i, s in enumerate(own)] for k, own in enumerate(shapes)]
    flat, owners = [p for own in parameters for p in own], [k for k, own in enumerate(parameters) for _ in own]
    groups: Any = [{"params": parameters[0]}, {"params": parameters[1], "lr": 0.003}]
    optimizer = RULES[name](groups, lr=0.02, **settings)
    starts, rates = [p.detach().clone() for p in flat], [(0.02, 0.003)[k] for k in owners]
    wanted = Reference(*literal_of(name, settings), starts, rates, owners)
    for step in range(STEPS):
        before = [p.detach().clone() for p in flat]
        for index, parameter in enumerate(flat):
            parameter.grad = gradient_of(wanted.weights[index], step, index)
        kept = [p.grad.clone() for p in flat if p.grad is not None]
        optimizer.step()
        wanted.step(kept)
        assert all(torch.equal(a, p.grad) for a, p in zip(kept, flat, strict=True) if p.grad is not None)
    for parameter, literal_weight, state, last in zip(flat, wanted.weights, wanted.states, before, strict=True):
        assert distance(parameter.detach(), literal_weight) < SAME
        assert distance(last, literal_weight) > 1e-6
        compare_states(name, optimizer.state.get(parameter, {}), state)


@pytest.mark.parametrize(("name", "settings"), STACKED, ids=label)
def test_every_member_of_a_stack_is_a_run_of_the_literal_rule_and_no_member_sees_another(
    name: str, settings: dict[str, Any]
) -> None:
    """Other gradients of one member change that member (the control) and no bit of the others."""
    cls, members, shapes = RULES[name], 4, shapes_of(name)[0] + ([] if name == "scaled_gd" else [(4, 2)])
    group, count = {**cls.DEFAULTS, **settings}, len(shapes)
    start = [torch.stack([drawn(50 * m + i, s) for m in range(members)]) for i, s in enumerate(shapes)]
    wanted = [Reference(*literal_of(name, settings), [w[m] for w in start], [0.02] * count) for m in range(members)]
    given = []
    for step in range(STEPS):
        of_each = [[gradient_of(w, step + 3 * m, 10 * m + i) for i, w in enumerate(r.weights)]
                   for m, r in enumerate(wanted)]  # fmt: skip
        for reference, own in zip(wanted, of_each, strict=True):
            reference.step(own)
        given.append([torch.stack(each) for each in zip(*of_each, strict=True)])

    def run(disturb: float) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        weights, states = start, [cls.begin(w, group) for w in start]
        for stacked in given:
            gradients = [g.clone() for g in stacked]
            for g in gradients:
                g[2, 0] += disturb
            directions = cls.advance(weights, gradients, states, [group] * count)
            weights = [w - 0.02 * u for w, u in zip(weights, directions, strict=True)]
        return weights, states

    (weights, states), (others, other_states) = run(0.0), run(-2.0)
    for m, reference in enumerate(wanted):
        for i, state in enumerate(states):
            assert distance(weights[i][m], reference.weights[i]) < SAME
            compare_states(name, {key: value[m] for key, value in state.items()}, reference.states[i])
    undisturbed = [0, 1, 3]
    assert all(torch.equal(a[undisturbed], b[undisturbed]) for a, b in zip(weights, others, strict=True))
    assert min(distance(a[2], b[2]) for a, b in zip(weights, others, strict=True)) > APART
    for state, other in zip(states, other_states, strict=True):
        assert all(torch.equal(value[undisturbed], other[key][undisturbed]) for key, value in state.items())


def trained(optimizer: Rule, parameters: Sequence[nn.Parameter], steps: int, first: int = 0) -> list[Tensor]:
    """Steps on gradients that depend on the weights; the weights at the end."""
    for step in range(first, first + steps):
        for index, p in enumerate(parameters):
            p.grad = gradient_of(p.detach(), step, index)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def fresh(name: str, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    shapes = [shape for own in shapes_of(name) for shape in own]
    return [nn.Parameter(drawn(i, s).to(dtype)) for i, s in enumerate(shapes)]


def grouped(name: str, parameters: Sequence[nn.Parameter], **settings: Any) -> Rule:
    """One group, or for ScaledGD one a pair."""
    cls = RULES[name]
    if name == "scaled_gd":
        return cls([{"params": parameters[i : i + 2]} for i in range(0, len(parameters), 2)], **settings)
    return cls(parameters, **settings)


@pytest.mark.parametrize("name", [name for name in RULES if name != "scaled_gd"])
def test_groups_of_one_rate_are_one_group_bit_for_bit_and_rates_are_their_own(name: str) -> None:
    """Also for the rules that look at all weights: they look across groups. With two rates (the control) it is not."""
    runs = []
    for rates in ((0.02, 0.02, 0.02), (0.02, 0.02, 0.01), None):
        parameters = fresh(name)
        groups = [{"params": [p], "lr": r} for p, r in zip(parameters, (rates or ())[: len(parameters)], strict=False)]
        rest = parameters[len(groups) :]
        held: Any = [*groups, *([{"params": rest, "lr": 0.02}] if rest else [])] if rates else parameters
        runs.append(trained(RULES[name](held, lr=0.02), parameters, 20))
    split, unequal, one = runs
    assert all(torch.equal(a, b) for a, b in zip(split, one, strict=True))
    assert distance(unequal[2], one[2]) > 1e-4


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (lambda p: Adam(p, lr=0.02), lambda p: torch.optim.Adam(p, lr=0.02)),
        (lambda p: Dial(p, lr=0.02, precond_power=1.0), lambda p: torch.optim.Adam(p, lr=0.02)),
        (lambda p: Adam(p, lr=0.02, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1)),
        (lambda p: RMSProp(p, lr=0.02), lambda p: torch.optim.RMSprop(p, lr=0.02, alpha=0.99)),
        (lambda p: Momentum(p, lr=0.02), lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)),
    ],
)
def test_rules_that_pytorch_has_too_are_its_own(
    own: Callable[[list[nn.Parameter]], Rule], theirs: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    """Decay is AdamW's, decoupled. Adam with another eps (the control) is another rule."""
    first, second, third = fresh("adam"), fresh("adam"), fresh("adam")
    runs = [trained(own(first), first, 30), trained(theirs(second), second, 30)]  # type: ignore[arg-type]
    control = trained(Adam(third, lr=0.02, eps=1e-2), third, 30)
    assert max(distance(a, b) for a, b in zip(*runs, strict=True)) < SAME
    assert max(distance(a, b) for a, b in zip(control, runs[1], strict=True)) > 1e-4


def test_the_dial_ends_where_it_says() -> None:
    """p = 1 is Adam bit for bit; p = 0 is scalar Adam with twice its eps, and scalar Adam itself only for eps = 0."""

    def end(make: Callable[[list[nn.Parameter]], Rule]) -> list[Tensor]:
        parameters = fresh("adam")
        return trained(make(parameters), parameters, 20)

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert same(end(lambda p: Dial(p, 0.02, precond_power=1.0, eps=0.1)), end(lambda p: Adam(p, 0.02, eps=0.1)))
    zero = end(lambda p: Dial(p, 0.02, precond_power=0.0, eps=0.1))
    assert same(zero, end(lambda p: ScalarAdam(p, 0.02, eps=0.2)))
    assert not same(zero, end(lambda p: ScalarAdam(p, 0.02, eps=0.1)))
    assert same(end(lambda p: Dial(p, 0.02, eps=0.0)), end(lambda p: ScalarAdam(p, 0.02, eps=0.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_a_state_dictionary_continues_the_run_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """Through `torch.save` of tensors and plain numbers alone. Without the state (the control) the run is another."""
    parameters = fresh(name, dtype)
    optimizer = grouped(name, parameters, lr=0.02)
    trained(optimizer, parameters, 23)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    copies, bare = copy.deepcopy(parameters), copy.deepcopy(parameters)
    loaded = grouped(name, copies, lr=0.5)
    loaded.load_state_dict(torch.load(stream, weights_only=True))
    wanted = trained(optimizer, parameters, 20, first=23)
    assert all(torch.equal(a, b) for a, b in zip(trained(loaded, copies, 20, first=23), wanted, strict=True))
    lost = trained(grouped(name, bare, lr=0.02), bare, 20, first=23)
    assert (max(distance(a, b) for a, b in zip(lost, wanted, strict=True)) > 1e-5) == bool(optimizer.state)
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            assert value.dtype == (torch.float64 if key == "step" else dtype)
            assert value.untyped_storage().nbytes() == value.nbytes, "a view of more would be saved with all of it"


class NoReading(TorchDispatchMode):
    """Raises where a tensor is read by the host: what would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"):
            raise AssertionError(f"{func.name()} in a step")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", RULES)
def test_no_step_reads_a_tensor(name: str) -> None:
    """Which a device would have to be waited for. A rule that does (the control) is caught."""
    parameters = fresh(name)
    optimizer = grouped(name, parameters, lr=0.02)
    with NoReading():
        trained(optimizer, parameters, 3)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoReading():
        float(parameters[0].detach().sum())


def test_corrections_are_taken_in_float64_for_weights_in_float32() -> None:
    """The first step of Adam is a sign, of size 1 to round-off; with 1 - b2 in float32 (the control) it is 6e-6 off."""
    p = nn.Parameter(torch.ones(5))
    p.grad = draw(0, 5).float()
    Adam([p], lr=1.0, eps=0.0).step()
    size = (1 - p.detach()).abs() - 1
    assert float(size.abs().max()) < 5e-7
    correction = 1 - torch.tensor(0.999) ** 1
    assert abs(float((correction / 0.001).sqrt()) - 1) > 5e-6


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    """Its gradients are those of the step. None without a closure."""
    p = nn.Parameter(draw(0, 3))
    optimizer = RULES["gd"]([p], lr=0.1)
    before = p.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == float(before.square().sum())
    assert distance(p.detach(), before * 0.8) < SAME
    assert optimizer.step() is None
    optimizer.zero_grad()
    assert optimizer.step() is None


@pytest.mark.parametrize("name", RULES)
def test_a_rate_as_a_tensor_is_that_rate_and_weights_without_gradients_stay(name: str) -> None:
    runs = []
    for rate in (0.02, torch.tensor(0.02, dtype=torch.float64), torch.tensor(0.04, dtype=torch.float64)):
        parameters = fresh(name)
        runs.append(trained(grouped(name, parameters, lr=rate, weight_decay=0.1), parameters, 10))
    assert max(distance(a, b) for a, b in zip(runs[0], runs[1], strict=True)) < SAME
    assert max(distance(a, b) for a, b in zip(runs[2], runs[1], strict=True)) > 1e-4
    if name == "scaled_gd":
        return
    parameters = fresh(name)
    optimizer = RULES[name](parameters, lr=0.02)
    parameters[0].grad = gradient_of(parameters[0].detach(), 0, 0)
    before = parameters[1].detach().clone()
    optimizer.step()
    assert torch.equal(parameters[1], before)
    assert parameters[1] not in optimizer.state


def test_shampoo_takes_roots_of_the_members_that_are_due_and_a_lost_member_loses_no_other() -> None:
    """Members may have begun at different steps, and one may have gone to infinity: what LAPACK would refuse."""
    group = {**Shampoo.DEFAULTS, "every": 3}
    w = torch.stack([draw(m, 4, 3) for m in range(3)])
    early, late = Shampoo.begin(w, group), Shampoo.begin(w[:1], group)
    for step in range(4):
        Shampoo.advance([w], [torch.stack([draw(10 * step + m, 4, 3) for m in range(3)])], [early], [group])
    Shampoo.advance([w[:1]], [draw(99, 1, 4, 3)], [late], [group])
    both = {key: torch.cat([early[key], late[key]]) for key in early}
    separate = [{key: value[m : m + 1].clone() for key, value in both.items()} for m in range(4)]
    weights = torch.cat([w, w[:1]])
    for step in range(7):
        g = torch.stack([draw(500 + 10 * step + m, 4, 3) for m in range(4)])
        if step >= 2:
            g[1] = torch.inf
        (together,) = Shampoo.advance([weights], [g], [both], [group])
        for m, state in enumerate(separate):
            (alone,) = Shampoo.advance([weights[m : m + 1]], [g[m : m + 1]], [state], [group])
            assert torch.equal(together[m].isnan(), alone[0].isnan())
            if m != 1:
                assert distance(together[m], alone[0]) < SAME
    assert bool(together[1].isnan().all())
    assert both["step"].tolist() == [11.0, 11.0, 11.0, 8.0]
