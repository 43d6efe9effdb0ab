"""What has to be carried through a rescaling: one mid-run training state, continued in ten ways.

A language model is trained in float64 to `imbalance.step`. That state goes on in canonical form (the reference); and
rescaled, left sides of all pairs times c = `imbalance.factor`, right sides divided by it, the same function: from the
canonical form, or before it is brought there. What else is done at that moment, and afterwards, is what the arms differ
by. All of them see the same batches in lockstep, so that at every step the distance to the reference can be taken
between canonical forms, in which equivalent weights are equal:

    distance = |canonical(arm) - canonical(reference)| / |canonical(reference)|       over all weights.

The identity behind it (the SAGGS paper, Kim, 2026; the settings are ours): AdamW on (c A, B / c) with moments carried,
learning rate c on A and 1 / c on B, eps / c and c eps, lr times decay as it was, repeats the run on (A, B).

The run is minutes long and keeps its states in memory: it is not resumed, but begun again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments.checks import ConfigError
from experiments.config import AdamW, Config, ReciprocalImbalance
from experiments.files import write_json
from experiments.identity import derived_seed
from experiments.language_model.batches import Batches
from experiments.language_model.data import load_data
from experiments.language_model.evaluation import evaluate
from experiments.language_model.model import build_model, check_model, require_plain_head
from experiments.language_model.task import chosen_pairs, facts_of
from experiments.language_model.tokens import TokenData
from experiments.language_model.training import StepLoss, schedule, stop_signals
from experiments.run import Diverged, Interrupted, Run
from saggs import ScalePair, balance, canonicalize, find_pairs
from saggs.lines import Moving
from saggs.pairs import named_parameters
from saggs.plan import ScalingPlan
from saggs.precision import float64_everywhere
from saggs.rescaling import rescale_checked

Pairs = Sequence[ScalePair]
LARGE_EPS = 1e-3
REFERENCE, REFERENCE_LARGE_EPS = "reference", "reference_large_eps"


@dataclass
class State:
    """A model, its optimizer, and how the settings of its param groups depend on the side of a pair they hold.

    Attributes:
        rates: learning rate c on left sides and 1 / c on right ones, with lr * decay as it was.
        eps: of the optimizer.
        scaled_eps: eps / c on left sides and c eps on right ones.
    """

    model: nn.Module
    optimizer: torch.optim.AdamW
    factor: float
    eps: float
    rates: bool = False
    scaled_eps: bool = False

    def set_rate(self, rate: float, decay: float) -> None:
        """The settings of the next step."""
        for group in self.optimizer.param_groups:
            power = float(group["side"])
            scale = self.factor**power
            group["lr"] = rate * (scale if self.rates else 1.0)
            group["weight_decay"] = (decay if group["decays"] else 0.0) / (scale if self.rates else 1.0)
            group["eps"] = self.eps / (scale if self.scaled_eps else 1.0)


def _rescale(state: State, pairs: Pairs, *, carry: bool) -> None:
    rescale_checked(state.model, pairs, [state.factor] * len(pairs), state.optimizer if carry else None)


def _canonical(state: State, pairs: Pairs) -> None:
    canonicalize(state.model, state.optimizer, pairs)


def _rescale_carry(state: State, pairs: Pairs) -> None:
    _canonical(state, pairs)
    _rescale(state, pairs, carry=True)


def _rescale_alone(state: State, pairs: Pairs) -> None:
    _canonical(state, pairs)
    _rescale(state, pairs, carry=False)


def _rates(state: State, pairs: Pairs) -> None:
    _canonical(state, pairs)
    _rescale(state, pairs, carry=True)
    state.rates = state.scaled_eps = True


def _rates_large_eps(state: State, pairs: Pairs) -> None:
    _canonical(state, pairs)
    _rescale(state, pairs, carry=True)
    state.rates, state.eps = True, LARGE_EPS


def _large_eps(state: State, pairs: Pairs) -> None:
    _canonical(state, pairs)
    state.eps = LARGE_EPS


def _balance_carry(state: State, pairs: Pairs) -> None:
    _rescale(state, pairs, carry=True)
    _canonical(state, pairs)


def _balance_alone(state: State, pairs: Pairs) -> None:
    _rescale(state, pairs, carry=True)
    balance(state.model, pairs)


def _carried_late(state: State, pairs: Pairs) -> None:
    _rescale(state, pairs, carry=False)
    _canonical(state, pairs)


def _like_weights(state: State, pairs: Pairs) -> None:
    """Moments multiplied as their weights are, which is wrong twice over: once the sign of the power, once its size."""
    _canonical(state, pairs)
    _rescale(state, pairs, carry=False)
    parameters = named_parameters(state.model)
    plan = ScalingPlan(pairs, parameters)
    names = ("exp_avg", "exp_avg_sq")
    moving = [Moving(n, state.optimizer.state[parameters[n]][key], 1, False) for n in plan.weighed for key in names]
    with torch.no_grad():
        plan.multiply(moving, plan.powers(moving, torch.full((len(pairs),), state.factor, dtype=torch.float64)))


# Arm -> what is done at the restart, to the state as it is. Distances are to the reference with the same eps.
ARMS: dict[str, Callable[[State, Pairs], None]] = {
    REFERENCE: _canonical,
    REFERENCE_LARGE_EPS: _large_eps,
    "rescale_carry": _rescale_carry,
    "rescale_alone": _rescale_alone,
    "rates": _rates,
    "rates_large_eps": _rates_large_eps,
    "balance_carry": _balance_carry,
    "balance_alone": _balance_alone,
    "carried_late": _carried_late,
    "like_weights": _like_weights,
}


def reference_of(arm: str) -> str:
    """The arm that another one is compared with."""
    return REFERENCE_LARGE_EPS if arm == "rates_large_eps" else REFERENCE


@dataclass
class Prepared:
    """A checked run: nothing about its configuration can fail any more."""

    config: Config
    model: nn.Module
    pairs: list[ScalePair]
    data: TokenData
    facts: dict[str, Any]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of every arm, those before the restart included."""
        return self.config.training.steps

    def execute(self, run: Run) -> dict[str, Any]:
        """Train to the restart, go on in every way, assess all of them; returns the summary's result."""
        write_json(run.directory / "pairs.json", [pair.to_json() for pair in self.pairs])
        run.rewind_metrics(0)
        with float64_everywhere():
            return _Ablation(self, run).result()


def prepare(config: Config) -> Prepared:
    """Load data, build model and pairs, and check each against the others.

    Raises:
        ConfigError: a setting that this task does not have, or that the model cannot do.
        DataMissing: the corpus is not there; the message says how to get it.
    """
    _check(config)
    torch.set_num_threads(config.training.threads)
    check_model(config)
    data = load_data(config)
    model = build_model(config, data.end_of_text_id)
    require_plain_head(model, data.vocabulary_size)
    assert isinstance(config.imbalance, ReciprocalImbalance)
    pairs = chosen_pairs(find_pairs(model, config.imbalance.kinds), config.imbalance.kinds, "imbalance.kinds",
                         config.model.name)  # fmt: skip
    for pair in pairs:
        if not all(part.is_whole() for part in pair.slices):
            raise ConfigError(
                f"model={config.model.name}: {pair} is a part of a fused matrix, and learning rates belong to whole "
                "parameters; choose a model with matrices of their own, as model=mini_llama"
            )
    return Prepared(config, model.double(), pairs, data, facts_of(config, data, "cpu"))


def _check(config: Config) -> None:
    """Raise a ConfigError where a setting contradicts the task: none is ignored."""
    training, imbalance = config.training, config.imbalance
    wanted: list[tuple[str, object, object]] = [
        ("imbalance", imbalance.name, "reciprocal"),
        ("rebalance", config.rebalance.name, "none"),
        ("optimizer", config.optimizer.name, "adamw"),
        ("training.clip_norm", training.clip_norm, None),
        ("training.precision", training.precision, "float64"),
        ("training.device", training.device, "cpu"),
        ("training.compile", training.compile, False),
        ("wandb.mode", config.wandb.mode, "disabled"),
        ("model.dropout", getattr(config.model, "dropout", 0.0), 0.0),
        ("imbalance.distribution", getattr(imbalance, "distribution", "fixed"), "fixed"),
        ("imbalance.transport", getattr(imbalance, "transport", True), True),
    ]
    for key, value, needed in wanted:
        if value != needed:
            shown = {None: "null", True: "true", False: "false"}.get(needed, needed)  # type: ignore[call-overload]
            raise ConfigError(f"{key}={value}: task=transport_ablation needs {key}={shown}")
    assert isinstance(imbalance, ReciprocalImbalance)
    if not imbalance.step:
        raise ConfigError("imbalance.step=0: task=transport_ablation rescales in mid-run; choose a later step")


class _Ablation:
    """One seed: the first half, the arms in lockstep, their figures."""

    def __init__(self, prepared: Prepared, run: Run) -> None:
        self._prepared, self._run, self._config = prepared, run, prepared.config
        imbalance, optimizer = self._config.imbalance, self._config.optimizer
        assert isinstance(imbalance, ReciprocalImbalance)
        assert isinstance(optimizer, AdamW)
        self._restart, self._optimizer = imbalance.step, optimizer
        self._batches = Batches(
            prepared.data.train, self._config.model.context, derived_seed(self._config.seed, "data")
        )
        self._rate = schedule(self._config.training, optimizer.learning_rate)
        self._start = State(prepared.model, self._adamw(prepared.model), imbalance.factor, optimizer.eps)

    def result(self) -> dict[str, Any]:
        """Everything that the summary keeps."""
        steps, every = self._config.training.steps, self._config.logging.every
        total = self._restart + (steps - self._restart) * len(ARMS)
        distances: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
        with stop_signals() as stop, self._bar(total) as bar:
            for step in range(1, steps + 1):
                if stop.asked:
                    raise Interrupted(f"{stop.asked} at step {step}; the same command begins anew")
                if step == self._restart + 1:
                    arms = self._arms()
                    self._measure(arms, distances, step - 1)
                running = {REFERENCE: self._start} if step <= self._restart else arms
                losses = {arm: self._step(state, step) for arm, state in running.items()}
                bar.update(len(running))
                if step > self._restart and (step % every == 0 or step == steps):
                    self._measure(arms, distances, step)
                if not math.isfinite(losses[REFERENCE]):
                    raise Diverged(f"the training loss is {losses[REFERENCE]} at step {step}")
                if step % every == 0 or step == steps:
                    self._run.log({"step": step, "losses": losses})
                if step % self._config.evaluation.every == 0 or step == steps:
                    self._record_validation(running[REFERENCE], step)
                self._run.beat(step)
        found = {arm: {"distance": distances[arm], **self._assess(state)} for arm, state in arms.items()}
        of_reference = {split: found[REFERENCE].pop(split) for split in ("validation", "test")}
        for arm in found:
            for split in ("validation", "test"):
                figures = found[arm].pop(split, of_reference[split])
                found[arm][f"{split}_perplexity"] = figures["perplexity"]
        return {**of_reference, "arms": found}

    def _bar(self, total: int) -> Any:
        name = self._run.manifest["run_id"]
        return tqdm(total=total, disable=not self._config.progress or None, unit="step", desc=name, leave=False)

    def _adamw(self, model: nn.Module) -> torch.optim.AdamW:
        """Param groups by (side of a pair, whether it decays), so that every arm has the same ones."""
        side = {part.name: part.exponent for pair in self._prepared.pairs for part in pair.slices}
        groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
        for name, parameter in named_parameters(model).items():
            groups.setdefault((side.get(name, 0), parameter.dim() >= 2), []).append(parameter)
        listed = [{"params": p, "side": exponent, "decays": decays} for (exponent, decays), p in groups.items()]
        beta1, beta2 = self._optimizer.beta1, self._optimizer.beta2
        return torch.optim.AdamW(listed, lr=self._optimizer.learning_rate, betas=(beta1, beta2), fused=True)

    def _arms(self) -> dict[str, State]:
        arms = {name: copy.deepcopy(self._start) for name in ARMS}
        for name, begin in ARMS.items():
            begin(arms[name], self._prepared.pairs)
        return arms

    def _step(self, state: State, step: int) -> float:
        sequences = self._config.training.total_batch_tokens // self._config.model.context
        state.set_rate(self._rate(step), self._optimizer.weight_decay)
        loss = StepLoss(state.model, self._config.training, "cpu").backward(
            *self._batches.sample((step - 1) * sequences, sequences)
        )
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        return float(loss)

    def _measure(self, arms: dict[str, State], distances: dict[str, dict[int, float]], step: int) -> None:
        forms = {arm: self._canonical(state.model) for arm, state in arms.items()}
        for arm, form in forms.items():
            reference = forms[reference_of(arm)]
            distance = float(torch.linalg.vector_norm(form - reference) / torch.linalg.vector_norm(reference))
            distances[arm][step] = distance

    def _canonical(self, model: nn.Module) -> Tensor:
        """The weights of the balanced model, in one vector."""
        balanced = copy.deepcopy(model)
        balance(balanced, self._prepared.pairs)
        return torch.cat([p.detach().flatten() for p in named_parameters(balanced).values()])

    def _record_validation(self, state: State, step: int) -> None:
        limit, tokens = self._config.evaluation.curve_tokens, self._prepared.data.validation
        found = self._likelihood(state, tokens if limit is None else tokens[: limit + 1]).as_dict()
        self._run.log({"step": step, "validation": {k: found[k] for k in ("nll_per_token", "perplexity", "tokens")}})

    def _assess(self, state: State) -> dict[str, Any]:
        found = {}
        for split in ("validation", "test"):
            counts = self._prepared.data.counts[split]
            likelihood = self._likelihood(state, self._prepared.data.split(split))
            found[split] = likelihood.with_text(words=counts.words, size_bytes=counts.bytes)
        return found

    def _likelihood(self, state: State, tokens: Any) -> Any:
        settings, steps = self._config.evaluation, self._config.training.steps
        return evaluate(state.model, tokens, self._config.model.context, settings.batch_sequences, "cpu",
                        after_batch=lambda: self._run.beat(steps))  # fmt: skip
