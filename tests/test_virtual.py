"""Balancing without moving weights: the run of a Rebalancer, seen from wherever on the orbit the weights are.

The reference is the optimizer with a `Rebalancer`, which moves the weights before every forward pass. Compared are
balanced weights. The recipe of scaled settings is written out below, for whole matrices; each of the controls leaves
out one line of it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import (
    Factors,
    ReluMlp,
    everything,
    factor_pair,
    randomised,
    relative_distance,
    tiny_gpt2,
    tokens,
    train,
)
from small_models import Net
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import saggs
from saggs import BalancedUpdate, ParameterSlice, Rebalancer, ScalePair
from saggs.pairs import BALANCED_KINDS, named_parameters
from saggs.precision import float64_everywhere

STEPS, CLIP = 150, 0.5
FACTORS = (8.0, 1 / 37, 3.3, 2.0**-4, 5.0, 16.0)  # powers of two and others, one a pair
Build = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """An optimizer, by name, and how often and how far to balance."""

    build: Build
    rate: float = 5e-3
    every: int = 1
    damping: float = 1.0


def _adamw(**changes: Any) -> Build:
    return lambda p: torch.optim.AdamW(p, lr=5e-3, weight_decay=0.1, **changes)


CASES = {
    "adamw": Case(_adamw()),
    "adamw_eps": Case(_adamw(eps=1e-3)),
    "amsgrad": Case(_adamw(amsgrad=True)),
    "period_10": Case(_adamw(), every=10),
    "damped": Case(_adamw(), damping=0.3),
    "sgd": Case(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1), rate=0.05),
    "adam_l2": Case(lambda p: torch.optim.Adam(p, lr=5e-3, weight_decay=0.1)),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*only approximate:UserWarning", "ignore:the state of:UserWarning")


# --- the identity ----------------------------------------------------------------------------------------------------


def small_llama() -> Any:
    """One layer, grouped queries, and weights so small that norms move: a late one shows."""
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return randomised(LlamaForCausalLM(config), 0, spread=0.03)


MODELS: dict[str, Callable[[], Any]] = {"llama": small_llama, "gpt2": tiny_gpt2}


@functools.cache
def pairs_of(model_name: str) -> list[ScalePair]:
    return saggs.find_pairs(MODELS[model_name](), BALANCED_KINDS)


def unbalanced(model_name: str, build: Build) -> tuple[Any, torch.optim.Optimizer, list[ScalePair]]:
    """A model in float64 after three steps, every pair moved off balance with its moments."""
    pairs = pairs_of(model_name)
    with float64_everywhere():
        model = MODELS[model_name]().double()
        optimizer = build(model.parameters())
        train(model, optimizer, 3)
    saggs.inject_imbalance(model, pairs, list(FACTORS[: len(pairs)]), optimizer)
    return model, optimizer, pairs


def run(model: Any, rate: float, step: Callable[[float], None], before: Callable[[], object] = lambda: None) -> None:
    """Backward passes on fresh batches; `step` gets the scheduled rate and updates."""
    for number in range(STEPS):
        before()
        ids = tokens(500 + number)
        with float64_everywhere():
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        step(rate * (1 + math.cos(math.pi * number / STEPS)) / 2)
        model.zero_grad()


def balanced(model: nn.Module, pairs: list[ScalePair]) -> dict[str, Tensor]:
    """The weights at the balanced point, without GPT-2's biases of keys, which have no effect."""
    saggs.balance(model, pairs)
    return {name: p.detach() for name, p in model.named_parameters() if not name.endswith("c_attn.bias")}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@functools.cache
def reference(model_name: str, case_name: str) -> dict[str, Tensor]:
    """Where the hard-balanced run ends: balanced before every forward pass, the first one too."""
    case = CASES[case_name]
    model, optimizer, pairs = unbalanced(model_name, case.build)
    rebalancer = Rebalancer(model, optimizer, pairs, every=case.every, damping=case.damping)

    def step(rate: float) -> None:
        set_rate(optimizer, rate)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    run(model, case.rate, step, before=rebalancer.step)
    return balanced(model, pairs)


def distance(found: dict[str, Tensor], case_name: str, model_name: str = "llama") -> float:
    expected = reference(model_name, case_name)
    return max(relative_distance(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("model_name", "case_name"), [*(("llama", name) for name in CASES), ("gpt2", "adamw")], ids=lambda name: name
)
def test_a_balanced_update_repeats_the_hard_balanced_run_from_any_point_of_the_orbit(
    model_name: str, case_name: str
) -> None:
    """Exact but for rounding: 2e-15 to 2e-14 after 150 steps, whole matrices and thirds of fused ones."""
    case = CASES[case_name]
    model, optimizer, pairs = unbalanced(model_name, case.build)
    update = BalancedUpdate(model, optimizer, pairs, every=case.every, damping=case.damping)

    def step(rate: float) -> None:
        set_rate(optimizer, rate)
        update.step(CLIP)

    run(model, case.rate, step)
    ratios = saggs.log2_norm_ratios(model, pairs).abs()
    assert ratios.max() > 5, "the weights are still where they were"
    assert distance(balanced(model, pairs), case_name, model_name) < 1e-13


class Recipe:
    """The settings that make the balanced point's step here, one param group a matrix; `wrong` leaves one out."""

    def __init__(
        self, model: Any, build: Build, pairs: list[ScalePair], old: torch.optim.Optimizer, wrong: str
    ) -> None:
        self.parameters, self.pairs, self.wrong = named_parameters(model), pairs, wrong
        self.optimizer = build([{"params": [p]} for p in self.parameters.values()])
        self.optimizer.state.update(old.state)
        self.coupled = not isinstance(self.optimizer, torch.optim.AdamW)
        self.late: dict[str, float] = {}

    def scales(self) -> dict[str, float]:
        """c = (|A| / |B|)^(1/2) for A, 1 / c for B, 1 for what is in no pair."""
        found = dict.fromkeys(self.parameters, 1.0)
        for pair in self.pairs:
            a, b = pair.left[0].name, pair.right[0].name
            c = math.sqrt(float(self.parameters[a].detach().norm()) / float(self.parameters[b].detach().norm()))
            found[a], found[b] = c, 1 / c
        return found

    def step(self, rate: float) -> None:
        now = self.scales()
        scales = self.late or now
        self.late = now if self.wrong == "norms one step late" else {}
        own = [1.0] * len(scales) if self.wrong == "clip on raw gradients" else list(scales.values())
        gradients = [p.grad for p in self.parameters.values()]
        total = math.sqrt(sum(float(s * g.norm()) ** 2 for s, g in zip(own, gradients, strict=True) if g is not None))
        clip = min(1.0, CLIP / (total + 1e-6))
        sgd = isinstance(self.optimizer, torch.optim.SGD)
        for group, c in zip(self.optimizer.param_groups, scales.values(), strict=True):
            group["params"][0].grad.mul_(clip)
            group["lr"] = rate * (c**2 if sgd else c)
            if not sgd:
                group["eps"] = self.optimizer.defaults["eps"] / (1.0 if self.wrong == "eps unscaled" else c)
            decay = 1.0 if self.wrong == "decay unscaled" else c**2 if self.coupled else c
            group["weight_decay"] = self.optimizer.defaults["weight_decay"] / decay
        self.optimizer.step()


def recipe(case_name: str, wrong: str = "") -> float:
    """How far from the reference the recipe ends."""
    case = CASES[case_name]
    model, optimizer, pairs = unbalanced("llama", case.build)
    run(model, case.rate, Recipe(model, case.build, pairs, optimizer, wrong).step)
    return distance(balanced(model, pairs), case_name)


def unmoved_gradient() -> float:
    """The same for balancing between backward and step, with the gradient left where it was."""
    case = CASES["adamw"]
    model, optimizer, pairs = unbalanced("llama", case.build)

    def step(rate: float) -> None:
        gradients = {p: p.grad.clone() for p in model.parameters()}
        saggs.balance(model, pairs, optimizer)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        set_rate(optimizer, rate)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    run(model, case.rate, step)
    return distance(balanced(model, pairs), "adamw")


@pytest.mark.parametrize("case_name", ["adamw", "adamw_eps", "sgd", "adam_l2"])
def test_the_recipe_of_scaled_settings_is_the_same_run(case_name: str) -> None:
    """Written out with floats, one param group a matrix: what the update does without knowing any of it."""
    assert recipe(case_name) < 1e-13


@pytest.mark.parametrize(
    ("wrong", "least"),
    [
        ("eps unscaled", 1e-4),
        ("decay unscaled", 0.1),
        ("clip on raw gradients", 0.3),
        ("norms one step late", 1e-3),
    ],
)
def test_each_line_of_the_recipe_is_needed(wrong: str, least: float) -> None:
    """Left out, the run ends elsewhere: by 6e-4, 0.4, 0.7 and 7e-3 here; the whole recipe is at 3e-15."""
    assert recipe("adamw", wrong) > least


def test_balancing_between_backward_and_step_needs_the_gradient_moved_too() -> None:
    assert unmoved_gradient() > 0.05


# --- on factors: other optimizers, exponents, gains ------------------------------------------------------------------


class FreeIterate(torch.optim.Optimizer):
    """A schedule-free rule in short: its state is a copy of the weights, made at the first step."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                z = state.setdefault("iterate", p.detach().clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.data.lerp_(z, 0.3)


OTHERS: dict[str, Build] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=2e-3, momentum=0.9, nesterov=True),
    "free_iterate": FreeIterate,
}


def fit(
    model: nn.Module, step: Callable[[], object], steps: int = 30, before: Callable[[], object] = lambda: 0
) -> None:
    """Fit random outputs, the same at every step."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for _ in range(steps):
        before()
        y = model() if isinstance(model, Factors) else model(x)
        (y - torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)).square().sum().backward()
        step()
        model.zero_grad()


def ends(model: nn.Module, build: Build, pair: ScalePair, factor: float = 11.0) -> float:
    """How far the update's run ends from the hard-balanced one, at the balanced point."""
    moved = copy.deepcopy(model)
    optimizer, other = build(model.parameters()), build(moved.parameters())
    saggs.rescale(moved, pair, factor)
    rebalancer = Rebalancer(model, optimizer, [pair], every=1)
    fit(model, optimizer.step, before=rebalancer.step)
    fit(moved, BalancedUpdate(moved, other, [pair]).step)
    for one, its in ((model, optimizer), (moved, other)):
        saggs.balance(one, [pair], its)
    first, second = dict(everything(model, optimizer)), dict(everything(moved, other))
    return max(relative_distance(second[name], first[name]) for name in first)


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_without_a_recipe_make_the_balanced_step_too(name: str) -> None:
    assert ends(Factors(), OTHERS[name], factor_pair()) < 1e-12


def gain_pair() -> ScalePair:
    whole = ParameterSlice("gain", (None,), 1, offset=1)
    return ScalePair("norm_gain", "", (whole,), (ParameterSlice("out.weight", (None, None), -1),))


def gains() -> Net:
    """A gain that is used as 1 + w, and its reader."""
    return Net(lambda net, x: net.out((1 + net.gain) * x), gain=(6,), out=nn.Linear(6, 4)).double()


@pytest.mark.parametrize("factor", [4.0, 1 / 7])
def test_exponents_and_gains_used_as_one_plus_w_come_back_right(factor: float) -> None:
    """For a gain s (1 + w) - 1 the change is divided by s; weight decay acts on w at the balanced point, as there."""
    build: Build = lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)  # noqa: E731
    assert ends(gains(), build, gain_pair(), factor) < 1e-12
    relu = ReluMlp(power=2).double()
    assert ends(relu, build, relu.pair(), factor) < 1e-12


def test_several_optimizers_step_at_one_balanced_point() -> None:
    """Handed over together they are one run with the same hard-balanced; one alone is refused."""
    models = [tiny_gpt2().double() for _ in range(2)]
    results = []
    for index, model in enumerate(models):
        named = named_parameters(model)
        optimizers = [
            torch.optim.SGD([p for p in named.values() if p.dim() > 1], lr=0.02, momentum=0.9),
            torch.optim.AdamW([p for p in named.values() if p.dim() == 1], lr=1e-2),
        ]
        pairs = saggs.find_pairs(model, BALANCED_KINDS)
        saggs.inject_imbalance(model, pairs, 3.0 if index else 1.0)
        with pytest.raises(ValueError, match=r"no optimizer given here holds .*c_attn\.bias, which trains"):
            BalancedUpdate(model, optimizers[0], pairs)
        one = BalancedUpdate(model, optimizers, pairs) if index else Rebalancer(model, optimizers, pairs, every=1)
        for seed in range(10):
            if isinstance(one, Rebalancer):
                one.step()
            ids = tokens(seed)
            with float64_everywhere():
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            for step in [o.step for o in optimizers] if isinstance(one, Rebalancer) else [one.step]:
                step()
            model.zero_grad()
        results.append(balanced(model, pairs))
    assert max(relative_distance(results[1][name], results[0][name]) for name in results[0]) < 1e-12
