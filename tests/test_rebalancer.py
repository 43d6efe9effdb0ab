"""What uses pairs checks them: the rebalancer's settings, counts and state, and the injected imbalance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import (
    Factors,
    differing,
    factor_pair,
    logits_and_gradients,
    relative_distance,
    snapshot,
    tiny_llama,
    train,
)

import saggs
from saggs import ParameterSlice, Rebalancer, ScalePair
from saggs.pairs import BALANCED_KINDS, named_parameters


def test_pairs_that_share_entries_are_balanced_by_sweeps_and_neighbouring_slices_at_once() -> None:
    """One pass cannot balance pairs that overlap. The thirds of one fused tensor do not."""
    whole = (None, None)
    other = ScalePair(
        "value_output", "", (ParameterSlice("left", (None, (1, 3)), 1),), (ParameterSlice("right", whole, -1),)
    )
    assert Rebalancer(Factors(), None, [factor_pair(), other], transport=False).sweeps > 1
    columns = [((None, (0, 2)), (None, (0, 2))), ((None, (2, 4)), (None, (2, 4)))]
    apart = [
        ScalePair("value_output", "", (ParameterSlice("left", a, 1),), (ParameterSlice("right", b, -1),))
        for a, b in columns
    ]
    model = Factors()
    product = model().detach()
    rebalancer = Rebalancer(model, None, apart, transport=False)
    assert rebalancer.sweeps == 1
    rebalancer.step()
    assert relative_distance(model(), product) < 1e-14
    assert saggs.log2_norm_ratios(model, apart).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every=0 must be a whole number of steps, at least 1"),
        ({"every": -3}, "every=-3"),
        ({"every": 2.5}, r"every=2\.5"),
        ({"every": True}, "every=True"),
        ({"damping": 0.0}, r"damping=0\.0 must lie in \(0, 1\]: 1 is hard balancing"),
        ({"damping": 1.5}, r"damping=1\.5"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"pairs": []}, "no exact pair to balance"),
    ],
    ids=str,
)
def test_a_rebalancer_refuses_a_bad_setting_with_its_value(arguments: dict[str, Any], message: str) -> None:
    model = Factors()
    with pytest.raises(ValueError, match=message):
        Rebalancer(model, torch.optim.AdamW(model.parameters()), **{"pairs": [factor_pair()], **arguments})


def test_a_rebalancer_refuses_no_optimizer_and_pairs_of_another_model() -> None:
    with pytest.raises(ValueError, match="transport=True needs the optimizer; pass it, or transport=False"):
        Rebalancer(Factors(), None, [factor_pair()])
    with pytest.raises(ValueError, match="no parameter 'lef'; the nearest is 'left'"):
        Rebalancer(Factors(), None, [factor_pair("lef")], transport=False)
    sliced = ScalePair(
        "value_output", "", (ParameterSlice("left", (None, (0, 9)), 1),), (ParameterSlice("right", (None, None), -1),)
    )
    with pytest.raises(ValueError, match="range 0:9 lies outside dimension 1"):
        Rebalancer(Factors(rank=4), None, [sliced], transport=False)


@pytest.mark.parametrize("every", [1, 3])
def test_a_rebalancer_balances_at_its_first_call_and_every_so_many_after(every: int) -> None:
    model = Factors()
    rebalancer = Rebalancer(model, None, [factor_pair()], every=every, transport=False)
    assert [rebalancer.step() for _ in range(7)] == [step % every == 0 for step in range(7)]
    assert rebalancer.steps == 7


def test_a_restored_rebalancer_continues_the_count_and_the_run_bit_for_bit() -> None:
    """Exact: what it keeps is a counter. A new one in its place (the control) balances out of turn."""
    ends = []
    for resume in ("none", "restored", "new"):
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        pairs = saggs.find_pairs(model, BALANCED_KINDS)
        saggs.inject_imbalance(model, pairs, 8.0)
        rebalancer = Rebalancer(model, optimizer, pairs, every=5)
        train(model, optimizer, 3, before=rebalancer.step)
        if resume != "none":
            state = rebalancer.state_dict()
            rebalancer = Rebalancer(model, optimizer, pairs, every=5)
            if resume == "restored":
                rebalancer.load_state_dict(state)
        train(model, optimizer, 5, first_seed=900, before=rebalancer.step)
        ends.append(snapshot(model, optimizer))
    assert differing(ends[0], ends[1]) == []
    assert differing(ends[0], ends[2])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"every": 7}, "has every=10, this one 7"),
        ({"damping": 0.5}, "has damping=1.0, this one 0.5"),
        ({"transport": False}, "has transport=True, this one False"),
        ({"pairs": "fewer"}, "has pairs=.*query_key:model"),
    ],
    ids=str,
)
def test_the_state_of_a_rebalancer_with_other_settings_is_refused(other: dict[str, Any], message: str) -> None:
    model = tiny_llama()
    optimizer, pairs = torch.optim.AdamW(model.parameters()), saggs.find_pairs(model, BALANCED_KINDS)
    state = Rebalancer(model, optimizer, pairs).state_dict()
    chosen = pairs[1:] if other.pop("pairs", None) else pairs
    rebalancer = Rebalancer(model, optimizer, chosen, **other)
    with pytest.raises(ValueError, match=message):
        rebalancer.load_state_dict(state)
    assert rebalancer.steps == 0
    Rebalancer(model, optimizer, pairs).load_state_dict(state)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pair_with_a_zero_or_non_finite_norm_is_counted_and_all_others_are_balanced(side: str, value: float) -> None:
    """Such a pair has no balanced point: it keeps its bits, the others end at equal norms."""
    model = tiny_llama()
    pairs = saggs.find_pairs(model, BALANCED_KINDS)
    dead = getattr(pairs[1], side)[0].name
    with torch.no_grad():
        named_parameters(model)[dead].fill_(value)
    before = snapshot(model)
    rebalancer = Rebalancer(model, None, pairs, transport=False)
    assert int(rebalancer.unbalanced) == 0
    factors = rebalancer.rebalance()
    assert int(rebalancer.unbalanced) == 1
    assert float(factors[1]) == 1.0
    after = snapshot(model)
    for part in pairs[1].slices:
        assert torch.equal(after[part.name].nan_to_num(7.0), before[part.name].nan_to_num(7.0))
    alive = [pair for i, pair in enumerate(pairs) if i != 1]
    assert saggs.log2_norm_ratios(model, alive).abs().max() < 1e-5
    assert all(not torch.equal(after[p.left[0].name], before[p.left[0].name]) for p in alive)


def test_injection_multiplies_every_pair_by_its_own_factor_and_keeps_the_function() -> None:
    """Factor c moves log2(|A| / |B|) by 2 log2 c, exactly for powers of two; the logits keep every bit."""
    model = tiny_llama()
    pairs = saggs.find_pairs(model, BALANCED_KINDS)
    logits, _ = logits_and_gradients(model)
    gaps = saggs.log2_norm_ratios(model.double(), pairs)
    factors = [2.0, 0.5, 8.0, 1.0, 4.0, 0.25]
    saggs.inject_imbalance(model, pairs, factors)
    moved = saggs.log2_norm_ratios(model, pairs) - gaps
    torch.testing.assert_close(moved, 2 * torch.tensor(factors, dtype=moved.dtype).log2(), rtol=0, atol=1e-12)
    assert torch.equal(logits_and_gradients(model.float())[0], logits)


@pytest.mark.parametrize(
    ("factor", "message"),
    [([2.0, 2.0], "2 factors for 6 pairs; give one, or one a pair"), ([2.0] * 5 + [0.0], r"factor 0\.0")],
)
def test_injection_with_a_wrong_list_of_factors_changes_nothing(factor: list[float], message: str) -> None:
    model = tiny_llama()
    pairs, before = saggs.find_pairs(model, BALANCED_KINDS), snapshot(model)
    with pytest.raises(ValueError, match=message):
        saggs.inject_imbalance(model, pairs, factor)
    assert differing(before, snapshot(model)) == []


def test_log_uniform_factors_depend_on_the_seed_alone_and_span_the_range() -> None:
    """The same for the same seed, others for another; uniform in the logarithm over [1 / 32, 32]."""
    drawn = saggs.log_uniform_factors(2000, 32.0, seed=5)
    torch.manual_seed(123)
    assert saggs.log_uniform_factors(2000, 32.0, seed=5) == drawn
    assert not set(saggs.log_uniform_factors(2000, 32.0, seed=6)) & set(drawn)
    assert saggs.log_uniform_factors(10, 32.0, seed=5) == drawn[:10]
    logs = torch.tensor(drawn, dtype=torch.float64).log2()
    assert logs.abs().max() <= 5
    assert logs.min() < -4.9
    assert logs.max() > 4.9
    assert abs(float(logs.mean())) < 0.2
    assert float(logs.std()) == pytest.approx(10 / 12**0.5, rel=0.05)
    assert min(drawn) >= 1 / 32
    assert max(drawn) <= 32


@pytest.mark.parametrize("factor", [1.0, 0.5, -2.0, float("inf"), float("nan")])
def test_log_uniform_factors_need_a_finite_range_above_one(factor: float) -> None:
    with pytest.raises(ValueError, match="must be finite and above 1"):
        saggs.log_uniform_factors(3, factor, seed=0)
