"""Parameters that the files hold under other names, or in several tensors, are balanced as those held whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import factor_pair, randomised
from safetensors.torch import load_file, save_file
from saved import contents, logits, remains, save, steps, tensors, trainer_groups
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MixtralConfig, MixtralForCausalLM

import saggs
from saggs import ParameterSlice
from saggs.checkpoints import CheckpointError, open_checkpoint, rebalance_checkpoint
from saggs.checkpoints import operations as checkpoints
from saggs.checkpoints.model import skeleton
from saggs.checkpoints.pieces import Piece, pieces_of
from saggs.pairs import BALANCED_KINDS

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip


def neox() -> Any:
    """Its output matrix is stored as `embed_out`; queries, keys and values of a head lie next to each other."""
    return randomised(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)), 0)


def mixtral() -> Any:
    """Its experts are one three-dimensional parameter, and in the files two and one matrices an expert."""
    config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    return randomised(MixtralForCausalLM(config), 0)


@pytest.mark.parametrize("build", [neox, mixtral], ids=lambda build: build.__name__)
def test_files_are_what_save_pretrained_makes_of_the_balanced_model(build: Any, tmp_path: Path) -> None:
    """Tensor for tensor, bit for bit for powers of two, with the optimizer's state along: from discovery to the end."""
    model = build()
    pairs = saggs.find_pairs(model, BALANCED_KINDS)
    for index, pair in enumerate(pairs):
        saggs.rescale(model, pair, 4.0 if index % 2 else 0.125)
    optimizer = torch.optim.AdamW(trainer_groups(model), lr=1e-4)
    steps(model, optimizer, 2)
    source = save(model, tmp_path / "in", shards=True)
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    done = rebalance_checkpoint(source, tmp_path / "out", factors="power_of_two")
    assert done.optimizer == "carried"
    balanced = copy.deepcopy(model)
    state = torch.optim.AdamW(trainer_groups(balanced), lr=1e-4)
    state.load_state_dict(optimizer.state_dict())
    saggs.balance(balanced, pairs, state, factors="power_of_two")
    wanted, found = tensors(save(balanced, tmp_path / "wanted", shards=True)), tensors(tmp_path / "out")
    assert wanted.keys() == found.keys() == tensors(source).keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert contents(tmp_path / "out") != contents(source)
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    moments = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"]
    for position, entry in state.state_dict()["state"].items():
        assert all(torch.equal(moments[position][key], value) for key, value in entry.items())


def test_an_expert_is_a_rectangle_of_its_parameter(tmp_path: Path) -> None:
    layout = open_checkpoint(save(mixtral(), tmp_path / "in"))
    found = pieces_of(layout, skeleton(layout))
    held = {piece.tensor: piece for piece in found["model.layers.1.mlp.experts.gate_up_proj"]}
    last = held["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    assert last == Piece(last.tensor, ((2, 3), (48, 96), (0, 32)), (1, 2))
    assert len(held) == 6
    part = ParameterSlice("p", ((2, 3), (40, 60), None), 1)
    taken = last.part_of(part, (48, 32))
    assert taken == ParameterSlice(last.tensor, ((0, 12), None), 1, shape=(48, 32))
    assert held["model.layers.1.block_sparse_moe.experts.1.w3.weight"].part_of(part, (48, 32)) is None


@pytest.mark.parametrize("change", ["missing", "misshapen", "left over"])
def test_experts_that_do_not_add_up_are_refused(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(mixtral(), tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    if change == "missing":
        del weights[name]
    elif change == "misshapen":
        weights[name] = weights[name][:, :-1].contiguous()
    else:
        weights[name.replace("experts.1", "experts.3")] = weights[name].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    message = {
        "missing": r"missing \['model.layers.0.mlp.experts.down_proj'\]",
        "misshapen": r"experts.1.w2.weight has shape \(32, 47\), the model's .* needs \(32, 48\)",
        "left over": r"left over \['model.layers.0.block_sparse_moe.experts.3.w2.weight'\]",
    }
    monkeypatch.setattr(checkpoints, "pairs_of_checkpoint", lambda *_: [factor_pair()])
    with pytest.raises(CheckpointError, match=message[change]):
        rebalance_checkpoint(source, tmp_path / "out")
    assert remains(tmp_path) == ["in"]
