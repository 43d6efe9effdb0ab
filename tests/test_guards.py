"""Mistakes that would otherwise pass silently: another model's optimizer, half an injection, a dead parameter."""

from __future__ import annotations

import pytest
import torch
from models import tiny_gpt2, tiny_llama, vectors
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


class ClampedGLU(nn.Module):
    """down(silu(gate(x)) * clamp(up(x), -limit, limit)): no pair, but linear as far as small weights can see."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = nn.Linear(6, 16), nn.Linear(6, 16)
        self.down_proj = nn.Linear(16, 6)
        self.limit = limit
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x).clamp(-self.limit, self.limit)
        result: torch.Tensor = self.down_proj(inner)
        return result


@pytest.mark.parametrize("limit", [7.0, 40.0, 100.0, 200.0])
def test_a_clamp_that_small_weights_do_not_reach_is_found_all_the_same(limit: float) -> None:
    with pytest.warns(UserWarning, match="left out: up_down"):
        assert saggs.find_pairs(ClampedGLU(limit), inputs=vectors) == []
    assert len(saggs.find_pairs(ClampedGLU(float("inf")), inputs=vectors)) == 1  # the control


class Wrapped(nn.Module):
    """A layer around a layer, as adapters are."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        return result


class Adapted(nn.Module):
    """y = W x + B A x, as low-rank adapters are."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Parameter(0.3 * torch.randn(3, base_layer.in_features))
        self.up = nn.Parameter(0.3 * torch.randn(base_layer.out_features, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x) + x @ self.down.T @ self.up.T
        return result


def described(pairs: list[saggs.ScalePair]) -> list[tuple[str, list[str]]]:
    return [(pair.kind, [str(part) for part in pair.slices]) for pair in pairs]


@pytest.mark.parametrize("how", ["wrapped", "parametrised", "adapted"])
def test_a_layer_around_a_weight_has_the_pairs_that_it_truly_has(how: str) -> None:
    """Wrapped: the same pairs under the new name. With a weight norm: its gain scales, its direction does not, and
    what scales the direction's columns is no pair. With an adapter: the adapter's own two factors scale.

    All other pairs of the model stay; and what is found keeps the logits, as a control with half a pair does not.
    """
    torch.manual_seed(0)
    model, mlp_path = tiny_llama(), "model.layers.0.mlp"
    plain = described(saggs.find_pairs(model))
    mlp = model.model.layers[0].mlp
    down, up = f"{mlp_path}.down_proj.weight", f"{mlp_path}.up_proj"
    norm = "model.layers.0.post_attention_layernorm.weight"
    gone = [pair for pair in plain if down in pair[1] or norm in pair[1]]
    assert [kind for kind, _ in gone] in (["norm_gain", "up_down"], ["up_down", "norm_gain"])
    if how == "wrapped":
        mlp.up_proj = Wrapped(mlp.up_proj)
        new = [(kind, [name.replace(f"{up}.", f"{up}.base_layer.") for name in parts]) for kind, parts in gone]
    elif how == "parametrised":
        nn.utils.parametrizations.weight_norm(mlp.up_proj)
        new = [("norm_gain", [f"{up}.parametrizations.weight.original0", down])]
    else:
        mlp.up_proj = Adapted(mlp.up_proj)
        readers = [f"{mlp_path}.gate_proj.weight", f"{up}.down", f"{up}.base_layer.weight"]
        new = [("value_output", [f"{up}.down", f"{up}.up"]), ("norm_gain", [norm, *readers])]
    found = saggs.find_pairs(model)
    kept = [pair for pair in plain if pair not in gone]
    assert sorted((kind, sorted(parts)) for kind, parts in described(found)) == sorted(
        (kind, sorted(parts)) for kind, parts in kept + new
    )
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    before = model(input_ids=ids).logits.detach()
    for pair in found:
        saggs.rescale(model, pair, 4.0)
    after = model(input_ids=ids).logits.detach()
    assert float((after - before).abs().max() / before.abs().max()) < 1e-5
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(4)
    assert float((model(input_ids=ids).logits.detach() - before).abs().max() / before.abs().max()) > 1e-2


def test_a_head_with_a_bias_or_soft_capping_is_refused_by_the_suite() -> None:
    from experiments.checks import ConfigError
    from experiments.language_model.model import require_plain_head

    model = tiny_llama()
    require_plain_head(model, model.config.vocab_size)
    model.lm_head.bias = nn.Parameter(torch.ones(model.config.vocab_size))
    with pytest.raises(ConfigError, match="logits are not hidden states times output embedding"):
        require_plain_head(model, model.config.vocab_size)
    with pytest.raises(ConfigError, match="is no causal language model"):
        require_plain_head(ClampedGLU(1.0), 8)
