"""Training in lockstep of a small Transformer and its twins: does the rule keep a rotated twin on the same function?

    python train.py task=attention_rotation optimizer=adam seed=42
    python train.py task=attention_rotation optimizer=muon attention=characters

Twins (`twins`): the base; `identity`, which has to stay bit-equal; `rotated`, the same function at the start; and one
`noise_…` for each level in `attention.noises`. All see the same batches, and have optimizers of the same settings.

Distances alone do not tell the classes of rules apart, since training amplifies rounding: the ratio of the rotated
twin's drift to a noise twin's does. The summary's result:

    arms      for each twin its status ("trained", or "diverged at step N"), its drift from the base by step, whether
              its weights are the base's at the end, and loss and accuracy on fixed parts of both splits
    ratios    for each noise twin: the rotated twin's drift over its drift, at step 1, 10 and the last

Rates of Singh (2026): Adam 1e-3, SGD with momentum 0.9 at 0.5, scalar Adam 3e-3, Muon 0.02 (the rest in Adam 1e-3).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from experiments import registry, saved
from experiments.attention_rotation.model import Transformer
from experiments.attention_rotation.problems import Batch, Problem, build_problem
from experiments.attention_rotation.twins import (
    BASE,
    ROTATED,
    Twin,
    drift,
    make_models,
    noise_name,
    same_weights,
    score_forms,
)
from experiments.checks import ConfigError
from experiments.config import SGD, Adam, Config, CustomOptimizer, Muon, Optimizer, ScalarAdam
from experiments.identity import derived_seed
from experiments.language_model.training import stop_signals
from experiments.run import Interrupted, Run
from experiments.study import facts_of
from experiments.tracking import Tracker
from saggs import rules

DTYPES = {"float64": torch.float64, "float32": torch.float32}
FIGURES = ("train_loss", "validation_loss", "train_accuracy", "validation_accuracy")
RATIOS_AT = (1, 10)
_PUBLISHED = (0, 1, 10, 50, 100, 300, 600, 1000, 1500)
_IN_A_DECADE = (1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.5)


def recorded_steps(last: int) -> list[int]:
    """Steps at which the twins are measured: a dozen a decade, those that were published, and the last."""
    spread = {round(mantissa * 10**power) for power in range(len(str(last))) for mantissa in _IN_A_DECADE}
    return sorted({step for step in {*spread, *_PUBLISHED} if step < last} | {last})


@dataclass
class Prepared:
    """A checked run: nothing about its configuration can fail any more."""

    config: Config
    problem: Problem
    twins: dict[str, Twin]
    facts: dict[str, Any]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of every twin."""
        return self.config.attention.steps

    def execute(self, run: Run) -> dict[str, Any]:
        """Train all twins, from the newest intact saved state or from the start; returns the summary's result."""
        with Tracker.start(self.config, run.manifest) as tracker:
            _Training(self, run, tracker).train()
            result = _result(self, run)
            tracker.summarise(result)
        return result


def prepare(config: Config) -> Prepared:
    """Build problem, models and optimizers.

    Raises:
        ConfigError: a setting that this task cannot do.
        DataMissing: the corpus is not there; the message says how to get it.
    """
    torch.set_num_threads(1)
    registry.load_plugins(config.plugins)
    if decay := config.optimizer.weight_decay:
        raise ConfigError(
            f"optimizer.weight_decay={decay}: task=attention_rotation compares the rules alone; use "
            "optimizer.weight_decay=0"
        )
    problem, settings = build_problem(config), config.attention
    # In float32, whatever follows: both precisions start from the same weights.
    torch.manual_seed(config.seed)
    base = Transformer(
        problem.vocabulary,
        problem.outputs,
        problem.context,
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        mlp_width=settings.mlp_width,
        causal=problem.causal,
        last_only=problem.last_only,
    ).to(DTYPES[settings.precision])
    models = make_models(base, settings.rotation_seed, settings.noises, config.seed)
    twins = {name: Twin(model, build_optimizers(model, config.optimizer)) for name, model in models.items()}
    seeds = {"model": config.seed, "split": config.seed, "rotation": settings.rotation_seed}
    facts = facts_of(config, seeds, problem.data)
    facts |= {"optimizer": config.optimizer.name, "learning_rate": config.optimizer.learning_rate}
    facts["parameters"] = sum(p.numel() for p in base.parameters())
    return Prepared(config, problem, twins, facts)


def build_optimizers(model: nn.Module, config: Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of one twin: two for Muon, which is for the matrices of the layers, else one of all weights.

    Raises:
        ConfigError: an optimizer that this task does not build, or a custom one that nobody registered or that does not
            hold all weights.
    """
    parameters, rate = list(model.parameters()), config.learning_rate
    if isinstance(config, Adam):
        return [torch.optim.Adam(parameters, rate, (config.beta1, config.beta2), config.eps, fused=True)]
    if isinstance(config, SGD):
        momentum, nesterov = config.momentum, config.nesterov
        return [torch.optim.SGD(parameters, rate, momentum, nesterov=nesterov, fused=True)]
    if isinstance(config, ScalarAdam):
        return [rules.ScalarAdam(parameters, rate, betas=(config.beta1, config.beta2), eps=config.eps)]
    if isinstance(config, Muon):
        named = dict(model.named_parameters())
        hidden = [name for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2]
        rest = [p for name, p in named.items() if name not in hidden]
        muon = rules.Muon([named[name] for name in hidden], rate, momentum=config.momentum)
        return [muon, torch.optim.Adam(rest, config.adam_rate, fused=True)]
    if isinstance(config, CustomOptimizer):
        return [_registered(config, parameters)]
    raise ConfigError(
        f"optimizer={config.name}: task=attention_rotation has adam, sgd, scalar_adam, muon, and custom ones that a "
        "plugin registers"
    )


def _registered(config: CustomOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": parameters, "weight_decay": 0.0}]
    rates = {"learning_rate": config.learning_rate, "weight_decay": 0.0}
    built = registry.build("optimizer", config.name, config.options, groups=groups, **rates)
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigError(f"optimizer {config.name!r} returned a {type(built).__name__}, not a torch.optim.Optimizer")
    if {id(p) for group in built.param_groups for p in group["params"]} != {id(p) for p in parameters}:
        raise ConfigError(f"optimizer {config.name!r} does not hold exactly the model's parameters; pass it `groups`")
    return built


class _Training:
    """One run: all twins step by step, measured at `recorded_steps`."""

    def __init__(self, prepared: Prepared, run: Run, tracker: Tracker) -> None:
        self._problem, self._twins, self._config = prepared.problem, prepared.twins, prepared.config
        self._last, self._run, self._tracker = prepared.total_steps, run, tracker
        self._checkpoints = run.directory / "checkpoints"

    def train(self) -> None:
        step, recorded = self._resume(), set(recorded_steps(self._last))
        written = time.monotonic()
        shown, name = self._config.progress or None, self._run.manifest["run_id"]
        with (
            stop_signals() as stop,
            tqdm(total=self._last, initial=step, disable=not shown, unit="step", desc=name, leave=False) as bar,
        ):
            while True:
                self._run.beat(step)
                # Before the measurement of this step, which a resumed run then repeats.
                if stop.asked or time.monotonic() - written > saved.SAVE_EVERY_SECONDS:
                    self._save(step)
                    written = time.monotonic()
                if stop.asked:
                    raise Interrupted(f"{stop.asked} at step {step}; the same command goes on from there")
                if step in recorded:
                    self._record(step)
                if step == self._last or not self._in_training():
                    return
                self._advance(step)
                step += 1
                bar.update()

    def _in_training(self) -> list[Twin]:
        return [twin for twin in self._twins.values() if twin.diverged is None]

    def _advance(self, step: int) -> None:
        batch = self._problem.batch(step)
        seed = derived_seed(self._config.seed, f"draws of step {step}")
        for twin in self._in_training():
            torch.default_generator.manual_seed(seed)  # what a rule may draw is the same for every twin
            loss = functional.cross_entropy(twin.model(batch.tokens_bt), batch.targets_n)
            if math.isfinite(loss.item()):
                twin.update(loss)
            else:
                twin.diverged = step

    def _record(self, step: int) -> None:
        """A row of what is finite; a twin that is not has diverged."""
        row: dict[str, Any] = {"step": step, **{figure: {} for figure in FIGURES}, "drift": {}}
        forms: dict[str, Tensor] = {}
        for name, twin in self._twins.items():
            if twin.diverged is not None:
                continue
            figures, forms[name] = self._figures(twin), score_forms(twin.model)
            size = float(torch.linalg.vector_norm(2 * forms[name]))  # finite, so is any distance of two such forms
            if not all(map(math.isfinite, (*figures.values(), size))):
                twin.diverged = step
                continue
            for figure, value in figures.items():
                row[figure][name] = value
            if name != BASE and self._twins[BASE].diverged is None:
                row["drift"][name] = drift(forms[BASE], forms[name])
        self._run.log(row)
        self._tracker.log(row)

    def _figures(self, twin: Twin) -> dict[str, float]:
        train, validation = (_assessed(twin.model, part) for part in (self._problem.train, self._problem.validation))
        return dict(zip(FIGURES, (train[0], validation[0], train[1], validation[1]), strict=True))

    # --- saved states ------------------------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {}
        for name, twin in self._twins.items():
            own, facts[name] = twin.state()
            tensors |= {f"{name}/{place}": tensor for place, tensor in own.items()}
        saved.save(self._checkpoints, step, tensors, facts, metrics=self._run.metrics_mark())

    def _resume(self) -> int:
        found = saved.load(self._checkpoints, self._run)
        if found is None:
            return 0
        for name, twin in self._twins.items():
            own = {p.removeprefix(f"{name}/"): t for p, t in found.tensors.items() if p.startswith(f"{name}/")}
            twin.load(own, found.facts[name])
        return found.step


@torch.no_grad()
def _assessed(model: Transformer, part: Batch) -> tuple[float, float]:
    """Mean loss in nats, and accuracy."""
    logits = model(part.tokens_bt)
    loss = functional.cross_entropy(logits, part.targets_n)
    return loss.item(), (logits.argmax(1) == part.targets_n).double().mean().item()


def _result(prepared: Prepared, run: Run) -> dict[str, Any]:
    """What the summary keeps, from the rows of metrics and the state of the twins at the end."""
    rows, base = run.metrics(), prepared.twins[BASE]
    arms: dict[str, dict[str, Any]] = {}
    for name, twin in prepared.twins.items():
        ended = twin.diverged
        arms[name] = {"status": "trained" if ended is None else f"diverged at step {ended}"}
        if name != BASE:
            arms[name]["drift"] = {row["step"]: row["drift"][name] for row in rows if name in row["drift"]}
            arms[name]["weights_of_base"] = same_weights(base.model, twin.model)
        arms[name] |= {figure: rows[-1][figure][name] if ended is None else None for figure in FIGURES}
    noisy = [noise_name(level) for level in prepared.config.attention.noises]
    return {"arms": arms, "ratios": {name: _ratios(arms, name, prepared.total_steps) for name in noisy}}


def _ratios(arms: dict[str, dict[str, Any]], noise: str, last: int) -> dict[str, float | None]:
    """The rotated twin's drift over a noise twin's; None where either is missing or the latter is zero."""
    found: dict[str, float | None] = {}
    for label, step in [*((str(step), step) for step in RATIOS_AT), ("final", last)]:
        above, below = arms[ROTATED]["drift"].get(step), arms[noise]["drift"].get(step)
        found[label] = above / below if above is not None and below else None
    return found


__all__ = ["Prepared", "build_optimizers", "prepare", "recorded_steps"]
