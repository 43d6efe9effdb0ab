"""What is damaged, of another kind or not meant is refused by name, and nothing is written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_gpt2, tiny_llama
from safetensors.torch import load_file, save_file
from saved import contents, imbalanced, known_pairs, remains, save
from transformers import LlamaForCausalLM

from saggs.checkpoints import CheckpointError, open_checkpoint, rebalance_checkpoint
from saggs.checkpoints import operations as checkpoints

Damage = Callable[[Path], object]
FIRST = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_config(**changes: Any) -> Damage:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(changes))


def edit_shard(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / FIRST)
        change(weights)
        save_file(weights, folder / FIRST, metadata={"format": "pt"})

    return damage


def truncated(folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[:-100])


def header_too_long(folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(struct.pack("<Q", 1 << 40) + data[8:])


def duplicated(folder: Path) -> None:
    second = folder / "model-00002-of-00003.safetensors"
    weights = load_file(second) | {"model.embed_tokens.weight": load_file(folder / FIRST)["model.embed_tokens.weight"]}
    save_file(weights, second, metadata={"format": "pt"})


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def both_kinds(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / FIRST).read_bytes())


def outside(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": "../other.safetensors"}))


def float8(folder: Path) -> None:
    change = {"model.embed_tokens.weight": torch.zeros(61, 32).to(torch.float8_e4m3fn)}
    edit_shard(lambda weights: weights.update(change))(folder)


def checkpoints_inside(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "config.json").write_text("{}")


def without_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


REFUSED_ON_OPENING: list[tuple[Damage, str]] = [
    (truncated, r"00001-of-00003.safetensors is damaged .* its tensors need \d+ bytes, the file has \d+"),
    (header_too_long, "00001-of-00003.safetensors is damaged .* header is cut short"),
    (lambda f: (f / FIRST).write_bytes(b""), "is damaged"),
    (lambda f: (f / FIRST).write_bytes(b"version 1\noid sha256:0\nsize 9\n"), "Git LFS pointer"),
    (lambda f: (f / FIRST).unlink(), r"00001-of-00003.safetensors is missing; .* has \d+ tensors in it"),
    (edit_shard(lambda w: w.pop("model.embed_tokens.weight")), "says that 'model.embed_tokens.weight' is in"),
    (edit_shard(lambda w: w.update(extra=torch.zeros(2))), "holds 'extra', which .* does not list"),
    (duplicated, "'model.embed_tokens.weight' is in two files"),
    (lambda f: (f / INDEX).write_text("{"), "is not readable JSON"),
    (lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    (outside, "lies outside the checkpoint"),
    (both_kinds, "holds both model.safetensors and"),
    (adapter, "merge it first"),
    (edit_config(quantization_config={"quant_method": "gptq"}), r"is quantised \(gptq\)"),
    (
        edit_shard(lambda w: w.update({"model.embed_tokens.weight": torch.zeros(61, 32, dtype=torch.int8)})),
        "torch.int8",
    ),
    (float8, "F8_E4M3, a quantised weight"),
    (lambda f: (f / "config.json").unlink(), "has no config.json"),
    (checkpoints_inside, "name one of its checkpoints: checkpoint-500"),
    (without_weights, "has no weights"),
]

REFUSED_ON_LOADING: list[tuple[Damage, str]] = [
    (edit_config(architectures=["LamaForCausalLM"]), "'LamaForCausalLM' is no model of transformers"),
    (edit_config(architectures=["os"]), "'os' is no model of transformers"),
    (
        edit_config(architectures=["MyModel"], auto_map={"AutoModel": "my.MyModel"}),
        "its class is code in the checkpoint, which is never run",
    ),
    (edit_config(architectures=None), "names no class under 'architectures'"),
    (edit_config(model_type="gpt2"), "model_type 'gpt2' does not belong to LlamaForCausalLM"),
    (edit_config(hidden_size=33), "no LlamaForCausalLM can be built of it"),
    (edit_config(intermediate_size=47), r"mlp.\w+.weight has shape \(.*\), the model's"),
    (edit_config(num_hidden_layers=3), r"missing \['model.layers.2"),
    (edit_config(num_hidden_layers=1), r"left over \['model.layers.1"),
    (edit_shard(lambda w: w["model.embed_tokens.weight"].fill_(float("nan"))), "NaN or infinite.*model.embed_tokens"),
    (
        edit_shard(lambda w: w["model.layers.0.mlp.gate_proj.weight"][2].fill_(float("inf"))),
        "NaN or infinite.*0.mlp.gate",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"),
    REFUSED_ON_OPENING + REFUSED_ON_LOADING,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_checkpoint_is_refused_by_name(damage: Damage, message: str, tmp_path: Path) -> None:
    source = save(tiny_llama(), tmp_path / "in", shards=True)
    damage(source)
    before = contents(source)
    with pytest.raises(CheckpointError, match=message):
        rebalance_checkpoint(source, tmp_path / "out")
    assert remains(tmp_path) == ["in"]
    assert contents(source) == before


@pytest.mark.parametrize(
    ("damage", "message"), REFUSED_ON_OPENING, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_intact_checkpoint_is_opened(damage: Damage, message: str, tmp_path: Path) -> None:
    """The control: what is refused above is the damage, and nothing of it is left once it is undone."""
    source = save(tiny_llama(), tmp_path / "in", shards=True)
    assert len(open_checkpoint(source).shards) == 3
    damage(source)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(source)


def test_paths_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, message in ((tmp_path / "none", "does not exist"), (tmp_path / "file", "is a file; name the directory")):
        with pytest.raises(CheckpointError, match=message):
            rebalance_checkpoint(path, tmp_path / "out")


def test_weights_that_went_bad_are_named_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where discovery did not read the weights: the pass that sums them notices."""
    monkeypatch.setattr(checkpoints, "pairs_of_checkpoint", known_pairs)
    model = imbalanced("llama")
    model.model.layers[0].self_attn.v_proj.weight.data[3, 4] = float("nan")
    source = save(model, tmp_path / "in", shards=True)
    with pytest.raises(CheckpointError, match=r"0.self_attn.v_proj.weight holds NaN or infinite"):
        rebalance_checkpoint(source, tmp_path / "out")
    assert remains(tmp_path) == ["in"]


def test_a_model_that_cannot_be_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, input_ids: Any = None, **__: Any) -> None:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(LlamaForCausalLM, "forward", failing)
    source = save(tiny_llama(), tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"forward pass failed on the probing inputs \(RuntimeError: no kernel\)"):
        rebalance_checkpoint(source, tmp_path / "out")
    assert remains(tmp_path) == ["in"]


def test_an_overflow_in_float16_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "pairs_of_checkpoint", known_pairs)
    model = tiny_llama().half()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight.data[0, 0] = 6e4
    mlp.down_proj.weight.data.mul_(1000).add_(5e4)  # balanced, that entry of `up` would be 3e5
    source = save(model, tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj.weight overflows in float16"):
        rebalance_checkpoint(source, tmp_path / "out")
    assert remains(tmp_path) == ["in"]


def test_two_different_tensors_that_the_configuration_ties_are_refused(tmp_path: Path) -> None:
    model = tiny_gpt2()
    source = save(model, tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    for shift, refused in ((0.0, False), (1.0, True)):
        head = weights["transformer.wte.weight"] + shift
        save_file(weights | {"lm_head.weight": head}, source / "model.safetensors", metadata={"format": "pt"})
        if refused:
            with pytest.raises(CheckpointError, match="differ, though the configuration ties them"):
                rebalance_checkpoint(source, tmp_path / "out 2")
        else:
            rebalance_checkpoint(source, tmp_path / "out", kinds=("value_output",))


def test_pickled_weights_with_code_are_not_loaded(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    source = save(tiny_gpt2(), tmp_path / "in")
    (source / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(2), "b": Touch()}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only running its code could"):
        open_checkpoint(source)
    torch.save({"a": torch.zeros(2), "b": 3}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="does not hold tensors by name"):
        open_checkpoint(source)
    (source / "pytorch_model.bin").write_bytes(b"PK nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(source)
    assert remains(tmp_path) == ["in"]


def test_code_of_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    """A known class that brings code along, and asks for kernels: the installed class is built, the code stays put."""
    source = save(tiny_llama(), tmp_path / "in")
    (source / "modeling.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass LlamaForCausalLM: ...")
    edit_config(
        auto_map={"AutoModelForCausalLM": "modeling.LlamaForCausalLM"},
        attn_implementation="someone/kernel",
        _attn_implementation="someone/kernel",
        transformers_weights="other.safetensors",
    )(source)
    rebalance_checkpoint(source, tmp_path / "out", kinds=("up_down",))
    assert remains(tmp_path) == ["in", "out"]
    assert contents(tmp_path / "out").keys() == contents(source).keys()


def test_a_model_without_pairs_of_the_kind_is_refused(tmp_path: Path) -> None:
    source = save(tiny_gpt2(), tmp_path / "in")
    with pytest.raises(CheckpointError, match="no exact pair of the kinds up_down"):
        rebalance_checkpoint(source, tmp_path / "out", kinds=("up_down",))
