"""Canonical restarts: equivalent training states become one, and go on as one run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    Factors,
    differing,
    everything,
    factor_pair,
    relative_distance,
    snapshot,
    tiny_gpt2,
    tiny_llama,
    tokens,
)
from pytorch_optimizer import Lion
from torch import Tensor, nn

import saggs
from saggs import BALANCED_KINDS, ScalePair
from saggs.lines import Moving
from saggs.pairs import named_parameters
from saggs.plan import ScalingPlan
from saggs.precision import float64_everywhere
from saggs.reference_rules import newton_schulz

Optimizers = list[torch.optim.Optimizer]
Build = Callable[[nn.Module], Optimizers]


class Muon64(torch.optim.Optimizer):
    """Muon with its iteration in the precision of the weights."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(newton_schulz(momentum, eps=0.0).to(p), alpha=group["lr"])


def _with_adamw(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Build:
    """One optimizer for the matrices inside the blocks, AdamW for the rest."""

    def built(model: nn.Module) -> Optimizers:
        inner = {n for n, p in model.named_parameters() if p.dim() == 2 and (".h." in n or ".layers." in n)}
        matrices = [p for n, p in model.named_parameters() if n in inner]
        rest = [p for n, p in model.named_parameters() if n not in inner]
        return [build(matrices), torch.optim.AdamW(rest, lr=3e-3)]

    return built


OPTIMIZERS: dict[str, Build] = {
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=3e-3, weight_decay=0.1)],
    "sgd_momentum": lambda m: [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9)],
    "lion": lambda m: [Lion(m.parameters(), lr=1e-3, weight_decay=0.1)],
    "muon_and_adamw": _with_adamw(lambda p: torch.optim.Muon(p, lr=0.01)),
}
IN_FLOAT64: dict[str, Build] = {
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-30, weight_decay=0.1)],
    "sgd_momentum": OPTIMIZERS["sgd_momentum"],
    "lion": OPTIMIZERS["lion"],
    "muon64_and_adamw": _with_adamw(Muon64),
}
MODELS: dict[str, Callable[[], Any]] = {"gpt2": tiny_gpt2, "llama": tiny_llama}


def go_on(model: nn.Module, optimizers: Optimizers, steps: int, first_seed: int = 100) -> None:
    for step in range(steps):
        ids = tokens(first_seed + step)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def warm(model_name: str, build: Build, double: bool = False) -> tuple[Any, Optimizers]:
    model = MODELS[model_name]().double() if double else MODELS[model_name]()
    optimizers = build(model)
    go_on(model, optimizers, 5)
    return model, optimizers


def state_of(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    return {name: tensor for one in optimizers for name, tensor in everything(model, one)}


def powers_of_two(count: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [2.0 ** draw.choice([-5, -3, -1, 2, 4]) for _ in range(count)]


def rescaled(
    model: Any, optimizers: Optimizers, build: Build, pairs: list[ScalePair], factors: list[float], carry: bool = True
) -> tuple[Any, Optimizers]:
    """The state once more, rescaled pair by pair. (Optimizers are built anew: not every class survives a deep copy.)"""
    other = copy.deepcopy(model)
    others = build(other)
    for new, old in zip(others, optimizers, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    for pair, factor in zip(pairs, factors, strict=True):
        saggs.rescale(other, pair, factor, others if carry else None)
    return other, others


def distance_of(first: nn.Module, second: nn.Module) -> float:
    """The largest relative distance of a weight; attention biases hold a key bias, which does nothing and is noise."""
    there = named_parameters(second)
    return max(relative_distance(p, there[n]) for n, p in named_parameters(first).items() if "attn.bias" not in n)


@pytest.mark.parametrize("granularity", ["matrix", "head"])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_states_that_powers_of_two_lie_between_go_on_bit_for_bit(
    model_name: str, optimizer_name: str, granularity: Any
) -> None:
    """Two hundred steps; weights and every state. The control: before the canonical form hardly a tensor agrees."""
    model, optimizers = warm(model_name, OPTIMIZERS[optimizer_name])
    pairs = saggs.find_pairs(model, BALANCED_KINDS, granularity)
    other, others = rescaled(model, optimizers, OPTIMIZERS[optimizer_name], pairs, powers_of_two(len(pairs)))
    assert len(differing(state_of(model, optimizers), state_of(other, others))) >= len(pairs) // 4
    saggs.canonicalize(model, optimizers, pairs)
    saggs.canonicalize(other, others, pairs)
    assert differing(state_of(model, optimizers), state_of(other, others)) == []
    go_on(model, optimizers, 200, first_seed=900)
    go_on(other, others, 200, first_seed=900)
    assert differing(state_of(model, optimizers), state_of(other, others)) == []


@pytest.mark.parametrize("optimizer_name", IN_FLOAT64)
@pytest.mark.parametrize("model_name", MODELS)
def test_states_that_any_factors_lie_between_go_on_to_rounding(model_name: str, optimizer_name: str) -> None:
    with float64_everywhere():
        model, optimizers = warm(model_name, IN_FLOAT64[optimizer_name], double=True)
        pairs = saggs.find_pairs(model, BALANCED_KINDS)
        draw = random.Random(1)
        factors = [10 ** draw.uniform(-1.5, 1.5) for _ in pairs]
        other, others = rescaled(model, optimizers, IN_FLOAT64[optimizer_name], pairs, factors)
        saggs.canonicalize(model, optimizers, pairs)
        saggs.canonicalize(other, others, pairs)
        go_on(model, optimizers, 30, first_seed=900)
        go_on(other, others, 30, first_seed=900)
        assert distance_of(model, other) < 1e-10


def test_pytorchs_muon_goes_on_to_the_rounding_of_its_bfloat16_iteration() -> None:
    """Its Newton-Schulz iteration rounds to eight bits: by other factors than powers of two the runs part a little."""
    with float64_everywhere():
        model, optimizers = warm("llama", OPTIMIZERS["muon_and_adamw"], double=True)
        pairs = saggs.find_pairs(model, BALANCED_KINDS)
        other, others = rescaled(model, optimizers, OPTIMIZERS["muon_and_adamw"], pairs, [3.7] * len(pairs))
        saggs.canonicalize(model, optimizers, pairs)
        saggs.canonicalize(other, others, pairs)
        assert distance_of(model, other) < 1e-14
        go_on(model, optimizers, 10, first_seed=900)
        go_on(other, others, 10, first_seed=900)
        assert distance_of(model, other) < 1e-3


def _moved_like_weights(model: nn.Module, optimizers: Optimizers, pairs: list[ScalePair], factors: list[float]) -> None:
    """Multiply moments as their weights were: what transport is not."""
    parameters, plan = named_parameters(model), ScalingPlan(pairs, named_parameters(model))
    for optimizer in optimizers:
        moving = [
            Moving(name, value, 1, False)
            for name in plan.weighed
            for value in optimizer.state.get(parameters[name], {}).values()
            if isinstance(value, Tensor) and value.shape == parameters[name].shape
        ]
        with torch.no_grad():
            plan.multiply(moving, plan.powers(moving, torch.tensor(factors, dtype=torch.float64)))


@pytest.mark.parametrize("wrong", ["no_transport", "no_balancing", "like_weights"])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_what_is_left_out_of_a_canonical_restart_is_seen(optimizer_name: str, wrong: str) -> None:
    """Without carrying, without balancing, with moments moved like weights: the runs part by more than 1e-3."""
    model, optimizers = warm("llama", OPTIMIZERS[optimizer_name])
    pairs = saggs.find_pairs(model, BALANCED_KINDS)
    factors = [32.0] * len(pairs)
    other, others = rescaled(
        model, optimizers, OPTIMIZERS[optimizer_name], pairs, factors, carry=wrong == "no_balancing"
    )
    if wrong == "like_weights":
        _moved_like_weights(other, others, pairs, factors)
    saggs.canonicalize(model, optimizers, pairs)
    if wrong != "no_balancing":
        saggs.canonicalize(other, others, pairs)
    go_on(model, optimizers, 20, first_seed=900)
    go_on(other, others, 20, first_seed=900)
    for one in (model, other):
        saggs.balance(one, pairs)
    assert distance_of(model, other) > 1e-3


def test_it_is_refused_where_there_is_no_one_representative() -> None:
    """Pairs that share entries; a zero norm; an optimizer that cannot be carried. Nothing has changed then."""
    model, optimizers = warm("llama", OPTIMIZERS["adamw"])
    before = state_of(model, optimizers)
    before = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(ValueError, match="share entries"):
        saggs.canonicalize(model, optimizers, saggs.find_pairs(model))
    pairs = saggs.find_pairs(model, BALANCED_KINDS)
    with pytest.raises(ValueError, match="Adadelta"):
        saggs.canonicalize(model, torch.optim.Adadelta(model.parameters()), pairs)
    assert differing(before, state_of(model, optimizers)) == []
    empty = Factors()
    with torch.no_grad():
        empty.left.zero_()
    kept = snapshot(empty)
    with pytest.raises(ValueError, match=r"value_output.*norms are 0, .*cannot be balanced"):
        saggs.canonicalize(empty, None, [factor_pair()])
    assert differing(kept, snapshot(empty)) == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", ["mini_gpt2", "mini_llama"])
def test_models_of_the_suite_go_on_bit_for_bit(model_name: str, optimizer_name: str) -> None:
    """The mini models of the tables, 1.3M parameters, at the suite's own granularity."""
    from forked import composed

    from experiments.checks import validated
    from experiments.language_model.model import build_model

    model: Any = build_model(validated(composed([f"model={model_name}"])), 0)
    optimizers = OPTIMIZERS[optimizer_name](model)

    def train(one: Any, its: Optimizers, steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            ids = torch.randint(0, 4096, (2, 64), generator=generator)
            one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            for optimizer in its:
                optimizer.step()
                optimizer.zero_grad()

    train(model, optimizers, 3, 1)
    pairs = saggs.find_pairs(model, BALANCED_KINDS)
    other, others = rescaled(model, optimizers, OPTIMIZERS[optimizer_name], pairs, powers_of_two(len(pairs)))
    assert differing(state_of(model, optimizers), state_of(other, others))
    for one, its in ((model, optimizers), (other, others)):
        saggs.canonicalize(one, its, pairs)
        train(one, its, 50, 2)
    assert differing(state_of(model, optimizers), state_of(other, others)) == []
