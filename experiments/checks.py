"""Checks of a configuration that need more than a type: ranges, choices, and fields that contradict each other.

Imports neither torch nor transformers, so that a wrong setting is refused before anything slow happens.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.config import (
    KINDS,
    Config,
    CustomRebalance,
    Data,
    GPT2Model,
    LlamaModel,
    Model,
    Optimizer,
    Rebalance,
    ReciprocalImbalance,
    Saggs,
    Virtual,
)
from experiments.study_config import (
    Attention,
    Characters,
    MatScene,
    ModularAddition,
    RuleGrid,
    Scene,
    Sensing,
)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; empty dictionaries stay as values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class ConfigError(ValueError):
    """A configuration that cannot mean what it says: the message names the key, its value and the remedy."""


def validated(config: DictConfig) -> Config:
    """The composed configuration as dataclasses, after all checks. Raises ConfigError."""
    _require_known(config, "")
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(f"no value for {', '.join(missing)}; set it, as in {missing[0]}=VALUE")
    result = OmegaConf.to_object(config)
    assert isinstance(result, Config)
    check(result)
    return result


def _require_known(node: DictConfig, prefix: str) -> None:
    """Hydra's `+key=value` may add keys that the schema lacks; none of them would have an effect."""
    known = [f.name for f in dataclasses.fields(OmegaConf.get_type(node))]  # type: ignore[arg-type]
    for key in map(str, node):
        if key not in known:
            raise ConfigError(f"{prefix}{key} is not a setting{nearest(key, known)}")
        if OmegaConf.is_missing(node, key):
            continue
        child = node[key]
        if isinstance(child, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(child)):
            _require_known(child, f"{prefix}{key}.")


def nearest(word: str, options: Any) -> str:
    """'; did you mean X?' where one of `options` is near to `word`, else ''."""
    near = difflib.get_close_matches(word, [str(o) for o in options], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _require(condition: bool, key: str, value: object, remedy: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value}: {remedy}")


def _one_of(key: str, value: str, options: tuple[str, ...]) -> None:
    _require(value in options, key, value, f"choose one of {', '.join(options)}{nearest(value, options)}")


def check(config: Config) -> None:
    """Raise a ConfigError for the first setting that is out of range or contradicts another one."""
    for key, value in flatten(dataclasses.asdict(config)).items():
        _require(not isinstance(value, float) or math.isfinite(value), key, value, "must be a finite number")
    _check_model(config.model)
    _check_data(config.data)
    _check_optimizer(config.optimizer)
    _check_imbalance(config)
    _check_rebalance(config.rebalance)
    _check_training(config)
    _check_rules(config)
    _check_sensing(config.sensing)
    _check_scene(config.scene)
    _check_attention(config.attention)
    _require(0 <= config.seed < 2**63, "seed", config.seed, "must be 0 or more, and below 2**63")
    _require(bool(config.paths.outputs), "paths.outputs", repr(config.paths.outputs), "name a folder")
    _one_of("wandb.mode", config.wandb.mode, ("disabled", "offline", "online", "auto"))


def _positive(prefix: str, node: object, *names: str) -> None:
    for name in names:
        value = getattr(node, name)
        _require(value is None or value >= 1, f"{prefix}.{name}", value, "must be at least 1")


def _check_model(model: Model) -> None:
    _positive("model", model, "layers", "width", "heads", "context")
    _require(model.width % model.heads == 0, "model.heads", model.heads, f"must divide model.width={model.width}")
    if isinstance(model, GPT2Model):
        _require(0 <= model.dropout < 1, "model.dropout", model.dropout, "must lie in [0, 1)")
    if isinstance(model, LlamaModel):
        _positive("model", model, "kv_heads", "mlp_width")
        fits = model.heads % model.kv_heads == 0
        _require(fits, "model.kv_heads", model.kv_heads, f"must divide model.heads={model.heads}")
        _require(model.width // model.heads % 2 == 0, "model.heads", model.heads, "RoPE needs an even head size")


def _check_data(data: Data) -> None:
    _one_of("data.tokenizer", data.tokenizer, ("bpe", "gpt2"))
    _positive("data", data, "limit_documents")
    if data.name == "text" and not data.path:
        raise ConfigError("no value for data.path; set it, as in data.path=FILE_OR_FOLDER")
    if data.tokenizer == "gpt2":
        _require(data.vocabulary == 50257, "data.vocabulary", data.vocabulary, "GPT-2's tokenizer has 50257 entries")
    else:
        _require(data.vocabulary > 256, "data.vocabulary", data.vocabulary, "a byte-level BPE needs more than 256")


def _check_optimizer(optimizer: Optimizer) -> None:
    rate = optimizer.learning_rate
    _require(0 < rate < math.inf, "optimizer.learning_rate", rate, "must be positive and finite")
    _require(optimizer.weight_decay >= 0, "optimizer.weight_decay", optimizer.weight_decay, "must be 0 or more")
    for name in ("beta1", "beta2", "momentum", "alpha"):
        value = getattr(optimizer, name, 0.0)
        _require(0 <= value < 1, f"optimizer.{name}", value, "must lie in [0, 1)")
    _require(getattr(optimizer, "eps", 0.0) >= 0, "optimizer.eps", getattr(optimizer, "eps", 0.0), "must be 0 or more")


def _check_kinds(key: str, kinds: list[str]) -> None:
    _require(bool(kinds) and len(set(kinds)) == len(kinds), key, kinds, "name each kind once, at least one")
    for kind in kinds:
        _one_of(key, kind, KINDS)


def _check_imbalance(config: Config) -> None:
    imbalance = config.imbalance
    if isinstance(imbalance, ReciprocalImbalance):
        _one_of("imbalance.distribution", imbalance.distribution, ("fixed", "log_uniform"))
        _require(imbalance.factor > 0 and imbalance.factor != 1, "imbalance.factor", imbalance.factor,
                 "must be positive and not 1")  # fmt: skip
        if imbalance.distribution == "log_uniform":
            _require(imbalance.factor > 1, "imbalance.factor", imbalance.factor, "log_uniform needs a factor above 1")
        inside = 0 <= imbalance.step < config.training.steps
        _require(inside, "imbalance.step", imbalance.step, f"must lie in [0, training.steps={config.training.steps})")
        _check_kinds("imbalance.kinds", imbalance.kinds)


def _check_rebalance(rebalance: Rebalance) -> None:
    if isinstance(rebalance, CustomRebalance) and rebalance.name == "none":
        raise ConfigError("no value for rebalance.name; set it to the name that a plugin registered")
    if isinstance(rebalance, Saggs | Virtual | CustomRebalance):
        _require(rebalance.every >= 1, "rebalance.every", rebalance.every,
                 "the period must be at least 1 step; rebalance=none never rebalances")  # fmt: skip
        _check_kinds("rebalance.kinds", rebalance.kinds)
    if isinstance(rebalance, Saggs | Virtual):
        inside = 0 < rebalance.damping <= 1
        _require(inside, "rebalance.damping", rebalance.damping, "must lie in (0, 1]; 1 is hard balancing")


def _check_training(config: Config) -> None:
    t = config.training
    _positive("training", t, "steps", "total_batch_tokens", "micro_batch_sequences", "loss_chunk_tokens", "threads")
    _positive("evaluation", config.evaluation, "every", "curve_tokens", "batch_sequences")
    _positive("checkpoint", config.checkpoint, "every", "keep")
    _positive("logging", config.logging, "every")
    _require(t.threads <= 1024, "training.threads", t.threads, "no machine has so many cores")
    context = config.model.context
    _require(t.total_batch_tokens % context == 0, "training.total_batch_tokens", t.total_batch_tokens,
             f"must be a multiple of model.context={context}")  # fmt: skip
    sequences = t.total_batch_tokens // context
    if t.micro_batch_sequences is not None:
        _require(t.micro_batch_sequences <= sequences, "training.micro_batch_sequences", t.micro_batch_sequences,
                 f"the whole batch has only {sequences} sequences")  # fmt: skip
    _require(0 <= t.warmup_steps <= t.steps, "training.warmup_steps", t.warmup_steps,
             f"must lie in [0, training.steps={t.steps}]")  # fmt: skip
    _one_of("training.schedule", t.schedule, ("cosine", "constant"))
    _require(0 <= t.final_rate_fraction <= 1, "training.final_rate_fraction", t.final_rate_fraction, "lies in [0, 1]")
    _require(t.clip_norm is None or t.clip_norm > 0, "training.clip_norm", t.clip_norm,
             "must be positive; null turns clipping off")  # fmt: skip
    _one_of("training.precision", t.precision, ("float32", "bf16_autocast", "float64"))
    _require(t.precision != "float64" or config.task == "transport_ablation", "training.precision", t.precision,
             "float64 is for task=transport_ablation; use float32")  # fmt: skip
    _one_of("training.device", t.device, ("cpu", "cuda", "auto"))
    if t.schedule == "constant":
        _require(t.final_rate_fraction == 1, "training.final_rate_fraction", t.final_rate_fraction,
                 "a constant schedule ends at 1")  # fmt: skip


# --- factorizations, and attention in another basis -----------------------------------------------------------------


def _check_rules(config: Config) -> None:
    if config.task in ("matrix_sensing", "hyperspectral") and not config.rules:
        raise ConfigError(f"no rules for task={config.task}; choose some, as in rules=nine")
    for arm, grid in config.rules.items():
        _check_grid(f"rules.{arm}", grid)


def _check_grid(key: str, grid: RuleGrid) -> None:
    _require(bool(grid.rates), f"{key}.rates", grid.rates, "give at least one learning rate")
    _require(len(set(grid.rates)) == len(grid.rates), f"{key}.rates", grid.rates, "give each learning rate once")
    for rate in grid.rates:
        _require(0 < rate < math.inf, f"{key}.rates", rate, "a learning rate is positive and finite")
    _one_of(f"{key}.schedule", grid.schedule, ("constant", "cosine"))


def _check_sensing(sensing: Sensing) -> None:
    _positive("sensing", sensing, "size", "rank", "measurements", "width", "steps", "check_every")
    for name in ("rank", "width"):
        value = getattr(sensing, name)
        _require(value <= sensing.size, f"sensing.{name}", value,
                 f"must not exceed that of the matrix, sensing.size={sensing.size}")  # fmt: skip
    if sensing.tail:
        _require(sensing.rank < sensing.size, "sensing.rank", sensing.rank,
                 f"sensing.tail={sensing.tail:g} needs room outside the rank")  # fmt: skip
    _require(sensing.measurements <= sensing.size**2, "sensing.measurements", sensing.measurements,
             f"a matrix of {sensing.size} x {sensing.size} is known after {sensing.size**2}")  # fmt: skip
    _require(0 <= sensing.tail < 1, "sensing.tail", sensing.tail, "must lie in [0, 1)")
    _check_holdout("sensing.holdout", sensing.holdout)
    if sensing.holdout:
        _require(sensing.holdout * sensing.measurements >= 1, "sensing.holdout", sensing.holdout,
                 f"leaves out no measurement of {sensing.measurements}; 0 makes no second pass")  # fmt: skip
    _require(sensing.start_scale > 0, "sensing.start_scale", sensing.start_scale,
             "must be positive: from zero no rule can move")  # fmt: skip
    _require(sensing.stop_loss >= 0, "sensing.stop_loss", sensing.stop_loss, "must be 0 or more")
    _one_of("sensing.precision", sensing.precision, ("float32", "float64"))


def _check_holdout(key: str, share: float) -> None:
    _require(0 <= share < 1, key, share, "must lie in [0, 1); 0 makes no second pass")


def _check_scene(scene: Scene) -> None:
    _positive("scene", scene, "pixels", "width", "steps")
    if isinstance(scene, MatScene):
        for name in ("path", "variable"):
            if not getattr(scene, name):
                raise ConfigError(f"no value for scene.{name}; set it, as in scene.{name}=NAME")
    _require(0 < scene.density < 1, "scene.density", scene.density,
             "must lie between 0 and 1: some entries are observed and some are left to test on")  # fmt: skip
    _check_holdout("scene.holdout", scene.holdout)
    _require(scene.start_scale > 0, "scene.start_scale", scene.start_scale,
             "must be positive: from zero no rule can move")  # fmt: skip
    falling = bool(scene.levels) and scene.levels[-1] > 0 and all(a > b for a, b in itertools.pairwise(scene.levels))
    _require(falling, "scene.levels", scene.levels, "give positive training errors, each smaller than the one before")
    _require(0 <= scene.pixel_seed < 2**63, "scene.pixel_seed", scene.pixel_seed, "must be 0 or more, below 2**63")


def _check_attention(attention: Attention) -> None:
    _positive("attention", attention, "layers", "width", "heads", "mlp_width", "steps")
    _require(attention.width % attention.heads == 0, "attention.heads", attention.heads,
             f"must divide attention.width={attention.width}")  # fmt: skip
    _require(len(set(attention.noises)) == len(attention.noises), "attention.noises", attention.noises,
             "give each size of noise once")  # fmt: skip
    for noise in attention.noises:
        _require(noise > 0, "attention.noises", noise, "a noise is positive; the identity twin has none")
    _require(0 <= attention.rotation_seed < 2**63, "attention.rotation_seed", attention.rotation_seed,
             "must be 0 or more, below 2**63")  # fmt: skip
    _one_of("attention.precision", attention.precision, ("float32", "float64"))
    if isinstance(attention, ModularAddition):
        _require(attention.modulus >= 2, "attention.modulus", attention.modulus, "must be at least 2")
        pairs, share = attention.modulus**2, attention.train_fraction
        _require(0 < share < 1 and 1 <= int(share * pairs) < pairs, "attention.train_fraction", share,
                 "must lie between 0 and 1, and leave pairs on both sides")  # fmt: skip
    if isinstance(attention, Characters):
        _positive("attention", attention, "context", "batch_sequences")
