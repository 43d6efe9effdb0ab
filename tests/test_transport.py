"""An optimizer's state carried along: every class there is, exactly or refused; and every way to hold an optimizer."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Factors, differing, everything, factor_pair, relative_distance, snapshot, tiny_gpt2, tokens, train
from torch import Tensor, nn

import saggs
from saggs import BALANCED_KINDS, ParameterSlice, ScalePair
from saggs.transport import Carrier

# Seconds for a step of a matrix; no tensor of its own; gradients with a graph.
LEFT_OUT = {"SpectralSphere", "Optimizer", "BaseOptimizer", "SparseAdam"}


def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Every class of both libraries that is built from parameters and a learning rate alone."""
    found = {}
    for library in (torch.optim, pytorch_optimizer):
        for name, cls in vars(library).items():
            if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)) or name in LEFT_OUT:
                continue
            try:
                cls([nn.Parameter(torch.zeros(3, 2))], lr=1e-2)  # type: ignore[call-arg]
            except Exception:
                continue
            found[f"{library.__name__}.{name}"] = cls
    return found


CLASSES = _classes()


def gradients_of(seed: int, model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) + 1 for p in model.parameters()]


def run(model: Factors, optimizer: torch.optim.Optimizer, steps: int, factor: float = 1.0, first: int = 0) -> None:
    """Steps on gradients laid down beforehand, divided and multiplied as those of the rescaled factors are."""
    scale = {id(model.left): 1 / factor, id(model.right): factor}
    for step in range(first, first + steps):
        for p, g in zip(model.parameters(), gradients_of(step, model), strict=True):
            p.grad = (g * scale.get(id(p), 1.0)).to(p)
        optimizer.step(lambda: 1.0) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in everything(model, optimizer)}


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_there_is_is_carried_exactly_or_refused_by_name(name: str) -> None:
    """By 2^5 and back every bit is there again; in between the states are those of a run on the rescaled factors.

    That is so for states built from gradients; those that move like weights follow the updates, whose degree is another
    matter. A refused optimizer has been left as it was.
    """
    torch.manual_seed(0)
    model, other = Factors().double(), Factors().double()
    optimizer = CLASSES[name](model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    try:
        run(model, optimizer, 7)
    except Exception as error:
        pytest.skip(f"its step wants more than gradients ({type(error).__name__})")
    before = state_of(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            saggs.rescale(model, factor_pair(), 32.0, optimizer)
        except ValueError as error:
            refusal = str(error)
        else:
            refusal = ""
        if refusal:
            assert re.search(rf"cannot carry the state of \S+\.{CLASSES[name].__name__} ", refusal)
            assert differing(before, state_of(model, optimizer)) == []
            return
        saggs.rescale(other, factor_pair(), 32.0)
        companion = CLASSES[name](other.parameters(), lr=1e-2)  # type: ignore[call-arg]
        torch.manual_seed(0)
        run(other, companion, 7, factor=32.0)
        there, carrier = state_of(other, companion), Carrier(optimizer)
        for side, parameter in (("left", model.left), ("right", model.right)):
            rules = carrier.rules(parameter)
            for entry, rule in rules.entries.items():
                key = f"{side}.{entry}"
                if rule.moves and rule.degree is not None and rule.degree <= 0 and key in there and there[key].any():
                    here = state_of(model, optimizer)[key]
                    assert relative_distance(here, there[key]) < max(1e-9, 10 * rules.inexact), key
        saggs.rescale(model, factor_pair(), 1 / 32.0, optimizer)
    assert differing(before, state_of(model, optimizer)) == []


def test_most_of_them_are_carried() -> None:
    """The control of the test before: refusing everything would pass it."""
    carried = 0
    for cls in CLASSES.values():
        model = Factors().double()
        try:
            saggs.transport.require_transportable(cls(model.parameters(), lr=1e-2))  # type: ignore[call-arg]
        except ValueError:
            continue
        carried += 1
    assert carried >= 85, f"{carried} of {len(CLASSES)}"


EXACT: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=0.0, weight_decay=0.0),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "lion": lambda p: pytorch_optimizer.Lion(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon(p, lr=1e-2, weight_decay=0.0),
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    k=st.integers(-24, 24),
    rows=st.integers(2, 20),
    columns=st.integers(2, 20),
    rank=st.integers(2, 9),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    name=st.sampled_from(sorted(EXACT)),
)
def test_there_and_back_restores_every_bit(
    k: int, rows: int, columns: int, rank: int, dtype: torch.dtype, name: str
) -> None:
    model = Factors(rows, columns, rank).to(dtype)
    optimizer = EXACT[name](model.parameters())
    run(model, optimizer, 3)
    before = state_of(model, optimizer)
    saggs.rescale(model, factor_pair(), 2.0**k, optimizer)
    assert (differing(before, state_of(model, optimizer)) == []) == (k == 0)
    saggs.rescale(model, factor_pair(), 2.0**-k, optimizer)
    assert differing(before, state_of(model, optimizer)) == []


@pytest.mark.parametrize("k", [-6, 5])
@pytest.mark.parametrize("name", EXACT)
def test_a_carried_state_is_the_companions_to_the_bit_and_so_are_the_updates_that_follow(name: str, k: int) -> None:
    """The update of c W is c^e times that of W: -1 for SGD, 0 for the others. The control is a state left alone."""
    degree = -1 if name == "sgd" else 0
    model = Factors().double()
    optimizer = EXACT[name](model.parameters())
    run(model, optimizer, 6)
    other, alone = copy.deepcopy(model), copy.deepcopy(model)
    steps = []
    for one, carry, factor in ((model, True, 1.0), (other, True, 2.0**k), (alone, False, 2.0**k)):
        its = EXACT[name](one.parameters())
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if one is not model:
            saggs.rescale(one, factor_pair(), factor, its if carry else None)
        start = {n: p.detach().clone() for n, p in one.named_parameters()}
        run(one, its, 4, factor=factor, first=6)
        steps.append({n: p.detach() - start[n] for n, p in one.named_parameters()})
    for side, factor in (("left", 2.0**k), ("right", 2.0**-k)):
        wanted = steps[0][side] * factor**degree
        assert relative_distance(steps[1][side], wanted) < 1e-10
        assert relative_distance(steps[2][side], wanted) > 1e-3


# --- every way to hold an optimizer -----------------------------------------------------------------------------------


def test_a_fused_matrix_is_carried_slice_by_slice_and_refused_where_a_state_sees_all_of_it() -> None:
    """Queries and keys are thirds of GPT-2's c_attn: the values' moments keep their bits. Adafactor has no thirds."""
    model = tiny_gpt2()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 2)
    pair = next(p for p in saggs.find_pairs(model, BALANCED_KINDS) if p.kind == "query_key")
    weight = model.get_parameter(pair.left[0].name)
    before = optimizer.state[weight]["exp_avg"].clone()
    saggs.rescale(model, pair, 8.0, optimizer)
    after = optimizer.state[weight]["exp_avg"]
    for parts, factor in ((pair.left, 1 / 8), (pair.right, 8.0)):
        (own,) = [p for p in parts if p.name == pair.left[0].name]
        assert torch.equal(own.view(after), own.view(before) * factor)
    width = weight.shape[0]
    assert torch.equal(after[:, 2 * width :], before[:, 2 * width :])
    for build in (torch.optim.Adafactor, pytorch_optimizer.SM3, pytorch_optimizer.SOAP):
        optimizer = build(model.parameters(), lr=1e-3)
        kept = snapshot(model)
        with pytest.raises(ValueError, match=f"{build.__name__}.*sees whole tensors"):
            saggs.rescale(model, pair, 8.0, optimizer)
        assert differing(kept, snapshot(model)) == []


def test_a_whole_matrix_is_carried_by_factored_second_moments_too() -> None:
    model = Factors().double()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    run(model, optimizer, 3)
    row = optimizer.state[model.left]["row_var"].clone()
    saggs.rescale(model, factor_pair(), 4.0, optimizer)
    assert torch.equal(optimizer.state[model.left]["row_var"], row / 16)
    half = ScalePair("value_output", "", (ParameterSlice("left", ((0, 2), None), 1),),
                     (ParameterSlice("right", (None, None), -1),))  # fmt: skip
    with pytest.raises(ValueError, match="'row_var' sees whole tensors"):
        saggs.rescale(model, half, 4.0, optimizer)


def test_groups_have_rules_of_their_own_and_several_optimizers_are_one() -> None:
    """Momentum in one group and none in another; AdamW for one side and SGD for the other."""
    model = Factors().double()
    groups = [{"params": [model.left], "momentum": 0.9}, {"params": [model.right], "momentum": 0.0, "lr": 1e-3}]
    one = torch.optim.SGD(groups, lr=1e-2)
    run(model, one, 2)
    kept = one.state[model.left]["momentum_buffer"].clone()
    saggs.rescale(model, factor_pair(), 2.0, one)
    assert torch.equal(one.state[model.left]["momentum_buffer"], kept / 2)
    two = [torch.optim.AdamW([model.left], lr=1e-3), torch.optim.SGD([model.right], lr=1e-2, momentum=0.9)]
    for p, optimizer in ((model.left, two[0]), (model.right, two[1])):
        p.grad = torch.ones_like(p)
        optimizer.step()
    first, second = two[0].state[model.left]["exp_avg_sq"].clone(), two[1].state[model.right]["momentum_buffer"].clone()
    saggs.rescale(model, factor_pair(), 2.0, two)
    assert torch.equal(two[0].state[model.left]["exp_avg_sq"], first / 4)
    assert torch.equal(two[1].state[model.right]["momentum_buffer"], second * 2)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}, {"differentiable": False}])
def test_variants_of_one_rule_are_carried_alike(options: dict[str, Any]) -> None:
    model = Factors()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    run(model, optimizer, 3)
    before = state_of(model, optimizer)
    saggs.rescale(model, factor_pair(), 8.0, optimizer)
    after = state_of(model, optimizer)
    powers = {"exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2, "step": 0}
    assert {key.partition(".")[2] for key in after if "." in key} <= powers.keys()
    for key, value in after.items():
        side, _, entry = key.partition(".")
        factor = 8.0 if side == "left" else 1 / 8
        assert torch.equal(value, before[key] * factor ** powers.get(entry, 1)), key


def test_float32_moments_of_bfloat16_weights_stay_float32() -> None:
    model = Factors().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run(model, optimizer, 2)
    for p in model.parameters():
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].float()
    before = optimizer.state[model.left]["exp_avg"].clone()
    saggs.rescale(model, factor_pair(), 4.0, optimizer)
    assert optimizer.state[model.left]["exp_avg"].dtype == torch.float32
    assert torch.equal(optimizer.state[model.left]["exp_avg"], before / 4)


def test_a_scheduler_at_rate_zero_a_subclass_and_hooks_do_not_disturb_the_measurement() -> None:
    """And it leaves no trace: state, settings, hooks and random numbers are what they were."""

    class Mine(torch.optim.AdamW):
        pass

    model = Factors()
    optimizer = Mine(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(5)
    random, groups = torch.get_rng_state(), copy.deepcopy([{k: v for k, v in g.items() if k != "params"}
                                                           for g in optimizer.param_groups])  # fmt: skip
    saggs.rescale(model, factor_pair(), 2.0, optimizer)
    assert calls == []
    assert torch.equal(random, torch.get_rng_state())
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert not optimizer.state
    assert schedule.last_epoch == 0
    run(model, optimizer, 2)
    kept = optimizer.state[model.left]["exp_avg"].clone()
    saggs.rescale(model, factor_pair(), 2.0, optimizer)
    assert torch.equal(optimizer.state[model.left]["exp_avg"], kept / 2)
    assert len(calls) == 2


def test_a_negative_factor_is_refused_where_a_state_is_a_size() -> None:
    """Adamax keeps a largest |g|: it would turn negative. Adam's second moment is even, its first one odd: fine."""
    model = Factors().double()
    for build, allowed in ((torch.optim.Adamax, False), (torch.optim.Adam, True)):
        optimizer = build(model.parameters(), lr=1e-2)
        run(model, optimizer, 2)
        before = state_of(model, optimizer)
        if allowed:
            saggs.rescale(model, factor_pair(), -2.0, optimizer)
            assert torch.equal(optimizer.state[model.left]["exp_avg"], before["left.exp_avg"] / -2)
        else:
            with pytest.raises(ValueError, match=r"'exp_inf'.*cannot follow a negative factor"):
                saggs.rescale(model, factor_pair(), -2.0, optimizer)
            assert differing(before, state_of(model, optimizer)) == []


def test_a_factored_state_that_begins_at_larger_sizes_is_found_out() -> None:
    """CAME and AdaFactor factor from some size on: a matrix that is larger than the rehearsal's is measured again."""

    class Late(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    factored = p.shape[0] >= 128
                    value = p.grad.square().mean(1) if factored else p.grad.square()
                    self.state[p].setdefault("v", torch.zeros_like(value)).add_(value)

    for rows, whole in ((20, True), (130, False)):
        model = Factors(rows, 6, 5).double()
        optimizer = Late(model.parameters())
        run(model, optimizer, 2)
        kept = optimizer.state[model.left]["v"].clone()
        saggs.rescale(model, factor_pair(), 2.0, optimizer)
        assert torch.equal(optimizer.state[model.left]["v"], kept / 4)
        half = ScalePair("value_output", "", (ParameterSlice("left", ((0, 2), None), 1),),
                         (ParameterSlice("right", (None, None), -1),))  # fmt: skip
        if whole:
            saggs.rescale(model, half, 2.0, optimizer)
        else:
            with pytest.raises(ValueError, match="sees whole tensors"):
                saggs.rescale(model, half, 2.0, optimizer)


def test_training_goes_on_with_an_optimizer_nobody_listed() -> None:
    """A Rebalancer with Lion and with schedule-free AdamW on a small GPT-2: finite, and the pairs stay balanced."""
    for build in (pytorch_optimizer.Lion, pytorch_optimizer.ScheduleFreeAdamW):
        model = tiny_gpt2()
        optimizer = build(model.parameters(), lr=1e-3)
        pairs = saggs.find_pairs(model, BALANCED_KINDS)
        rebalancer = saggs.Rebalancer(model, optimizer, pairs, every=1)
        train(model, optimizer, 3, before=rebalancer.step)
        rebalancer.rebalance()
        assert saggs.log2_norm_ratios(model, pairs).abs().max() < 1e-5
        assert torch.isfinite(model(input_ids=tokens(1)).logits).all()


# --- refusals ---------------------------------------------------------------------------------------------------------


class Mixing(torch.optim.Optimizer):
    """Keeps the sum of weight and gradient: no power of a factor carries that."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("mixed", torch.zeros_like(p))
                kept.mul_(0.9).add_(p + p.grad)
                p.sub_(kept, alpha=group["lr"])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Mixing, "Mixing.*its state 'mixed' answers with no whole power"),
        (torch.optim.Adadelta, "Adadelta.*its state 'acc_delta' answers with no whole power"),
        (torch.optim.LBFGS, "LBFGS"),
    ],
)
def test_an_optimizer_that_cannot_be_carried_is_refused_by_name_and_nothing_is_changed(build: Any, reason: str) -> None:
    """A guess would be worse than none. Weights alone may still be moved."""
    model = Factors()
    optimizer = build(model.parameters())
    before = snapshot(model)
    for attempt in (
        lambda: saggs.rescale(model, factor_pair(), 2.0, optimizer),
        lambda: saggs.balance(model, [factor_pair()], optimizer),
        lambda: saggs.Rebalancer(model, optimizer, [factor_pair()]),
    ):
        with pytest.raises(ValueError, match=rf"cannot carry the state of .*{reason}.*transport=False"):
            attempt()
    assert differing(before, snapshot(model)) == []
    assert saggs.Rebalancer(model, optimizer, [factor_pair()], transport=False).step()


def test_an_unknown_state_entry_is_refused_by_name() -> None:
    model = Factors()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.left] = {"momentum_buffer": torch.ones_like(model.left), "shadow": torch.ones(1)}
    with pytest.raises(
        ValueError, match=r"SGD.*its state 'shadow' is another one than in a rehearsal \(.*momentum_buf"
    ):
        saggs.rescale(model, factor_pair(), 2.0, optimizer)
