"""`saggs.probe`: how optimizers answer rescaling, rotation and signed permutation, against what formulas say."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import saggs
from saggs.probes import OptimizerProbe, degree_text, probe
from saggs.reference_optimizer import RULES, ReferenceOptimizer
from saggs.rehearsal import Build, RehearsalError
from saggs.responses import MOST_STEPS, Responses, periods, steps_for

RATE = 1e-2
Params = list[nn.Parameter]


def built(cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Build:
    return lambda params: cls(params, **{"lr": RATE, **settings})


@cache
def of_rule(name: str, **settings: Any) -> OptimizerProbe:
    """A literal rule's probe, with eps where it is an argument to be set to 0."""
    return probe(lambda p: ReferenceOptimizer(p, RULES[name], RATE, **settings), name=name)


@cache
def of_class(cls: type[torch.optim.Optimizer], **settings: Any) -> OptimizerProbe:
    return probe(built(cls, **settings), name=cls.__name__)


class Rule(torch.optim.Optimizer):
    """A rule of one's own, without state: `update(weight, gradient)` is taken off the weight."""

    def __init__(self, params: Params, update: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, {"lr": RATE})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None
                p.sub_(group["lr"] * self.update(p, p.grad))


def of_own(update: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> OptimizerProbe:
    return probe(lambda p: Rule(p, update), name="own")


# --- the degree --------------------------------------------------------------------------------------------------

DEGREES = {
    **dict.fromkeys(("gd", "momentum"), -1),
    **dict.fromkeys(("adam", "rmsprop", "sign", "signum", "lion", "adafactor", "muon", "polar", "scalar_adam"), 0),
    **dict.fromkeys(("lars", "lamb", "unrooted_adam"), 1),
}
EPS = {"adam": 1e-8, "scalar_adam": 1e-8, "rmsprop": 1e-8, "adafactor": 1e-8, "muon": 1e-7, "lamb": 1e-6}
EPS |= {"unrooted_adam": 1e-8}


@pytest.mark.parametrize("name", DEGREES)
def test_the_published_rules_have_the_degrees_that_algebra_gives_them(name: str) -> None:
    """papers.md, section 1: exactly, since c is a power of two and eps is 0 (or moves updates by rounding only)."""
    found = of_rule(name, **({"eps": EPS[name]} if name in EPS else {}))
    assert found.scaling.degree == DEGREES[name]
    assert found.scaling.residual <= 1e-9
    assert found.homogeneous
    assert found.scale_equivariant == (DEGREES[name] == 1)


@pytest.mark.parametrize(("exponent", "degree"), [(-0.25, 0), (-0.5, 1)])
def test_the_root_of_shampoo_decides_its_degree(exponent: float, degree: int) -> None:
    found = of_rule("shampoo", exponent=exponent, damping=0.0, floor=0.0)
    assert found.scaling.degree == degree
    assert found.scaling.residual <= 1e-9


def test_parameter_scaled_adafactor_is_equivariant_and_the_unscaled_one_is_not() -> None:
    assert of_rule("scaled_adafactor", floor=0.0, clip=None, eps=1e-8).scale_equivariant
    assert not of_rule("adafactor", eps=1e-8).scale_equivariant


def test_degrees_of_torch_classes() -> None:
    assert of_class(torch.optim.SGD, momentum=0.9).scaling.degree == -1
    assert of_class(torch.optim.AdamW).scaling.degree == 0
    assert of_class(torch.optim.Adafactor).scaling.degree == 1


def test_a_rule_that_changes_its_regime_has_no_one_degree() -> None:
    """RAdam begins as gradient descent (degree -1) and goes on as Adam (0): the last update's degree is not all."""
    found = of_class(torch.optim.RAdam)
    assert found.scaling.degree == 0
    assert not found.homogeneous
    assert found.scaling.residual > 1


def test_an_equivariant_rule_of_ones_own_and_a_broken_one_are_told_apart() -> None:
    """Update |W| G / |G| follows; a hundredth of the gradient mixed in, of degree -1, does not."""
    good = of_own(lambda w, g: w.norm() * g / g.norm())
    assert good.scale_equivariant
    assert good.scaling.residual <= 1e-12
    broken = of_own(lambda w, g: w.norm() * g / g.norm() + 0.01 * g)
    assert not broken.scale_equivariant
    assert broken.scaling.residual > 1e-3


def test_a_direction_that_turns_is_seen_where_the_norm_is_right() -> None:
    """The degree alone would pass: |sign| and |G| / |G| are as long at every c, but which one it is depends on c."""

    def turning(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        small = w.norm() < 1
        direction = g.sign() if small else g / g.norm() * math.sqrt(g.numel())
        return w.norm() * direction

    found = of_own(turning)
    assert found.scaling.degree == pytest.approx(1, abs=0.05)
    assert not found.scale_equivariant
    assert found.scaling.residual > 0.1


def test_rows_follow_by_themselves_only_in_rules_that_act_entry_by_entry() -> None:
    adam, lars, unrooted = of_class(torch.optim.AdamW), of_rule("lars"), of_rule("unrooted_adam", eps=1e-8)
    assert adam.scaling.rows == (0, 0)
    assert unrooted.scaling.rows == (1, 0)
    inside, rest = lars.scaling.rows
    assert inside is not None
    assert rest is not None
    assert inside < 0.5 < rest  # the rescaled rows do not go their way, and the others are drawn along


def test_a_shared_scalar_couples_weights() -> None:
    assert of_rule("scalar_adam", eps=1e-8).couples
    assert not of_class(torch.optim.AdamW).couples


# --- the families do not mix -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scales", "rotates", "permutes"),
    [
        ("gd", False, True, True),
        ("momentum", False, True, True),
        ("lars", True, True, True),
        ("lamb", True, False, True),
        ("unrooted_adam", True, False, True),
        ("adam", False, False, True),
        ("rmsprop", False, False, True),
        ("lion", False, False, True),
        ("signum", False, False, True),
        ("adafactor", False, False, True),
        ("muon", False, True, True),
        ("scalar_adam", False, True, True),
    ],
)
def test_each_family_has_a_verdict_of_its_own(name: str, scales: bool, rotates: bool, permutes: bool) -> None:
    """papers.md, sections 1 and 2: all four combinations of the first two occur."""
    found = of_rule(name, **({"eps": EPS[name]} if name in EPS else {}))
    assert found.scale_equivariant is scales
    assert found.follows(found.rotation.largest) is rotates
    assert found.follows(found.signed_permutation) is permutes
    assert (found.rotation.largest > 1e-3) is not rotates  # no residual lies between


def test_shampoo_follows_rotations_from_both_sides() -> None:
    found = of_rule("shampoo", damping=0.0, floor=0.0)
    assert max(found.rotation.left, found.rotation.right, found.rotation.pair) <= 1e-9


def test_a_left_preconditioner_follows_rotations_from_the_right_only() -> None:
    """Phi(G) = H(G G^T) G, made with the diagonal of G G^T, which no rotation from the left keeps."""
    found = of_own(lambda w, g: g / g.square().mean(1, keepdim=True).sqrt())
    assert found.rotation.right <= 1e-9
    assert found.rotation.left > 1e-3


def test_scalar_adam_follows_a_rotation_of_the_pair_and_adam_does_not() -> None:
    assert of_rule("scalar_adam", eps=1e-8).rotation.pair <= 1e-9
    assert of_rule("adam", eps=1e-8).rotation.pair > 1e-2


def test_a_rule_that_sees_positions_breaks_signed_permutations() -> None:
    def weighted(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return g * torch.linspace(0.5, 1.5, g.shape[0], dtype=g.dtype).unsqueeze(1)

    found = of_own(weighted)
    assert found.signed_permutation > 1e-2
    assert found.rotation.right <= 1e-9  # from the left it is not the same either
    assert found.rotation.left > 1e-2


def test_coarse_arithmetic_is_told_from_a_broken_symmetry() -> None:
    """torch's Muon computes in bfloat16: its residual is as large as at c = 3, and zero at powers of two."""
    found = of_class(torch.optim.Muon)
    assert found.scaling.residual == 0
    assert 1e-3 < found.rounding < 5e-2
    assert found.rotation.largest > 1e-3
    assert found.follows(found.rotation.largest) is True
    assert found.follows(0.5) is False
    assert "equivariant to its rounding" in str(found)


# --- settings ----------------------------------------------------------------------------------------------------


def test_eps_breaks_the_degree_by_its_size() -> None:
    small, large = of_class(torch.optim.AdamW).settings.eps, of_class(torch.optim.AdamW, eps=1e-3).settings.eps
    assert small is not None
    assert large is not None
    assert 0 < small < 1e-4 < 1e-2 < large
    assert of_class(torch.optim.AdamW, eps=0.0).settings.eps == 0
    assert of_class(torch.optim.SGD).settings.eps is None


def test_decoupled_decay_keeps_the_degree_and_coupled_decay_does_not() -> None:
    decoupled, coupled = of_class(torch.optim.AdamW).settings.decay, of_class(torch.optim.Adam).settings.decay
    assert decoupled == 0
    assert coupled is not None
    assert coupled > 1e-2
    assert of_class(torch.optim.Rprop).settings.decay is None
    assert of_class(torch.optim.AdamW).settings.coupled_decay > 1e-2  # in the gradient it breaks AdamW as well
    assert of_own(lambda w, g: w).settings.coupled_decay == 0  # and not what does not look at the gradient


def test_clipping_breaks_gradient_descent_and_leaves_what_normalises_alone() -> None:
    assert of_class(torch.optim.SGD).settings.clipping > 1
    assert 1e-3 < of_class(torch.optim.AdamW).settings.clipping < 1
    assert of_own(lambda w, g: w.norm() * g / g.norm()).settings.clipping <= 1e-12


def test_a_rule_that_needs_eps_is_measured_with_it_and_says_so() -> None:
    found = of_class(torch.optim.Adadelta)
    assert not found.eps_removed
    assert found.settings.eps is None
    assert "cannot be 0 here" in str(found)


# --- what is named rather than scored ------------------------------------------------------------------------------


def test_random_rules_are_named() -> None:
    def noisy(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return g * (1 + torch.rand((), dtype=g.dtype))

    def noisy_in_python(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return g * (1 + random.random())

    for rule in (noisy, noisy_in_python):
        found = of_own(rule)
        assert found.random
        assert found.scaling.residual == 0  # the same draws in both runs
        assert "random numbers" in str(found)
    assert not of_own(lambda w, g: g).random


def test_global_random_states_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    random.seed(5)
    before = torch.random.get_rng_state(), random.getstate()
    of_own(lambda w, g: g * (1 + random.random() + torch.rand(()).double()))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (built(torch.optim.AdamW, lr=-1.0), "Invalid learning rate"),
        (built(torch.optim.SparseAdam), "does not support dense gradients"),
        (lambda p: Rule(p, lambda w, g: 0 * g), "no step moved the weight in 24 steps"),
        (lambda p: Rule(p, lambda w, g: g / 0), "not finite"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(build: Build, why: str) -> None:
    with pytest.raises(RehearsalError, match=why):
        probe(build, name="broken")


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps=1"):
        probe(built(torch.optim.SGD), name="SGD", steps=1)


def test_runs_are_longer_than_refresh_periods_as_far_as_they_may() -> None:
    def with_period(period: int) -> Build:
        def build(params: Params) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(params, lr=RATE)
            optimizer.param_groups[0]["precondition_frequency"] = period
            return optimizer

        return build

    assert periods(with_period(30)) == {"precondition_frequency": 30}
    assert steps_for({"precondition_frequency": 30}) > 60
    assert steps_for({}) == 24
    assert probe(with_period(3), name="short").beyond == {}
    long = probe(with_period(5000), name="long")
    assert long.steps == MOST_STEPS
    assert long.beyond == {"precondition_frequency": 5000}
    assert "was not seen" in str(long)


def test_a_rule_of_single_precision_is_measured_in_it() -> None:
    def single_only(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        if w.dtype != torch.float32:
            raise TypeError("float32 only")
        return g

    found = of_own(single_only)
    assert found.dtype == "float32"
    assert found.scaling.degree == -1
    assert found.follows(found.rotation.right)


def test_each_number_is_a_function_of_the_seed() -> None:
    """The same numbers twice; other draws give other residuals and the same degree."""
    first, again, other = (probe(built(torch.optim.Adam), name="Adam", seed=s) for s in (0, 0, 1))
    assert first == again
    assert first.rotation.right != other.rotation.right
    assert first.scaling.degree == other.scaling.degree == 0


# --- the report --------------------------------------------------------------------------------------------------


def test_json_is_plain_and_holds_the_transport_rules() -> None:
    found = of_class(torch.optim.AdamW)
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert plain["scaling"]["degree"] == 0
    assert plain["scaling"]["equivariant"] is False
    assert plain["rotation"]["equivariant"] is False
    entries = plain["states"]["entries"]
    assert {name: entry["degree"] for name, entry in entries.items() if entry["degree"]} == {
        "exp_avg": -1,
        "exp_avg_sq": -2,
    }
    json.dumps(of_class(torch.optim.RAdam).to_json(), allow_nan=False)


def test_the_table_names_verdicts_and_powers() -> None:
    text = str(of_class(torch.optim.AdamW))
    assert "exp_avg_sq" in text
    assert "c^-2" in text
    assert "not equivariant; degree +0" in text
    assert "degree +1" in str(of_own(lambda w, g: w.norm() * g / g.norm()))
    assert "no state to carry" in str(of_class(torch.optim.SGD))


def test_degrees_are_written_with_their_sign() -> None:
    assert [degree_text(d) for d in (1.0, -1.0, 0.0, -1e-9, -0.5, 1 / 3, None)] == [
        *("+1", "-1", "+0", "+0", "-0.5", "+0.33"),
        "?",
    ]


def test_the_library_offers_the_probe() -> None:
    assert saggs.probe is probe
    assert saggs.OptimizerProbe is OptimizerProbe
    assert Responses(built(torch.optim.SGD), 3, 0, torch.float64).degree == -1
