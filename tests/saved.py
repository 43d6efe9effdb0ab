"""Checkpoints of tiny models on disk, out of balance by known factors, and what the tests compare of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from models import biased_llama, tiny_gpt2, tiny_llama, tokens
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer

import saggs
from saggs import ScalePair, find_pairs
from saggs.checkpoints.layout import Layout
from saggs.pairs import BALANCED_KINDS

BUILDERS = {"gpt2": tiny_gpt2, "llama": tiny_llama, "biased_llama": biased_llama}
FACTORS = (8.0, 0.25, 4.0, 16.0, 0.5, 32.0)


@functools.cache
def pairs_of(family: str, granularity: str = "matrix") -> tuple[ScalePair, ...]:
    """The pairs of a tiny model: the same for every seed and dtype, so they are found once."""
    return tuple(find_pairs(BUILDERS[family](), BALANCED_KINDS, granularity))  # type: ignore[arg-type]


def known_pairs(layout: Layout | Path, kinds: object = None, granularity: str = "matrix") -> list[ScalePair]:
    """In the place of `pairs_of_checkpoint`, for the tests that are about something else."""
    assert isinstance(layout, Layout)
    family = "biased_llama" if layout.config.get("mlp_bias") else layout.config["model_type"]
    return list(pairs_of(family, granularity))


def imbalanced(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A tiny model whose pairs are each off by a power of two of their own."""
    model: Any = BUILDERS[family](seed)
    for pair, factor in zip(pairs_of(family), FACTORS, strict=False):
        saggs.rescale(model, pair, factor)
    return model.to(dtype)


def save(model: Any, folder: Path, shards: bool = False) -> Path:
    """`save_pretrained`, in several files where asked for."""
    model.save_pretrained(folder, max_shard_size="30KB" if shards else "1GB")
    return folder


def load(folder: Path) -> Any:
    """The model as transformers loads it, in the dtype of its files."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def logits(folder: Path) -> Tensor:
    """Of one batch, in float64."""
    with torch.no_grad():
        result: Tensor = load(folder)(input_ids=tokens(5)).logits
    return result.double()


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file under a folder, by relative name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def remains(folder: Path) -> list[str]:
    """What lies in a folder, hidden things too."""
    return sorted(p.name for p in folder.iterdir())


def trainer_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Parameter groups as Hugging Face's Trainer makes them."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n in decayed], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    """A few steps of training."""
    for step in range(count):
        ids = tokens(100 + step)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Largest difference of any entry relative to the largest one of its tensor; both must hold the same names."""
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max() / b[n].double().abs().max()) for n in a)
