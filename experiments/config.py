"""The schema of the configuration: what may stand under `configs/`, with types.

Every group is a dataclass registered with Hydra, so that an unknown key or a wrong type stops a run before anything is
imported that takes time. A group whose options take different settings (an optimizer, a balancing rule) has one
dataclass an option: a setting that would have no effect does not exist, and so cannot be ignored. Checks that need
more than a type are in `experiments.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from experiments.study_config import (
    Attention,
    Characters,
    IndianPines,
    MatScene,
    ModularAddition,
    RuleGrid,
    Scene,
    Sensing,
)

KINDS = ("query_key", "value_output", "up_down")


# --- model ---------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """A decoder-only language model of transformers' own classes; `hf` adds fields of its configuration class."""

    name: str = MISSING
    architecture: str = MISSING
    layers: int = MISSING
    width: int = MISSING
    heads: int = MISSING
    context: int = MISSING
    tied: bool = True
    hf: dict[str, Any] = field(default_factory=dict)


@dataclass
class GPT2Model(Model):
    """LayerNorm, learned positions, fused attention with biases, tanh-GELU."""

    architecture: str = "gpt2"
    dropout: float = 0.0


@dataclass
class LlamaModel(Model):
    """RMSNorm, RoPE, SwiGLU, no biases; grouped queries where kv_heads < heads."""

    architecture: str = "llama"
    kv_heads: int = MISSING
    mlp_width: int = MISSING


@dataclass
class CustomModel(Model):
    """A model registered by a plugin under `architecture`."""

    options: dict[str, Any] = field(default_factory=dict)


# --- data ----------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """A corpus and its tokenizer. `vocabulary` is also the model's."""

    name: str = MISSING
    path: str | None = None
    tokenizer: str = "bpe"
    vocabulary: int = MISSING
    limit_documents: int | None = None


# --- optimizer -----------------------------------------------------------------------------------------------------


@dataclass
class Optimizer:
    """What every optimizer has. Weight decay acts on matrices and embeddings, not on biases and gains."""

    name: str = MISSING
    learning_rate: float = MISSING
    weight_decay: float = 0.0


@dataclass
class AdamW(Optimizer):
    """`torch.optim.AdamW`, decoupled decay."""

    name: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


@dataclass
class SGD(Optimizer):
    """`torch.optim.SGD`; its weight decay is coupled."""

    name: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False


@dataclass
class RMSprop(Optimizer):
    """`torch.optim.RMSprop`; its weight decay is coupled."""

    name: str = "rmsprop"
    alpha: float = 0.99
    eps: float = 1e-8


@dataclass
class Adam(Optimizer):
    """`torch.optim.Adam`; its weight decay is coupled."""

    name: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass
class ScalarAdam(Optimizer):
    """`saggs.rules.ScalarAdam`: one second moment for all weights together."""

    name: str = "scalar_adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass
class Muon(Optimizer):
    """`saggs.rules.Muon` for hidden matrices; Adam with `adam_rate` for embeddings, head and vectors."""

    name: str = "muon"
    momentum: float = 0.9
    adam_rate: float = 1e-3


@dataclass
class CustomOptimizer(Optimizer):
    """An optimizer registered by a plugin under `name`."""

    options: dict[str, Any] = field(default_factory=dict)


# --- imbalance and rebalancing ---------------------------------------------------------------------------------------


@dataclass
class Imbalance:
    """No imbalance."""

    name: str = "none"


@dataclass
class ReciprocalImbalance(Imbalance):
    """Left sides times a factor, right sides divided by it, after `step` optimizer steps (0: before the first)."""

    name: str = "reciprocal"
    factor: float = 32.0
    distribution: str = "fixed"
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    step: int = 0
    transport: bool = True


@dataclass
class Rebalance:
    """No rebalancing."""

    name: str = "none"


@dataclass
class Saggs(Rebalance):
    """Balance the Frobenius norms of the exact pairs every `every` steps; damping 1 is hard, below 1 soft."""

    name: str = "saggs"
    every: int = 10
    damping: float = 1.0
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    transport: bool = True


@dataclass
class Virtual(Rebalance):
    """Update as at the balanced point and leave the weights where they are; c is chosen every `every` steps."""

    name: str = "virtual"
    every: int = 1
    damping: float = 1.0
    kinds: list[str] = field(default_factory=lambda: list(KINDS))


@dataclass
class CustomRebalance(Rebalance):
    """A balancing rule registered by a plugin under `name`."""

    every: int = 10
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    transport: bool = True
    options: dict[str, Any] = field(default_factory=dict)


# --- training --------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """One optimizer step sees `total_batch_tokens` predicted tokens, in micro-batches that fit the memory."""

    steps: int = MISSING
    total_batch_tokens: int = MISSING
    micro_batch_sequences: int | None = None
    warmup_steps: int = MISSING
    schedule: str = "cosine"
    final_rate_fraction: float = 0.1
    clip_norm: float | None = 1.0
    loss_chunk_tokens: int = 256
    precision: str = "float32"
    compile: bool = False
    device: str = "cpu"
    threads: int = 1


@dataclass
class Evaluation:
    """`curve_tokens` limits the validation curve to the split's first tokens; final figures use whole splits."""

    every: int = MISSING
    curve_tokens: int | None = None
    batch_sequences: int = 32


@dataclass
class Logging:
    """A row of training metrics every `every` steps."""

    every: int = 10


@dataclass
class Checkpoint:
    """A checkpoint every `every` steps, the newest `keep` of them kept; the final one always stays."""

    every: int = MISSING
    keep: int = 2


@dataclass
class Wandb:
    """`auto` is online where a key is present and offline where not."""

    mode: str = "disabled"
    project: str = "saggs"
    entity: str | None = None


@dataclass
class Paths:
    """Where the live store lies, relative to the working directory."""

    outputs: str = "outputs"


@dataclass
class Config:
    """One run. `arm` and `scale` are labels of what their config groups set; they do not enter the run's identity."""

    task: str = "language_model"
    scale: str = MISSING
    arm: str = MISSING
    seed: int = 0
    model: Model = MISSING
    data: Data = MISSING
    optimizer: Optimizer = MISSING
    imbalance: Imbalance = field(default_factory=Imbalance)
    rebalance: Rebalance = field(default_factory=Rebalance)
    rules: dict[str, RuleGrid] = field(default_factory=dict)
    sensing: Sensing = field(default_factory=Sensing)
    scene: Scene = MISSING
    attention: Attention = MISSING
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    logging: Logging = field(default_factory=Logging)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    wandb: Wandb = field(default_factory=Wandb)
    paths: Paths = field(default_factory=Paths)
    plugins: list[str] = field(default_factory=list)
    progress: bool = True
    reuse_committed: bool = False


OPTIONS: dict[str, dict[str, type]] = {
    "model": {"gpt2": GPT2Model, "llama": LlamaModel, "custom": CustomModel},
    "data": {"corpus": Data},
    "optimizer": {
        "adamw": AdamW,
        "sgd": SGD,
        "rmsprop": RMSprop,
        "adam": Adam,
        "scalar_adam": ScalarAdam,
        "muon": Muon,
        "custom": CustomOptimizer,
    },
    "imbalance": {"none": Imbalance, "reciprocal": ReciprocalImbalance},
    "rebalance": {"none": Rebalance, "saggs": Saggs, "virtual": Virtual, "custom": CustomRebalance},
    "scene": {"indian_pines": IndianPines, "mat": MatScene},
    "attention": {"modular": ModularAddition, "characters": Characters},
}


def register() -> None:
    """Make the schema known to Hydra; YAML files build on `<group>/schema/<option>`. May be called twice."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, options in OPTIONS.items():
        for option, node in options.items():
            store.store(group=f"{group}/schema", name=option, node=node, package=group)


RESULTS = Path(__file__).resolve().parent.parent / "results"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def known_keys() -> list[str]:
    """Every dotted key that some option of the schema has."""
    keys = [f.name for f in fields(Config)]
    for name, node in (("training", Training), ("evaluation", Evaluation), ("logging", Logging),
                       ("checkpoint", Checkpoint), ("wandb", Wandb), ("paths", Paths),
                       ("sensing", Sensing)):  # fmt: skip
        keys += [f"{name}.{f.name}" for f in fields(node)]
    for group, options in OPTIONS.items():
        keys += [f"{group}.{f.name}" for node in options.values() for f in fields(node)]
    return list(dict.fromkeys(keys))
