"""Perplexity over a whole split, the same whatever the batch size.

The stream is cut into non-overlapping windows of `context` inputs, the last one as short as it comes; each window's
targets are its tokens moved by one. So every token but the first (an end-of-text) is predicted exactly once, and

    perplexity      = exp(total negative log-likelihood / predicted tokens)
    word perplexity = exp(total negative log-likelihood / whitespace words of the raw text)
    bits per byte   = total negative log-likelihood / (ln 2 * UTF-8 bytes of the raw text).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.language_model.model import head_weight, hidden_states


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Total negative log-likelihood in nats over a number of predicted tokens."""

    nll_nats: float
    tokens: int
    context: int

    @property
    def per_token(self) -> float:
        """Nats a token."""
        return self.nll_nats / self.tokens

    def as_dict(self) -> dict[str, float | int]:
        """Token-level figures under the names that tables use."""
        return {
            "nll_nats": self.nll_nats,
            "tokens": self.tokens,
            "nll_per_token": self.per_token,
            "perplexity": _exp(self.per_token),
            "context": self.context,
            "stride": self.context,
        }

    def with_text(self, words: int, size_bytes: int) -> dict[str, float | int]:
        """Token-level figures and, for a whole split, the word- and byte-level ones."""
        return self.as_dict() | {
            "words": words,
            "word_perplexity": _exp(self.nll_nats / words),
            "bytes": size_bytes,
            "bits_per_byte": self.nll_nats / (math.log(2) * size_bytes),
        }


def _exp(value: float) -> float:
    """exp, or the largest float where that overflows: an untrained word-level perplexity may."""
    return math.exp(min(value, 700.0))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: np.ndarray,
    context: int,
    batch_sequences: int,
    device: str,
    after_batch: Callable[[], None] = lambda: None,
) -> Likelihood:
    """The likelihood of a token stream. Touches no random state and leaves the model in the mode it was in.

    Args:
        model: a causal language model.
        tokens: (tokens,), unsigned integers.
        context: inputs a window.
        batch_sequences: windows at a time; changes speed and memory only.
        device: where the model is.
        after_batch: called after every batch, to say that the run is alive.

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"a split of {len(tokens)} tokens predicts nothing; use more text")
    was_training = model.training
    model.eval()
    forward, weight = hidden_states(model), head_weight(model)
    total = torch.zeros((), dtype=torch.float64, device=device)
    predicted = len(tokens) - 1
    whole = predicted // context
    inputs = torch.from_numpy(np.asarray(tokens[: whole * context], dtype=np.int64)).view(whole, context)
    targets = torch.from_numpy(np.asarray(tokens[1 : whole * context + 1], dtype=np.int64)).view(whole, context)
    for begin in range(0, whole, batch_sequences):
        rows = slice(begin, begin + batch_sequences)
        total += _summed(forward, weight, inputs[rows].to(device), targets[rows].to(device))
        after_batch()
    if predicted % context:
        tail = torch.from_numpy(np.asarray(tokens[whole * context :], dtype=np.int64)).unsqueeze(0).to(device)
        total += _summed(forward, weight, tail[:, :-1], tail[:, 1:])
    model.train(was_training)
    return Likelihood(float(total), predicted, context)


def _summed(forward: Callable[[Tensor], Tensor], weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of a batch, each token's in the model's precision, their sum in float64."""
    hidden = forward(inputs)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for row, target in zip(hidden, targets, strict=True):  # one window's logits at a time
        total += cross_entropy((row @ weight.T).float(), target, reduction="none").double().sum()
    return total
