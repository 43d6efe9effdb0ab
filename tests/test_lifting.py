"""What is found through a twin is what is found on the model itself: pair by pair, in every block."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from deep_models import DEEP, Inputs, Settings, Twig, cohere2, smollm3
from families import randomised
from families_table import differences
from torch import nn

from saggs import ScalePair, discovery, find_pairs, lifting
from saggs.assembly import GRANULARITIES, Granularity
from saggs.lifting import Analysis, analyse
from saggs.twin import blocks_of

HUGE = 10**15
SIZES = {"t5": (32, 3, 4), "bert": (32, 4, 4)}
NAMES = ["gpt2", "llama", "gemma2", "gpt_neox", "opt", "mixtral", "bert", "t5"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "whisper")]


@functools.cache
def model_of(name: str) -> tuple[nn.Module, Inputs | None]:
    """A model of four blocks (three of T5), every bias and gain drawn at random."""
    torch.manual_seed(0)
    build, inputs = DEEP[name]
    return randomised(build(*SIZES.get(name, (32, 4, 4))), 0), inputs


def analysed(model: nn.Module, inputs: Inputs | None, through_twin: bool) -> Analysis:
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("SMALL", "NARROW"):
            patch.setattr(lifting, limit, 0 if through_twin else HUGE)
        return analyse(model, inputs)


@functools.cache
def analysis_of(name: str, through_twin: bool) -> Analysis:
    return analysed(*model_of(name), through_twin)


def pairs_by(
    model: nn.Module, inputs: Inputs | None, granularity: Granularity, analysis: Analysis
) -> tuple[list[ScalePair], list[str]]:
    """`find_pairs` with an analysis at hand, and what it warned of."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(discovery, "analyse", lambda *_: analysis)
        patch.setattr(discovery, "cached", lambda model, granularity, directory, find: list(find()))
        pairs = find_pairs(model, granularity=granularity, inputs=inputs)
    return pairs, [str(w.message) for w in caught]


@pytest.mark.parametrize("name", [*NAMES, *SLOW])
def test_the_twin_is_shallower_and_stands_for_every_block(name: str) -> None:
    model, _ = model_of(name)
    through, direct = analysis_of(name, True), analysis_of(name, False)
    assert (through.through, direct.through) == ("a shallow twin", "itself")
    own, twins = blocks_of(model), blocks_of(through.probing.model)
    assert own.keys() == twins.keys()
    assert all(len(twins[blocks]) < len(own[blocks]) for blocks in own if len(own[blocks]) > 3)
    assert sum(g.relation.count for g in through.generators) == sum(g.relation.count for g in direct.generators)
    names = dict(model.named_parameters())
    for side in (s for g in through.generators for s in g.relation.sides):
        assert tuple(names[side.lines.name].shape) == side.lines.shape
        assert int(side.index.max()) < side.lines.count
    assert through.wiring.additive == direct.wiring.additive & names.keys()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", [*NAMES, *SLOW])
def test_a_twin_finds_exactly_what_the_model_itself_shows(name: str, granularity: Granularity) -> None:
    """Kinds, slices, exponents, signs and paths; all of them certified on the model, none left out."""
    model, inputs = model_of(name)
    found, said = pairs_by(model, inputs, granularity, analysis_of(name, True))
    wanted, said_too = pairs_by(model, inputs, granularity, analysis_of(name, False))
    assert said == said_too == []
    assert differences(model, found, wanted) == []
    assert [(p.kind, p.path) for p in found] == [(p.kind, p.path) for p in wanted]
    assert len(found) >= 9
    assert all(p.certificate is not None for p in found)
    fewer = [p for p in found if p.path != found[-1].path]
    assert differences(model, fewer, wanted) != []  # the comparison sees a block that is forgotten


def test_the_encoders_last_norm_is_read_by_every_block_of_the_decoder() -> None:
    """Six matrices of three blocks; without those of the block that the twin has not, the pair is refused."""
    model, inputs = model_of("t5")
    found, _ = pairs_by(model, inputs, "matrix", analysis_of("t5", True))
    (pair,) = [p for p in found if p.left[0].name == "encoder.final_layer_norm.weight"]
    readers = {f"decoder.block.{i}.layer.1.EncDecAttention.{m}.weight" for i in range(3) for m in "kv"}
    assert {part.name for part in pair.right} == readers


# --- blocks of one shape that compute different things ----------------------------------------------------------------


def through_both(model: nn.Module, granularity: Granularity) -> tuple[list[str], list[str]]:
    """How the pairs found through a twin differ from the model's own, and what was warned of."""
    found, said = pairs_by(model, None, granularity, analysed(model, None, True))
    wanted, _ = pairs_by(model, None, granularity, analysed(model, None, False))
    return differences(model, found, wanted), said


@pytest.mark.parametrize(
    ("build", "granularity"),
    [(smollm3, "head"), (cohere2, "head"), (smollm3, "channel"), (cohere2, "channel")],
)
def test_a_layer_without_rotary_positions_has_its_own_generators(build: Any, granularity: Granularity) -> None:
    """Its channels scale one by one, not two by two; by heads there is no difference."""
    assert through_both(randomised(build(), 0), granularity) == ([], [])


@pytest.mark.parametrize("turn", [0, 1, 2, 3, 4])
def test_blocks_of_one_shape_with_other_functions_are_told_apart(turn: int) -> None:
    """ReLU in the blocks from `turn` on, GELU before: four or none, or some."""
    torch.manual_seed(0)
    model = randomised(Twig(Settings(turn=turn)), 0)
    own, _ = pairs_by(model, None, "matrix", analysed(model, None, False))
    assert sum(p.kind == "up_down" for p in own) == 4 - turn
    assert through_both(model, "matrix") == ([], [])


def test_a_wrong_proposal_of_a_twin_is_refused_on_the_model() -> None:
    """Where blocks of one shape differ, no wrong pair comes out: each is certified where it stands."""
    torch.manual_seed(0)
    model = randomised(Twig(Settings(layers=5, turn=3)), 0)
    two = randomised(Twig(Settings(layers=5, turn=0)), 0)  # every block has a ReLU
    found, said = pairs_by(model, None, "matrix", analysed(two, None, True))
    assert [p.path for p in found if p.kind == "up_down"] == ["leaves.3", "leaves.4"]
    assert len(said) == 3
    assert all("left out: up_down of leaves." in line and "is not exact" in line for line in said)
