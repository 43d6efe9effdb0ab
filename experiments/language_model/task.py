"""The language-model task: everything is built and checked first, then the run is opened, trained and assessed."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import registry
from experiments.checks import ConfigError
from experiments.config import Config, CustomRebalance, ReciprocalImbalance, Saggs, Virtual
from experiments.files import write_json
from experiments.identity import derived_seed
from experiments.language_model.batches import Batches
from experiments.language_model.data import load_data
from experiments.language_model.evaluation import evaluate
from experiments.language_model.model import build_model, check_model, require_plain_head
from experiments.language_model.optimizers import build_optimizer
from experiments.language_model.tokens import TokenData
from experiments.language_model.training import RebalancingRule, Trainer
from experiments.run import Run
from experiments.tracking import Tracker
from saggs import BALANCED_KINDS, BalancedUpdate, Rebalancer, ScalePair, find_pairs
from saggs.pairs import named_parameters
from saggs.transport import require_transportable


@dataclass
class Prepared:
    """A checked run: nothing about its configuration can fail any more."""

    config: Config
    trainer: Trainer
    data: TokenData
    facts: dict[str, Any]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.config.training.steps

    def execute(self, run: Run) -> dict[str, Any]:
        """Train, then assess the validation and the test split whole; returns the summary's result."""
        write_json(run.directory / "pairs.json", [pair.to_json() for pair in self.trainer.pairs])
        with Tracker.start(self.config, run.manifest) as tracker:
            self.trainer.train(run, tracker)
            result = {split: self._assess(split, run) for split in ("validation", "test")}
            tracker.summarise(result)
        return result

    def _assess(self, split: str, run: Run) -> dict[str, float | int]:
        counts, tokens = self.data.counts[split], self.data.split(split)
        settings, context = self.config.evaluation, self.config.model.context
        trainer, beat = self.trainer, lambda: run.beat(self.total_steps)
        found = evaluate(trainer.model, tokens, context, settings.batch_sequences, trainer.device, after_batch=beat)
        return found.with_text(words=counts.words, size_bytes=counts.bytes)


def prepare(config: Config) -> Prepared:
    """Load data, build model, pairs, optimizer and rebalancing rule, checking each against the others.

    Raises:
        ConfigError: whatever the configuration asks for that this model, data or optimizer cannot do.
        DataMissing: the corpus is not there; the message says how to get it.
    """
    torch.set_num_threads(config.training.threads)
    device = _device(config.training.device)
    registry.load_plugins(config.plugins)
    check_model(config)
    data = load_data(config)
    model = build_model(config, data.end_of_text_id)
    require_plain_head(model, data.vocabulary_size)
    pairs = find_pairs(model, BALANCED_KINDS, cache=Path(config.paths.outputs) / "pairs")
    optimizer_model = model.to(device)
    optimizer = build_optimizer(optimizer_model, config.optimizer)
    _check_imbalance(config, pairs, optimizer, optimizer_model)
    rebalancer = build_rebalancer(config, optimizer_model, optimizer, pairs)
    batches = Batches(data.train, config.model.context, derived_seed(config.seed, "data"))
    trainer = Trainer(config, optimizer_model, optimizer, pairs, rebalancer, batches, data.validation, device)
    return Prepared(config, trainer, data, facts_of(config, data, device))


def _device(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("training.device=cuda: no CUDA device is available here; use training.device=cpu")
    return ("cuda" if available else "cpu") if wanted == "auto" else wanted


def chosen_pairs(pairs: list[ScalePair], kinds: list[str], key: str, model: str) -> list[ScalePair]:
    chosen = [pair for pair in pairs if pair.kind in kinds]
    if not chosen:
        raise ConfigError(f"{key}={kinds}: {model} has no exact pair of these kinds; use {key.split('.')[0]}=none")
    return chosen


def _check_imbalance(
    config: Config, pairs: list[ScalePair], optimizer: torch.optim.Optimizer, model: nn.Module
) -> None:
    imbalance = config.imbalance
    if isinstance(imbalance, ReciprocalImbalance):
        chosen = chosen_pairs(pairs, imbalance.kinds, "imbalance.kinds", config.model.name)
        if imbalance.transport:
            _require_transportable(optimizer, "imbalance", chosen, model)


def _require_transportable(
    optimizer: torch.optim.Optimizer, group: str, pairs: list[ScalePair], model: nn.Module
) -> None:
    try:
        require_transportable(optimizer, pairs, named_parameters(model))
    except ValueError as error:
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} with {group}: {error}. Here: {group}.transport=false"
        ) from None


def build_rebalancer(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, pairs: list[ScalePair]
) -> RebalancingRule | BalancedUpdate | None:
    """The balancing rule of the configuration, or None."""
    rule = config.rebalance
    if not isinstance(rule, Saggs | Virtual | CustomRebalance):
        return None
    chosen = chosen_pairs(pairs, rule.kinds, "rebalance.kinds", config.model.name)
    if isinstance(rule, Virtual):
        try:
            return BalancedUpdate(model, optimizer, chosen, every=rule.every, damping=rule.damping)
        except ValueError as error:
            raise ConfigError(f"rebalance=virtual: {error}. Here: rebalance=none") from None
    if rule.transport:
        _require_transportable(optimizer, "rebalance", chosen, model)
    if isinstance(rule, Saggs):
        return Rebalancer(model, optimizer, chosen, every=rule.every, damping=rule.damping, transport=rule.transport)
    common = {"model": model, "optimizer": optimizer, "pairs": chosen}
    built: RebalancingRule = registry.build(
        "rebalance", rule.name, rule.options, every=rule.every, transport=rule.transport, **common
    )
    missing = [name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(built, name, None))]
    if missing:
        raise ConfigError(f"rebalance {rule.name!r} returned a {type(built).__name__} without {', '.join(missing)}()")
    try:
        json.dumps(built.state_dict())
    except TypeError as error:
        raise ConfigError(f"rebalance {rule.name!r}: its state_dict() must hold plain values ({error})") from None
    return built


def facts_of(config: Config, data: TokenData, device: str) -> dict[str, Any]:
    import transformers

    from experiments.code_version import code_version

    return {
        "seeds": {name: derived_seed(config.seed, name) for name in ("init", "data", "dropout")},
        "data": {
            "name": data.name,
            "variant": data.variant,
            "tokenizer": data.tokenizer,
            "vocabulary": data.vocabulary_size,
            "fingerprint": data.fingerprint,
            "licence": data.licence,
            "counts": {split: dataclasses.asdict(counts) for split, counts in data.counts.items()},
        },
        "code": code_version(),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(),
            "weights_dtype": "float32",
            "host_cores": os.cpu_count(),
        },
    }
