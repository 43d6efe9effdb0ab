"""Batches as a pure function of (data seed, global sample index).

The training tokens are cut into windows of `context` inputs with their targets one token later. Epoch e reads all
windows once, in an order and from an offset drawn from (data seed, e) alone, so that ranks, micro-batches and a
resumed run slice one and the same sequence of samples and nothing has to be remembered.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


class Batches:
    """Training samples of one token stream.

    Args:
        tokens: the stream, shape (tokens,), any unsigned integer type, may be memory-mapped.
        context: inputs a sample.
        data_seed: decides order and offsets, nothing else does.

    Raises:
        ValueError: fewer tokens than one sample needs.
    """

    def __init__(self, tokens: np.ndarray, context: int, data_seed: int) -> None:
        # One window less than fits at offset 0, so that every offset below `context` yields as many.
        self.windows_per_epoch = (len(tokens) - context) // context
        if self.windows_per_epoch < 1:
            raise ValueError(
                f"the training split has {len(tokens)} tokens; a context of {context} needs at least {2 * context}. "
                "Use more text or a shorter context"
            )
        self._tokens = tokens
        self._context = context
        self._seed = data_seed
        self._epoch: tuple[int, int, np.ndarray] | None = None

    def sample(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples start … start + count - 1: inputs and targets, each of shape (count, context), int64."""
        rows = np.empty((count, self._context + 1), dtype=np.int64)
        for row in range(count):
            begin = self._position(start + row)
            rows[row] = self._tokens[begin : begin + self._context + 1]
        samples = torch.from_numpy(rows)
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def _position(self, index: int) -> int:
        epoch, within = divmod(index, self.windows_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            digest = hashlib.sha256(f"{self._seed}:{epoch}".encode()).digest()
            generator = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "big")))
            offset = int(generator.integers(self._context))
            self._epoch = (epoch, offset, generator.permutation(self.windows_per_epoch))
        _, offset, order = self._epoch
        return offset + int(order[within]) * self._context
