"""How states answer, as measured: against a table written from the formulas, and on rules made to be hard cases."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from saggs.rehearsal import RehearsalError
from saggs.state_rules import EXACT, REFUSED, TOLERANCE, StateRules, measure

SHAPE = (12, 10)
# Written from the formulas: state -> k in s' = c^k s, the degree of the update, whether slices may be carried.
FIRST, SECOND, RATIO, WEIGHT = -1, -2, 0, 1
KNOWN: dict[str, tuple[Any, dict[str, Any], dict[str, int], float, bool]] = {
    "AdamW": (torch.optim.AdamW, {}, {"exp_avg": FIRST, "exp_avg_sq": SECOND, "step": 0}, 0, True),
    "Adam": (torch.optim.Adam, {}, {"exp_avg": FIRST, "exp_avg_sq": SECOND, "step": 0}, 0, True),
    "AMSGrad": (
        torch.optim.AdamW, {"amsgrad": True},
        {"exp_avg": FIRST, "exp_avg_sq": SECOND, "max_exp_avg_sq": SECOND, "step": 0}, 0, True,
    ),
    "NAdam": (
        torch.optim.NAdam, {}, {"exp_avg": FIRST, "exp_avg_sq": SECOND, "mu_product": 0, "step": 0}, 0, True,
    ),
    "RAdam": (torch.optim.RAdam, {}, {"exp_avg": FIRST, "exp_avg_sq": SECOND, "step": 0}, 0, True),
    "Adamax": (torch.optim.Adamax, {}, {"exp_avg": FIRST, "exp_inf": FIRST, "step": 0}, 0, True),
    "Adagrad": (torch.optim.Adagrad, {}, {"sum": SECOND, "step": 0}, 0, True),
    "RMSprop": (
        torch.optim.RMSprop, {"momentum": 0.9, "centered": True},
        {"square_avg": SECOND, "grad_avg": FIRST, "momentum_buffer": RATIO, "step": 0}, 0, True,
    ),
    "Rprop": (torch.optim.Rprop, {}, {"prev": FIRST, "step_size": RATIO, "step": 0}, 0, True),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}, {"momentum_buffer": FIRST}, -1, True),
    "Nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {"momentum_buffer": FIRST}, -1, True),
    "ASGD": (torch.optim.ASGD, {}, {"ax": WEIGHT, "eta": RATIO, "mu": RATIO, "step": 0}, -1, True),
    "Adafactor": (torch.optim.Adafactor, {}, {"row_var": SECOND, "col_var": SECOND, "step": 0}, 1, False),
    "Muon": (torch.optim.Muon, {}, {"momentum_buffer": FIRST}, 0, True),
    "Lion": (pytorch_optimizer.Lion, {}, {"exp_avg": FIRST}, 0, True),
    # Gradients are normalised before they are averaged: the same name, another degree.
    "ADOPT": (pytorch_optimizer.ADOPT, {}, {"exp_avg": RATIO, "exp_avg_sq": SECOND}, 0, True),
    "ScheduleFreeAdamW": (pytorch_optimizer.ScheduleFreeAdamW, {}, {"z": WEIGHT, "exp_avg_sq": SECOND}, 0, True),
    "LARS": (pytorch_optimizer.LARS, {}, {"momentum_buffer": WEIGHT}, 1, False),
    "CAME": (
        pytorch_optimizer.CAME, {},
        {"exp_avg": RATIO, "exp_avg_sq_row": SECOND, "exp_avg_sq_col": SECOND, "RMS": WEIGHT}, 0, False,
    ),
    "SM3": (pytorch_optimizer.SM3, {}, {"accumulator_0": SECOND, "accumulator_1": SECOND}, 0, False),
    "SOAP": (
        pytorch_optimizer.SOAP, {},
        {"exp_avg": FIRST, "exp_avg_sq": SECOND, "GG[0]": SECOND, "GG[1]": SECOND, "Q[0]": 0, "Q[1]": 0}, 0, False,
    ),
    "AdaFactor": (
        pytorch_optimizer.AdaFactor, {},
        {"exp_avg": WEIGHT, "exp_avg_sq_row": SECOND, "exp_avg_sq_col": SECOND}, 1, False,
    ),
    "AdEMAMix": (
        pytorch_optimizer.AdEMAMix, {}, {"exp_avg": FIRST, "exp_avg_slow": FIRST, "exp_avg_sq": SECOND}, 0, True,
    ),
    "Adan": (
        pytorch_optimizer.Adan, {},
        {"exp_avg": FIRST, "exp_avg_diff": FIRST, "previous_grad": FIRST, "exp_avg_sq": SECOND}, 0, True,
    ),
    "PAdam": (pytorch_optimizer.PAdam, {}, {"exp_avg": FIRST, "exp_avg_sq": SECOND}, -0.5, True),
    "Fromage": (pytorch_optimizer.Fromage, {}, {}, 1, True),
}  # fmt: skip


def _of(build: Callable[..., Any], shape: tuple[int, ...] = SHAPE, **settings: Any) -> StateRules:
    return measure(lambda parameters: build(parameters, **settings), shape)


@functools.cache
def _known(name: str) -> StateRules:
    build, settings, *_ = KNOWN[name]
    return _of(build, lr=1e-2, **settings)


@pytest.mark.parametrize("name", KNOWN)
def test_the_table_of_known_optimizers_is_what_is_measured(name: str) -> None:
    _, _, degrees, update, sliced = KNOWN[name]
    rules = _known(name)
    assert {state: rules.entries[state].degree for state in degrees} == degrees
    carried = {n for n, rule in rules.entries.items() if rule.moves and not rule.empty and rule.degree != 0}
    assert carried == {state for state, degree in degrees.items() if degree}, "the table leaves out none"
    assert all(rules.entries[state].residual <= EXACT for state in degrees)
    assert rules.update_degree == update
    assert rules.refusal() == ""
    assert (rules.refusal(sliced=True) == "") == sliced
    assert not rules.coupled
    assert rules.exact


def test_degrees_are_of_what_a_state_is_and_not_of_its_name() -> None:
    """The control of the table: `exp_avg` has three degrees in it."""
    every = {_known(name).entries["exp_avg"].degree for name in ("AdamW", "ADOPT")}
    every.add(_of(pytorch_optimizer.AdaFactor, lr=1e-2).entries["exp_avg"].degree)
    assert every == {FIRST, RATIO, WEIGHT}


# --- rules made to be hard cases --------------------------------------------------------------------------------------


class Made(torch.optim.Optimizer):
    """Keeps what `keep` makes of (state, weight, gradient, step), and moves by `move` of (state, weight, gradient)."""

    def __init__(self, params: Any, keep: Callable[..., None], move: Callable[..., Tensor], **settings: Any) -> None:
        super().__init__(params, {"lr": 1e-2, **settings})
        self.keep, self.move = keep, move

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                self.keep(state, p, p.grad, state["step"])
                p.sub_(self.move(state, p, p.grad), alpha=group["lr"])


def _average(state: dict[str, Any], key: str, value: Tensor, beta: float = 0.9) -> None:
    state.setdefault(key, torch.zeros_like(value)).mul_(beta).add_(value, alpha=1 - beta)


def _plain(state: dict[str, Any], p: Tensor, g: Tensor, step: int) -> None:
    _average(state, "m", g)


def made(keep: Callable[..., None] = _plain, move: Callable[..., Tensor] = lambda s, p, g: g, **settings: Any) -> Any:
    return _of(Made, keep=keep, move=move, **settings)


def _normalised(s: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
    return s["m"] / s["m"].norm() * p.norm()


def _cube_root(s: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
    return g.sign() * g.abs() ** (1 / 3)


@pytest.mark.parametrize(
    ("move", "degree"),
    [(lambda s, p, g: s["m"], -1), (lambda s, p, g: s["m"].sign(), 0), (_normalised, 1), (_cube_root, -1 / 3)],
)
def test_a_rule_made_to_scale_is_found_exact_with_the_degree_of_its_update(
    move: Callable[..., Tensor], degree: float
) -> None:
    """The control of the broken ones below: one state, -1, whatever the update does."""
    rules = made(move=move)
    assert rules.exact
    assert rules.refusal(sliced=True) == ""
    assert rules.summary() == "m^-1"
    assert rules.update_degree == pytest.approx(degree, abs=1e-9)


def _with_weight(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    _average(s, "mixed", g + p)


def _with_eps(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    _average(s, "shifted", g * g + 0.1)


def _size(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    _average(s, "size", g.abs())


def _by_row(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    _average(s, "rows", g.square().mean(1, keepdim=True))


def _whole(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    _average(s, "unit", g / g.norm())
    _average(s, "scaled", g * g.norm())


def _changes_at_15(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    _average(s, "late", g if t < 15 else g * g)


def _nested(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    inner = s.setdefault("deep", {"list": [torch.zeros_like(g), torch.zeros_like(g)], "count": 0})
    inner["list"][0].add_(g)
    inner["list"][1].add_(g**3)
    inner["count"] += 1


class _Box:
    def __init__(self, like: Tensor) -> None:
        self.inside, self.itself = [torch.zeros_like(like)], self


def _hidden(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    s.setdefault("box", _Box(g)).inside[0].add_(g * g)
    s.setdefault("queue", deque(maxlen=3)).append(g.clone())


def _random(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    _average(s, "noisy", g + torch.randn_like(g))


def _float(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    s["norm"] = float(g.norm())


def _half_power(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    _average(s, "root", g.abs().sqrt())


def _idle(s: dict[str, Any], p: Tensor, g: Tensor, t: int) -> None:
    s.setdefault("spare", torch.zeros_like(g))


@pytest.mark.parametrize(
    ("keep", "named"),
    [(_with_weight, "mixed"), (_with_eps, "shifted"), (_changes_at_15, "late"), (_float, "norm"),
     (_half_power, "root")],
)  # fmt: skip
def test_a_state_without_a_whole_degree_is_refused_by_name(keep: Callable[..., None], named: str) -> None:
    rules = made(keep)
    assert rules.entries[named].degree is None
    assert f"its state {named!r} answers with no whole power" in rules.refusal()
    assert not rules.exact
    assert made().refusal() == "", "the control"


def test_a_state_that_is_drawn_at_random_is_refused() -> None:
    """What it answers has no degree; and beside a second weight it is another draw."""
    rules = made(_random)
    assert rules.entries["noisy"].degree is None
    assert "'noisy'" in rules.refusal()


def test_a_state_in_lists_and_dictionaries_has_its_degree_by_its_path() -> None:
    rules = made(_nested)
    degrees = {name: rule.degree for name, rule in rules.entries.items()}
    assert degrees == {"step": 0, "deep.list[0]": -1, "deep.list[1]": -3, "deep.count": 0}
    assert rules.refusal(sliced=True) == ""


def test_a_state_in_a_queue_or_an_object_is_seen() -> None:
    rules = made(_hidden)
    degrees = {name: rule.degree for name, rule in rules.entries.items()}
    assert degrees == {"step": 0, "box.inside[0]": -2, "queue[0]": -1, "queue[1]": -1, "queue[2]": -1}


@pytest.mark.parametrize(("keep", "named"), [(_by_row, "rows"), (_whole, "unit"), (_whole, "scaled")])
def test_a_state_that_sees_more_than_its_own_entries_moves_with_whole_tensors_only(
    keep: Callable[..., None], named: str
) -> None:
    rules = made(keep)
    assert rules.refusal() == ""
    assert not rules.entries[named].sliced
    assert "sees whole tensors" in rules.refusal(sliced=True)


def test_a_state_that_answers_the_size_of_a_factor_allows_positive_ones_only() -> None:
    assert made(_size).positive_only == "size"
    assert _known("Adamax").positive_only == "exp_inf"
    assert made().positive_only == ""
    assert _known("AdamW").positive_only == ""


def test_a_state_that_stays_zero_is_known_for_unknown() -> None:
    rules = made(_idle)
    assert rules.entries["spare"].empty
    assert rules.entries["spare"].degree is None
    assert rules.refusal() == ""


class Shared(torch.optim.Optimizer):
    """Divides by the norm of all gradients together, in its state or (`counted`) in a number of the group."""

    def __init__(self, params: Any, counted: bool) -> None:
        super().__init__(params, {"lr": 1e-2, "norm": 0.0})
        self.counted = counted

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            if self.counted:
                group["norm"] = 0.9 * group["norm"] + float(norm)
            for p in group["params"]:
                _average(self.state[p], "unit", p.grad / norm)
                p.sub_(self.state[p]["unit"], alpha=group["lr"])


@pytest.mark.parametrize(("counted", "named"), [(False, "'unit'"), (True, "'group[0].norm'")])
def test_what_couples_weights_is_refused_by_name(counted: bool, named: str) -> None:
    rules = _of(Shared, counted=counted)
    assert named in rules.refusal()
    assert "several weights" in rules.refusal()


@pytest.mark.parametrize(
    ("build", "leaps"),
    [
        (pytorch_optimizer.MADGRAD, True),
        (pytorch_optimizer.Nero, True),
        (pytorch_optimizer.ScheduleFreeAdamW, False),
        (pytorch_optimizer.Fromage, False),
        (torch.optim.SGD, False),
    ],
)
def test_what_makes_weights_anew_from_its_state_is_refused(build: Any, leaps: bool) -> None:
    """MADGRAD is x0 less a step from all gradients, Nero keeps the norms of rows: both would undo a rescaling."""
    rules = _of(build, lr=1e-2)
    assert all(rule.degree is not None for rule in rules.entries.values())
    assert rules.leaps == leaps
    assert ("throw rescaled weights back" in rules.refusal()) == leaps


def test_a_state_that_weighs_gradients_against_weights_by_the_rate_has_no_degree() -> None:
    """FTRL's z: only together with the learning rate would it have one, and a rescaling does not change that."""
    assert _of(pytorch_optimizer.FTRL, lr=1e-2).entries["z"].degree is None


# --- settings ---------------------------------------------------------------------------------------------------------


def test_coupled_decay_is_told_from_decoupled_decay() -> None:
    """g + decay w is in the moments of Adam; AdamW's decay never comes near them."""
    coupled: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.Adam, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {}),
    ]
    for build, settings in coupled:
        assert _of(build, lr=1e-2, weight_decay=0.1, **settings).decay_mixes, build
        assert not _of(build, lr=1e-2, **settings).decay_mixes, build
    assert not _of(torch.optim.AdamW, lr=1e-2, weight_decay=0.1).decay_mixes
    assert not _of(torch.optim.Adam, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True).decay_mixes


@pytest.mark.parametrize(
    ("eps", "warned", "refused"),
    [(0.0, False, False), (1e-16, False, False), (1e-11, True, False), (1e-4, True, True)],
)
def test_what_eps_adds_to_a_state_is_its_residual(eps: float, warned: bool, refused: bool) -> None:
    """AdaBelief adds eps to its second moment at every step; AdamW keeps its own out of the state."""
    rules = _of(pytorch_optimizer.AdaBelief, lr=1e-2, eps=eps)
    assert rules.exact, "the rule itself is measured without eps"
    assert (rules.inexact > TOLERANCE) == warned
    assert (rules.inexact > REFUSED) == refused == ("eps" in rules.refusal())
    assert _of(torch.optim.AdamW, lr=1e-2, eps=eps).inexact == 0.0


def test_a_change_of_regime_is_seen_in_the_last_update() -> None:
    """RAdam is momentum for five steps and Adam afterwards: its degree is 0, of a shorter rehearsal -1."""

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.RAdam(parameters, lr=1e-2)

    assert measure(build, SHAPE).update_degree == 0
    assert measure(build, SHAPE, steps=4).update_degree == -1


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 1), (3, 1), (5, 4, 3), (4, 2, 3, 3)])
def test_weights_of_any_shape(shape: tuple[int, ...]) -> None:
    rules = _of(torch.optim.AdamW, shape, lr=1e-2)
    assert rules.summary() == "exp_avg^-1 exp_avg_sq^-2"
    assert rules.refusal(sliced=True) == ""


def test_what_cannot_be_run_is_an_error_with_the_exceptions_name() -> None:
    def failing(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise LookupError("no such rule")

    with pytest.raises(RehearsalError, match="LookupError: no such rule"):
        measure(failing, SHAPE)


def test_a_closure_is_given_where_one_is_wanted() -> None:
    """And the global random state is left alone, whatever is drawn."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert _of(torch.optim.LBFGS, lr=1e-2).coupled
    made(_random)
    assert torch.equal(before, torch.get_rng_state())
