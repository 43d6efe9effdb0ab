"""A twin is the same class from a smaller configuration: the same names, fewer blocks, narrower ones, and it runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from deep_models import DEEP, Inputs, Leaf, Settings, Twig, cohere2, smollm3
from families import FAMILIES
from models import differing, snapshot
from small_models import mlp, rows
from torch import nn

from saggs.inputs import default_inputs, default_output
from saggs.pairs import canonical_names
from saggs.twin import blocks_of, indexless, shallow_twin, signatures_of, small_twin

WIDTH, LAYERS, HEADS = 96, 5, 6
TIED = ("gpt2", "gemma2", "opt", "bert", "t5", "whisper")
SEARCHES = {"small": small_twin, "shallow": shallow_twin}


def weightless(name: str) -> tuple[nn.Module, Inputs | None]:
    """A model on the meta device, made outside of what comes after."""
    build, inputs = DEEP[name]
    with torch.device("meta"):
        model = build(WIDTH, LAYERS, HEADS)
    return model, inputs


def names(model: nn.Module) -> set[str]:
    return {indexless(name) for name, _ in model.named_parameters()}


def ties(model: nn.Module) -> set[tuple[str, str]]:
    """Which names stand for one parameter, layer indices aside."""
    return {(indexless(a), indexless(b)) for a, b in canonical_names(model).items() if a != b}


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def blocks(model: nn.Module) -> int:
    return sum(map(len, blocks_of(model, 1).values()))


def logits(model: nn.Module, inputs: Inputs | None) -> torch.Tensor:
    arguments = (inputs or default_inputs(model))(torch.Generator().manual_seed(3), 2)
    with torch.no_grad():
        return default_output(model(**arguments))


@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize("name", DEEP)
def test_a_twin_has_the_same_names_and_ties_fewer_blocks_and_runs(name: str, kind: str) -> None:
    """Made for a model without weights; the model, its configuration and the random state are as before."""
    model, inputs = weightless(name)
    before: Any = copy.deepcopy(model.config.to_dict())  # type: ignore[operator, union-attr]
    held = {n: id(p) for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    found = SEARCHES[kind](model, inputs)
    assert found is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == before  # type: ignore[operator, union-attr]
    assert {n: id(p) for n, p in model.named_parameters()} == held
    assert all(p.is_meta for p in model.parameters())

    assert type(found) is type(model)
    assert names(found) == names(model)
    assert ties(found) == ties(model)
    assert bool(ties(found)) == (name in TIED)
    assert blocks(found) < blocks(model)
    assert blocks_of(found).keys() == blocks_of(model).keys()
    assert size(found) * 2 < size(model)
    assert not any(p.is_meta for p in found.parameters())
    assert not found.training
    output = logits(found, inputs)
    assert bool(torch.isfinite(output).all())
    assert float(output.std()) > 0


@pytest.mark.parametrize("name", DEEP)
def test_a_shallow_twin_has_the_real_widths_and_a_block_of_every_kind(name: str) -> None:
    """A narrow one has not: it is smaller by far, and no matrix of a block is as wide."""
    model, inputs = weightless(name)
    shallow, small = shallow_twin(model, inputs), small_twin(model, inputs)
    assert shallow is not None
    assert small is not None
    for blocks_name, members in blocks_of(model).items():
        own, twins = signatures_of(model), signatures_of(shallow)
        kinds = {own[b] for b in members}
        assert {twins[b] for b in blocks_of(shallow)[blocks_name]} == kinds
        shapes = {tuple(p.shape) for b in members for p in model.get_submodule(b).parameters() if p.dim() > 1}
        narrow = {
            tuple(p.shape) for b in members for p in small.get_submodule(f"{blocks_name}.0").parameters() if p.dim() > 1
        }
        assert max(map(max, narrow)) < max(map(max, shapes))
    assert size(small) * 2 < size(shallow)


def test_gemma2_keeps_a_layer_of_each_kind_of_attention() -> None:
    model, _ = weightless("gemma2")
    found: Any = shallow_twin(model)
    assert found.config.layer_types == ["sliding_attention", "full_attention"]
    assert len(model.config.layer_types) == LAYERS  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(("build", "switch"), [(smollm3, "use_rope"), (cohere2, "sliding_window")])
def test_a_layer_with_other_switches_is_a_kind_of_its_own(build: Any, switch: str) -> None:
    """Without rotary positions, with the very same parameters: the twin has one of each."""
    with torch.device("meta"):
        model = build()
    found = shallow_twin(model)

    def states(of: nn.Module) -> set[bool]:
        (members,) = blocks_of(of).values()
        return {bool(getattr(of.get_submodule(f"{b}.self_attn"), switch)) for b in members}

    assert states(model) == {True, False}
    assert states(found if found is not None else model) == {True, False}


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_model_with_weights_keeps_them(kind: str) -> None:
    torch.manual_seed(1)
    build, inputs = DEEP["llama"]
    model = build(32, 3, 4).train()
    before, state = snapshot(model), torch.get_rng_state()
    found = SEARCHES[kind](model, inputs)
    assert found is not None
    assert differing(before, snapshot(model)) == []
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    again = SEARCHES[kind](model, inputs)
    assert again is not None
    assert differing(snapshot(found), snapshot(again)) == []


def test_ratios_of_heads_survive_narrowing() -> None:
    """Six query heads on three key heads of more than one channel, or the pairs of the twin would be others."""
    model, _ = weightless("llama")
    config: Any = getattr(small_twin(model), "config", None)
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert config.num_key_value_heads > 1
    assert config.head_dim > 1
    assert config.hidden_size < WIDTH


def test_a_twin_of_a_plain_class_with_a_configuration_of_its_own() -> None:
    """No library, no attribute known by name: `layers` counts the blocks, `turn` says which kind they are."""
    for turn, kinds in ((0, [True, True]), (6, [False, False])):
        found: Any = shallow_twin(Twig(Settings(layers=6, turn=turn)))
        assert [leaf.homogeneous for leaf in found.leaves] == kinds
    found = shallow_twin(Twig(Settings(layers=6, turn=2)))
    assert {leaf.homogeneous for leaf in found.leaves} == {True, False}
    assert len(found.leaves) < 6
    assert found.table.num_embeddings == 64


class Stranger(Twig):
    """Its constructor wants more than a configuration."""

    def __init__(self, config: Settings, more: int) -> None:
        super().__init__(config)
        self.more = more


class Refusing(Twig):
    """Its constructor accepts the depth that it has, and no other."""

    def __init__(self, config: Settings) -> None:
        if config.layers != 4 or config.vocab_size != 200 or config.width != 16:
            raise RuntimeError("no other sizes")
        super().__init__(config)


def _grown() -> nn.Module:
    model = Twig(Settings())
    model.head.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    return model


def _untied() -> nn.Module:
    model: Any = DEEP["gpt2"][0](32, 3, 4)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


NONE = {
    "no_configuration": lambda: mlp(torch.relu),
    "other_constructor": lambda: Stranger(Settings(), 1),
    "refusing": lambda: Refusing(Settings()),
    "grown_by_hand": _grown,
    "untied_by_hand": _untied,
    "untied_family": FAMILIES["t5_v1_1"].build,
    "foreign_configuration": lambda: _with_config(object()),
}


def _with_config(config: Any) -> nn.Module:
    model = Leaf(16, homogeneous=True)
    model.config = config
    return model


@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize("what", NONE)
def test_a_model_that_its_class_would_not_build_so_has_no_twin(what: str, kind: str) -> None:
    """No configuration, other arguments, or other parameters than its configuration says; else (the control) it has."""
    assert SEARCHES[kind](NONE[what](), rows(16)) is None
    if what in ("grown_by_hand", "other_constructor", "refusing"):
        assert SEARCHES[kind](Twig(Settings())) is not None
    elif what == "untied_by_hand":
        assert SEARCHES[kind](DEEP["gpt2"][0](32, 3, 4)) is not None


def test_inputs_that_the_twin_cannot_run_on_give_none_rather_than_a_twin_that_fails() -> None:
    def refused(generator: torch.Generator, count: int) -> Any:
        return {"input_ids": torch.full((count, 5), 10_000)}

    model, _ = weightless("llama")
    assert shallow_twin(model, refused) is None
    assert shallow_twin(model) is not None
