"""The algebra of rescalings: the count from below equals the count from above, and what is missed is named."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expected_pairs import SIZES, expected
from families_table import MODELS, built
from models import differing, snapshot
from odd_models import Hush
from small_models import Net, attended, mlp, rows, sequences
from torch import Tensor, nn

import saggs
from saggs import nullspace, report
from saggs.checkpoints.shards import CheckpointError
from saggs.kinds import Generators, classify
from saggs.nullspace import Algebra, algebra, null_space

FAST = ("gpt2", "llama", "falcon_7b", "vit", "opt", "gemma2", "braid", "quarry", "carousel")
COMPLETE = "every dimension is explained: no rescaling of whole rows, columns and gains was missed there"


# Lines that twelve tokens, never the padding, do not reach: further positions, and the padding's own embedding.
UNREACHED = {"gpt2": 12, "opt": 14, "llama": 1, "falcon_7b": 0, "vit": 0}


@functools.cache
def of_family(name: str) -> Algebra:
    """The algebra of a family, once for all tests."""
    family = MODELS[name]
    return algebra(built(name), family.inputs, family.output)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_a_family_has_the_expected_dimension_and_nothing_is_left_over(name: str) -> None:
    """As many generators of each kind as are written by hand, and they span the null space, with a wide gap."""
    found = of_family(name)
    space, wanted = found.null_space, Counter(pair.kind for pair in expected(name, "channel"))
    assert found.dimension == sum(wanted.values())
    assert {kind: count for kind, count in found.by_kind().items() if count} == wanted
    assert sum(g.relation.count for g in found.generators) == found.dimension
    assert space.unexplained == 0
    assert space.left_over == ()
    assert space.nullity == found.dimension + space.trivial
    assert space.largest_zero < 1e-12
    assert space.smallest_other > 1e-7
    assert len(space.singular_values) == space.lines <= space.probes - 40
    assert space.measured_on == "the model"
    assert space.unknown == UNREACHED.get(name, space.unknown)
    assert str(found).splitlines()[-1 - bool(space.unknown)] == COMPLETE
    assert "NOT explained" not in str(found)
    assert found.to_json()["null_space"]["unexplained"] == 0
    assert found.to_json()["dimension"] == found.dimension


# --- the control: what is taken away is missed ------------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, drop: Callable[[list[Generators]], list[Generators]]) -> None:
    """Have the count from below miss what `drop` takes away."""
    monkeypatch.setattr(nullspace, "classify", lambda found, probing: drop(classify(found, probing)))


def _block(net: Any, x: Tensor) -> Tensor:
    ready = net.norm(x)
    mixed = attended(net.query(ready), net.key(ready), net.value(ready))
    return net.head(torch.cat([net.output(mixed), net.down(torch.relu(net.up(ready)))], dim=-1))


def block() -> Net:
    """One head of attention beside neurons, behind a norm; what it makes is read by a last matrix."""
    sizes = {"query": (4, 6), "key": (4, 6), "value": (3, 6), "output": (5, 3), "up": (9, 6), "down": (5, 9)}
    parts = {name: nn.Linear(ins, outs) for name, (outs, ins) in sizes.items()}
    return Net(_block, norm=nn.LayerNorm(6), head=nn.Linear(10, 2), **parts)


KINDS = {
    "query_key": (4, {"query.weight", "key.weight"}),
    "value_output": (3, {"value.weight", "output.weight"}),
    "up_down": (9, {"up.weight", "down.weight"}),
    "norm_gain": (6, {"norm.weight", "norm.bias", "query.weight", "key.weight", "value.weight", "up.weight"}),
}


def test_the_block_of_these_controls_has_its_closed_form_but_for_what_its_last_matrix_reads() -> None:
    """Ten rows with their biases against the columns of their reader: equal lines, and so they are found too."""
    found = algebra(block(), sequences())
    extra = found.by_kind()["value_output"] - KINDS["value_output"][0]
    assert extra == 10
    assert found.dimension == sum(count for count, _ in KINDS.values()) + extra
    assert found.null_space.unexplained == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_is_not_found_is_counted_as_unexplained_and_its_parameters_are_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, names = KINDS[kind]

    def drop(generators: list[Generators]) -> list[Generators]:
        return [g for g in generators if {s.lines.name for s in g.relation.sides} != names]

    without(monkeypatch, drop)
    space = null_space(block(), sequences())
    assert space.unexplained == count
    assert names <= set(space.left_over)


def test_a_single_generator_that_is_not_found_is_missed_in_its_own_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: set[str] = set()  # which relation is found first depends on the last bits

    def drop(generators: list[Generators]) -> list[Generators]:
        relation = generators[0].relation
        layers.update(".".join(side.lines.name.split(".")[:3]) for side in relation.sides)
        fewer = replace(relation, sides=tuple(replace(s, index=s.index[1:]) for s in relation.sides))
        return [replace(generators[0], relation=fewer), *generators[1:]]

    without(monkeypatch, drop)
    family = MODELS["falcon_7b"]
    found = algebra(built("falcon_7b"), family.inputs, family.output)
    assert found.null_space.unexplained == 1
    (layer,) = layers
    assert all(name.startswith(f"{layer}.") for name in found.null_space.left_over)
    assert f"1 dimensions are NOT explained by generators; they move {layer}." in str(found)
    assert COMPLETE not in str(found)


def test_a_generator_that_is_found_twice_explains_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is explained is a dimension, not a number of generators: a copy does not make up for one that is missing."""
    net = mlp(torch.relu)

    def copied(generators: list[Generators]) -> list[Generators]:
        relation = generators[0].relation
        sides = tuple(replace(s, index=torch.cat([s.index[1:2], s.index[1:]])) for s in relation.sides)
        return [replace(generators[0], relation=replace(relation, sides=sides))]

    assert null_space(net, rows()).unexplained == 0
    without(monkeypatch, copied)
    assert null_space(net, rows()).unexplained == 1


# --- symmetries of a shape that discovery does not know ---------------------------------------------------------------


def _low_rank(net: Any, x: Tensor) -> Tensor:
    return net.out(net.base(x) + net.up(net.down(x)))


def _plain_stream(net: Any, x: Tensor) -> Tensor:
    h = net.enter(x)
    return net.head(h + net.down(torch.tanh(net.up(h))))


def _late_bias(net: Any, x: Tensor) -> Tensor:
    return net.out(net.base(x).clone() + net.late)


def _linear(outs: int, ins: int) -> nn.Linear:
    return nn.Linear(ins, outs, bias=False)


# Each: the network, its found generators, its unexplained ones, and what they move.
UNKNOWN_SHAPES: dict[str, tuple[Callable[[], Net], int, int, set[str]]] = {
    # a low-rank update beside a matrix: rows of both against the columns of their reader
    "low_rank": (
        lambda: Net(_low_rank, base=_linear(9, 6), down=_linear(2, 6), up=_linear(9, 2), out=nn.Linear(9, 5)),
        2, 9, {"base.weight", "up.weight", "out.weight"},
    ),
    # a residual stream without norms: what writes into a channel against what reads from it
    "stream_without_norms": (
        lambda: Net(_plain_stream, enter=_linear(7, 6), up=nn.Linear(7, 9), down=nn.Linear(9, 7), head=nn.Linear(7, 4)),
        0, 7, {"enter.weight", "down.weight", "up.weight", "head.weight"},
    ),
    # a bias that is not seen to belong to its matrix
    "late_bias": (
        lambda: Net(_late_bias, base=_linear(9, 6), late=(9,), out=nn.Linear(9, 5)),
        0, 9, {"base.weight", "late", "out.weight"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", UNKNOWN_SHAPES)
def test_a_symmetry_of_an_unknown_shape_is_not_dropped_in_silence(shape: str) -> None:
    """Sums of three lines or more are found by no shape: they are counted from above, and named."""
    build, dimension, unexplained, names = UNKNOWN_SHAPES[shape]
    found = algebra(build(), rows())
    assert found.dimension == dimension
    assert found.null_space.unexplained == unexplained
    assert names <= set(found.null_space.left_over)
    assert found.null_space.smallest_other > 1e-4
    assert f"{unexplained} dimensions are NOT explained by generators; they move" in found.verdict()
    assert found.to_json()["null_space"]["left_over"] == found.null_space.left_over


@torch.no_grad()
def test_the_low_rank_rows_are_a_symmetry_indeed() -> None:
    """What is counted from above is a rescaling that changes no output; either part of it alone changes them."""
    net = UNKNOWN_SHAPES["low_rank"][0]().double()
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = net(x)
    changes = {}
    for moved in (("base", "up", "out"), ("base", "out"), ("up", "out")):
        again = UNKNOWN_SHAPES["low_rank"][0]().double()
        for name in moved:
            weight = again.get_parameter(f"{name}.weight")
            (weight[:, 3] if name == "out" else weight[3]).mul_(0.4 if name == "out" else 2.5)
        changes[moved] = float((again(x) - before).abs().max())
    assert changes.pop(("base", "up", "out")) < 1e-14
    assert min(changes.values()) > 1e-2


@pytest.mark.parametrize(("eps", "free"), [(0.0, 1), (1e-6, 0), (1e-12, 0)])
def test_a_norm_frees_the_scale_before_it_only_without_an_eps(eps: float, free: int) -> None:
    """With an eps the freedom is approximate, and not counted, however small the eps is."""
    norm = Hush(9)
    norm.floor = eps
    found = algebra(
        Net(lambda n, x: n.out(n.norm(n.into(x))), into=_linear(9, 6), norm=norm, out=_linear(4, 9)), rows()
    )
    assert found.by_kind()["norm_gain"] == found.dimension == 9
    assert found.null_space.unexplained == free
    assert found.null_space.left_over == ("into.weight",) * free
    assert found.null_space.smallest_other > 1e-4


# --- what is not known ------------------------------------------------------------------------------------------------


def _picked(net: Any, x: Tensor) -> Tensor:
    return net.out(torch.relu(net.up(net.table(x))))


@pytest.mark.parametrize(("reached", "unknown"), [(10, 0), (6, 4)])
def test_lines_that_no_probe_reaches_are_counted_as_unknown(reached: int, unknown: int) -> None:
    """Four tokens that never occur; the verdict says so, and with all ten it does not."""

    def inputs(generator: torch.Generator, count: int) -> Mapping[str, Tensor]:
        return {"x": torch.arange(reached).expand(count, -1)}

    net = Net(_picked, table=nn.Embedding(10, 6), up=nn.Linear(6, 9), out=nn.Linear(9, 5))
    found = algebra(net, inputs)
    assert found.null_space.unknown == unknown
    assert found.null_space.unexplained == 0
    assert found.dimension == 9 + 6  # neurons, and channels of the table against the columns of `up`
    sentence = f"{unknown} lines were reached by no probe: of those nothing is known"
    assert (sentence in str(found)) == (unknown > 0)
    assert found.null_space.lines + unknown == 10 + 6 + 9 + 6 + 5 + 9


# --- which model is measured ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_is_not_tiny_is_counted_on_its_narrow_twin() -> None:
    """The generators are the model's own, in closed form; the null space is that of the twin, and complete."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    found = algebra(LlamaForCausalLM(config))
    assert found.by_kind() == {
        "query_key": 3 * 4 * 4, "value_output": 3 * 4 * 8, "up_down": 3 * 160, "norm_gain": 7 * 64, "query_key_gain": 0,
    }  # fmt: skip
    assert found.by_place[("model.layers.1.self_attn", "query_key")] == 16
    assert found.null_space.measured_on == "its narrow twin"
    assert found.null_space.unexplained == 0
    assert found.null_space.nullity < found.dimension


def test_a_large_model_without_a_twin_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert null_space(mlp(torch.relu), rows()).lines == 29
    monkeypatch.setattr(nullspace, "_MOST_LINES", 28)
    with pytest.raises(ValueError, match=r"Net has 29 lines of weights and no narrow twin.*Build the model narrower"):
        null_space(mlp(torch.relu), rows())


def test_counting_changes_nothing_and_comes_out_the_same_again() -> None:
    net = mlp(torch.relu).train()
    before, state = snapshot(net), torch.get_rng_state()
    first, again = algebra(net, rows()), saggs.algebra(net, rows())
    assert first.null_space == again.null_space
    assert differing(before, snapshot(net)) == []
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)


def test_the_table_has_a_row_for_each_module_and_its_sums() -> None:
    text = str(of_family("falcon_7b")).splitlines()
    assert text[0].split() == ["module", "query_key", "value_output", "norm_gain", "all"]
    s = SIZES["falcon_7b"]
    assert ["transformer.h.0.self_attention", "4", "8", "12"] in [line.split() for line in text]
    assert text[text.index("") - 1].split() == ["all", "8", "16", str(2 * s.width), "88"]


# --- the picture ------------------------------------------------------------------------------------------------------


def _bars(found: Algebra, target: Path) -> Sequence[float]:
    """Draws the picture and returns the heights of its bars."""
    heights: list[float] = []
    from matplotlib.axes import Axes

    with pytest.MonkeyPatch.context() as patch:
        draw = Axes.bar

        def bar(self: Axes, x: Any, height: Any, **rest: Any) -> Any:
            heights.extend(height)
            return draw(self, x, height, **rest)

        patch.setattr(Axes, "bar", bar)
        report.plot_algebra(found, target, "a title")
    return heights


@pytest.mark.parametrize(("ending", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_the_picture_shows_every_generator(ending: str, magic: bytes, tmp_path: Path) -> None:
    found = of_family("falcon_7b")
    target = tmp_path / f"algebra{ending}"
    assert sum(_bars(found, target)) == found.dimension
    assert target.read_bytes()[:4] == magic
    assert target.stat().st_size > 5000


def test_a_picture_of_a_model_without_generators_and_one_of_an_unknown_ending(tmp_path: Path) -> None:
    found = algebra(UNKNOWN_SHAPES["late_bias"][0](), rows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a legend without entries
        report.plot_algebra(found, tmp_path / "none.png", "nothing found")
    assert (tmp_path / "none.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(CheckpointError, match=r"the name has to end in one of .*png"):
        report.plot_algebra(found, tmp_path / "wrong.txt", "nothing found")
    assert not (tmp_path / "wrong.txt").exists()
