"""Rotated twins: the same function at the start; after training only under rules that follow rotations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_runs import RULES, SMALL, TASK, TINY, finished
from forked import composed, directory, rows
from torch import Tensor
from torch.nn import functional

from experiments import command_line, registry
from experiments.attention_rotation import twins
from experiments.attention_rotation.model import Transformer
from experiments.attention_rotation.problems import Sums, Text
from experiments.attention_rotation.task import prepare, recorded_steps
from experiments.checks import ConfigError, validated


def tiny(causal: bool = False, last_only: bool = True, layers: int = 2) -> Transformer:
    torch.manual_seed(0)
    sizes = {"layers": layers, "width": 16, "heads": 2, "mlp_width": 32}
    return Transformer(8, 7, 3, **sizes, causal=causal, last_only=last_only).double()


def logits(model: Transformer, tokens_bt: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens_bt)
    return found


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


ALL = Sums(7, 0.5, 0).train.tokens_bt


# --- the model -------------------------------------------------------------------------------------------------------


def literal(model: Transformer, tokens_bt: Tensor, causal: bool) -> Tensor:
    """Logits at every position, as the formulas say, one sequence and one head at a time."""

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    found = []
    for tokens in tokens_bt:
        x = model.embedding.weight[tokens] + model.positions[: len(tokens)]
        for block in model.layers:
            y, size = norm(x, block.attention_norm.weight), len(block.query.weight) // block.heads
            mixed = []
            for head in range(block.heads):
                rows_of = slice(head * size, (head + 1) * size)
                q, k, v = (y @ p.weight[rows_of].T for p in (block.query, block.key, block.value))
                scores = q @ k.T / math.sqrt(size)
                if causal:
                    scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
                mixed.append(scores.softmax(-1) @ v)
            x = x + torch.cat(mixed, -1) @ block.output.weight.T
            hidden = norm(x, block.mlp_norm.weight) @ block.up.weight.T
            x = x + (hidden * hidden.sigmoid()) @ block.down.weight.T
        found.append(norm(x, model.norm.weight) @ model.head.weight.T)
    return torch.stack(found)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_the_model_is_what_its_formulas_say(causal: bool, layers: int) -> None:
    """For all positions, or the last of each sequence; with the other mask it is another function."""
    whole, last = tiny(causal, last_only=False, layers=layers), tiny(causal, layers=layers)
    wanted, other = (literal(whole, ALL, masked) for masked in (causal, not causal))
    assert far(logits(whole, ALL).view(wanted.shape), wanted) < 1e-12
    assert far(logits(last, ALL), wanted[:, -1]) < 1e-12
    assert far(logits(whole, ALL).view(wanted.shape), other) > 1e-2


def test_gradients_are_those_of_the_formulas() -> None:
    """Though the first layer computes what depends on token and position alone once for all sequences."""
    model, targets = tiny(), ALL.sum(1) % 7
    found = torch.autograd.grad(functional.cross_entropy(model(ALL), targets), list(model.parameters()))
    loss = functional.cross_entropy(literal(model, ALL, causal=False)[:, -1], targets)
    for one, other in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        assert far(one, other) < 1e-14 < 1e-4 < float(other.abs().max())


# --- rotation and drift ----------------------------------------------------------------------------------------------


def test_a_rotation_inside_the_heads_changes_the_weights_and_not_the_function() -> None:
    """Of queries and keys alike; of queries alone, or by a matrix that is not orthogonal, it changes both."""
    model = tiny()
    turns = twins.random_rotations(2, 2, 8, 777)
    assert far(turns @ turns.mT, torch.eye(8).double()) < 1e-14
    before, forms = logits(model, ALL), twins.score_forms(model)
    turned = twins.rotated(model, turns)
    assert far(turned.layers[0].query.weight, model.layers[0].query.weight) > 1e-2
    assert far(logits(turned, ALL), before) < 1e-12
    assert twins.drift(forms, twins.score_forms(turned)) < 1e-14
    for other in (twins.rotated(model, turns, keys=False), twins.rotated(model, turns + 0.1)):
        assert far(logits(other, ALL), before) > 1e-4
        assert twins.drift(forms, twins.score_forms(other)) > 1e-2


def test_every_head_of_every_layer_is_turned_by_its_own_matrix() -> None:
    model, turns = tiny(), twins.random_rotations(2, 2, 8, 777)
    turned = twins.rotated(model, turns)
    for layer, (old, new) in enumerate(zip(model.layers, turned.layers, strict=True)):
        for head in range(2):
            rows_of = slice(8 * head, 8 * head + 8)
            assert far(new.key.weight[rows_of], turns[layer, head] @ old.key.weight[rows_of]) < 1e-15
            assert far(new.key.weight[rows_of], turns[layer - 1, head] @ old.key.weight[rows_of]) > 1e-2
        assert torch.equal(new.value.weight, old.value.weight)
        assert torch.equal(new.output.weight, old.output.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_twin_turned_by_the_identity_is_equal_bit_for_bit(dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    models = twins.make_models(model, 777, [1e-7], seed=0)
    assert list(models) == ["base", "identity", "rotated", "noise_1e-07"]
    assert twins.same_weights(model, models["identity"])
    assert not twins.same_weights(model, models["rotated"])
    assert not twins.same_weights(model, models["noise_1e-07"])


def test_noise_is_relative_to_the_size_of_each_weight() -> None:
    model = tiny()
    other = twins.disturbed(model, 1e-3, seed=5)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        ratio = float(((two - one).square().mean().sqrt() / one.square().mean().sqrt()).detach())
        assert ratio == pytest.approx(1e-3, rel=0.5)
    assert twins.same_weights(other, twins.disturbed(model, 1e-3, seed=5))
    assert not twins.same_weights(other, twins.disturbed(model, 1e-3, seed=6))
    assert twins.noise_name(1e-5) == "noise_1e-05"
    assert twins.noise_name(2.5e-7) == "noise_2.5e-07"


def test_drift_of_forms_made_by_hand() -> None:
    """Two heads: one equal, one opposite (4 |I| over a mean of 2 |I|), so 1 on average; heads count alike."""
    eye = torch.eye(3).double()
    one = torch.stack([eye, 2 * eye])[None]
    assert twins.drift(one, torch.stack([eye, -2 * eye])[None]) == pytest.approx(1.0, rel=1e-15)
    assert twins.drift(one, one) == twins.drift(0 * one, 0 * one) == 0
    assert twins.drift(one, torch.stack([3 * eye, 2 * eye])[None]) == pytest.approx(0.5, rel=1e-15)


def test_the_form_of_a_head_is_made_of_its_rows_alone() -> None:
    model = tiny()
    block = model.layers[1]
    query, key = block.query.weight.detach(), block.key.weight.detach()
    forms = twins.score_forms(model)
    assert forms.shape == (2, 2, 16, 16)
    assert far(forms[1, 1], query[8:].T @ key[8:]) < 1e-15
    assert far(forms[1, 0], query[8:].T @ key[8:]) > 1e-2


# --- the problems ----------------------------------------------------------------------------------------------------


def test_sums_modulo_47_are_split_into_883_and_1326_pairs() -> None:
    problem = Sums(47, 0.4, 42)
    parts = (problem.train, problem.validation)
    assert [len(part.tokens_bt) for part in parts] == [883, 1326]
    pairs = torch.cat([part.tokens_bt for part in parts])
    assert len(torch.unique(pairs, dim=0)) == 47 * 47
    assert set(pairs[:, 2].tolist()) == {47}
    for part in parts:
        assert torch.equal(part.targets_n, (part.tokens_bt[:, 0] + part.tokens_bt[:, 1]) % 47)
    assert torch.equal(Sums(47, 0.4, 42).train.tokens_bt, problem.train.tokens_bt)
    assert not torch.equal(Sums(47, 0.4, 43).train.tokens_bt, problem.train.tokens_bt)
    assert problem.batch(0) is problem.batch(7)


def test_the_published_model_has_104896_weights() -> None:
    """48 tokens, 3 positions, two layers of four squares and a hidden layer, five norms, 47 logits, all 64 wide."""
    config = validated(composed([*TASK, "optimizer=adam", "attention.noises=[]"]))
    prepared = prepare(config)
    assert prepared.total_steps == 1500
    assert prepared.facts["parameters"] == 64 * (48 + 3 + 2 * (4 * 64 + 2 * 256) + 5 + 47) == 104_896
    assert all(p.dtype == torch.float64 for p in prepared.twins["rotated"].model.parameters())


def test_both_precisions_begin_from_the_same_weights() -> None:
    found = [
        prepare(validated(composed([*TINY, "optimizer=adam", f"attention.precision={precision}"]))).twins
        for precision in ("float64", "float32")
    ]
    for name in ("base", "rotated"):
        one, other = (made[name].model.parameters() for made in found)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.float(), b)
            assert (a.dtype, b.dtype) == (torch.float64, torch.float32)


DOCUMENTS = {"train": ["the quick brown fox jumps over the lazy dog"] * 9, "validation": ["0123456789" * 5], "test": []}


def test_batches_of_text_are_a_function_of_seed_and_step() -> None:
    def problem(seed: int) -> Text:
        return Text(DOCUMENTS, "text", context=8, sequences=4, seed=seed)

    batch = problem(0).batch(3)
    assert torch.equal(batch.tokens_bt, problem(0).batch(3).tokens_bt)
    assert not torch.equal(batch.tokens_bt, problem(0).batch(4).tokens_bt)
    assert not torch.equal(batch.tokens_bt, problem(1).batch(3).tokens_bt)
    text = "\n".join(DOCUMENTS["train"])
    for tokens, targets in zip(batch.tokens_bt.tolist(), batch.targets_n.view(4, 8).tolist(), strict=True):
        assert tokens[1:] == targets[:-1]
        assert bytes([*tokens, targets[-1]]).decode() in text
    assert bytes(problem(0).validation.tokens_bt.flatten().tolist()) == (b"0123456789" * 5)[:48]


# --- in training -----------------------------------------------------------------------------------------------------


def test_steps_are_recorded_densely_at_first_and_the_last_one_always() -> None:
    steps = recorded_steps(1500)
    assert steps[:4] == [0, 1, 2, 3]
    assert {10, 50, 100, 300, 600, 1000, 1500} <= set(steps)
    assert len(steps) < 50
    assert recorded_steps(23)[-2:] == [20, 23]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_follows_rotations_keeps_the_twin_and_adam_does_not(rule: str, tmp_path: Path) -> None:
    """Muon and SGD turn as the gradient turns, and one common second moment does not see it; Adam's many do."""
    result = finished(tmp_path, *RULES[rule])
    arms = result["arms"]
    assert list(arms) == ["base", "identity", "rotated", "noise_1e-07", "noise_1e-05"]
    assert [int(step) for step in arms["rotated"]["drift"]] == recorded_steps(20)
    assert set(arms["identity"]["drift"].values()) == {0.0}
    assert arms["identity"]["weights_of_base"]
    assert arms["identity"]["validation_loss"] == arms["base"]["validation_loss"]
    assert arms["base"]["train_loss"] < rows(directory(tmp_path))[0]["train_loss"]["base"] - 0.05
    apart = arms["rotated"]["drift"]
    assert apart["0"] < 1e-14
    ratio = result["ratios"]["noise_1e-07"]["1"]
    if rule == "adam":
        assert apart["1"] > 5e-3
        assert apart["20"] > 5e-2
        assert ratio > 30
    else:
        assert max(apart.values()) < 1e-9
        assert ratio < 10
    assert min(arms["noise_1e-07"]["drift"].values()) > 1e-8
    assert not arms["noise_1e-07"]["weights_of_base"]


def test_in_float32_the_twins_are_one_function_up_to_its_rounding(tmp_path: Path) -> None:
    result = finished(tmp_path, "optimizer=sgd", "attention.precision=float32", "attention.steps=3")
    assert 1e-9 < result["arms"]["rotated"]["drift"]["0"] < 1e-6
    assert set(result["arms"]["identity"]["drift"].values()) == {0.0}


def test_characters_are_learned_by_all_twins_from_the_same_batches(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for split in ("train", "validation", "test"):
        text = f"Here is the {split} text, and it says one thing again and again. " * 20
        (tmp_path / "text" / f"{split}.txt").write_text(text)
    result = finished(
        tmp_path / "outputs", *RULES["sgd"], "attention=characters", f"attention.path={tmp_path / 'text'}",
        "attention.context=8", "attention.batch_sequences=8", "attention.steps=10", common=SMALL,
    )  # fmt: skip
    arms = result["arms"]
    assert arms["identity"]["weights_of_base"]
    assert max(arms["rotated"]["drift"].values()) < 1e-9
    assert arms["base"]["validation_loss"] < 5.0 < rows(directory(tmp_path / "outputs"))[0]["validation_loss"]["base"]


def test_a_twin_that_diverges_is_a_result(tmp_path: Path) -> None:
    """Noise of 1e300 times the weights is beyond float64 at once; the others go on."""
    result = finished(tmp_path, "optimizer=adam", "attention.noises=[1e-7,1e300]", "attention.steps=3")
    lost = result["arms"]["noise_1e+300"]
    assert lost["status"] == "diverged at step 0"
    assert lost["validation_loss"] is None
    assert lost["drift"] == {}
    assert result["ratios"]["noise_1e+300"] == {"1": None, "10": None, "final": None}
    assert result["arms"]["base"]["status"] == result["arms"]["rotated"]["status"] == "trained"
    assert result["ratios"]["noise_1e-07"]["1"] > 30


@pytest.mark.parametrize("rate", ["1e30", "1e140", "1e200"])
def test_a_run_whose_twins_all_diverge_ends_with_them(rate: str, tmp_path: Path) -> None:
    """Whatever overflows first: the weights, the products of two of them, or their squares."""
    result = finished(tmp_path, "optimizer=sgd", f"optimizer.learning_rate={rate}", "attention.noises=[1e-7]")
    statuses = {arm["status"] for arm in result["arms"].values()}
    assert all(status.startswith("diverged at step") for status in statuses)
    assert result["arms"]["base"]["train_loss"] is None
    assert result["ratios"]["noise_1e-07"]["final"] is None


# --- optimizers of one's own -----------------------------------------------------------------------------------------


@registry.optimizer("mean_square")
def _mean_square(groups: list[dict[str, Any]], learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    assert len(groups) == 1
    return torch.optim.RMSprop(groups, lr=learning_rate)


@registry.optimizer("forgetful")
def _forgetful(groups: list[dict[str, Any]], learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups[0]["params"][1:], lr=learning_rate)


CUSTOM = ("optimizer=custom", "optimizer.learning_rate=1e-3")


def test_a_rule_of_ones_own_is_told_too(tmp_path: Path) -> None:
    result = finished(tmp_path, *CUSTOM, "optimizer.name=mean_square", "attention.steps=2")
    assert result["ratios"]["noise_1e-07"]["1"] > 30


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["optimizer=adamw", "optimizer.weight_decay=0"], ["optimizer=adamw", "adam, sgd, scalar_adam, muon"]),
        (["optimizer=rmsprop"], ["optimizer=rmsprop", "custom"]),
        (["optimizer=adam", "optimizer.weight_decay=0.1"], ["optimizer.weight_decay=0.1", "=0"]),
        ([*CUSTOM, "optimizer.name=nobody"], ["'nobody'", "plugins="]),
        ([*CUSTOM, "optimizer.name=forgetful"], ["'forgetful'", "`groups`"]),
    ],
)
def test_what_the_task_cannot_do_is_refused_by_name(changes: list[str], expected: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        command_line.run(composed([*TINY, *changes, f"paths.outputs={tmp_path}"]))
    assert [word for word in expected if word not in str(caught.value)] == []
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    settings = [*TASK, "optimizer=adam", "attention=characters", "attention.path=/nowhere", f"paths.outputs={tmp_path}"]
    with pytest.raises(ConfigError, match=r"attention\.path=/nowhere.*wikipedia_mini"):
        command_line.run(composed(settings))
