"""What is carried is what a run on the rescaled weights would hold, for every class there is, whatever its shapes."""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_optimizer
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models import Factors, differing, factor_pair, square_llama, train
from test_transport import CLASSES, run
from torch import Tensor, nn

import saggs
from saggs.pairs import named_parameters
from saggs.rehearsal import entries
from saggs.state_rules import DECAY, EPS, StateRules
from saggs.transport import Carrier, require_transportable

pytestmark = pytest.mark.filterwarnings("ignore")  # of classes that are carried approximately at their own eps
STEPS = 7
RATE = 1e-2


@dataclass
class Running:
    """Two factors, and an optimizer of one class with a param group for each."""

    model: Factors
    optimizer: torch.optim.Optimizer

    @property
    def weights(self) -> list[nn.Parameter]:
        return [self.model.left, self.model.right]

    def states(self) -> list[dict[str, Tensor]]:
        """Copies of the state tensors of both factors, by their path."""
        found = [entries(self.optimizer.state.get(p, {})) for p in self.weights]
        return [{n: v.clone() for n, v in each if isinstance(v, Tensor)} for each in found]

    def everything(self) -> dict[str, Tensor]:
        named = {f"{side}.{n}": v for side, each in enumerate(self.states()) for n, v in each.items()}
        return {**named, **{str(side): p.detach().clone() for side, p in enumerate(self.weights)}}

    def rules(self) -> list[StateRules]:
        return [Carrier(self.optimizer).rules(p) for p in self.weights]


def started(
    name: str, shape: Sequence[int], dtype: torch.dtype, factor: float = 1.0, rates: Sequence[float] = (1.0, 1.0)
) -> Running:
    """On (c A, B / c), each factor at a rate of its own. Without decay and, all but, without eps."""
    model = Factors(*shape)
    with torch.no_grad():
        model.left.mul_(0.5 * factor)
        model.right.mul_(0.5 / factor)
    model = model.to(dtype)
    torch.manual_seed(0)
    groups = [{"params": [p], "lr": RATE * r} for p, r in zip((model.left, model.right), rates, strict=True)]
    optimizer = CLASSES[name](groups, lr=RATE)  # type: ignore[call-arg]
    for group in optimizer.param_groups:
        for key, old in group.items():
            if DECAY.match(key) and isinstance(old, float):
                group[key] = 0.0
            elif EPS.match(key) and isinstance(old, float):
                group[key] = 1e-30
            elif EPS.match(key) and isinstance(old, tuple | list):
                group[key] = type(old)(1e-30 if isinstance(v, float) else v for v in old)
    return Running(model, optimizer)


def go_on(running: Running, steps: int, factor: float = 1.0, first: int = 0) -> list[Tensor]:
    """Steps on gradients laid down beforehand, as (c A, B / c) would have them; the last update of both."""
    before: list[Tensor] = []
    torch.manual_seed(first)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p, c in zip(running.weights, (factor, 1 / factor), strict=True):
            p.grad = ((torch.randn(p.shape, generator=generator, dtype=torch.float64) + 1) / c).to(p)
        before = [p.detach().clone() for p in running.weights]
        running.optimizer.step()
    running.optimizer.zero_grad()
    return [p.detach() - b for p, b in zip(running.weights, before, strict=True)]


def distance(value: Tensor, wanted: Tensor) -> float:
    size = float(wanted.double().norm())
    return float((value.double() - wanted.double()).norm()) / (size or 1.0)


def carried(name: str, shape: Sequence[int], dtype: torch.dtype) -> Running:
    """After some steps; or the test is skipped, where the class is refused or takes no such weights."""
    try:
        running = started(name, shape, dtype)
        reasons = [rules.refusal() or ("" if rules.exact else "not to rounding") for rules in running.rules()]
        go_on(running, STEPS)
    except Exception as error:
        pytest.skip(f"takes no such weights, or cannot be rehearsed ({type(error).__name__})")
    if any(reasons):
        pytest.skip(f"not carried exactly: {reasons}")
    return running


SHAPES = st.tuples(st.integers(3, 12), st.integers(2, 9)).map(lambda both: (both[0], both[0], both[1]))
PROFILE: dict[str, Any] = {"deadline": None, "derandomize": True, "database": None, "phases": [Phase.generate]}
# What the others hold to 1e-9 at any factor: 8, 11 or 24 bits inside; a basis, or a sign, of what is zero but for
# rounding.
POWERS_OF_TWO_ONLY = {
    "torch.optim.ASGD", "torch.optim.Muon",
    *(f"pytorch_optimizer.{name}" for name in ("AdaFactor", "Conda", "FlashAdamW", "Muon", "SCION", "SCIONLight",
                                               "SOAP")),
}  # fmt: skip
# Updates that are no power of the factor, bounds on rates, and rates that have gone into a state or a group.
NO_DEGREE = {
    "torch.optim.ASGD", "torch.optim.Rprop",
    *(f"pytorch_optimizer.{name}" for name in ("AdaBound", "AdaMod", "Amos", "DAdaptLion", "DiffGrad",
                                               "ScheduleFreeAdamW", "ScheduleFreeRAdam", "ScheduleFreeSGD")),
}  # fmt: skip
# Moved by their eps alone, which is all but zero here; masks that are laid down when an optimizer is built; and one
# that answers otherwise after its first steps than from the start.
LEFT_OUT = {
    "torch.optim.Adadelta",
    *(f"pytorch_optimizer.{name}" for name in ("AdaDelta", "AdaSmooth", "Aida", "ApolloDQN", "FOCUS", "LaProp",
                                               "SPAM")),
}  # fmt: skip
NAMES = sorted(CLASSES.keys() - LEFT_OUT)


@pytest.mark.parametrize("name", NAMES)
def test_a_carried_state_is_that_of_a_run_on_rescaled_weights_and_so_is_the_next_update(name: str) -> None:
    """To 1e-9 for any factor, and 1e-11 for powers of two; the control is the state as it was.

    States that are built from updates are compared at the rate at which weights keep their ratio, and so is the update.
    """

    @settings(max_examples=2, **PROFILE)
    @given(shape=SHAPES, k=st.sampled_from([6, -3, 5]), odd=st.booleans())
    def check(shape: tuple[int, int, int], k: int, odd: bool) -> None:
        running, straight = carried(name, shape, torch.float64), started(name, shape, torch.float64)
        odd = odd and name not in POWERS_OF_TWO_ONLY
        factor, tolerance = (1.37 * 2.0**k, 1e-9) if odd else (2.0**k, 1e-11)
        rules, alone = [Carrier(running.optimizer).rules(p) for p in running.weights], running.states()
        saggs.rescale(running.model, factor_pair(), factor, running.optimizer)
        rates = [c ** (1 - (r.update_degree or 0)) for c, r in zip((factor, 1 / factor), rules, strict=True)]
        runs = []
        for matched in (False, True):
            companion = started(name, shape, torch.float64, factor, rates if matched else (1.0, 1.0))
            go_on(companion, STEPS, factor)
            runs.append(companion.states())
        for side, (state, kept) in enumerate(zip(running.states(), alone, strict=True)):
            for entry, value in state.items():
                rule = rules[side].entries[entry]
                if not rule.moves or rule.empty or not value.any():
                    continue
                assert rule.degree is not None
                found = [distance(value, one[side][entry]) for one in runs[: 1 + (rule.degree > 0)]]
                assert min(found) < tolerance, (entry, found)
                untouched = distance(kept[entry], runs[found.index(min(found))][side][entry])
                assert (untouched > 1e-2) == (rule.degree != 0), (entry, untouched)
        if name in NO_DEGREE:
            return
        go_on(straight, STEPS)
        for group, rate in zip(running.optimizer.param_groups, rates, strict=True):
            group["lr"] *= rate
        updates = zip(
            go_on(running, 1, factor, STEPS), go_on(straight, 1, 1.0, STEPS), (factor, 1 / factor), strict=True
        )
        for update, plain, c in updates:
            assert distance(update, plain * c) < 1e-8, distance(update, plain * c)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_restores_every_bit_and_measuring_leaves_no_trace(name: str) -> None:
    """Weights in bfloat16, float32 or float64, by powers of two up to 2^24."""

    @settings(max_examples=2, **PROFILE)
    @given(
        shape=SHAPES,
        k=st.sampled_from([24, -24, 9, -17]),
        dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    )
    def check(shape: tuple[int, int, int], k: int, dtype: torch.dtype) -> None:
        running = carried(name, shape, dtype)
        before, random = running.everything(), torch.get_rng_state()
        counters = copy.deepcopy(
            [{k: v for k, v in g.items() if k != "params"} for g in running.optimizer.param_groups]
        )
        require_transportable(running.optimizer)
        assert differing(before, running.everything()) == []
        assert torch.equal(random, torch.get_rng_state())
        assert counters == [{k: v for k, v in g.items() if k != "params"} for g in running.optimizer.param_groups]
        try:
            saggs.rescale(running.model, factor_pair(), 2.0**k, running.optimizer)
        except ValueError as error:
            if not re.search("over- or underflows|is another one than in a rehearsal", str(error)):
                raise
        else:
            assert len(differing(before, running.everything())) >= 2
            saggs.rescale(running.model, factor_pair(), 2.0**-k, running.optimizer)
        assert differing(before, running.everything()) == []

    check()


# --- more ways to hold an optimizer -----------------------------------------------------------------------------------


def test_a_state_loaded_into_an_optimizer_of_another_order_stays_with_its_weight() -> None:
    """Queries and keys have one shape here, so that a swap would pass unseen."""
    model = square_llama()
    first = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, first, 2)
    parameters = list(model.parameters())
    backwards = torch.optim.AdamW(parameters[::-1], lr=1e-3)
    saved, count = first.state_dict(), len(parameters)
    backwards.load_state_dict({**saved, "state": {count - 1 - i: v for i, v in saved["state"].items()}})
    pair = saggs.find_pairs(model, ["query_key"])[0]
    named = named_parameters(model)
    q, k = named[pair.left[0].name], named[pair.right[0].name]
    before = {p: backwards.state[p]["exp_avg"].clone() for p in (q, k)}
    assert q.shape == k.shape
    assert torch.equal(before[q], first.state[q]["exp_avg"])
    saggs.rescale(model, pair, 4.0, backwards)
    assert torch.equal(backwards.state[q]["exp_avg"], before[q] / 4)
    assert torch.equal(backwards.state[k]["exp_avg"], before[k] * 4)
    assert not torch.equal(before[k] / 4, backwards.state[q]["exp_avg"])


def test_groups_with_settings_of_their_own_keep_states_of_their_own() -> None:
    """A largest second moment in one group only; another rate, eps and betas in the other."""
    model = Factors()
    groups: list[dict[str, Any]] = [
        {"params": [model.left], "amsgrad": True, "lr": 1e-1},
        {"params": [model.right], "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.3},
    ]
    running = Running(model, torch.optim.AdamW(groups, lr=1e-2))
    go_on(running, 3)
    left, right = running.states()
    assert ("max_exp_avg_sq" in left, "max_exp_avg_sq" in right) == (True, False)
    saggs.rescale(model, factor_pair(), 8.0, running.optimizer)
    powers = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "step": 0}
    for before, after, factor in zip((left, right), running.states(), (1 / 8, 8.0), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(after[n], v * factor ** powers[n]) for n, v in before.items())


@pytest.mark.parametrize("option", ["capturable", "fused", "foreach", "maximize"])
def test_a_state_that_was_made_on_another_device_is_carried_whatever_its_group_says(option: str) -> None:
    """`capturable` cannot be run without an accelerator; a checkpoint that says so can be carried."""
    running = Running(Factors(), torch.optim.Adam([nn.Parameter(torch.zeros(1))]))
    running.optimizer = torch.optim.Adam(running.model.parameters(), lr=1e-2)
    go_on(running, 2)
    running.optimizer.param_groups[0][option] = True
    before = running.states()[0]
    saggs.rescale(running.model, factor_pair(), 4.0, running.optimizer)
    after = running.states()[0]
    assert torch.equal(after["exp_avg"], before["exp_avg"] / 4)
    assert torch.equal(after["step"], before["step"])
    assert running.optimizer.param_groups[0][option] is True


@pytest.mark.parametrize("held", [True, False])
def test_a_frozen_weight_moves_without_a_state(held: bool) -> None:
    """Without a gradient, in the optimizer or beside it: the weight is rescaled, and nothing is invented for it."""
    model = Factors()
    model.right.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.left, model.right] if held else [model.left], lr=1e-2)
    for p, _ in ((model.left, 0), (model.left, 1)):
        p.grad = torch.ones_like(p)
        optimizer.step()
    weight, moment = model.right.clone(), optimizer.state[model.left]["exp_avg"].clone()
    saggs.rescale(model, factor_pair(), 2.0, optimizer)
    assert torch.equal(model.right, weight / 2)
    assert torch.equal(optimizer.state[model.left]["exp_avg"], moment / 2)
    assert model.right not in optimizer.state


def test_before_the_first_step_weights_move_alone_and_the_run_is_that_of_the_rescaled_start() -> None:
    model, other = Factors(), Factors()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saggs.rescale(model, factor_pair(), 8.0, optimizer)
    assert not optimizer.state
    saggs.rescale(other, factor_pair(), 8.0)
    runs = [Running(model, optimizer), Running(other, torch.optim.AdamW(other.parameters(), lr=1e-2))]
    for running in runs:
        go_on(running, 3, 8.0)
    assert differing(runs[0].everything(), runs[1].everything()) == []


class _Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.itself = self


class Keeping(torch.optim.Optimizer):
    """Keeps its gradients in what is neither a dictionary nor a list."""

    def __init__(self, params: Any, keep: Callable[[Tensor], Any]) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.keep = keep

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["kept"] = self.keep(p.grad.clone())
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("keep", [lambda g: deque([g], 3), _Box, lambda g: {"deep": [_Box(g)]}, lambda g: (g,)])
def test_a_state_is_found_in_queues_and_objects_too(keep: Callable[[Tensor], Any]) -> None:
    model = Factors()
    running = Running(model, Keeping(model.parameters(), keep))
    go_on(running, 2)
    (before,) = running.states()[0].values()
    saggs.rescale(model, factor_pair(), 4.0, running.optimizer)
    (after,) = running.states()[0].values()
    assert torch.equal(after, before / 4)
    torch.testing.assert_close(before, gradient_at(1, model.left), rtol=0, atol=0)


def gradient_at(step: int, weight: Tensor) -> Tensor:
    """What `go_on` lays down for the left factor."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(weight.shape, generator=generator, dtype=torch.float64) + 1).to(weight)


def test_a_queue_of_gradients_is_carried() -> None:
    """AdaShift uses gradients of ten steps ago, which it keeps in a queue."""
    model = Factors()
    running = Running(model, pytorch_optimizer.AdaShift(model.parameters(), lr=1e-2))
    go_on(running, 12)
    queue = [g.clone() for g in running.optimizer.state[model.left]["grad_queue"]]
    saggs.rescale(model, factor_pair(), 4.0, running.optimizer)
    moved = running.optimizer.state[model.left]["grad_queue"]
    assert len(queue) > 1
    assert all(torch.equal(a, b / 4) for a, b in zip(moved, queue, strict=True))


def test_a_schedule_goes_on_from_where_it_was() -> None:
    """Its step is wrapped, its rate is zero at warm-up; the measurement turns neither its counter nor its rate."""
    model = Factors()
    optimizer = pytorch_optimizer.Lion(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    running, calls = Running(model, optimizer), []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    go_on(running, 2)
    before, kept = {k: v for k, v in schedule.state_dict().items() if k != "lr_lambdas"}, optimizer.state[model.left]
    moment = kept["exp_avg"].clone()
    saggs.rescale(model, factor_pair(), 2.0, optimizer)
    assert torch.equal(kept["exp_avg"], moment / 2)
    assert {k: v for k, v in schedule.state_dict().items() if k != "lr_lambdas"} == before
    assert calls == ["post"] * 2
    assert optimizer.param_groups[0]["lr"] == 0
    assert Carrier(optimizer).rules(model.left).update_degree == 0, "measured at a rate that is not zero"
    go_on(running, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize("steps", [0, 3, 8])
def test_what_is_measured_does_not_depend_on_when(steps: int) -> None:
    """Ranger counts its steps in the param group, and synchronises every sixth: a copy begins at step 0 anyway."""
    model = Factors().double()
    optimizer = pytorch_optimizer.Ranger(model.parameters(), lr=1e-2)
    run(model, optimizer, steps)
    assert "'slow_buffer'" in Carrier(optimizer).rules(model.left).refusal()
