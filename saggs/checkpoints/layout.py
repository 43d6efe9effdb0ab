"""What lies in a checkpoint directory: which files hold weights, which one the optimizer's state, and what it is not.

Three layouts are known, and everything else is refused by name:

    config.json + model.safetensors (or shards and model.safetensors.index.json, or pytorch_model.bin likewise):
        a Hugging Face model, or a checkpoint of its Trainer, which adds optimizer.pt and more
    weights.safetensors + optimizer.pt + state.json + COMPLETE:
        a checkpoint of this project's runs; its model is described by the run's manifest.json
    manifest.json + checkpoints/:
        such a run; its newest checkpoint is meant

Opening reads JSON and headers only. No pickle but a `pytorch_model.bin` is opened, and never with code allowed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from saggs.checkpoints.shards import CheckpointError, PickleShard, SafetensorsShard, Shard

OPTIMIZER = "optimizer.pt"
MARKER = "COMPLETE"
_RUN_FILES = ("weights.safetensors", OPTIMIZER, "state.json")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_NO_WEIGHTS = re.compile(r"(training_args\.bin|scheduler\.pt|scaler\.pt|rng_state.*\.pth|optimizer\.pt)$")
_SHARDED_OPTIMIZER = re.compile(r"(optimizer\.bin|optimizer(\.pt)?_.*|global_step\d+|rank\d+-of-\d+-optimizer\.pt)$")


@dataclass(frozen=True)
class Layout:
    """A checkpoint directory whose files agree with one another.

    Attributes:
        path: the directory.
        config: transformers' configuration, as in its config.json.
        shards: the weight files.
        shard_of: tensor name -> the file that holds it.
        optimizer: optimizer.pt, where there is one.
        sharded_optimizer: files and folders of an optimizer's state that cannot be carried (FSDP, DeepSpeed).
        manifest: the manifest of the run it belongs to, for a checkpoint of this project's runs; None for others.
        notes: what a user should know about the directory.
    """

    path: Path
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    shard_of: Mapping[str, Shard]
    optimizer: Path | None = None
    sharded_optimizer: tuple[Path, ...] = ()
    manifest: Path | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by its name in the files."""
        return {name: shard.entries[name].shape for name, shard in self.shard_of.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor by its name in the files."""
        dtype = self.shard_of[name].entries[name].dtype
        assert isinstance(dtype, torch.dtype)
        return dtype


def open_checkpoint(path: Path) -> Layout:
    """The layout of a checkpoint directory, headers and index checked against each other.

    Raises:
        CheckpointError: no such directory, an unknown layout, an adapter, quantised weights, a shard that is missing,
            cut short or not what the index says.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; name the directory that holds config.json and the weights")
    if (path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path} holds a LoRA or other adapter, whose scale depends on its base model; "
            "merge it first (peft's merge_and_unload, then save_pretrained)"
        )
    if (path / "manifest.json").exists() and (path / "checkpoints").is_dir():
        return _newest_of_run(path)
    if (path / MARKER).exists() or (path / _RUN_FILES[0]).exists():
        return _run_checkpoint(path)
    return _transformers_checkpoint(path)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def _transformers_checkpoint(path: Path) -> Layout:
    if not (path / "config.json").exists():
        inner = sorted(p.name for p in path.glob("checkpoint-*") if (p / "config.json").exists())
        hint = f"; name one of its checkpoints: {', '.join(inner)}" if inner else ""
        raise CheckpointError(f"{path} has no config.json, so its model is unknown{hint}")
    config = read_json(path / "config.json")
    _refuse_quantised_config(path, config)
    present = [name for name in _WEIGHTS if (path / name).exists()]
    if not present:
        raise CheckpointError(f"{path} has no weights: none of {', '.join(_WEIGHTS)}")
    if present[:2] == list(_WEIGHTS[:2]):
        raise CheckpointError(f"{path} holds both {_WEIGHTS[0]} and {_WEIGHTS[1]}; remove the one that is not meant")
    shards, shard_of = _open_shards(path, present[0])
    _refuse_quantised_tensors(shard_of)
    return Layout(
        path=path,
        config=config,
        shards=shards,
        shard_of=shard_of,
        optimizer=path / OPTIMIZER if (path / OPTIMIZER).is_file() else None,
        sharded_optimizer=tuple(sorted(p for p in path.iterdir() if _SHARDED_OPTIMIZER.match(p.name))),
        notes=_notes(path, {shard.path for shard in shards}),
    )


def _open_shards(path: Path, name: str) -> tuple[tuple[Shard, ...], dict[str, Shard]]:
    if not name.endswith(".json"):
        shard = _open_shard(path / name)
        return (shard,), dict.fromkeys(shard.entries, shard)
    weight_map = read_json(path / name).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path / name} has no weight_map of tensor names to files")
    files = sorted(set(weight_map.values()))
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{path / name} names {file!r}, which lies outside the checkpoint")
        if not (path / file).exists():
            missing = sum(v == file for v in weight_map.values())
            raise CheckpointError(f"{path / file} is missing; {name} has {missing} tensors in it")
    shards = {file: _open_shard(path / file) for file in files}
    _compare_index(path / name, weight_map, shards)
    return tuple(shards.values()), {tensor: shards[file] for tensor, file in weight_map.items()}


def _open_shard(path: Path) -> Shard:
    return PickleShard(path) if path.suffix == ".bin" else SafetensorsShard(path)


def _compare_index(index: Path, weight_map: Mapping[str, str], shards: Mapping[str, Shard]) -> None:
    holders: dict[str, list[str]] = {}
    for file, shard in shards.items():
        for tensor in shard.entries:
            holders.setdefault(tensor, []).append(file)
    for tensor, files in holders.items():
        if len(files) > 1:
            raise CheckpointError(f"{index.parent}: tensor {tensor!r} is in two files, {files[0]} and {files[1]}")
        if tensor not in weight_map:
            raise CheckpointError(f"{index.parent / files[0]} holds {tensor!r}, which {index.name} does not list")
    for tensor, file in weight_map.items():
        if holders.get(tensor) != [file]:
            raise CheckpointError(f"{index} says that {tensor!r} is in {file}, but it is not there")


def _refuse_quantised_config(path: Path, config: Mapping[str, Any]) -> None:
    inner = [config, *(value for value in config.values() if isinstance(value, dict))]
    for part in inner:
        method = part.get("quantization_config")
        if method:
            name = method.get("quant_method", "unnamed method") if isinstance(method, dict) else method
            raise CheckpointError(
                f"{path} is quantised ({name}): its integers have scales of their own. Rebalance the original "
                "weights, then quantise"
            )


def _refuse_quantised_tensors(shard_of: Mapping[str, Shard]) -> None:
    for name, shard in shard_of.items():
        entry = shard.entries[name]
        narrow = not isinstance(entry.dtype, torch.dtype) or entry.dtype == torch.int8
        # (A square uint8 table of four dimensions is an attention mask that older models saved along.)
        if narrow or (entry.dtype == torch.uint8 and len(entry.shape) != 4):
            raise CheckpointError(
                f"{shard.path}: {name} is {entry.dtype}, a quantised weight. Rebalance the original weights, "
                "then quantise"
            )


def _notes(path: Path, own: set[Path]) -> tuple[str, ...]:
    others = [
        p.name
        for p in sorted(path.iterdir())
        if p.is_file() and p not in own and p.suffix in _OTHER_WEIGHTS and not _NO_WEIGHTS.match(p.name)
    ]
    others = [name for name in others if not _SHARDED_OPTIMIZER.match(name)]
    return tuple(f"{name} is not one of the model's weight files; it is copied as it is" for name in others)


# --- this project's runs ---------------------------------------------------------------------------------------------


def _newest_of_run(path: Path) -> Layout:
    steps = [p for p in (path / "checkpoints").glob("step-*") if re.fullmatch(r"step-[0-9]+", p.name)]
    if not steps:
        raise CheckpointError(f"{path} has no checkpoint")
    return _run_checkpoint(max(steps, key=lambda p: int(p.name[5:])))


def _run_checkpoint(path: Path) -> Layout:
    hashes = read_json(path / MARKER) if (path / MARKER).exists() else None
    for name in _RUN_FILES:
        if hashes is None or not (path / name).is_file() or digest(path / name) != hashes.get(name):
            what = MARKER if hashes is None else name
            raise CheckpointError(f"{path} is damaged: {what} is missing or not what was written; use an older one")
    manifests = [p for p in (path / "manifest.json", path.parent.parent / "manifest.json") if p.is_file()]
    if not manifests:
        raise CheckpointError(
            f"{path} is a run's checkpoint without the run's manifest.json, which describes its model; leave it in "
            "the run's directory, or put the manifest beside the weights"
        )
    shard = SafetensorsShard(path / _RUN_FILES[0])
    return Layout(
        path=path,
        config=config_of_run(read_json(manifests[0])),
        shards=(shard,),
        shard_of=dict.fromkeys(shard.entries, shard),
        optimizer=path / OPTIMIZER,
        manifest=manifests[0],
    )


def config_of_run(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' configuration of a run's model, as `experiments.language_model.model` builds it.

    The manifest holds every setting that the outputs depend on; dropout is left out, tokens that end a text are not
    known to it and change no output.

    Raises:
        CheckpointError: a model of the user's own, whose code only the run's plugin has.
    """
    try:
        model, vocabulary = manifest["config"]["model"], manifest["config"]["data"]["vocabulary"]
        architecture = model["architecture"]
        common = {"vocab_size": vocabulary, "tie_word_embeddings": model["tied"], "use_cache": False}
        common |= {"bos_token_id": 0, "eos_token_id": 0}
        if architecture == "gpt2":
            return common | {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "n_layer": model["layers"],
                "n_embd": model["width"],
                "n_head": model["heads"],
                "n_positions": model["context"],
                "activation_function": "gelu_pytorch_tanh",
                **model["hf"],
            }
        if architecture == "llama":
            return common | {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": model["width"],
                "num_hidden_layers": model["layers"],
                "num_attention_heads": model["heads"],
                "num_key_value_heads": model["kv_heads"],
                "intermediate_size": model["mlp_width"],
                "max_position_embeddings": model["context"],
                **model["hf"],
            }
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the run's manifest does not describe a model: {error} is missing or wrong") from None
    raise CheckpointError(
        f"the run's model is {architecture!r}, which only its own code can build; use `saggs.balance` in that code"
    )


# --- files -----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The dictionary in a JSON file; a CheckpointError that names the file where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def names(paths: Sequence[Path]) -> str:
    """File names for a message."""
    return ", ".join(path.name for path in paths)
