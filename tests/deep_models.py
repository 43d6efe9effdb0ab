"""Models of several blocks, by name, with the class's own configuration: what has a twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from families import token_ids
from torch import Tensor, nn

Inputs = Callable[[torch.Generator, int], Mapping[str, Any]]
MEL_BINS, FRAMES = 16, 24


def _modern(width: int, layers: int, heads: int, **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 300, "hidden_size": width, "intermediate_size": 2 * width + 8, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 96,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
        "experts_implementation": "eager", **changes,
    }  # fmt: skip


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}


def _gpt2(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=300, n_positions=96, n_embd=width, n_layer=layers, n_head=heads, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def _llama(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_modern(width, layers, heads)))


def _gemma2(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**_modern(width, layers, heads, head_dim=width // heads, sliding_window=8)))


def _gpt_neox(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    settings = _without(_modern(width, layers, heads, rotary_pct=0.5), "num_key_value_heads")
    return GPTNeoXForCausalLM(GPTNeoXConfig(**settings))


def _opt(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=300, hidden_size=width, num_hidden_layers=layers, ffn_dim=2 * width + 8,
            num_attention_heads=heads, max_position_embeddings=96, word_embed_proj_dim=width, dropout=0.0,
        )
    )  # fmt: skip


def _mixtral(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_modern(width, layers, heads, num_local_experts=4)))


def _deepseek_v3(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = _modern(
        width, layers, heads, num_key_value_heads=heads, q_lora_rank=width // 2, kv_lora_rank=width // 4,
        qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=7, n_routed_experts=4, n_shared_experts=1, n_group=1,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=width // 2, first_k_dense_replace=1,
        num_mtp_layers=0,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(DeepseekV3Config(**settings))


def _bert(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=300, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=2 * width + 8, max_position_embeddings=96, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _t5(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=300, d_model=width, d_kv=width // heads, d_ff=2 * width + 8, num_layers=layers, num_heads=heads,
            relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        )
    )  # fmt: skip


def _whisper(width: int, layers: int, heads: int) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=300, num_mel_bins=MEL_BINS, d_model=width, encoder_layers=layers, decoder_layers=layers,
            encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=2 * width,
            decoder_ffn_dim=2 * width, max_source_positions=FRAMES // 2, max_target_positions=96, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip


def smollm3(width: int = 32, layers: int = 5, heads: int = 4) -> nn.Module:
    """Every fourth layer has no rotary positions; nothing in its parameters tells."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    return SmolLM3ForCausalLM(SmolLM3Config(**_modern(width, layers, heads, no_rope_layer_interval=4)))


def cohere2(width: int = 32, layers: int = 4, heads: int = 4) -> nn.Module:
    """Rotary positions in layers of sliding attention alone."""
    from transformers import Cohere2Config, Cohere2ForCausalLM

    return Cohere2ForCausalLM(Cohere2Config(**_modern(width, layers, heads)))


def _text_to_text(generator: torch.Generator, count: int) -> Mapping[str, Any]:
    ids = {n: token_ids(generator, count, 9) for n in ("input_ids", "decoder_input_ids")}
    return {**ids, "use_cache": False}


def _masked_text(generator: torch.Generator, count: int) -> Mapping[str, Any]:
    return {"input_ids": token_ids(generator, count)}


def _speech_to_text(generator: torch.Generator, count: int) -> Mapping[str, Any]:
    sound = torch.randn(count, MEL_BINS, FRAMES, generator=generator, dtype=torch.get_default_dtype())
    return {"input_features": sound, "decoder_input_ids": token_ids(generator, count, 9), "use_cache": False}


Build = Callable[[int, int, int], nn.Module]
DEEP: dict[str, tuple[Build, Inputs | None]] = {
    "gpt2": (_gpt2, None),
    "llama": (_llama, None),
    "gemma2": (_gemma2, None),
    "gpt_neox": (_gpt_neox, None),
    "opt": (_opt, None),
    "mixtral": (_mixtral, None),
    "deepseek_v3": (_deepseek_v3, None),
    "bert": (_bert, _masked_text),
    "t5": (_t5, _text_to_text),
    "whisper": (_whisper, _speech_to_text),
}


class Settings:
    """A plain configuration."""

    def __init__(self, layers: int = 4, vocab_size: int = 200, width: int = 16, turn: int = 0) -> None:
        self.layers, self.vocab_size, self.width, self.turn = layers, vocab_size, width, turn


class Leaf(nn.Module):
    """up, a non-linearity of its own, down."""

    def __init__(self, width: int, homogeneous: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up, self.down = nn.Linear(width, 9, bias=False), nn.Linear(9, width, bias=False)
        self.homogeneous = homogeneous

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return self.down(h.relu() if self.homogeneous else torch.nn.functional.gelu(h))


class Twig(nn.Module):
    """Blocks of one shape: those before `turn` have a GELU, the others a ReLU."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.leaves = nn.ModuleList(Leaf(config.width, i >= config.turn) for i in range(config.layers))
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = self.table(input_ids)
        for leaf in self.leaves:
            x = x + leaf(x)
        return self.head(x)
