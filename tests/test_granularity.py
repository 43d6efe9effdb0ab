"""Pairs of heads and channels are rescaled and balanced as the literal reference says, in a few tensor operations."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from granular import CASES, Bag, Case, entries, gain_pairs, gpt2_pairs, llama_pairs, pair
from models import differing, relative_distance, snapshot, tiny_gpt2, tiny_llama
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import saggs
from saggs import ScalePair, plan, reference
from saggs.balancing import pair_norms
from saggs.pairs import named_parameters
from saggs.precision import float64_everywhere

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
DEGREES = {"grad": -1, "exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2}


def stepped(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Any, torch.optim.Optimizer]:
    """A model after one AdamW step, with gradients in flight: every kind of tensor that moves is there."""
    model = case.build().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    with float64_everywhere() if dtype == torch.float64 else contextlib.nullcontext():
        for _ in range(2):
            case.run(model).square().mean().backward()
            if not optimizer.state:
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer


def several(pairs: list[ScalePair], powers_of_two: bool = False) -> list[float]:
    """A factor a pair, each another one."""
    factors = saggs.log_uniform_factors(len(pairs), 8.0, seed=2)
    return [2.0 ** round(math.log2(f)) for f in factors] if powers_of_two else factors


def literal(before: Mapping[str, Tensor], pairs: list[ScalePair], factors: list[float]) -> dict[str, Tensor]:
    """Every weight, gradient and state tensor after the rescaling, entry by entry."""
    result = {name: tensor.double() for name, tensor in before.items()}
    for one, factor in zip(pairs, factors, strict=True):
        for part in one.slices:
            for key in (k for k in before if k in {part.name, *(f"{part.name}.{suffix}" for suffix in DEGREES)}):
                degree = 1 if key == part.name else DEGREES[key.rpartition(".")[2]]
                offset = part.offset if key == part.name else 0
                multiplier = math.pow(factor, part.exponent * degree)
                result[key] = reference.rescale_entries(result[key] + offset, part.ranges, multiplier) - offset
    return result


@EVERY
def test_rescaling_equals_the_literal_one_on_weights_gradients_and_state(case: Case) -> None:
    """To 1e-12 for odd factors; to the bit for powers of two, save for 1 + w, whose rounding is another one there."""
    for powers_of_two in (False, True):
        model, optimizer = stepped(case)
        before, factors = snapshot(model, optimizer), several(case.pairs, powers_of_two)
        saggs.inject_imbalance(model, case.pairs, factors, optimizer)
        after, expected = snapshot(model, optimizer), literal(before, case.pairs, factors)
        offsets = {part.name for one in case.pairs for part in one.slices if part.offset}
        for name, tensor in after.items():
            if powers_of_two and name not in offsets:
                assert torch.equal(tensor.double(), expected[name]), name
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-12, atol=1e-14, msg=name)
        assert len(differing(before, after)) >= 4 * len({part.name for one in case.pairs for part in one.slices})


@EVERY
def test_a_factor_a_pair_keeps_the_function_and_a_wrong_pair_does_not(case: Case) -> None:
    """To 1e-12 in float64; to the bit in float32 for powers of two, where no 1 + w is rounded. Controls: a forgotten
    bias, the wrong rotary partner, another order of the rows, a neighbour's expert, a gate, an offset, an exponent."""
    with float64_everywhere():
        model = case.build().double()
        before = case.run(model)
        saggs.inject_imbalance(model, case.pairs, several(case.pairs))
        assert relative_distance(case.run(model), before) < 1e-12
        wrong = case.build().double()
        saggs.inject_imbalance(wrong, case.spoilt, several(case.spoilt))
        assert relative_distance(case.run(wrong), before) > 1e-3
    narrow = case.build().float()
    before = case.run(narrow)
    saggs.inject_imbalance(narrow, case.pairs, several(case.pairs, powers_of_two=True))
    if any(part.offset for one in case.pairs for part in one.slices):
        assert relative_distance(case.run(narrow), before) < 1e-6
    else:
        assert torch.equal(case.run(narrow), before)


def slices_of(one: ScalePair) -> list[tuple[str, Any, int, int]]:
    return [(part.name, part.ranges, part.exponent, part.offset) for part in one.slices if not part.bias]


@EVERY
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_balancing_equals_the_literal_minimum_of_every_pair(case: Case, norm: Any) -> None:
    """The factor to 1e-12, the function too; a second time every factor is 1. The control is the other norm."""
    with float64_everywhere():
        model, optimizer = stepped(case)
        saggs.inject_imbalance(model, case.pairs, several(case.pairs), optimizer)
        output, before = case.run(model), snapshot(model, optimizer)
        order = {"l2": 2, "l1": 1}[norm]
        expected = [reference.balance_slices(before, slices_of(one), order) for one in case.pairs]
        found = saggs.balance(model, case.pairs, optimizer, norm=norm)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
        after = literal(before, case.pairs, found.tolist())
        for name, tensor in snapshot(model, optimizer).items():
            torch.testing.assert_close(tensor.double(), after[name], rtol=1e-12, atol=1e-14, msg=name)
        assert relative_distance(case.run(model), output) < 1e-12
        again = saggs.balance(model, case.pairs, optimizer, norm=norm)
        assert float((again - 1).abs().max()) < 1e-12
        other = torch.tensor([reference.balance_slices(before, slices_of(p), 3 - order) for p in case.pairs])
        assert float((found - other).abs().max()) > 1e-3


def test_l1_balancing_equalises_sums_of_absolute_values_and_l2_does_not() -> None:
    """With exponents 1 and -1 the minimum is where both are equal; damping closes its share of the gap."""
    for damping in (1.0, 0.25):
        model = tiny_llama().double()
        pairs = llama_pairs()
        gap = saggs.log2_norm_ratios(model, pairs, norm="l1")
        saggs.balance(model, pairs, norm="l1", damping=damping)
        after = saggs.log2_norm_ratios(model, pairs, norm="l1")
        torch.testing.assert_close(after, (1 - damping) * gap, rtol=0, atol=1e-12)
    saggs.balance(model, pairs)
    assert saggs.log2_norm_ratios(model, pairs).abs().max() < 1e-12
    assert saggs.log2_norm_ratios(model, pairs, norm="l1").abs().max() > 1e-3


@EVERY
def test_lines_and_views_give_the_same_products(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways to the same bits in the same dtype; norms are summed in another order, so balancing to rounding."""
    ends, factors = [], []
    for limit in (1, 10**9):
        monkeypatch.setattr(plan, "VIEWS", limit)
        model, optimizer = stepped(case, torch.float32)
        saggs.inject_imbalance(model, case.pairs, several(case.pairs), optimizer)
        ends.append(snapshot(model, optimizer))
        factors.append(saggs.balance(model, case.pairs, optimizer))
    assert differing(*ends) == []
    torch.testing.assert_close(*factors, rtol=1e-5, atol=0)


def test_entries_outside_every_pair_keep_their_bits_in_the_same_product() -> None:
    """Negative zeros, infinities and NaN next to the lines of a pair: they are multiplied by one, and stay."""
    model = Bag(weight=torch.randn(40, 8), gain=torch.randn(40))
    odd = torch.tensor([-0.0, float("inf"), float("nan"), 1e-42, 1.0] * 4)
    model["weight"][1::2], model["gain"][1::2] = odd[:, None], odd
    pairs = [pair("norm_gain", [entries("gain", i, offset=1)], [entries("weight", i, None)]) for i in range(0, 40, 2)]
    before = [model[name].clone().view(torch.int32) for name in ("weight", "gain")]
    saggs.balance(model, pairs)
    after = [model[name].clone().view(torch.int32) for name in ("weight", "gain")]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[1::2], new[1::2])
        assert not torch.equal(old[::2], new[::2])


class Watch(TorchDispatchMode):
    """Counts operations, and raises for one whose result the host has to wait for."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "masked_select", "unique")

    def __init__(self, may_wait: bool = False) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self._may_wait = may_wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._may_wait and name in self.WAITING:
            raise AssertionError(f"{name} waits for the device")
        self.count[name] += 1
        return func(*args, **(kwargs or {}))


class Channels(nn.Module):
    """A gain, an up and a down projection of any width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.up, self.down = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(3, width))


def neurons(width: int) -> list[ScalePair]:
    return [pair("up_down", [entries("up", i, None)], [entries("down", None, i)]) for i in range(width)]


def gains(width: int) -> list[ScalePair]:
    return [pair("norm_gain", [entries("gain", i)], [entries("up", None, i)]) for i in range(width)]


def operations(width: int, pairs: list[ScalePair]) -> Counter[str]:
    model = Channels(width)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    rebalancer = saggs.Rebalancer(model, optimizer, pairs)
    with Watch() as watch:
        rebalancer.rebalance()
    return watch.count


@pytest.mark.parametrize("overlapping", [False, True], ids=["disjoint", "overlapping"])
def test_the_number_of_operations_does_not_depend_on_the_number_of_channels(
    overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of them waits for the device. The control multiplies view by view."""

    def total(width: int) -> Counter[str]:
        return operations(width, neurons(width) + (gains(width) if overlapping else []))

    few, many = total(10), total(1000)
    assert few == many
    assert sum(many.values()) < (1100 if overlapping else 120)
    monkeypatch.setattr(plan, "VIEWS", 10**9)
    few, many = total(10), total(40)
    assert sum(many.values()) > 2 * sum(few.values())


def test_a_host_that_waits_is_noticed() -> None:
    """The control of the watch: reading the count of unbalanced pairs waits."""
    rebalancer = saggs.Rebalancer(Channels(10), None, neurons(10), transport=False)
    rebalancer.rebalance()
    with pytest.raises(AssertionError, match="_local_scalar_dense waits"), Watch():
        int(rebalancer.unbalanced)


@pytest.mark.parametrize("kinds", ["matrices", "channels"])
def test_an_event_follows_its_model_to_another_dtype_and_device(kinds: str) -> None:
    """The meta device has no values to wait for, and refuses tensors of another device: an event runs through there."""
    model = tiny_gpt2()
    rebalancer = saggs.Rebalancer(model, None, gpt2_pairs(32 if kinds == "matrices" else 1), transport=False)
    assert rebalancer.rebalance().dtype == torch.float32
    model.double()
    rebalancer.rebalance()
    assert saggs.log2_norm_ratios(model, rebalancer.pairs).abs().max() < 1e-13
    model.bfloat16()
    factors = rebalancer.rebalance()
    assert torch.equal(factors, torch.exp2(torch.log2(factors).round())), "powers of two, now"
    model.float().to("meta")
    assert rebalancer.rebalance().device.type == "meta"


def test_a_replaced_parameter_is_balanced_by_channel_and_one_of_another_shape_is_refused() -> None:
    model = tiny_llama()
    rebalancer = saggs.Rebalancer(model, torch.optim.AdamW(model.parameters()), llama_pairs())
    projection = model.model.layers[0].mlp.up_proj
    dead = projection.weight
    kept = dead.detach().clone()
    projection.weight = nn.Parameter(dead.detach() * 100)
    rebalancer.rebalance()
    assert torch.equal(dead, kept)
    assert saggs.log2_norm_ratios(model, rebalancer.pairs).abs().max() < 1e-5
    projection.weight = nn.Parameter(torch.ones(7, 32))
    with pytest.raises(ValueError, match=r"up_proj\.weight has shape \(7, 32\), the plan was compiled for \(48, 32\)"):
        rebalancer.rebalance()


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_channel_that_is_zero_or_not_finite_is_left_alone_and_all_others_are_balanced(bad: float) -> None:
    """And no NaN is written, into no moment either, though the factor that it would have is 0 or infinite."""
    case = CASES["gpt2 channels"]
    model, optimizer = stepped(case)
    one = case.pairs[5]
    with torch.no_grad():
        one.left[0].view(named_parameters(model)[one.left[0].name]).fill_(bad)
    before = snapshot(model, optimizer)
    with pytest.warns(UserWarning, match=f"1 of {len(case.pairs)} pairs were left alone"):
        factors = saggs.balance(model, case.pairs, optimizer)
    assert float(factors[5]) == 1.0
    after = snapshot(model, optimizer)
    for part in one.slices:
        for key in (k for k in before if k == part.name or k.rpartition(".")[0] == part.name):
            if before[key].dim():
                torch.testing.assert_close(
                    part.view(after[key]), part.view(before[key]), rtol=0, atol=0, equal_nan=True
                )
    for name, tensor in after.items():
        assert torch.equal(torch.isnan(tensor), torch.isnan(before[name])), name
    ratios = torch.cat([saggs.log2_norm_ratios(model, case.pairs)[:5], saggs.log2_norm_ratios(model, case.pairs)[6:]])
    assert ratios.abs().max() < 1e-12


def test_a_factor_whose_square_is_infinite_writes_no_nan_into_moments() -> None:
    """c = 2^-70 would divide second moments by 2^-140: infinity times a moment of zero. Such a pair is left alone."""
    model = Channels(6).float()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        zero = torch.zeros_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": zero.clone(), "exp_avg_sq": zero.clone()}
    with torch.no_grad():
        model.up[0] = 2.0**60
        model.down[:, 0] = 2.0**-80
    rebalancer = saggs.Rebalancer(model, optimizer, neurons(6), norm="l1")
    rebalancer.rebalance()
    assert int(rebalancer.unbalanced) == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in snapshot(model, optimizer).values())


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_balancing_by_channel_gives_equal_bits_from_every_power_of_two_on_the_orbit(build: Callable[[], Any]) -> None:
    """A granularity at least as fine as the rescaling has one representative; a coarser one (the control) has not."""
    fine = gpt2_pairs() if build is tiny_gpt2 else llama_pairs()
    coarse = saggs.find_pairs(build(), saggs.pairs.BALANCED_KINDS)
    for pairs, met in ((fine, True), (coarse, False)):
        ends = []
        for moved in (False, True):
            model = build()
            optimizer = torch.optim.AdamW(model.parameters())
            if moved:
                saggs.inject_imbalance(model, fine, several(fine, powers_of_two=True), optimizer)
            saggs.balance(model, pairs, optimizer)
            ends.append(snapshot(model, optimizer))
        assert (differing(*ends) == []) == met


def test_norms_count_one_plus_w_and_no_biases() -> None:
    """Against sums written out; with offset 0 (the control) the gain's norm is another."""
    case = CASES["gains 1 + w"]
    model = case.build().double()
    left, right = pair_norms(case.pairs, named_parameters(model))
    torch.testing.assert_close(left, (1 + model.gain.detach()).abs(), rtol=1e-14, atol=0)
    both = torch.cat([model.first.weight, model.second.weight]).detach()
    torch.testing.assert_close(right, both.norm(dim=0), rtol=1e-14, atol=0)
    assert relative_distance(pair_norms(gain_pairs(offset=0), named_parameters(model))[0], left) > 0.1
