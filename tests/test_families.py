"""In every family, at every granularity, exactly the pairs that were written by hand: no pair more, none missing."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from expected_pairs import expected
from families_table import MODELS, PAGE, built, differences, discovered, either_way, render, table_of, with_table
from torch import Tensor, nn

from saggs import ParameterSlice, ScalePair
from saggs.assembly import GRANULARITIES, Granularity
from saggs.pairs import BALANCED_KINDS, named_parameters
from saggs.precision import float64_everywhere, use_plain_kernels
from saggs.rescaling import rescale_checked

every_model = pytest.mark.parametrize("name", MODELS)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)


@every_model
@every_granularity
def test_exactly_the_expected_pairs_are_found_and_each_is_certified(name: str, granularity: Granularity) -> None:
    """Kind, slices, exponents, offsets, biases, signs and sides; and a proof whose control changes the outputs."""
    found, model = discovered(name, granularity), built(name)
    assert differences(model, found, expected(name, granularity), either_way(name)) == []
    shapes = {n: tuple(p.shape) for n, p in named_parameters(model).items()}
    for pair in found:
        assert all(part.shape == shapes[part.name] for part in pair.slices)
        assert pair.certificate is not None
        assert pair.certificate.residual <= 1e-10
        assert pair.certificate.control > 1e-6
        assert pair.certificate.spreads == (0.4, 2.0)
        assert (-1.5 in pair.certificate.factors) == (pair.signs == "any")


@every_model
@every_granularity
def test_pairs_of_the_balanced_kinds_share_no_entry_and_gains_share_columns(
    name: str, granularity: Granularity
) -> None:
    """So that one pass balances them; a gain's reader is another pair's query (the control), wherever there is one."""
    touched = {n: torch.zeros(p.shape, dtype=torch.int) for n, p in named_parameters(built(name)).items()}
    for balanced in (True, False):
        for pair in discovered(name, granularity):
            if (pair.kind in BALANCED_KINDS) == balanced:
                for part in pair.slices:
                    part.view(touched[part.name]).add_(1)
        most = max(int(count.max()) for count in touched.values())
        assert most == 1 or not balanced
    assert most > 1 or name in ("opt_post_norm", "bert", "olmo2")


def change(pair: ScalePair, how: str) -> list[ScalePair]:
    """What a faulty discovery would yield in the place of a right pair."""
    biased = [part for part in pair.left if not part.bias]
    rows = pair.left[0].ranges
    moved = [(b + 1, e + 1) if r else (1, 2) for r in rows for b, e in [r or (0, 1)]]
    wrong = {
        "deleted": [],
        "twice": [pair, pair],
        "wrong exponent": [_with_right(pair, lambda s: dataclasses.replace(s, exponent=2 * s.exponent))],
        "forgotten bias": [dataclasses.replace(pair, left=tuple(biased))],
        "wrong kind": [dataclasses.replace(pair, kind="up_down" if pair.kind != "up_down" else "value_output")],
        "wrong signs": [dataclasses.replace(pair, signs="positive" if pair.signs == "any" else "any")],
        "wrong offset": [_with_right(pair, lambda s: dataclasses.replace(s, offset=1 - s.offset))],
        "a slice twice": [dataclasses.replace(pair, left=(*pair.left, pair.left[0]))],
        "one off": [dataclasses.replace(pair, left=(dataclasses.replace(pair.left[0], ranges=tuple(moved)),
                                                    *pair.left[1:]))],
    }  # fmt: skip
    return wrong[how]


def _with_right(pair: ScalePair, edit: Callable[[ParameterSlice], ParameterSlice]) -> ScalePair:
    return dataclasses.replace(pair, right=tuple(map(edit, pair.right)))


FAULTS = ["deleted", "twice", "wrong exponent", "wrong kind", "wrong signs", "wrong offset", "a slice twice", "one off"]


@pytest.mark.parametrize("fault", [*FAULTS, "forgotten bias"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "opt", "carousel"])
def test_the_comparison_sees_each_kind_of_fault_in_any_single_pair(name: str, fault: str) -> None:
    """The control of the test above, which would otherwise pass whatever is found."""
    model, found, wanted = built(name), list(discovered(name, "head")), expected(name, "head")
    assert differences(model, found, wanted, either_way(name)) == []
    for i, pair in enumerate(found):
        if fault == "forgotten bias" and not any(part.bias for part in pair.left):
            continue
        faulty = [*found[:i], *change(pair, fault), *found[i + 1 :]]
        assert differences(model, faulty, wanted, either_way(name)), (pair, fault)


@pytest.mark.parametrize("name", ["llama", "falcon_40b", "mixtral"])
def test_the_comparison_sees_swapped_groups_layers_experts_and_sides(name: str) -> None:
    """Right sides of two pairs of one kind exchanged; and, where sides are told apart, left and right exchanged."""
    model, found, wanted = built(name), list(discovered(name, "head")), expected(name, "head")
    for i, j in ((a, b) for a in range(len(found)) for b in range(a) if found[a].kind == found[b].kind):
        swapped = list(found)
        swapped[i] = dataclasses.replace(found[i], right=found[j].right)
        swapped[j] = dataclasses.replace(found[j], right=found[i].right)
        assert len(differences(model, swapped, wanted)) == 4
    for i, pair in enumerate(found):
        left, right = (tuple(dataclasses.replace(s, exponent=-s.exponent) for s in side)
                       for side in (pair.left, pair.right))  # fmt: skip
        turned = [*found[:i], dataclasses.replace(pair, left=right, right=left), *found[i + 1 :]]
        assert len(differences(model, turned, wanted)) == 2
        assert differences(model, turned, wanted, either_way=[pair.kind]) == []


# --- rescaling --------------------------------------------------------------------------------------------------------


def run(model: nn.Module, name: str, inputs: Mapping[str, Any]) -> Tensor:
    with torch.no_grad():
        return MODELS[name].output(model(**inputs)).clone()


def scale_left_sides(model: nn.Module, pairs: Sequence[ScalePair], factors: Sequence[float]) -> None:
    parameters = named_parameters(model)
    with torch.no_grad():
        for pair, factor in zip(pairs, factors, strict=True):
            for part in pair.left:
                view = part.view(parameters[part.name])
                view.copy_((part.offset + view) * factor**part.exponent - part.offset)


def distance(now: Tensor, before: Tensor) -> float:
    return float((now - before).abs().max() / before.abs().max())


@every_model
def test_all_pairs_rescaled_by_random_factors_keep_the_outputs(name: str) -> None:
    """To 1e-12 in float64, negative factors where they are allowed; the left sides alone (the control) do not."""
    pairs, draw = discovered(name, "matrix"), random.Random(3)
    factors = [2 ** draw.uniform(-2, 2) * (draw.choice([1, -1]) if p.signs == "any" else 1) for p in pairs]
    moved, control = copy.deepcopy(built(name)).double(), copy.deepcopy(built(name)).double()
    use_plain_kernels(moved)
    with float64_everywhere():
        inputs = MODELS[name].inputs(torch.Generator().manual_seed(11), 4)
        before = run(moved, name, inputs)
        rescale_checked(moved, pairs, factors)
        scale_left_sides(control, pairs, factors)
        assert distance(run(moved, name, inputs), before) < 1e-12
        assert distance(run(control, name, inputs), before) > 1e-2
    weights = named_parameters(built(name))
    for pair in pairs:  # and something was done
        part = pair.left[0]
        assert not torch.equal(part.view(named_parameters(moved)[part.name]), part.view(weights[part.name]).double())


@every_model
def test_powers_of_two_keep_every_bit_in_float32(name: str) -> None:
    """All pairs at once, bit for bit; those of a gain 1 + w to rounding. The left sides alone (the control) do not."""
    pairs, draw = discovered(name, "matrix"), random.Random(4)
    factors = [2.0 ** draw.choice([-3, -2, -1, 1, 2, 3]) for _ in pairs]
    inputs = MODELS[name].inputs(torch.Generator().manual_seed(12), 4)
    before = run(built(name), name, inputs)
    exact = [(p, f) for p, f in zip(pairs, factors, strict=True) if not any(s.offset for s in p.slices)]
    moved, control = copy.deepcopy(built(name)), copy.deepcopy(built(name))
    rescale_checked(moved, [p for p, _ in exact], [f for _, f in exact])
    assert torch.equal(run(moved, name, inputs), before)
    rest = [(p, f) for p, f in zip(pairs, factors, strict=True) if (p, f) not in exact]
    rescale_checked(moved, [p for p, _ in rest], [f for _, f in rest])
    assert distance(run(moved, name, inputs), before) < 1e-5
    assert (name in ("gemma2", "gemma3", "braid")) == bool(rest)
    scale_left_sides(control, pairs, factors)
    assert distance(run(control, name, inputs), before) > 1e-2


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_this_table() -> None:
    """docs/symmetries.md is what the tests measure. Where it is not: `python tests/families_table.py --write`."""
    page = PAGE.read_text()
    assert table_of(page) == render()
    assert with_table(page, table_of(page)) == page
    assert with_table(page, "other") != page
