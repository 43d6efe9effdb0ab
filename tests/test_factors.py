"""Which factor: mixed exponents, powers of two for narrow dtypes, gains used as 1 + w, and the settings of all that."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from granular import CASES, Bag, entries, gain_pairs, gpt2_pairs, llama_pairs, of_ids, pair
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Factors, differing, factor_pair, relative_distance, snapshot, tiny_gpt2, tiny_llama, train

import saggs
from saggs import ParameterSlice, ScalePair, reference
from saggs.balancing import balanced_factors
from saggs.objective import nearest_power_of_two


@settings(max_examples=60, deadline=None)
@given(
    left=st.lists(st.tuples(st.integers(1, 4), st.floats(-6, 6)), min_size=1, max_size=3),
    right=st.lists(st.tuples(st.integers(1, 4), st.floats(-6, 6)), min_size=1, max_size=3),
    norm=st.sampled_from(["l2", "l1"]),
)
def test_mixed_exponents_are_balanced_at_the_literal_minimum(left: Any, right: Any, norm: Any) -> None:
    """Against bisection of the derivative, over twelve decades of norms. Newton's steps are fixed in number."""
    generator = torch.Generator().manual_seed(len(left) + 3 * len(right))
    tensors: dict[str, torch.Tensor] = {}
    sides: dict[str, list[ParameterSlice]] = {"left": [], "right": []}
    for side, terms in (("left", left), ("right", right)):
        for index, (exponent, size) in enumerate(terms):
            tensors[f"{side}{index}"] = 10.0**size * torch.randn(3, 2, generator=generator, dtype=torch.float64)
            sides[side].append(entries(f"{side}{index}", None, None, exponent=exponent))
    one = pair("up_down", sides["left"], sides["right"])
    order = {"l2": 2, "l1": 1}[norm]
    expected = reference.solve_balanced_factor([(tensors[p.name], p.exponent) for p in one.slices], order)
    model = Bag(**tensors)
    assert float(saggs.balance(model, [one], norm=norm)) == pytest.approx(expected, rel=1e-11)
    assert float(saggs.balance(model, [one], norm=norm)) == pytest.approx(1, rel=1e-11)


def test_a_mixed_pair_in_company_leaves_the_others_at_their_closed_form() -> None:
    """One vectorised call for all; a zero norm among a mixed side's terms is no reason to leave it alone."""
    generator = torch.Generator().manual_seed(0)
    names = ["a", "b", "c", "d", "e", "f"]
    model = Bag(**{name: torch.randn(3, 2, generator=generator, dtype=torch.float64) for name in names})
    whole = (None, None)
    mixed = pair("up_down", [entries("a", *whole), entries("b", *whole, exponent=3)], [entries("c", *whole)])
    plain = pair("value_output", [entries("d", *whole)], [entries("e", *whole)])
    model["b"].zero_()
    before = snapshot(model)
    factors = saggs.balance(model, [mixed, plain])
    assert float(factors[0]) == pytest.approx(reference.find_balanced_factor(before["a"], before["c"]), rel=1e-12)
    assert float(factors[1]) == float(torch.sqrt(before["e"].norm() / before["d"].norm()))
    with pytest.raises(ValueError, match="exponents are mixed in one side; use balance"):
        balanced_factors([mixed], torch.ones(1), torch.ones(1))


@pytest.mark.parametrize(("p", "q"), [(1, 1), (1, 2), (3, 1)])
def test_the_l1_minimum_is_the_closed_form(p: int, q: int) -> None:
    generator = torch.Generator().manual_seed(p + q)
    a, b = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    one = pair("up_down", [entries("a", None, None, exponent=p)], [entries("b", None, None, exponent=q)])
    found = float(saggs.balance(Bag(a=a.clone(), b=b.clone()), [one], norm="l1"))
    assert found == pytest.approx(reference.find_l1_factor(a, b, p, q), rel=1e-13)
    assert found == pytest.approx(reference.solve_balanced_factor([(a, p), (b, -q)], order=1), rel=1e-13)
    assert found != pytest.approx(reference.solve_balanced_factor([(a, p), (b, -q)]), rel=1e-3)


@settings(max_examples=200, deadline=None)
@given(factor=st.floats(2.0**-60, 2.0**60, width=32))
def test_the_nearest_power_of_two_is_the_literal_one_and_what_is_left_rounds_to_one(factor: float) -> None:
    for dtype in (torch.float32, torch.float64):
        rounded = nearest_power_of_two(torch.tensor([factor], dtype=dtype))
        assert float(rounded) == reference.round_to_power_of_two(factor)
        assert float(nearest_power_of_two(torch.tensor([factor], dtype=dtype) / rounded)) == 1.0


@pytest.mark.parametrize("k", range(-30, 31, 5))
def test_the_threshold_between_two_powers_lies_at_the_root_of_two(k: int) -> None:
    """A last place below 2^(k + 1/2) goes to 2^k, one above it to 2^(k + 1); so does the literal one."""
    edge = torch.tensor(math.sqrt(2.0) * 2.0**k, dtype=torch.float32)
    for value in (torch.nextafter(edge, torch.zeros(())), edge, torch.nextafter(edge, edge + 1e30)):
        assert float(nearest_power_of_two(value)) == reference.round_to_power_of_two(float(value))


def gpt2_in(dtype: torch.dtype) -> Any:
    model: Any = tiny_gpt2()
    saggs.inject_imbalance(model, gpt2_pairs(), saggs.log_uniform_factors(len(gpt2_pairs()), 30.0, seed=5))
    return model.to(dtype)


def test_bfloat16_is_balanced_by_powers_of_two_which_keep_every_bit_of_the_logits_and_are_idempotent() -> None:
    """The second time every factor is 1, exactly. Odd factors (the control) round a third of the weights."""
    model, pairs = gpt2_in(torch.bfloat16), gpt2_pairs()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    logits, ratios = of_ids(model), saggs.log2_norm_ratios(model, pairs)
    factors = saggs.balance(model, pairs, optimizer)
    assert torch.equal(of_ids(model), logits)
    assert set(torch.frexp(factors)[0].tolist()) == {0.5}
    assert len(set(factors.tolist())) > 4
    assert ratios.abs().max() > 4
    assert saggs.log2_norm_ratios(model, pairs).abs().max() <= 1.0001, "c is off by at most a root of two"
    before = snapshot(model, optimizer)
    assert torch.equal(saggs.balance(model, pairs, optimizer), torch.ones(len(pairs)))
    assert differing(before, snapshot(model, optimizer)) == []
    exact = gpt2_in(torch.bfloat16)
    logits = of_ids(exact)
    saggs.balance(exact, pairs, factors="exact")
    assert not torch.equal(of_ids(exact), logits)
    assert saggs.log2_norm_ratios(exact, pairs).abs().max() < 1e-2


@pytest.mark.parametrize("channels", [False, True], ids=["views", "lines"])
def test_odd_factors_round_each_narrow_weight_once_from_float32(channels: bool) -> None:
    """Products in bfloat16 by a factor rounded to bfloat16 (the control) are others."""
    model = Factors(12, 10, 8).bfloat16()
    whole = [pair("value_output", [entries("left", None, None)], [entries("right", None, None)])]
    single = [pair("value_output", [entries("left", None, i)], [entries("right", None, i)]) for i in range(8)]
    before = snapshot(model)
    factors = saggs.balance(model, single if channels else whole, factors="exact")
    assert factors.dtype == torch.float32
    assert torch.equal(model.left, (before["left"].float() * factors).bfloat16())
    assert torch.equal(model.right, (before["right"].float() * factors.reciprocal()).bfloat16())
    assert not torch.equal(model.left, before["left"] * factors.bfloat16())


def test_a_pair_of_several_dtypes_keeps_each_and_moves_by_a_power_of_two() -> None:
    """A gain in float32 before a bfloat16 matrix, with moments in float32: exact in both. A pair in float32 beside it
    is balanced exactly."""
    model = Bag(
        gain=torch.rand(6) * 9 + 1, weight=torch.randn(4, 6).bfloat16(), a=torch.randn(3, 2), b=torch.rand(3, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {key: torch.rand(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    pairs = [pair("norm_gain", [entries("gain", j)], [entries("weight", None, j)]) for j in range(6)]
    pairs.append(pair("up_down", [entries("a", None, None)], [entries("b", None, None)]))
    before = snapshot(model, optimizer)
    factors = saggs.balance(model, pairs, optimizer)
    after = snapshot(model, optimizer)
    assert {name: tensor.dtype for name, tensor in after.items()} == {n: t.dtype for n, t in before.items()}
    powers = factors[:6]
    assert set(torch.frexp(powers)[0].tolist()) == {0.5}
    assert float(powers.log2().abs().max()) >= 1
    assert torch.equal(after["gain"], before["gain"] * powers)
    assert torch.equal(after["weight"].float(), before["weight"].float() / powers)
    assert torch.equal(after["weight.exp_avg_sq"], before["weight.exp_avg_sq"] * powers**2)
    assert float(torch.frexp(factors[6])[0]) != 0.5
    assert float(after["a"].norm()) == pytest.approx(float(after["b"].norm()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gains_used_as_one_plus_w_are_rounded_once(dtype: torch.dtype) -> None:
    """s (1 + w) - 1 to half a unit in the last place of its dtype; by way of a rounded 1 + w (control) it is not."""
    model = Bag(gain=torch.linspace(-0.3, 0.4, 8).to(dtype), weight=torch.randn(5, 8).to(dtype))
    pairs = [pair("norm_gain", [entries("gain", j, offset=1)], [entries("weight", None, j)]) for j in range(8)]
    before = snapshot(model)
    factors = saggs.balance(model, pairs, factors="exact").double()
    assert (factors - 1).abs().max() > 0.1
    exact = factors * (1 + before["gain"].double()) - 1
    error = (model["gain"].double() - exact).abs()
    spacing = torch.finfo(dtype).eps * (exact.abs() if dtype == torch.bfloat16 else 2 + exact.abs())
    assert bool((error <= 0.501 * spacing).all()) if dtype == torch.bfloat16 else bool((error <= 2 * spacing).all())
    careless = ((1 + before["gain"]) * factors.to(dtype) - 1).double()
    if dtype == torch.bfloat16:
        assert bool(((careless - exact).abs() > 0.51 * spacing).any())


def test_gains_that_come_near_minus_one_in_bfloat16_are_reported_and_in_float32_not() -> None:
    """At w = -0.97 the rounding of w is 32 times larger relative to 1 + w. A gain that grows is no cause for alarm."""
    for dtype, factor, warns in (
        (torch.bfloat16, 2.0**-5, True),
        (torch.bfloat16, 2.0, False),
        (torch.float32, 2.0**-5, False),
    ):
        case = CASES["gains 1 + w"]
        model = case.build().to(dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saggs.inject_imbalance(model, gain_pairs(), factor)
        assert ["gains used as 1 + w are near w = -1" in str(w.message) for w in caught] == [True] * warns
    model = case.build().bfloat16()
    with torch.no_grad():
        model.first.weight.mul_(2**-6)
        model.second.weight.mul_(2**-6)
    with pytest.warns(UserWarning, match=r"near w = -1 now, where the rounding of w is more than 8 times"):
        saggs.balance(model, gain_pairs())


def test_float16_is_computed_in_float32_and_its_subnormals_are_announced() -> None:
    """2^-10 makes most of these weights subnormal: that is rounding, and said; infinity is refused."""
    model = Factors().to(torch.float16)
    before = snapshot(model)
    with pytest.warns(UserWarning, match="left is in float16, where entries below 6e-5 are subnormal") as caught:
        saggs.rescale(model, factor_pair(), 1.7)
    assert caught[0].filename == __file__
    assert torch.equal(model.left, (before["left"].float() * 1.7).half())
    with pytest.warns(UserWarning, match="float16"):
        saggs.rescale(model, factor_pair(), 2.0**-13)
    with pytest.warns(UserWarning, match="float16"), pytest.raises(ValueError, match="nothing was changed"):
        saggs.rescale(model, factor_pair(), 2.0**-13)
    with pytest.warns(UserWarning, match="float16"):
        saggs.Rebalancer(model, None, [factor_pair()], transport=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "l3"}, "norm='l3': choose l2"),
        ({"factors": "odd"}, "factors='odd': choose exact, power_of_two"),
        ({"tolerance": 0.0}, r"tolerance=0\.0 must be above 0"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"max_sweeps": 0}, "max_sweeps=0 must be a whole number of sweeps"),
        ({"max_sweeps": True}, "max_sweeps=True"),
    ],
    ids=str,
)
def test_a_setting_out_of_its_range_is_refused_with_its_value(arguments: dict[str, Any], message: str) -> None:
    model = Factors()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        saggs.balance(model, [factor_pair()], **arguments)
    assert differing(before, snapshot(model)) == []
    with pytest.raises(ValueError, match="sweeps=0"):
        saggs.Rebalancer(model, None, [factor_pair()], transport=False, sweeps=0)


def test_states_saved_before_there_were_these_settings_are_loaded_and_other_settings_are_compared() -> None:
    """Defaults are not written, so that old and new states of a default Rebalancer are the same."""
    old = {"steps": 4, "every": 10, "damping": 1.0, "transport": False, "pairs": ["value_output:"]}

    def rebalancer(**chosen: Any) -> saggs.Rebalancer:
        return saggs.Rebalancer(Factors(), None, [factor_pair()], transport=False, **chosen)

    assert rebalancer().state_dict() == {**old, "steps": 0}
    plain = rebalancer()
    plain.load_state_dict(old)
    assert plain.steps == 4
    for name, value in (("norm", "l1"), ("factors", "exact")):
        changed = rebalancer(**{name: value})
        with pytest.raises(ValueError, match=f"{name}={old.get(name, 'l2' if name == 'norm' else None)!r}"):
            changed.load_state_dict(old)
        state = changed.state_dict()
        assert state[name] == value
        rebalancer(**{name: value}).load_state_dict(state)
        with pytest.raises(ValueError, match=f"the saved Rebalancer has {name}='{value}'"):
            rebalancer().load_state_dict(state)


def test_pairs_of_one_path_are_told_apart_in_saved_states_by_their_first_slice() -> None:
    """Another order of channels is another plan; a single pair of a kind and path keeps its short label."""
    model = tiny_llama()
    pairs = llama_pairs()
    whole = dataclasses.replace(factor_pair("lm_head.weight", "model.embed_tokens.weight"), path="head")
    state = saggs.Rebalancer(model, None, [*pairs, whole], transport=False).state_dict()
    assert state["pairs"][-1] == "value_output:head"
    assert state["pairs"][0] == "query_key::model.layers.0.self_attn.q_proj.weight[0:1, :]"
    assert len(set(state["pairs"])) == len(state["pairs"])
    other = saggs.Rebalancer(model, None, [*pairs[::-1], whole], transport=False)
    with pytest.raises(ValueError, match="the saved Rebalancer has pairs="):
        other.load_state_dict(state)


def test_powers_of_two_on_request_are_exact_in_float32() -> None:
    model = tiny_llama()
    saggs.inject_imbalance(model, llama_pairs(), 5.3)
    logits = of_ids(model)
    factors = saggs.balance(model, llama_pairs(), factors="power_of_two")
    assert torch.equal(of_ids(model), logits)
    assert bool((factors != 1).all())
    again = saggs.balance(model, llama_pairs(), factors="power_of_two")
    assert torch.equal(again, torch.ones_like(again))
    saggs.balance(model, llama_pairs())
    assert not torch.equal(of_ids(model), logits), "the control: odd factors round"
    assert relative_distance(of_ids(model), logits) < 1e-5


def test_a_slice_of_a_meta_pair_is_refused_with_the_pair() -> None:
    """A slice outside its parameter, among thousands: the message is that of a single one."""
    pairs = [pair("value_output", [entries("left", i, None)], [entries("right", i, None)]) for i in range(13)]
    with pytest.raises(ValueError, match=r"right: range 10:11 lies outside dimension 0 of \(10, 4\)"):
        saggs.Rebalancer(Factors(), None, pairs, transport=False)
    wrong = ScalePair(
        "up_down", "", (ParameterSlice("left", (None,), 1),), (ParameterSlice("right", (None, None), -1),)
    )
    with pytest.raises(ValueError, match="has 2 dimensions, the slice has 1"):
        saggs.balance(Factors(), [wrong])
