"""Mistakes that would otherwise pass silently: another model's optimizer, half an injection, a dead parameter."""

from __future__ import annotations

import pytest
import torch
from models import tiny_gpt2, tiny_llama
from torch import nn

import saggs


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _unchanged(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_optimizer_of_another_model_is_refused() -> None:
    model, other = tiny_llama(), tiny_llama()
    foreign = torch.optim.AdamW(other.parameters())
    pairs = saggs.find_pairs(model)
    before = _weights(model)
    with pytest.raises(ValueError, match="holds none of the pairs' parameters"):
        saggs.rescale(model, pairs[0], 2.0, foreign)
    with pytest.raises(ValueError, match="holds none of the pairs' parameters"):
        saggs.Rebalancer(model, foreign, pairs)
    assert _unchanged(model, before)
    saggs.rescale(model, pairs[0], 2.0, torch.optim.AdamW(model.parameters()))  # the control
    assert not _unchanged(model, before)


def test_an_injection_that_cannot_be_finished_changes_nothing() -> None:
    model = tiny_gpt2()
    pairs = saggs.find_pairs(model)
    before = _weights(model)
    with pytest.raises(ValueError, match="nothing was changed"):
        saggs.inject_imbalance(model, pairs, [2.0] * (len(pairs) - 1) + [1e60])
    assert _unchanged(model, before)
    saggs.inject_imbalance(model, pairs, torch.full((len(pairs),), 2.0))
    assert not _unchanged(model, before)


def test_a_replaced_parameter_is_balanced_and_not_the_dead_one() -> None:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    rebalancer = saggs.Rebalancer(model, optimizer, every=1)
    projection = model.model.layers[0].mlp.up_proj
    dead = projection.weight
    projection.weight = nn.Parameter(dead.detach() * 100)
    kept = dead.detach().clone()
    rebalancer.step()
    assert torch.equal(dead, kept)
    assert saggs.log2_norm_ratios(model, rebalancer.pairs).abs().max() < 1e-4


@pytest.mark.parametrize("damping", [None, True, 0.0, 1.5, float("nan"), "0.3"])
def test_a_damping_that_is_no_share_of_the_gap_is_refused(damping: object) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match="damping="):
        saggs.Rebalancer(model, torch.optim.AdamW(model.parameters()), damping=damping)  # type: ignore[arg-type]


def test_the_warning_of_coupled_decay_points_at_the_caller() -> None:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with pytest.warns(UserWarning, match="coupled weight decay") as caught:
        saggs.balance(model, saggs.find_pairs(model), optimizer)
    assert caught[0].filename == __file__
