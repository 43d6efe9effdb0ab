"""A small Transformer with nothing between queries and keys that would tell a rotated head from another one.

A head's attention depends on q_i . k_j alone, so that W_Q -> R W_Q, W_K -> R W_K with R orthogonal leaves the function
as it is. Biases, QK-norm or RoPE between the projections and the product would shrink that group; there are none.

Source: the setting of Singh (2026): layers, heads, width, an MLP of one hidden layer with SiLU, RMSNorm, learned
positions from N(0, 0.02), PyTorch's initialisation elsewhere. Where that paper is silent, what meets its numbers, such
as a drift of 0.53 at Adam's step 300: a hidden layer without a gate (with one, 0.41), no causal mask where only the
last token is asked for (with one, 0.56), a norm before the head (without, 0.55), logits for the numbers alone and none
for "=" (with one, 0.56). Ours: pre-norm, an untied head, `nn.Embedding`'s N(0, 1), four separate square projections,
eps = 1e-6 in the norms, and this order of draws: embedding, positions, then for each layer query, key, value, output,
up, down, at last the head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

POSITION_SCALE = 0.02
EPS = 1e-6
Spread = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Attention, then the MLP, each added to what comes in: x + W_O attend(norm(x)), x + W_down silu(W_up norm(x))."""

    def __init__(self, width: int, heads: int, mlp_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=EPS)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=EPS)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, states: Tensor, spread: Spread, *, causal: bool, last_only: bool) -> Tensor:
        """The states after the block, shape (sequences, positions asked for, width).

        Args:
            states: before it, of width `width`.
            spread: makes (sequences, positions, width) of what stands where `states` do.
            causal: whether a position sees only itself and those before it.
            last_only: ask for the last position of each sequence alone.
        """

        def asked(x: Tensor) -> Tensor:
            return spread(x)[:, -1:] if last_only else spread(x)

        y = self.attention_norm(states)
        query, key, value = (
            x_btw.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for x_btw in (asked(self.query(y)), spread(self.key(y)), spread(self.value(y)))
        )
        # The last position sees all, mask or none.
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal and not last_only)
        x_btw = asked(states) + self.output(mixed.transpose(1, 2).flatten(2))
        after: Tensor = x_btw + self.down(functional.silu(self.up(self.mlp_norm(x_btw))))
        return after


class Transformer(nn.Module):
    """Tokens to logits: of every position, or of the last one of each sequence alone.

    Args:
        vocabulary: number of tokens.
        outputs: number of logits.
        context: number of positions.
        layers, width, heads, mlp_width: sizes; `heads` divides `width`.
        causal: whether a position sees only itself and those before it.
        last_only: whether only the last position is asked for; the last layer then computes nothing else.
    """

    def __init__(
        self,
        vocabulary: int,
        outputs: int,
        context: int,
        *,
        layers: int,
        width: int,
        heads: int,
        mlp_width: int,
        causal: bool,
        last_only: bool,
    ) -> None:
        super().__init__()
        self.causal, self.last_only = causal, last_only
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * POSITION_SCALE)
        self.blocks = nn.ModuleList([Block(width, heads, mlp_width) for _ in range(layers)])
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.head = nn.Linear(width, outputs, bias=False)

    @property
    def layers(self) -> list[Block]:
        """The blocks, from the first to the last."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Logits, of shape (sequences, outputs) or (sequences * positions, outputs)."""
        context = tokens_bt.shape[1]
        # Before the first attention a state depends on token and position alone: of the 2,649 positions of 883 sums
        # 95 are distinct. (An embedding lookup adds up its gradient row by row, in one order, and fast.)
        distinct_n, row_bt = torch.unique(tokens_bt * context + torch.arange(context), return_inverse=True)
        x = self.embedding(distinct_n // context) + functional.embedding(distinct_n % context, self.positions)
        spread: Spread = partial(functional.embedding, row_bt)
        for block in self.layers:
            x = block(x, spread, causal=self.causal, last_only=self.last_only and block is self.layers[-1])
            spread = _as_it_is
        logits: Tensor = self.head(self.norm(x)).flatten(0, 1)
        return logits


def _as_it_is(x: Tensor) -> Tensor:
    return x


__all__ = ["Block", "Transformer"]
