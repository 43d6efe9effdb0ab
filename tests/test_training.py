"""The loop's parts: loss and gradient, schedule, batches, seeds, evaluation; each the same however it is sliced."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from forked import DEBUG, composed
from torch import nn
from torch.nn.functional import cross_entropy

from experiments.checks import validated
from experiments.config import Config
from experiments.identity import derived_seed
from experiments.language_model.batches import Batches
from experiments.language_model.evaluation import evaluate
from experiments.language_model.model import build_model
from experiments.language_model.training import (
    StepLoss,
    schedule,
    seed_dropout,
    warn_if_updates_vanish,
    weights_copy,
)

MODELS = ["debug_gpt2", "debug_llama"]


def config(*arguments: str) -> Config:
    return validated(composed([*DEBUG, *arguments]))


def batch(sequences: int = 8, ragged: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; ragged: sequence n predicts 1 + 4 n of its 32 tokens only."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(512, (2, sequences, 32), generator=generator).unbind()
    if ragged:
        for row in range(sequences):
            targets[row, 1 + 4 * row :] = -100
    return inputs, targets


def gradients(model: nn.Module) -> torch.Tensor:
    """All gradients as one vector; they are taken away."""
    parts = [p.grad for p in model.parameters() if p.grad is not None]
    assert {part.dtype for part in parts} == {torch.float32}
    found = torch.cat([part.flatten() for part in parts])
    model.zero_grad(set_to_none=True)
    return found


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


# --- loss and gradient -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", MODELS)
def test_the_loss_is_transformers_own(option: str) -> None:
    """Equal up to rounding: ours never builds all logits at once."""
    settings = config(f"model={option}")
    model: Any = build_model(settings, 0)
    inputs, targets = batch()
    ours = StepLoss(model, settings.training, "cpu").backward(inputs, targets)
    gradient = gradients(model)
    shifted = torch.cat([inputs[:, :1], targets[:, :-1]], dim=1)  # transformers shifts labels by one itself
    logits = model(input_ids=inputs).logits
    theirs = cross_entropy(logits.flatten(0, 1), targets.flatten())
    theirs.backward()
    assert float(ours) == pytest.approx(theirs.item(), rel=1e-6)
    assert relative(gradient, gradients(model)) < 1e-5
    with torch.no_grad():
        own = float(model(input_ids=inputs, labels=shifted).loss)
    kept = targets.clone()
    kept[:, -1] = -100
    ours = StepLoss(model, settings.training, "cpu").backward(inputs, kept)
    assert float(ours) == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("micro", [8, 3, 2, 1])
def test_micro_batches_give_the_gradient_of_the_whole_batch(micro: int) -> None:
    """Ragged targets, and a last micro-batch that is short. Averaging the micro-batches' means is the control."""
    whole = config()
    model = build_model(whole, 0)
    inputs, targets = batch()
    loss = StepLoss(model, whole.training, "cpu").backward(inputs, targets)
    expected = gradients(model)
    sliced = config(f"training.micro_batch_sequences={micro}")
    found = StepLoss(model, sliced.training, "cpu").backward(inputs, targets)
    assert float(found) == pytest.approx(float(loss), rel=1e-6)
    assert relative(gradients(model), expected) < 1e-5
    parts = list(zip(inputs.split(micro), targets.split(micro), strict=True))
    for x, y in parts:
        logits = model(input_ids=x).logits
        (cross_entropy(logits.flatten(0, 1), y.flatten()) / len(parts)).backward()
    naive = relative(gradients(model), expected)
    assert naive < 1e-5 if micro == 8 else naive > 0.01


@pytest.mark.parametrize("chunk", [1, 7, 256, 100_000])
def test_the_size_of_a_chunk_changes_nothing(chunk: int) -> None:
    model = build_model(config(), 0)
    loss = StepLoss(model, config().training, "cpu").backward(*batch())
    expected = gradients(model)
    chunked = config(f"training.loss_chunk_tokens={chunk}")
    assert float(StepLoss(model, chunked.training, "cpu").backward(*batch())) == pytest.approx(float(loss), rel=1e-6)
    assert relative(gradients(model), expected) < 1e-5


def test_a_batch_without_targets_has_a_loss_of_nan_and_not_of_zero() -> None:
    model = build_model(config(), 0)
    inputs, targets = batch()
    loss = StepLoss(model, config().training, "cpu")
    assert math.isnan(float(loss.backward(inputs, torch.full_like(targets, -100))))
    assert math.isfinite(float(loss.backward(inputs, targets)))


def one_step(settings: Config) -> nn.Module:
    model = build_model(settings, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = weights_copy(model)
    loss = StepLoss(model, settings.training, "cpu").backward(*batch())
    optimizer.step()
    assert math.isfinite(float(loss))
    assert warn_if_updates_vanish(model, before, 1e-3) > 0.5
    return model


def test_bfloat16_autocast_leaves_weights_and_gradients_in_float32() -> None:
    model = one_step(config("training.precision=bf16_autocast"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    exact = one_step(config())
    found, expected = (
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (model, exact)
    )
    assert 0 < relative(found, expected) < 0.05, "rounded to 8 bits, but the same gradient"


@pytest.mark.slow
def test_the_compiled_model_gives_the_same_gradient() -> None:
    compiled, plain = one_step(config("training.compile=true")), one_step(config())
    found, expected = (
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (compiled, plain)
    )
    assert {p.dtype for p in compiled.parameters()} == {torch.float32}
    assert relative(found, expected) < 1e-4


@pytest.mark.parametrize(("dtype", "warns"), [(torch.bfloat16, True), (torch.float32, False)])
def test_updates_below_the_precision_of_the_weights_are_told(
    dtype: torch.dtype, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At a rate of 1e-5 weights of 0.02 move by a twentieth of bfloat16's spacing: none of them moves."""
    model = build_model(config(), 0).to(dtype)
    before = weights_copy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    inputs, targets = batch()
    model(input_ids=inputs, labels=targets).loss.backward()
    optimizer.step()
    with caplog.at_level(logging.WARNING):
        share = warn_if_updates_vanish(model, before, 1e-5)
    assert (share < 0.5) == warns
    assert ("below their precision" in caplog.text) == warns


# --- schedule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 4, 16])
def test_the_rate_peaks_after_warm_up_and_ends_at_the_last_step(micro: int) -> None:
    """A function of the optimizer step alone, so it is the same for every micro-batch and after every resumption."""
    training = config(
        "training.steps=40", "training.warmup_steps=8", f"training.micro_batch_sequences={micro}"
    ).training
    rate = schedule(training, 2e-3)
    rates = [rate(step) for step in range(1, 41)]
    expected = [2e-3 * step / 8 for step in range(1, 9)]
    expected += [2e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * k / 32)) / 2) for k in range(1, 33)]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert max(rates) == rates[7] == 2e-3
    assert rates[-1] == pytest.approx(2e-4, rel=1e-12)
    resumed = schedule(training, 2e-3)
    assert [resumed(step) for step in range(21, 41)] == rates[20:]


def test_a_constant_schedule_stays_at_its_peak() -> None:
    training = config("training.schedule=constant", "training.final_rate_fraction=1.0", "training.steps=9").training
    rate = schedule(training, 0.5)
    assert [rate(step) for step in range(1, 10)] == pytest.approx([0.5 / 3, 1.0 / 3, *[0.5] * 7])


# --- batches and seeds -----------------------------------------------------------------------------------------------

TOKENS = np.arange(1000, dtype=np.uint16)


def begins(batches: Batches, start: int, count: int) -> list[int]:
    """Where each sample begins; the tokens of the stream count from 0, so that a sample shows its place."""
    inputs, targets = batches.sample(start, count)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, inputs + 1)
    return inputs[:, 0].tolist()


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [16, 16, 16, 12], [7, 53]])
def test_batches_are_a_pure_function_of_the_sample_index(sizes: list[int]) -> None:
    """Any slicing gives the same samples, forwards, or backwards with jumps between epochs."""
    expected = begins(Batches(TOKENS, 32, 5), 0, 60)
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    batches = Batches(TOKENS, 32, 5)
    found = {start: begins(batches, start, size) for start, size in reversed(list(zip(starts, sizes, strict=True)))}
    assert [begin for start in starts for begin in found[start]] == expected


def test_an_epoch_sees_every_window_once_and_the_next_in_another_order() -> None:
    batches = Batches(TOKENS, 32, 0)
    count = batches.windows_per_epoch
    epochs = [begins(batches, epoch * count, count) for epoch in range(4)]
    for places in epochs:
        offset = min(places)
        assert 0 <= offset < 32
        assert sorted(places) == [offset + 32 * window for window in range(count)]
        assert places != sorted(places)
    orders = [[(place - min(places)) // 32 for place in places] for places in epochs]
    assert len({tuple(order) for order in orders}) == 4
    assert len({min(places) for places in epochs}) > 1


def test_a_stream_too_short_for_one_sample_is_refused() -> None:
    assert Batches(TOKENS[:64], 32, 0).windows_per_epoch == 1
    with pytest.raises(ValueError, match="63 tokens; a context of 32 needs at least 64"):
        Batches(TOKENS[:63], 32, 0)


@pytest.mark.parametrize("option", MODELS)
def test_seeds_differ_in_initial_weights_batches_and_dropout_and_equal_themselves(option: str) -> None:
    def what_seed_decides(seed: int) -> list[bytes]:
        settings = config(f"model={option}", f"seed={seed}")
        torch.manual_seed(123)  # no seed that the process happens to have may matter
        weights = torch.cat([p.detach().flatten() for p in build_model(settings, 0).parameters()])
        batches = Batches(TOKENS, 32, derived_seed(seed, "data"))
        first = torch.stack([batches.sample(step * 2, 2)[0] for step in range(20)])
        dropout = config("model.dropout=0.1", f"seed={seed}")
        seed_dropout(dropout, 1)
        masks = [torch.rand(8)]
        seed_dropout(dropout, 2)
        masks.append(torch.rand(8))
        return [part.numpy().tobytes() for part in (weights, first, *masks)]

    found = [what_seed_decides(seed) for seed in (0, 1, 2)]
    assert what_seed_decides(0) == found[0]
    assert [len(set(part)) for part in zip(*found, strict=True)] == [3, 3, 3, 3]
    assert found[0][2] != found[0][3], "masks of two steps differ"


def test_building_a_model_leaves_the_random_state_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build_model(config(), 0)
    assert torch.equal(before, torch.get_rng_state())


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [0, 1, 7])
@pytest.mark.parametrize("option", MODELS)
def test_perplexity_is_the_same_for_every_batch_and_equals_a_hand_loop(option: str, tail: int) -> None:
    """Windows one at a time through transformers' own logits; the last one has `tail` targets."""
    model: Any = build_model(config(f"model={option}"), 0).train()
    tokens = np.random.default_rng(0).integers(0, 512, 32 * 9 + tail + 1).astype(np.uint16)
    total, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(tokens) - 1, 32):
            window = torch.from_numpy(tokens[begin : begin + 33].astype(np.int64))
            logits = model.eval()(input_ids=window[None, :-1]).logits[0]
            total += float(cross_entropy(logits.double(), window[1:], reduction="sum"))
            count += len(window) - 1
    model.train()
    state = torch.get_rng_state()
    for size in (1, 3, 8, 64):
        found = evaluate(model, tokens, 32, size, "cpu")
        assert found.tokens == count == len(tokens) - 1
        assert found.as_dict()["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def test_a_mean_of_batch_means_would_weight_a_short_window_too_much() -> None:
    """The control: what depends on the batch size, and by how much."""
    model: Any = build_model(config(), 0).eval()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 512, 40)).long()
    with torch.no_grad():
        windows = (tokens[:33], tokens[32:])
        means = [float(cross_entropy(model(input_ids=w[None, :-1]).logits[0], w[1:])) for w in windows]
    exact = evaluate(model, tokens.numpy(), 32, 8, "cpu").per_token
    assert abs(sum(means) / 2 - exact) > 1e-4


@pytest.mark.parametrize("count", [0, 1])
def test_a_split_that_predicts_nothing_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="predicts nothing"):
        evaluate(build_model(config(), 0), TOKENS[:count], 32, 8, "cpu")


def test_words_and_bytes_come_from_the_text_not_from_the_tokens() -> None:
    found = evaluate(build_model(config(), 0), TOKENS[:65] % 512, 32, 8, "cpu")
    figures = found.with_text(words=20, size_bytes=100)
    assert figures["word_perplexity"] == pytest.approx(math.exp(found.nll_nats / 20))
    assert figures["bits_per_byte"] == pytest.approx(found.nll_nats / math.log(2) / 100)
