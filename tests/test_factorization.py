"""Matrix sensing: the batched engine is the literal one, member by member; draws, measures and ends are as stated."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import composed, stopped_at
from torch import Tensor

from experiments import matrix_sensing, registry
from experiments.checks import ConfigError, validated
from experiments.factorization import literal, steppers
from experiments.factorization.descent import Descent
from experiments.factorization.nuclear import least_nuclear_norm
from experiments.factorization.sensing import Problem, assess, draw, effective_rank, with_tail
from experiments.run import Interrupted, Run
from experiments.study_config import RuleGrid, Sensing

SMALL = Sensing(size=10, rank=1, measurements=60, width=10, steps=400, check_every=50, precision="float64")
NINE = {
    "gd": RuleGrid("gd", [1e-2, 3e-2]),
    "momentum": RuleGrid("momentum", [1e-3, 3e-3]),
    "adam": RuleGrid("adam", [1e-3, 1e-2]),
    "scalar_adam": RuleGrid("scalar_adam", [1e-3, 1e-2]),
    "rmsprop": RuleGrid("rmsprop", [1e-3, 1e-2], "cosine"),
    "signum": RuleGrid("signum", [1e-3, 3e-3], "cosine"),
    "lion": RuleGrid("lion", [1e-3, 3e-3], "cosine"),
    "adafactor": RuleGrid("adafactor", [1e-3, 3e-3]),
    "muon": RuleGrid("muon", [1e-2, 3e-2], "cosine"),
    "shampoo": RuleGrid("shampoo", [1e-2, 3e-2]),
    "dial": RuleGrid("dial", [1e-3, 1e-2], options={"precond_power": 0.5}),
}


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def factors_after(descent: Descent, steps: int) -> dict[tuple[str, float, bool], tuple[Tensor, Tensor]]:
    """U and V of every member after so many steps, none of which may have ended."""
    while descent.step < steps:
        descent.advance()
    tensors, facts = descent.state()
    assert not facts["results"]
    keys = [(m["arm"], m["rate"], m["second_pass"]) for m in facts["members"]]
    return {key: (tensors["u"][i].clone(), tensors["v"][i].clone()) for i, key in enumerate(keys)}


def test_the_batch_is_the_literal_rule_member_by_member() -> None:
    """Over the first hundred steps, to 1e-10, both passes. The other pass, and another rate, are the controls."""
    drawn = draw(SMALL, 42)
    settings = dataclasses.replace(SMALL, stop_loss=0.0)
    batched = factors_after(Descent(settings, NINE, drawn), 100)
    assert len(batched) == sum(2 * len(grid.rates) for grid in NINE.values())
    for arm, grid in NINE.items():
        for second_pass, count in ((False, None), (True, 54)):
            own = [literal.descend(drawn, grid, rate, 100, settings.steps, count) for rate in grid.rates]
            for rate, wanted in zip(grid.rates, own, strict=True):
                found = batched[arm, rate, second_pass]
                assert max(distance(f, w) for f, w in zip(found, wanted, strict=True)) < 1e-10, (arm, rate)
                other = batched[arm, rate, not second_pass]
                assert max(distance(f, w) for f, w in zip(other, wanted, strict=True)) > 1e-5, (arm, rate)
            assert distance(own[0][0], own[1][0]) > 1e-3


def test_an_optimizer_of_a_plugin_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam from torch, one instance a member, gives what the stacked rule gives; another eps does not."""

    def build(groups: Any, learning_rate: float, weight_decay: float, eps: float = 1e-8) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=learning_rate, weight_decay=weight_decay, eps=eps)

    monkeypatch.setitem(registry._BUILDERS["optimizer"], "torch_adam", build)
    rates, drawn = [1e-3, 1e-2], draw(SMALL, 42)
    rules = {
        "adam": RuleGrid("adam", rates),
        "torch": RuleGrid("torch_adam", rates),
        "eps": RuleGrid("torch_adam", rates, options={"eps": 1e-3}),
    }
    descent = Descent(dataclasses.replace(SMALL, stop_loss=0.0, holdout=0.0), rules, drawn)
    half = factors_after(descent, 30)
    tensors, facts = descent.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    found = factors_after(descent, 60)
    for rate in rates:
        assert distance(found["torch", rate, False][0], found["adam", rate, False][0]) < 1e-12
        assert distance(found["eps", rate, False][0], found["adam", rate, False][0]) > 1e-3
    again = Descent(dataclasses.replace(SMALL, stop_loss=0.0, holdout=0.0), rules, drawn)
    again.load(tensors, facts)
    resumed = factors_after(again, 60)
    assert all(torch.equal(a, b) for key in found for a, b in zip(found[key], resumed[key], strict=True))
    assert not torch.equal(half["torch", 1e-3, False][0], found["torch", 1e-3, False][0])


def run_out(descent: Descent) -> list[dict[str, Any]]:
    while not descent.ended:
        descent.advance()
    return descent.results


def test_members_end_each_for_itself() -> None:
    """One diverges, one interpolates, one reaches the horizon; without the diverging one the others are the same."""
    rules = {
        "wild": RuleGrid("gd", [1e3]),
        "adam": RuleGrid("adam", [3e-2]),
        "slow": RuleGrid("gd", [1e-6]),
        "shampoo": RuleGrid("shampoo", [1e4, 1e-2]),
    }
    settings = dataclasses.replace(SMALL, holdout=0.0, stop_loss=1e-3)
    results = {(r["arm"], r["rate"]): r for r in run_out(Descent(settings, rules, draw(SMALL, 42)))}
    assert results["wild", 1e3]["outcome"] == "diverged"
    assert results["wild", 1e3]["steps"] == 50
    assert results["wild", 1e3]["loss"] is None
    assert results["adam", 3e-2]["outcome"] == "interpolated"
    assert results["adam", 3e-2]["steps"] < 400
    assert results["slow", 1e-6]["outcome"] == "horizon"
    assert results["slow", 1e-6]["steps"] == 400
    assert results["shampoo", 1e4]["outcome"] == "diverged"
    assert results["shampoo", 1e-2]["outcome"] != "diverged"
    del rules["wild"]
    rules["shampoo"] = RuleGrid("shampoo", [1e-2])
    calm = {(r["arm"], r["rate"]): r for r in run_out(Descent(settings, rules, draw(SMALL, 42)))}
    for key, result in calm.items():
        assert result["steps"] == results[key]["steps"]
        assert result["error"] == pytest.approx(results[key]["error"], rel=1e-6)


def test_a_resumed_batch_is_bit_for_bit_the_undisturbed_one() -> None:
    """Stopped at every kind of place: before the first check, after members have left. Another seed is the control."""
    whole = Descent(SMALL, NINE, draw(SMALL, 42))
    wanted = run_out(whole)
    for stop in (7, 130, 300):
        first = Descent(SMALL, NINE, draw(SMALL, 42))
        while first.step < stop:
            first.advance()
        tensors, facts = first.state()
        second = Descent(SMALL, NINE, draw(SMALL, 42))
        second.load({name: tensor.clone() for name, tensor in tensors.items()}, facts)
        assert run_out(second) == wanted
    assert run_out(Descent(SMALL, NINE, draw(SMALL, 43))) != wanted


def test_the_gradient_is_that_of_the_loss() -> None:
    """By autograd, for both passes; with the weights of the other pass (the control) it is not."""
    drawn = draw(SMALL, 7)
    problem = Problem(drawn, held_out=6)
    u, v = (t.expand(2, -1, -1).clone().mul(300).requires_grad_() for t in (drawn.u, drawn.v))
    weights = problem.weights(torch.tensor([False, True]))
    assert torch.allclose(weights.sum(dim=1), torch.ones(2, dtype=torch.float64))
    with torch.no_grad():
        found = problem.gradients(problem.residuals(u, v), weights, u, v)
    losses = []
    for member, count in ((0, 60), (1, 54)):
        product = (u[member] @ v[member].T).flatten()
        losses.append((drawn.measurements[:count] @ product - drawn.values[:count]).square().mean())
    wanted = torch.autograd.grad(losses[0] + losses[1], (u, v))
    assert max(distance(f, w) for f, w in zip(found, wanted, strict=True)) < 1e-12
    with torch.no_grad():
        swapped = problem.gradients(problem.residuals(u, v), weights.flip(0), u, v)
    assert distance(swapped[0], wanted[0]) > 1e-3


def test_the_tail_has_its_share_of_energy_and_lies_outside() -> None:
    drawn = draw(SMALL, 42)
    noise = torch.randn(10, 10, generator=torch.Generator().manual_seed(0)).double()
    for tail in (0.1, 0.5):
        found = with_tail(drawn.truth, 1, noise, tail)
        assert float(found.norm() / drawn.truth.norm()) == pytest.approx(1, abs=1e-6)
        outside = found - math.sqrt(1 - tail**2) * drawn.truth
        assert float(outside.norm() / found.norm()) == pytest.approx(tail, abs=1e-6)
        left, _, right = torch.linalg.svd(drawn.truth)
        assert float((left[:, :1].T @ outside).norm()) < 1e-6
        assert float((outside @ right[:1].T).norm()) < 1e-6
        assert float((left[:, 1:].T @ outside @ right[1:].T).norm()) > 0.1 * tail


def test_measures_of_matrices_that_are_known() -> None:
    eye = torch.eye(6, dtype=torch.float64)
    found = assess(2 * eye, eye, eye)
    assert found.error == pytest.approx(1)
    assert found.effective_rank == pytest.approx(6)
    assert found.nuclear_norm == pytest.approx(12)
    assert found.balancedness == pytest.approx(3 * math.sqrt(6))
    assert effective_rank(torch.tensor([1.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.tensor([3.0, 1.0])) == pytest.approx(
        math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    )
    assert effective_rank(torch.zeros(3)) == 0


def test_the_least_nuclear_norm_finds_what_is_determined_and_fits_what_is_not() -> None:
    """Optimal: the sub-gradient condition holds. With too few measurements the truth has the larger norm."""
    drawn = draw(SMALL, 42)
    matrix, moved = least_nuclear_norm(drawn.measurements, drawn.values, 10)
    assert moved < 1e-9
    assert distance(matrix, drawn.truth) < 1e-6
    few = draw(dataclasses.replace(SMALL, measurements=16), 42)
    found, _ = least_nuclear_norm(few.measurements, few.values, 10)
    assert float((few.measurements @ found.flatten() - few.values).norm()) < 1e-8
    norm, of_truth = (float(torch.linalg.svdvals(m).sum()) for m in (found, few.truth))
    assert norm < of_truth - 1e-3
    assert distance(found, few.truth) > 0.1
    # Any feasible direction goes up.
    _, _, null = torch.linalg.svd(few.measurements, full_matrices=True)
    for row in null[16:22]:
        for sign in (1, -1):
            assert float(torch.linalg.svdvals(found + sign * 1e-3 * row.view(10, 10)).sum()) > norm - 1e-9


def test_measurements_that_depend_on_each_other_are_refused() -> None:
    drawn = draw(SMALL, 42)
    doubled = torch.cat([drawn.measurements, drawn.measurements[:1]])
    with pytest.raises(ValueError, match="61 measurements of 10 x 10 entries depend on each other"):
        least_nuclear_norm(doubled, torch.cat([drawn.values, drawn.values[:1]]), 10)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (RuleGrid("lionn", [0.1]), "rules.mine: rule 'lionn' is not known; did you mean 'lion'"),
        (RuleGrid("lion", [0.1], options={"beta": 0.9}), "rules.mine: Lion has no option 'beta'; did you mean 'betas'"),
        (RuleGrid("lion", [0.1], options={"betas": [0.9, 1.5]}), "rules.mine: Lion: betas"),
        (RuleGrid("dial", [0.1], options={"precond_power": 2.0}), "rules.mine: Dial: precond_power=2.0"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_name(grid: RuleGrid, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        steppers.check("mine", grid)
    steppers.check("mine", RuleGrid("lion", [0.1], options={"betas": [0.9, 0.95]}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sensing.width=41", "sensing.width=41: must not exceed that of the matrix, sensing.size=40"),
        ("sensing.rank=41", "sensing.rank=41"),
        ("sensing.measurements=1601", "sensing.measurements=1601: a matrix of 40 x 40 is known after 1600"),
        ("sensing.tail=1", "sensing.tail=1.0: must lie in"),
        ("sensing.holdout=1", "sensing.holdout=1.0: must lie in"),
        ("sensing.holdout=0.001", "sensing.holdout=0.001: leaves out no measurement of 462"),
        ("sensing.precision=float16", "sensing.precision=float16: choose one of float32, float64"),
        ("rules.gd.rates=[]", "rules.gd.rates=\\[\\]: give at least one"),
        ("rules.gd.rates=[0.1,0.1]", "give each learning rate once"),
        ("rules.gd.rates=[-1]", "rules.gd.rates=-1.0: a learning rate is positive"),
        ("rules.gd.schedule=cosin", "rules.gd.schedule=cosin: choose one of constant, cosine; did you mean 'cosine'"),
    ],
)
def test_wrong_settings_are_refused_by_name(override: str, message: str) -> None:
    validated(composed(["study=nine"]))
    with pytest.raises(ConfigError, match=message):
        validated(composed(["study=nine", override]))


def test_a_study_without_rules_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rules for task=matrix_sensing; choose some, as in rules=nine"):
        validated(composed(["task=matrix_sensing"]))


# --- runs ------------------------------------------------------------------------------------------------------------


def executed(outputs: Path, looks: int | None = None) -> tuple[dict[str, Any], bytes]:
    """A small study run by its task; asked to stop at every `looks`-th look, and started again."""
    overrides = ["scale=debug", "study=none", "task=matrix_sensing", "rules=few", "sensing.size=10", "sensing.rank=1"]
    overrides += ["sensing.measurements=60", "sensing.width=10", "sensing.steps=150", "sensing.check_every=25"]
    config = validated(composed([*overrides, "progress=false", f"paths.outputs={outputs}"]))
    for _ in range(20):
        prepared = matrix_sensing.prepare(config)
        run = Run.open(config, prepared.facts, prepared.total_steps)
        with pytest.MonkeyPatch.context() as patch:
            if looks is not None:
                patch.setattr(matrix_sensing, "stop_signals", stopped_at(looks))
            try:
                with run.recording():
                    result = prepared.execute(run)
                    run.succeed(result)
            except Interrupted:
                continue
        return json.loads(json.dumps(result)), (run.directory / "metrics.jsonl").read_bytes()
    raise AssertionError("it never came to an end")


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    wanted, metrics = executed(tmp_path / "whole")
    assert {m["arm"] for m in wanted["members"]} == {"gd", "adam", "muon", "shampoo"}
    assert wanted["reference"]["error"] < 1
    assert len(metrics.splitlines()) == 7
    assert executed(tmp_path / "stopped", looks=40) == (wanted, metrics)
    with pytest.raises(AssertionError, match="it never came to an end"):
        executed(tmp_path / "control", looks=0)
