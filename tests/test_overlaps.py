"""Pairs that share entries: rescaled in rounds, in any order; balanced by sweeps, to one minimum."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from granular import SIZE, Bag, entries, llama_pairs, of_ids, pair
from hypothesis import given, settings
from hypothesis import strategies as st
from models import WIDTH, differing, relative_distance, snapshot, tiny_llama, tokens, train
from torch import Tensor, nn

import saggs
from saggs import ParameterSlice, ScalePair, reference
from saggs.overlaps import disjoint_rounds
from saggs.precision import float64_everywhere


class GatedBlock(Bag):
    """A norm's gain and a gated MLP: gain -- gate and up, by column; up -- down, by neuron. In `up` they meet."""

    def __init__(self, width: int = 4, hidden: int = 5, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"gain": (width,), "gate": (hidden, width), "up": (hidden, width), "down": (3, hidden)}
        draw = {n: torch.randn(s, generator=generator, dtype=torch.float64).exp() for n, s in shapes.items()}
        super().__init__(**draw)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.get_parameter("gain")
        gate, up, down = (self.get_parameter(name).T for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(normed @ gate) * (normed @ up)) @ down


def block_pairs(width: int = 4, hidden: int = 5, readers: tuple[str, ...] = ("gate", "up")) -> list[ScalePair]:
    gains = [
        pair("norm_gain", [entries("gain", j)], [entries(r, None, j) for r in readers], "any") for j in range(width)
    ]
    neurons = [pair("up_down", [entries("up", i, None)], [entries("down", None, i)], "any") for i in range(hidden)]
    return gains + neurons


def whole_pairs() -> list[ScalePair]:
    whole = (None, None)
    return [
        pair("norm_gain", [entries("gain", None)], [entries("gate", *whole), entries("up", *whole)], "any"),
        pair("up_down", [entries("up", *whole)], [entries("down", *whole)], "any"),
    ]


def of_gains(model: nn.Module, x: Tensor | None = None) -> Tensor:
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64) if x is None else x
    result: Tensor = model(x.to(next(model.parameters()).dtype))
    return result


def slices_of(one: ScalePair) -> list[tuple[str, Any, int, int]]:
    return [(part.name, part.ranges, part.exponent, part.offset) for part in one.slices]


def squares(weights: Mapping[str, Tensor]) -> float:
    return sum(float(w.double().square().sum()) for w in weights.values())


def llama_with_gains() -> list[ScalePair]:
    """Every channel pair of a tiny Llama, and both norms' gains with the columns of their readers."""
    found = llama_pairs()
    for layer in (0, 1):
        path = f"model.layers.{layer}."
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            for j in range(WIDTH):
                right = [entries(f"{path}{reader}.weight", None, j) for reader in readers]
                found.append(pair("norm_gain", [entries(f"{path}{norm}.weight", j)], right, "any"))
    return found


def test_overlapping_pairs_are_rescaled_by_the_product_of_their_factors_in_any_order() -> None:
    """An entry of `up` moves by both its row's and its column's factor: against one pair after the other, reversed."""
    pairs = block_pairs()
    factors = saggs.log_uniform_factors(len(pairs), 5.0, seed=1)
    model, other = GatedBlock(), GatedBlock()
    expected: Mapping[str, Tensor] = snapshot(model)
    output = of_gains(model)
    for one, factor in reversed(list(zip(pairs, factors, strict=True))):
        expected = reference.rescale_slices(expected, slices_of(one), factor)
        saggs.rescale(other, one, factor)
    saggs.inject_imbalance(model, pairs, factors)
    for name, tensor in snapshot(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-13, atol=0)
        torch.testing.assert_close(snapshot(other)[name], expected[name], rtol=1e-13, atol=0)
    assert relative_distance(of_gains(model), output) < 1e-13


def test_gains_and_channels_of_a_llama_keep_every_bit_for_powers_of_two_and_a_forgotten_reader_does_not() -> None:
    """In float32, with moments carried: undone by the inverse factors, to the bit."""
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    pairs, before, logits = llama_with_gains(), snapshot(model, optimizer), of_ids(model)
    factors = [2.0 ** (index % 5 - 2) for index in range(len(pairs))]
    saggs.inject_imbalance(model, pairs, factors, optimizer)
    assert torch.equal(of_ids(model), logits)
    assert len(differing(before, snapshot(model, optimizer))) > 3 * 14
    saggs.inject_imbalance(model, pairs, [1 / factor for factor in factors], optimizer)
    assert differing(before, snapshot(model, optimizer)) == []
    forgotten = [ScalePair(p.kind, p.path, p.left, p.right[1:], p.signs) if p.kind == "norm_gain" else p for p in pairs]
    saggs.inject_imbalance(model, forgotten, factors)
    assert relative_distance(of_ids(model), logits) > 1e-2


@pytest.mark.parametrize("pairs", [block_pairs(), whole_pairs()], ids=["channels", "matrices"])
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_sweeps_reach_the_literal_minimum_and_keep_the_function(pairs: list[ScalePair], norm: Any) -> None:
    """The minimum is one point, whatever the order of the pairs, and the returned factors lead there in one step."""
    order = {"l2": 2, "l1": 1}[norm]
    expected, totals = reference.balance_by_sweeps(snapshot(GatedBlock()), [slices_of(p) for p in pairs], 60, order)
    for chosen in (list(range(len(pairs))), list(range(len(pairs)))[::-1]):
        model, moved = GatedBlock(), GatedBlock()
        output = of_gains(model)
        factors = saggs.balance(model, [pairs[i] for i in chosen], norm=norm, tolerance=1e-12, max_sweeps=200)
        torch.testing.assert_close(factors, torch.tensor(totals).double()[chosen], rtol=1e-7, atol=0)
        for name, tensor in snapshot(model).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-7, atol=0)
        assert relative_distance(of_gains(model), output) < 1e-12
        saggs.inject_imbalance(moved, [pairs[i] for i in chosen], factors)
        for name, tensor in snapshot(model).items():
            torch.testing.assert_close(tensor, snapshot(moved)[name], rtol=1e-13, atol=0)
        again = saggs.balance(model, pairs, norm=norm)
        assert float(again.log().abs().max()) < 1e-10


def test_every_sweep_lowers_the_squared_norm_and_the_step_until_the_tolerance() -> None:
    """Coordinate descent on a convex function. One sweep is not enough, and is said not to be."""
    seen, steps = [], []
    for sweeps in range(1, 12):
        model = GatedBlock()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saggs.balance(model, block_pairs(), max_sweeps=sweeps, tolerance=1e-3)
        seen.append(squares(snapshot(model)))
        steps.append(len(caught))
        assert all(f"after {sweeps} sweeps factors still change by" in str(w.message) for w in caught)
    assert all(after <= before for before, after in itertools.pairwise(seen))
    assert seen[0] > seen[-1] * (1 + 1e-4)
    assert steps[0] == 1
    assert steps[-1] == 0


@pytest.mark.parametrize("sweeps", [None, 2, 12])
def test_a_rebalancer_sweeps_a_fixed_number_of_times_and_carries_the_state_by_the_product(sweeps: int | None) -> None:
    """Moments are moved once, by the total. Events add up: two of them leave less to do than one."""
    model = GatedBlock()
    optimizer = torch.optim.AdamW(model.parameters())
    of_gains(model).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    rebalancer = saggs.Rebalancer(model, optimizer, block_pairs(), sweeps=sweeps)
    assert rebalancer.sweeps == (sweeps or 5)
    factors = rebalancer.rebalance()
    after = snapshot(model, optimizer)
    columns, rows = factors[:4], factors[4:]
    torch.testing.assert_close(after["up"], before["up"] / columns * rows[:, None], rtol=1e-13, atol=0)
    torch.testing.assert_close(after["up.exp_avg"], before["up.exp_avg"] * columns / rows[:, None], rtol=1e-13, atol=0)
    torch.testing.assert_close(after["gate.exp_avg_sq"], before["gate.exp_avg_sq"] * columns**2, rtol=1e-13, atol=0)
    torch.testing.assert_close(after["gain"], before["gain"] * columns, rtol=1e-13, atol=0)
    more = rebalancer.rebalance().log().abs().max()
    assert more < factors.log().abs().max() / (3 if sweeps == 2 else 30)


@pytest.mark.parametrize("alpha", [0.25, 0.5])
def test_damping_takes_its_share_of_the_way_to_the_joint_minimum(alpha: float) -> None:
    """c^alpha of the whole way, however many sweeps found it; not 1 - (1 - alpha)^sweeps (the control)."""
    full = saggs.balance(GatedBlock(), block_pairs(), tolerance=1e-12, max_sweeps=200)
    part = saggs.balance(GatedBlock(), block_pairs(), damping=alpha, tolerance=1e-12, max_sweeps=200)
    torch.testing.assert_close(part, full**alpha, rtol=1e-10, atol=0)
    assert float((part - full).abs().max()) > 0.1


def test_training_with_gains_and_channels_keeps_the_function_at_every_event() -> None:
    """The whole of a Llama's disjoint and overlapping pairs, rebalanced before each of five steps."""
    with float64_everywhere():
        model = tiny_llama().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        rebalancer = saggs.Rebalancer(model, optimizer, llama_with_gains(), every=1)

        def event() -> None:
            logits = of_ids(model)
            rebalancer.step()
            assert relative_distance(of_ids(model), logits) < 1e-11

        train(model, optimizer, 5, before=event)
        saggs.balance(model, rebalancer.pairs, optimizer, tolerance=1e-10)
        ratios = saggs.log2_norm_ratios(model, rebalancer.pairs)
        assert ratios.abs().max() < 1e-8, "with exponents 1 and -1 both sides of every pair are equal at the minimum"
        assert int(rebalancer.unbalanced) == 0
        assert model(input_ids=tokens(1)).logits.isfinite().all()


def test_a_refused_factor_of_an_overlapping_pair_changes_nothing() -> None:
    """Overflow by the product of two factors, neither of which overflows alone."""
    model = GatedBlock().float()
    before = snapshot(model)
    factors = [2.0**-70] * 4 + [2.0**70] * 5
    with pytest.raises(ValueError, match=r"over- or underflows .* of up\[.*nothing was changed"):
        saggs.inject_imbalance(model, block_pairs(), factors)
    assert differing(before, snapshot(model)) == []
    saggs.inject_imbalance(model, block_pairs(), [2.0**-20] * 4 + [2.0**70] * 5)


def test_a_broken_weight_stops_all_pairs_that_hold_it_and_no_other() -> None:
    model = GatedBlock()
    model["up"][2, 1] = float("nan")
    before = snapshot(model)
    with pytest.warns(UserWarning, match="2 of 9 pairs were left alone"):
        factors = saggs.balance(model, block_pairs())
    assert [i for i, f in enumerate(factors.tolist()) if f == 1.0] == [1, 4 + 2]
    assert int(torch.isnan(model["up"]).sum()) == 1
    assert torch.equal(model["down"][:, 2], before["down"][:, 2])


def test_sweeps_for_pairs_that_share_nothing_are_said_to_have_no_effect() -> None:
    neurons = block_pairs()[4:]
    with pytest.warns(UserWarning, match="sweeps=7 has no effect"):
        rebalancer = saggs.Rebalancer(GatedBlock(), None, neurons, transport=False, sweeps=7)
    assert rebalancer.sweeps == 1


def test_a_pair_that_holds_an_entry_twice_is_refused() -> None:
    twice = pair("up_down", [entries("up", 1, None), entries("up", None, 2)], [entries("down", None, 1)])
    with pytest.raises(ValueError, match=r"up_down of the model holds up\[:, 2:3\] twice"):
        saggs.balance(GatedBlock(), [twice])


BOXES = st.tuples(*[st.none() | st.tuples(st.integers(0, 3), st.integers(1, 2)) for _ in range(3)])


@settings(max_examples=60, deadline=None)
@given(boxes=st.lists(BOXES, min_size=1, max_size=9))
def test_rounds_hold_no_two_pairs_with_a_common_entry_and_no_round_is_needless(boxes: list[Any]) -> None:
    """Against `ParameterSlice.overlaps` of every two pairs, on rectangles of three dimensions."""
    shape = (5, 5, 5)
    pairs = []
    for index, box in enumerate(boxes):
        ranges = tuple(None if r is None else (r[0], r[0] + r[1]) for r in box)
        right = ParameterSlice(f"other{index}", (None,), -1)
        pairs.append(ScalePair("up_down", "", (ParameterSlice("shared", ranges, 1),), (right,)))
    shapes = {"shared": shape, **{f"other{index}": (2,) for index in range(len(boxes))}}
    rounds = disjoint_rounds(pairs, shapes)
    assert sorted(itertools.chain(*rounds)) == list(range(len(pairs)))

    def meet(i: int, j: int) -> bool:
        return pairs[i].left[0].overlaps(pairs[j].left[0])

    for members in rounds:
        assert not any(meet(i, j) for i, j in itertools.combinations(members, 2))
    for earlier, later in itertools.pairwise(rounds):
        assert all(any(meet(i, j) for j in earlier) for i in later), "a pair goes into the first round with room"


def test_rows_of_one_head_size_do_not_overlap_their_neighbours() -> None:
    """Adjacent slices share no entry; one more row does."""
    heads = [
        pair("value_output", [entries("up", (h * SIZE, (h + 1) * SIZE), None)], [entries("down", None, (h, h + 1))])
        for h in range(3)
    ]
    shapes = {"up": (24, 4), "down": (3, 5)}
    assert disjoint_rounds(heads, shapes) == [[0, 1, 2]]
    wide = pair("value_output", [entries("up", (0, SIZE + 1), None)], [entries("down", None, 0)])
    assert disjoint_rounds([wide, *heads[1:]], shapes) == [[0, 2], [1]]
