"""Three lines in a training loop of your own: a model that nobody configured, kept balanced while it trains.

python examples/own_loop.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import saggs


def main() -> None:
    """Train a tiny Llama on random tokens from a badly scaled start."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)  # fmt: skip
    model = LlamaForCausalLM(config)
    pairs = saggs.find_pairs(model, saggs.BALANCED_KINDS)
    saggs.inject_imbalance(model, pairs, factor=32.0)  # the same function, badly scaled
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    rebalancer = saggs.Rebalancer(model, optimizer, every=10)  # 1: finds the exact pairs and certifies them
    print("log2 norm ratios at the start:", saggs.log2_norm_ratios(model, rebalancer.pairs).round(decimals=1).tolist())
    for step in range(30):
        rebalancer.step()  # 2: at the top of every step
        tokens = torch.randint(0, 64, (4, 32))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:2d}  loss {loss.item():.3f}")
    state = {"rebalancer": rebalancer.state_dict()}  # 3: into your checkpoint
    print("log2 norm ratios at the end:", saggs.log2_norm_ratios(model, rebalancer.pairs).round(decimals=1).tolist())
    rebalancer.load_state_dict(state["rebalancer"])


if __name__ == "__main__":
    main()
