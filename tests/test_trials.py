"""Pairs are proved many at a time, and no wrong one hides behind others: singled out, named, and all is put back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from families import randomised
from families_table import MODELS, built, discovered
from models import GatedMlp, differing, relative_distance, snapshot, tiny_gpt2, tiny_llama, vectors
from small_models import mlp, rows
from torch import Tensor, nn
from torch.nn import functional

import saggs
from saggs import CertificationError, ParameterSlice, ScalePair, certificates
from saggs.assembly import GRANULARITIES, Granularity
from saggs.certificates import examine
from saggs.inputs import default_inputs, default_output
from saggs.pairs import named_parameters
from saggs.precision import float64_everywhere
from saggs.trials import Trial

Move = tuple[Sequence[ParameterSlice], float]
Results = Sequence[ScalePair | CertificationError]


def exchanged(first: ScalePair, second: ScalePair) -> tuple[ScalePair, ScalePair]:
    """Each with the other's right side."""
    return (
        dataclasses.replace(first, right=second.right, certificate=None),
        dataclasses.replace(second, right=first.right, certificate=None),
    )


def refused(results: Results) -> list[int]:
    return [i for i, found in enumerate(results) if isinstance(found, CertificationError)]


def of_kind(pairs: Sequence[ScalePair], kind: str) -> list[ScalePair]:
    return [pair for pair in pairs if pair.kind == kind]


@torch.no_grad()
def change(
    model: nn.Module, moves: Sequence[tuple[Sequence[ParameterSlice], float]], inputs: Any, output: Any
) -> float:
    """How far the outputs of a float64 model go when slices are multiplied by hand; the weights are put back."""
    parameters = named_parameters(model)
    before = {name: p.clone() for name, p in parameters.items()}
    with float64_everywhere():
        arguments = inputs(torch.Generator().manual_seed(9), 6)
        reference = output(model(**arguments))
        for parts, factor in moves:
            for part in parts:
                view = part.view(parameters[part.name])
                view.copy_((view + part.offset) * factor**part.exponent - part.offset)
        after = output(model(**arguments))
    for name, value in before.items():
        parameters[name].copy_(value)
    return relative_distance(after, reference)


# --- faults that make up for each other -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "granularity"),
    [
        ("gpt2", "query_key", "head"),
        ("gpt2", "value_output", "head"),
        ("llama", "query_key", "head"),
        ("gpt2", "query_key", "channel"),
        ("llama", "value_output", "channel"),
        ("opt", "up_down", "channel"),
        ("llama", "norm_gain", "channel"),
    ],
)
def test_two_wrong_pairs_that_make_up_for_each_other_are_both_refused(
    name: str, kind: str, granularity: Granularity
) -> None:
    """One head's queries with another's keys, and the reverse: by equal factors they change nothing together."""
    family, found = MODELS[name], list(discovered(name, granularity))
    first, second = of_kind(found, kind)[:2]
    wrong = exchanged(first, second)
    moves = [(pair.slices, 3.0) for pair in wrong]
    double = family.build().double()
    assert change(double, moves, family.inputs, family.output) < 1e-12
    assert change(double, moves[:1], family.inputs, family.output) > 1e-6
    others = [p for p in found if p not in (first, second)][:20]
    pairs = [*others[:10], *wrong, *others[10:]]
    results = examine(built(name), pairs, family.inputs, family.output)
    assert refused(results) == [len(others[:10]), len(others[:10]) + 1]
    assert refused(examine(built(name), [*others, first, second], family.inputs, family.output)) == []


def test_a_ring_of_wrong_pairs_is_refused_link_by_link() -> None:
    """Each neuron's row with the next one's column: all together by one factor, it is the pair of the matrices."""
    net = mlp(functional.leaky_relu)
    pairs = saggs.find_pairs(net, granularity="channel", inputs=rows())
    ring = [dataclasses.replace(p, right=q.right) for p, q in zip(pairs, pairs[1:] + pairs[:1], strict=True)]
    double = mlp(functional.leaky_relu).double()
    assert change(double, [(p.slices, 3.0) for p in ring], rows(), default_output) < 1e-12
    assert refused(examine(net, ring, rows())) == list(range(9))
    assert refused(examine(net, pairs, rows())) == []


def test_exponents_that_make_up_for_each_other_are_refused() -> None:
    """Queries by c² against keys by 1/c, and queries by c against keys by 1/c²: exact together, by equal factors."""
    model = tiny_gpt2()
    found = saggs.find_pairs(model)
    pair = found[0]
    steeper = dataclasses.replace(pair, left=tuple(dataclasses.replace(p, exponent=2) for p in pair.left))
    flatter = dataclasses.replace(pair, right=tuple(dataclasses.replace(p, exponent=-2) for p in pair.right))
    assert refused(examine(model, [steeper, flatter, *found[1:]])) == [0, 1]


# --- one among many ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 40, 87])
def test_a_wrong_pair_among_many_right_ones_is_singled_out_and_named(place: int) -> None:
    """Wherever it stands; every other pair has its certificate, as it has without the wrong one."""
    family, found = MODELS["falcon_7b"], list(discovered("falcon_7b", "channel"))
    assert len(found) == 88
    pairs = list(found)
    right = tuple(dataclasses.replace(p, exponent=3 * p.exponent) for p in found[place].right)
    pairs[place] = dataclasses.replace(found[place], right=right, certificate=None)
    results = examine(built("falcon_7b"), pairs, family.inputs, family.output)
    assert refused(results) == [place]
    assert f"{found[place]} is not exact: factor" in str(results[place])
    assert all(isinstance(r, ScalePair) and r.certificate is not None for i, r in enumerate(results) if i != place)
    with pytest.raises(CertificationError, match=f"{found[place].kind} of {found[place].path} is not exact"):
        saggs.certify(built("falcon_7b"), pairs, family.inputs, family.output)
    assert len(saggs.certify(built("falcon_7b"), found, family.inputs, family.output)) == 88


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "falcon_7b", "opt"])
def test_a_left_side_alone_changes_the_outputs_at_every_granularity(name: str, granularity: Granularity) -> None:
    """What the certificate's control says, measured on the whole model, for some of the channels."""
    family, found = MODELS[name], discovered(name, granularity)
    double = family.build().double()
    for pair in found[:: 1 if granularity != "channel" else 11]:
        assert pair.certificate is not None
        assert pair.certificate.control > 1e-6
        assert change(double, [(pair.left, 64.0)], family.inputs, family.output) > 1e-6, pair
        assert change(double, [(pair.slices, 64.0)], family.inputs, family.output) < 1e-10, pair


# --- at home and in the whole model -----------------------------------------------------------------------------------


def _faults(found: Sequence[ScalePair]) -> list[ScalePair]:
    """A wrong pair of every kind and layer: exchanged sides, a wrong exponent, a forgotten part."""
    wrong: list[ScalePair] = []
    for kind in saggs.KINDS:
        same = of_kind(found, kind)
        wrong += [w for a, b in itertools.pairwise(same) for w in exchanged(a, b)]
    for pair in found:
        wrong.append(dataclasses.replace(pair, right=tuple(dataclasses.replace(p, exponent=-3) for p in pair.right)))
        if sum(not part.bias for part in pair.right) > 1:
            wrong.append(dataclasses.replace(pair, right=pair.right[1:]))
    return wrong


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "mixtral", "carousel", "t5"])
def test_what_is_proved_at_home_is_proved_in_the_whole_model(name: str) -> None:
    """The same verdict, for right pairs and for wrong ones, as with a clone of the whole model for all of them."""
    family, model, found = MODELS[name], built(name), list(discovered(name, "matrix"))
    pairs = [*found, *_faults(found)]
    arguments = dict(family.inputs(torch.Generator().manual_seed(0), 6))
    whole = Trial(model, "", [((), arguments)], family.output, pairs).examine(pairs)
    here = examine(model, pairs, family.inputs, family.output)
    assert refused(here) == refused(whole)
    assert set(refused(whole)).isdisjoint(range(len(found)))
    assert len(refused(whole)) >= 0.8 * (len(pairs) - len(found))  # a key's bias may be forgotten


class Leaky(nn.Module):
    """A block that leaves its hidden layer behind, where the model around it may pick it up."""

    def __init__(self, picks_up: bool) -> None:
        super().__init__()
        self.inner, self.picks_up = Block(), picks_up
        randomised(self, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y + self.inner.left_behind.sum(-1, keepdim=True) if self.picks_up else y


class Block(nn.Module):
    """down(relu(up(x))), and what is between."""

    left_behind: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.left_behind = torch.relu(self.up(x)).detach()
        return self.down(self.left_behind)


def _block_pair(prefix: str, ending: str = "") -> ScalePair:
    up, down = f"{prefix}up{ending}", f"{prefix}down{ending}.weight"
    left = (ParameterSlice(f"{up}.weight", (None, None), 1), ParameterSlice(f"{up}.bias", (None,), 1, bias=True))
    right = (ParameterSlice(down, (None, None), -1),)
    return ScalePair("up_down", prefix.strip("."), left, right, signs="positive")


@pytest.mark.parametrize("picks_up", [True, False])
def test_what_a_module_shows_besides_its_outputs_counts(picks_up: bool) -> None:
    results = examine(Leaky(picks_up), [_block_pair("inner.")], vectors)
    assert refused(results) == [0] * picks_up


# --- models that are hard to run --------------------------------------------------------------------------------------


class Writes(nn.Module):
    """Overwrites what it is given, and what it has made."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.register_buffer("calls", torch.zeros(()))
        randomised(self, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.down(self.up(x).relu_())
        x.mul_(0.5).add_(y)
        return x


class Around(nn.Module):
    """One block, gone through three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Writes(), nn.Linear(6, 4)
        randomised(self, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for _ in range(3):
            x = self.block(x)
        return self.last(x)


@pytest.mark.parametrize(("build", "prefix"), [(Writes, ""), (Around, "block.")])
def test_a_module_that_writes_into_its_inputs_or_is_called_again_is_proved_all_the_same(
    build: Callable[[], nn.Module], prefix: str
) -> None:
    """A buffer that counts the calls included, the model is bit for bit what it was; a wrong pair is refused."""
    model = build()
    before = {**snapshot(model), **{n: b.clone() for n, b in model.named_buffers()}}
    pair = _block_pair(prefix)
    wrong = dataclasses.replace(pair, left=pair.left[:1])
    assert refused(examine(model, [pair, wrong], vectors)) == [1]
    assert differing(before, {**snapshot(model), **dict(model.named_buffers())}) == []


class Raising(nn.Module):
    """Fails in its forward pass, in a way of its own choice."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.up, self.down, self.error = nn.Linear(6, 9), nn.Linear(9, 6), error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [RuntimeError("odd"), TypeError("odd"), KeyError("odd"), IndexError("odd"), AssertionError("odd"),
     NotImplementedError("odd"), ZeroDivisionError("odd"), OSError("odd")],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_a_forward_pass_that_fails_is_a_value_error_that_names_the_class(error: Exception) -> None:
    model = Raising(error).train()
    with pytest.raises(ValueError, match=r"Raising.*odd"):
        examine(model, [_block_pair("")], vectors)
    assert model.training
    assert not model.up._forward_pre_hooks
    assert not model._forward_pre_hooks
    with pytest.raises(ValueError, match=r"Raising.*odd"):
        saggs.find_pairs(model, inputs=vectors)


def test_inputs_of_the_wrong_name_are_a_value_error_that_says_what_to_pass() -> None:
    def wrong(generator: torch.Generator, count: int) -> Mapping[str, Tensor]:
        return {"y": torch.zeros(count, 6)}

    with pytest.raises(ValueError, match=r"GatedMlp.*pass inputs="):
        examine(GatedMlp(), [_block_pair("", "_proj")], wrong)
    assert refused(examine(GatedMlp(), [_block_pair("", "_proj")], vectors)) == []


def test_modes_flags_gradients_and_hooks_are_as_before() -> None:
    """A model in the middle of training: mixed modes, a frozen parameter, gradients, a graph that is still needed."""
    model = tiny_llama().train()
    model.model.layers[0].eval()
    model.model.norm.weight.requires_grad_(False)
    ids = default_inputs(model)(torch.Generator().manual_seed(0), 2)["input_ids"]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, 2.0)
    before, modes = snapshot(model), [m.training for m in model.modules()]
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    pairs = saggs.find_pairs(model)
    assert saggs.certify(model, pairs) == pairs
    assert [m.training for m in model.modules()] == modes
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert differing(before, snapshot(model)) == []
    assert not any(m._forward_pre_hooks for m in model.modules())
    loss.backward()
    assert model.model.embed_tokens.weight.grad is not None


def test_a_faulty_certifier_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of this file: without the trial by own factors the exchanged pairs would pass."""
    pairs = list(of_kind(discovered("gpt2", "head"), "query_key")[:2])
    wrong = exchanged(*pairs)

    class Together(Trial):
        def _residuals(self, pairs: Any, tolerance: Any, where: Any, factors_of: Any, turns: int = 1) -> list[Any]:
            residual = self._change(lambda: self._scale([(pair.slices, 3.0) for pair in pairs]))
            return [residual if residual <= tolerance else CertificationError("together")] * len(pairs)

        def joint_residual(self, pairs: Sequence[ScalePair]) -> float:
            return 0.0

    family = MODELS["gpt2"]
    assert refused(examine(built("gpt2"), wrong, family.inputs, family.output)) == [0, 1]
    monkeypatch.setattr(certificates, "Trial", Together)
    assert refused(examine(built("gpt2"), wrong, family.inputs, family.output)) == []
