"""Tiny random models of many families: every bias and gain is drawn at random, and no two sizes agree by accident."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from expected_layouts import EXPERT_NEURONS, KV_RANK, Q_RANK, SHARED_NEURONS, SIZES, VALUE_SIZE
from torch import Tensor, nn

LENGTH = 12
FRAMES, MEL_BINS = 24, 5
IMAGE, PATCH = 12, 4

Inputs = Callable[[torch.Generator, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """How to build a model, what to feed it, and where its logits are."""

    build: Callable[[], nn.Module]
    inputs: Inputs
    output: Callable[[Any], Tensor]


def randomised(model: nn.Module, seed: int) -> nn.Module:
    """Matrices from N(0, .25^2), biases and gains moved by N(0, .4^2); evaluation mode, float32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.25 * noise if parameter.dim() > 1 else parameter + 0.4 * noise)
    return model.eval()


def token_ids(generator: torch.Generator, count: int, length: int = LENGTH, vocabulary: int = 50) -> Tensor:
    """Random tokens, but never the padding, 0."""
    return torch.randint(1, vocabulary, (count, length), generator=generator)


def _text(generator: torch.Generator, count: int) -> Mapping[str, Any]:
    return {"input_ids": token_ids(generator, count), "use_cache": False}


def _masked_text(generator: torch.Generator, count: int) -> Mapping[str, Any]:
    return {"input_ids": token_ids(generator, count)}


def _text_to_text(generator: torch.Generator, count: int) -> Mapping[str, Any]:
    source, target = token_ids(generator, count), token_ids(generator, count, LENGTH - 3)
    return {"input_ids": source, "decoder_input_ids": target, "use_cache": False}


def _speech_to_text(generator: torch.Generator, count: int) -> Mapping[str, Any]:
    sound = torch.randn(count, MEL_BINS, FRAMES, generator=generator, dtype=torch.get_default_dtype())
    return {"input_features": sound, "decoder_input_ids": token_ids(generator, count, LENGTH - 3), "use_cache": False}


def _pictures(generator: torch.Generator, count: int) -> Mapping[str, Any]:
    shape = (count, 3, IMAGE, IMAGE)
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.get_default_dtype())}


def logits(result: Any) -> Tensor:
    """The logits of a library model's result."""
    return result.logits


def _modern(name: str, **changes: Any) -> dict[str, Any]:
    """The settings that the families after Llama share."""
    s = SIZES[name]
    return {
        "vocab_size": s.vocabulary, "hidden_size": s.width, "intermediate_size": s.neurons,
        "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "num_key_value_heads": s.groups,
        "head_dim": s.size, "max_position_embeddings": 2 * LENGTH, "tie_word_embeddings": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
        "experts_implementation": "eager", **changes,
    }  # fmt: skip


def _eager(config: Callable[..., Any], **settings: Any) -> Any:
    """A configuration whose attention is computed step by step."""
    return config(**settings, attn_implementation="eager")


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    s = SIZES["gpt2"]
    return GPT2LMHeadModel(
        _eager(
            GPT2Config,
            vocab_size=s.vocabulary, n_positions=2 * LENGTH, n_embd=s.width, n_layer=s.layers, n_head=s.heads,
            n_inner=s.neurons, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_modern("llama")))


def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_modern("mistral", sliding_window=8)))


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_modern("qwen2")))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_modern("qwen3")))


def _phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**_modern("phi3", partial_rotary_factor=0.5)))


def _gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    changes = {"tie_word_embeddings": True, "query_pre_attn_scalar": 5, "sliding_window": 8}
    return Gemma2ForCausalLM(Gemma2Config(**_modern("gemma2", **changes)))


def _gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    changes = {"tie_word_embeddings": True, "query_pre_attn_scalar": 5, "sliding_window": 8}
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**_modern("gemma3", layer_types=kinds, **changes)))


def _gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    settings = _modern("gpt_neox", rotary_pct=0.5)
    del settings["num_key_value_heads"], settings["head_dim"]
    return GPTNeoXForCausalLM(GPTNeoXConfig(**settings))


def _opt(name: str, norm_first: bool) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    s = SIZES[name]
    return OPTForCausalLM(
        _eager(
            OPTConfig,
            vocab_size=s.vocabulary, hidden_size=s.width, num_hidden_layers=s.layers, ffn_dim=s.neurons,
            max_position_embeddings=2 * LENGTH, do_layer_norm_before=norm_first, dropout=0.0,
            num_attention_heads=s.heads,
        )
    )  # fmt: skip


def _falcon(name: str, **changes: Any) -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    s = SIZES[name]
    return FalconForCausalLM(
        _eager(
            FalconConfig,
            vocab_size=s.vocabulary, hidden_size=s.width, num_hidden_layers=s.layers, num_attention_heads=s.heads,
            ffn_hidden_size=s.neurons, max_position_embeddings=2 * LENGTH, bos_token_id=1, eos_token_id=2,
            **changes,
        )
    )  # fmt: skip


def _olmo2() -> nn.Module:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    settings = _modern("olmo2")
    return Olmo2ForCausalLM(Olmo2Config(**settings))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    changes = {"num_local_experts": SIZES["mixtral"].experts, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**_modern("mixtral", **changes)))


def _deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    s = SIZES["deepseek_v3"]
    settings = _modern(
        "deepseek_v3", q_lora_rank=Q_RANK, kv_lora_rank=KV_RANK, qk_nope_head_dim=s.size, qk_rope_head_dim=s.rotated,
        v_head_dim=VALUE_SIZE, n_routed_experts=s.experts, n_shared_experts=SHARED_NEURONS // EXPERT_NEURONS,
        moe_intermediate_size=EXPERT_NEURONS, n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
        num_mtp_layers=0,
    )  # fmt: skip
    del settings["head_dim"]
    return DeepseekV3ForCausalLM(DeepseekV3Config(**settings))


def _t5(name: str, gated: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    s = SIZES[name]
    config = _eager(
        T5Config,
        vocab_size=s.vocabulary, d_model=s.width, d_kv=s.size, d_ff=s.neurons, num_layers=s.layers, num_heads=s.heads,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=not gated,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    if gated:  # the class ties its head whatever the configuration says; checkpoints of version 1.1 bring their own
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        config.tie_word_embeddings = False
    return model


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    s = SIZES["bert"]
    return BertForMaskedLM(
        _eager(
            BertConfig,
            vocab_size=s.vocabulary, hidden_size=s.width, num_hidden_layers=s.layers, num_attention_heads=s.heads,
            intermediate_size=s.neurons, max_position_embeddings=2 * LENGTH, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    s = SIZES["vit"]
    return ViTForImageClassification(
        _eager(
            ViTConfig,
            hidden_size=s.width, num_hidden_layers=s.layers, num_attention_heads=s.heads, intermediate_size=s.neurons,
            image_size=IMAGE, patch_size=PATCH, num_labels=s.vocabulary,
        )
    )  # fmt: skip


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    s = SIZES["whisper"]
    return WhisperForConditionalGeneration(
        _eager(
            WhisperConfig,
            vocab_size=s.vocabulary, num_mel_bins=MEL_BINS, encoder_layers=s.layers, decoder_layers=s.layers,
            encoder_attention_heads=s.heads, decoder_attention_heads=s.heads, encoder_ffn_dim=s.neurons,
            decoder_ffn_dim=s.neurons, d_model=s.width, max_source_positions=FRAMES // 2,
            max_target_positions=2 * LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip


def _family(build: Callable[[], nn.Module], inputs: Inputs = _text, seed: int = 0) -> Family:
    return Family(lambda: randomised(build(), seed), inputs, logits)


# The seeds of the ReLU models leave no neuron dead on a handful of samples.
FAMILIES: dict[str, Family] = {
    "gpt2": _family(_gpt2),
    "llama": _family(_llama),
    "mistral": _family(_mistral),
    "qwen2": _family(_qwen2),
    "qwen3": _family(_qwen3),
    "phi3": _family(_phi3),
    "gemma2": _family(_gemma2),
    "gemma3": _family(_gemma3),
    "gpt_neox": _family(_gpt_neox),
    "opt": _family(lambda: _opt("opt", norm_first=True), seed=19),
    "opt_post_norm": _family(lambda: _opt("opt_post_norm", norm_first=False), seed=92),
    "falcon_7b": _family(lambda: _falcon("falcon_7b")),
    "falcon_40b": _family(
        lambda: _falcon("falcon_40b", new_decoder_architecture=True, num_kv_heads=SIZES["falcon_40b"].groups)
    ),
    "olmo2": _family(_olmo2),
    "mixtral": _family(_mixtral),
    "deepseek_v3": _family(_deepseek_v3),
    "t5": _family(lambda: _t5("t5", gated=False), _text_to_text, seed=1),
    "t5_v1_1": _family(lambda: _t5("t5_v1_1", gated=True), _text_to_text),
    "bert": _family(_bert, _masked_text),
    "vit": _family(_vit, _pictures),
    "whisper": _family(_whisper, _speech_to_text),
}
