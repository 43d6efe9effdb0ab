"""Language models: transformers' own classes, built from the configuration with a seed of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear_cross_entropy

from experiments import registry
from experiments.checks import ConfigError, nearest
from experiments.config import Config, CustomModel, GPT2Model, LlamaModel
from experiments.identity import derived_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_model(config: Config, end_of_text: int, device: str | torch.device = "cpu") -> nn.Module:
    """The model with its initial weights in float32, a function of the configuration and `seed` alone.

    Args:
        config: validated.
        end_of_text: token id that separates documents; stored in the model's configuration.
        device: "meta" allocates nothing (to count parameters).

    Raises:
        ConfigError: an architecture nobody registered, or a field in `model.hf` that transformers does not have.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(derived_seed(config.seed, "init"))
        model = _from_scratch(config, end_of_text)
    return model.float()


def check_model(config: Config) -> None:
    """Raise a ConfigError for a model that could not be built, before any data is touched."""
    if isinstance(config.model, CustomModel):
        registry.require("model", config.model.architecture)
        if config.model.hf:
            raise ConfigError(f"model.hf={config.model.hf}: a custom model does not read it; use model.options")
    else:
        transformers_config(config)


def _from_scratch(config: Config, end_of_text: int) -> nn.Module:
    if isinstance(config.model, CustomModel):
        shape = {k: v for k, v in dataclasses.asdict(config.model).items() if k in _SHAPE}
        built = registry.build(
            "model", config.model.architecture, config.model.options, vocabulary=config.data.vocabulary, **shape
        )
        if not isinstance(built, nn.Module):
            name = config.model.architecture
            raise ConfigError(f"model {name!r} returned a {type(built).__name__}, not a torch.nn.Module")
        return built
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(transformers_config(config, end_of_text), attn_implementation="sdpa")
    assert isinstance(model, nn.Module)
    return model


_SHAPE = ("layers", "width", "heads", "context", "tied")


def transformers_config(config: Config, end_of_text: int = 0) -> PretrainedConfig:
    """transformers' configuration of a GPT-2 or Llama-like model, with the fields of `model.hf` on top."""
    from transformers import GPT2Config, LlamaConfig

    model = config.model
    own: dict[str, Any] = {
        "vocab_size": config.data.vocabulary,
        "tie_word_embeddings": model.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": False,
    }
    cls: type[PretrainedConfig]
    if isinstance(model, GPT2Model):
        cls = GPT2Config
        own |= {
            "n_layer": model.layers,
            "n_embd": model.width,
            "n_head": model.heads,
            "n_positions": model.context,
            "activation_function": "gelu_pytorch_tanh",  # the same function as gelu_new, in one kernel
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
            "attn_pdrop": model.dropout,
        }
    elif isinstance(model, LlamaModel):
        cls = LlamaConfig
        own |= {
            "num_hidden_layers": model.layers,
            "hidden_size": model.width,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "intermediate_size": model.mlp_width,
            "max_position_embeddings": model.context,
        }
    else:
        raise ConfigError(f"model.architecture={model.architecture}: build on gpt2, llama or custom")
    known = cls().to_dict()
    for key in model.hf:
        if key in own:
            raise ConfigError(f"model.hf.{key} is set by the model's own settings; change those")
        if key not in known:
            raise ConfigError(f"model.hf.{key} is not a setting of {cls.__name__}{nearest(key, known)}")
    return cls(**own, **model.hf)


def hidden_states(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function from input ids (batch, context) to the last hidden states (batch, context, width)."""
    backbone = model.base_model
    assert isinstance(backbone, nn.Module)

    def forward(inputs: Tensor) -> Tensor:
        result: Tensor = backbone(input_ids=inputs, use_cache=False)[0]
        return result

    return forward


def head_weight(model: nn.Module) -> Tensor:
    """The output embedding, (vocabulary, width); the input embedding's very tensor in a tied model."""
    weight = model.get_output_embeddings().weight  # type: ignore[operator]
    assert isinstance(weight, Tensor)
    return weight


def require_plain_head(model: nn.Module, vocabulary: int) -> None:
    """Raise a ConfigError unless the model's logits are its last hidden states times its output embedding.

    Loss and perplexity are computed from those two in chunks; a head's bias, soft-capping or scaling would be lost.
    """
    ids = torch.arange(8).remainder(vocabulary).unsqueeze(0)
    was_training = model.training
    try:
        with torch.no_grad():
            own = model.eval()(input_ids=ids).logits
            ours = hidden_states(model)(ids) @ head_weight(model).T
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"{type(model).__name__} is no causal language model as transformers has them: {error}"
        ) from None
    finally:
        model.train(was_training)
    gap = float((own - ours).abs().max() / own.abs().max())
    if not gap < 1e-4:
        raise ConfigError(
            f"{type(model).__name__}'s logits are not hidden states times output embedding (they differ by {gap:.1e}): "
            "a head with a bias, soft-capping or scaling cannot be trained here"
        )


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    """Summed cross-entropy in nats over all targets that are not -100, in chunks: logits never exist whole.

    Args:
        hidden: (batch, context, width).
        weight: (vocabulary, width).
        targets: (batch, context), int64.
        chunk_tokens: tokens whose logits exist at one time.
    """
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
    flat = hidden.reshape(-1, hidden.shape[-1])
    return linear_cross_entropy(flat, weight, targets.reshape(-1), reduction="sum", options=options)
