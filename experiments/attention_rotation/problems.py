"""What the twins learn: sums modulo a number, or the next character of English text.

A problem gives the same batch to whoever asks for the same step, and two fixed parts to assess by. Nothing of it
depends on a model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from experiments.checks import ConfigError
from experiments.config import Config
from experiments.identity import derived_seed
from experiments.language_model.corpus import load_corpus
from experiments.study_config import Characters, ModularAddition

ASSESSED_SEQUENCES = 128


@dataclass(frozen=True)
class Batch:
    """Sequences, shape (sequences, positions), and one target for each logit that is asked for."""

    tokens_bt: Tensor
    targets_n: Tensor


class Problem(Protocol):
    """Sizes of the model that it needs, and its data.

    Attributes:
        vocabulary, outputs, context: numbers of tokens, logits and positions.
        causal: whether a position must not see those after it.
        last_only: whether only the last position of a sequence has a target.
        train, validation: fixed parts to assess by.
        data: what a manifest says of it.
    """

    vocabulary: int
    outputs: int
    context: int
    causal: bool
    last_only: bool
    train: Batch
    validation: Batch
    data: dict[str, Any]

    def batch(self, step: int) -> Batch:
        """What the update from the state after `step` steps learns from: a pure function of seed and step."""


class Sums:
    """a + b mod p, from the three tokens a, b and "=" (which is p), at the last of them; full batch.

    A share of all p^2 ordered pairs is for training, rounded down, the rest for validation: a permutation drawn from
    `seed` decides. Source: Singh (2026): p = 47, 40 %, 883 of 2,209 pairs.
    """

    context = 3
    causal, last_only = False, True

    def __init__(self, modulus: int, train_fraction: float, seed: int) -> None:
        self.vocabulary, self.outputs = modulus + 1, modulus
        pairs = modulus * modulus
        trained = int(train_fraction * pairs)
        first, second = torch.arange(modulus).repeat_interleave(modulus), torch.arange(modulus).repeat(modulus)
        tokens_bt = torch.stack([first, second, torch.full_like(first, modulus)], 1)
        order = torch.randperm(pairs, generator=torch.Generator().manual_seed(seed))
        parts = [_part(tokens_bt[chosen]) for chosen in (order[:trained], order[trained:])]
        self.train, self.validation = parts
        self.data = {
            "name": f"sums modulo {modulus}",
            "fingerprint": None,  # drawn from the seed, and so another for each
            "counts": {"train": trained, "validation": pairs - trained},
        }

    def batch(self, step: int) -> Batch:
        """All training pairs, at every step."""
        return self.train


def _part(tokens_bt: Tensor) -> Batch:
    modulus = int(tokens_bt[0, 2])
    return Batch(tokens_bt, (tokens_bt[:, 0] + tokens_bt[:, 1]) % modulus)


class Text:
    """The next byte of UTF-8 text at every position: 256 tokens, which no split can lack.

    Documents are joined by newlines. A batch is windows at places drawn for its step; a part is the first windows of
    its split, end to end.
    """

    vocabulary = outputs = 256
    causal, last_only = True, False

    def __init__(self, documents: dict[str, list[str]], name: str, context: int, sequences: int, seed: int) -> None:
        self.context = context
        self._sequences, self._seed = sequences, derived_seed(seed, "data")
        text = {split: "\n".join(documents[split]).encode() for split in ("train", "validation")}
        for split, data in text.items():
            if len(data) <= context:
                raise ConfigError(
                    f"attention.context={context}: the {split} split of {name} has {len(data)} bytes; give more text"
                )
        self._text = torch.from_numpy(np.frombuffer(text["train"], dtype=np.uint8).copy())
        self.train, self.validation = (self._windows(text[split]) for split in ("train", "validation"))
        self.data = {
            "name": name,
            "fingerprint": _fingerprint(b"\0".join(text.values())),
            "counts": {split: len(data) for split, data in text.items()},
        }

    def batch(self, step: int) -> Batch:
        """Windows at places drawn for this step."""
        generator = torch.Generator().manual_seed(derived_seed(self._seed, str(step)))
        places = torch.randint(len(self._text) - self.context, (self._sequences, 1), generator=generator)
        return self._next_bytes(self._text[places + torch.arange(self.context + 1)])

    def _windows(self, data: bytes) -> Batch:
        count = min((len(data) - 1) // self.context, ASSESSED_SEQUENCES)
        read = torch.from_numpy(np.frombuffer(data, dtype=np.uint8, count=count * self.context + 1).copy())
        return self._next_bytes(read.unfold(0, self.context + 1, self.context))

    @staticmethod
    def _next_bytes(windows: Tensor) -> Batch:
        windows = windows.long()
        tokens_bt = windows[:, :-1].contiguous()
        return Batch(tokens_bt, windows[:, 1:].flatten())


def _fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def build_problem(config: Config) -> Problem:
    """The problem of a configuration.

    Raises:
        ConfigError: a file that is not there, or less text than one window.
        DataMissing: the corpus is not there; the message says how to get it.
    """
    settings = config.attention
    if isinstance(settings, ModularAddition):
        return Sums(settings.modulus, settings.train_fraction, config.seed)
    assert isinstance(settings, Characters)
    if settings.path is None:
        corpus = load_corpus("wikipedia_mini")
    elif Path(settings.path).expanduser().exists():
        corpus = load_corpus("text", settings.path)
    else:
        raise ConfigError(f"attention.path={settings.path}: there is no such file; null reads wikipedia_mini")
    return Text(corpus.documents, corpus.name, settings.context, settings.batch_sequences, config.seed)


__all__ = ["Batch", "Problem", "Sums", "Text", "build_problem"]
