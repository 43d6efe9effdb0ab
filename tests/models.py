"""Tiny models for the tests, with every bias and gain drawn at random: zeros and ones are blind to forgotten ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from saggs import ParameterSlice, ScalePair

VOCABULARY = 61
WIDTH = 32
LENGTH = 16


def randomised(model: nn.Module, seed: int, spread: float = 0.25) -> Any:
    """The model with matrices from N(0, spread^2), and biases and gains moved by N(0, 0.4^2), in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(spread * noise if parameter.dim() > 1 else parameter + 0.4 * noise)
    return model


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Two layers, fused c_attn, biases everywhere, tied embeddings."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4, n_inner=48,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return randomised(GPT2LMHeadModel(config), seed)


def _modern(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, **changes,
    }  # fmt: skip


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers, four query heads on two key-value heads, SwiGLU, no biases."""
    return randomised(LlamaForCausalLM(LlamaConfig(**_modern())), seed)


def square_llama(seed: int = 0) -> LlamaForCausalLM:
    """As many key-value heads as query heads: q_proj and k_proj have one shape and could be swapped unseen."""
    return randomised(LlamaForCausalLM(LlamaConfig(**_modern(num_key_value_heads=4))), seed)


def biased_llama(seed: int = 0) -> LlamaForCausalLM:
    """Grouped queries with biases on every projection of attention and MLP."""
    return randomised(LlamaForCausalLM(LlamaConfig(**_modern(attention_bias=True, mlp_bias=True))), seed)


def tiny_qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    """Normalises queries and keys, so that query_key is no exact pair."""
    return randomised(Qwen3ForCausalLM(Qwen3Config(**_modern(head_dim=8))), seed)


LANGUAGE_MODELS: dict[str, Callable[[], Any]] = {"gpt2": tiny_gpt2, "llama": tiny_llama, "biased_llama": biased_llama}


class Factors(nn.Module):
    """W = left @ right^T, the smallest model with a pair."""

    def __init__(self, rows: int = 12, columns: int = 10, rank: int = 4, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = {"generator": generator, "dtype": torch.float64}
        self.left = nn.Parameter(torch.randn(rows, rank, **draw))  # type: ignore[call-overload]
        self.right = nn.Parameter(torch.randn(columns, rank, **draw))  # type: ignore[call-overload]

    def forward(self) -> Tensor:
        return self.left @ self.right.T


def factor_pair(left: str = "left", right: str = "right") -> ScalePair:
    """A hand-made pair of two whole matrices."""
    whole = (None, None)
    return ScalePair("value_output", "", (ParameterSlice(left, whole, 1),), (ParameterSlice(right, whole, -1),))


class ReluMlp(nn.Module):
    """down(relu(up(x)) ** power): exact for positive factors only, with exponents 1 and -power."""

    def __init__(self, power: int = 1, seed: int = 0) -> None:
        super().__init__()
        self.up, self.down, self.power = nn.Linear(6, 9), nn.Linear(9, 5), power
        randomised(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) ** self.power)

    def pair(self) -> ScalePair:
        left = (ParameterSlice("up.weight", (None, None), 1), ParameterSlice("up.bias", (None,), 1, bias=True))
        right = (ParameterSlice("down.weight", (None, None), -self.power),)
        return ScalePair("up_down", "", left, right, signs="positive")


class GatedMlp(nn.Module):
    """A gated MLP outside any language model: recognised by its wiring, but it has to be told its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)
        randomised(self, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def vectors(generator: torch.Generator, count: int) -> Mapping[str, Tensor]:
    """`inputs` for the plain modules above."""
    return {"x": torch.randn(count, 6, generator=generator, dtype=torch.float64)}


def tokens(seed: int, count: int = 3, length: int = LENGTH) -> Tensor:
    """A batch of random tokens: a pure function of its seed."""
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


def logits_and_gradients(model: nn.Module, seed: int = 7) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits on one batch, and every parameter's gradient by name."""
    model.zero_grad()
    ids = tokens(seed)
    result = model(input_ids=ids, labels=ids, use_cache=False)
    result.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result.logits.detach(), gradients


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    first_seed: int = 100,
    before: Callable[[], object] = lambda: None,
) -> None:
    """Steps on fresh batches; `before` is called at the top of each."""
    for step in range(steps):
        before()
        ids = tokens(first_seed + step)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def twin(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Independent copies of a model and its optimizer, state included."""
    return copy.deepcopy((model, optimizer))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a training state by name: weights, gradients, optimizer state."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad
        if optimizer is not None:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name}.{key}", value


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """A copy of `everything`."""
    return {name: tensor.clone() for name, tensor in everything(model, optimizer)}


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors are not equal bit for bit; missing ones too."""
    return [
        name
        for name in {**first, **second}
        if name not in first
        or name not in second
        or first[name].dtype != second[name].dtype
        or not torch.equal(first[name], second[name])
    ]


def relative_distance(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest entry of `b`."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max())
