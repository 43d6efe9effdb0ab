"""The training loop: batches, accumulation, schedule, imbalance, rebalancing, logging, saving, resuming, stopping."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments.code_version import code_version
from experiments.config import Config, ReciprocalImbalance, Training
from experiments.identity import derived_seed
from experiments.language_model import checkpoint
from experiments.language_model.batches import Batches
from experiments.language_model.evaluation import evaluate
from experiments.language_model.model import head_weight, hidden_states, summed_loss
from experiments.run import Diverged, Interrupted, Run
from experiments.tracking import Tracker
from saggs import BalancedUpdate, ScalePair, inject_imbalance, log2_norm_ratios, log_uniform_factors

log = logging.getLogger(__name__)


class RebalancingRule(Protocol):
    """What the loop asks of a balancing rule: `saggs.Rebalancer` and plugins' own.

    `step` is called before every forward pass; the state has to be plain values that JSON can hold.
    """

    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Trainer:
    """Everything one training run needs, built and checked before the run is opened."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    pairs: list[ScalePair]
    rebalancer: RebalancingRule | BalancedUpdate | None
    batches: Batches
    validation: np.ndarray
    device: str
    started: bool = False

    def train(self, run: Run, tracker: Tracker) -> None:
        """Train to the last step, from the newest intact checkpoint or from the start.

        Raises:
            Interrupted: after SIGTERM or SIGINT; the state is saved.
            Diverged: the loss or the gradient norm became NaN or infinite; no checkpoint is written after that.
        """
        training, every = self.config.training, self.config
        checkpoints = run.directory / "checkpoints"
        start = self._resume(run, checkpoints)
        rate_at = schedule(training, self.config.optimizer.learning_rate)
        step_loss = StepLoss(self.model, training, self.device)
        sequences = training.total_batch_tokens // self.config.model.context
        if start == 0:
            self._inject(at_step=0)
            self._record_validation(run, tracker, 0)
        pending: list[Tensor] = []  # losses and gradient norms not yet looked at: reading one waits for the device
        bar = tqdm(total=training.steps, initial=start, disable=not self.config.progress or None, unit="step",
                   desc=run.manifest["run_id"], leave=False)  # fmt: skip
        with stop_signals() as stop, bar:
            run.beat(start)
            began = time.perf_counter()
            for step in range(start + 1, training.steps + 1):
                if step - 1 > 0:
                    self._inject(at_step=step - 1)
                seed_dropout(self.config, step)
                inputs, targets = self.batches.sample((step - 1) * sequences, sequences)
                rate = rate_at(step)
                loss, norm = self._update(step_loss, inputs, targets, rate)
                pending.append(torch.stack([loss, norm.to(loss)]))
                last = step == training.steps
                asked = stop.asked  # once a step: a signal that comes later is seen in the next one
                log = last or step % every.logging.every == 0
                assess = last or step % every.evaluation.every == 0
                save = last or step % every.checkpoint.every == 0 or asked is not None
                if log or save or assess or self.device == "cpu":
                    _require_finite(pending, step)
                    pending.clear()
                if log:
                    row: dict[str, Any] = {"step": step, "loss": float(loss), "learning_rate": rate}
                    row |= {"gradient_norm": float(norm), "log2_norm_ratios": self._ratios()}
                    self._warn_of_unbalanced(step)
                    run.log(row)
                    tracker.log(row)
                    seconds = time.perf_counter() - began
                    run.log_timing({"step": step, "seconds": seconds, "since_step": start, "time": time.time()})
                if assess:
                    self._record_validation(run, tracker, step)
                if save:
                    self._save(run, checkpoints, step)
                run.beat(step)
                bar.update()
                if asked and not last:
                    raise Interrupted(f"{asked} at step {step}; the state is saved, the same command resumes it")

    # --- one step ----------------------------------------------------------------------------------------------------

    def _update(self, step_loss: StepLoss, inputs: Tensor, targets: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One call of the balancing rule, then one optimizer step; returns mean loss and gradient norm."""
        if self.rebalancer is not None and not isinstance(self.rebalancer, BalancedUpdate):
            self.rebalancer.step()
        loss = step_loss.backward(inputs, targets)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        before = None if self.started else weights_copy(self.model)
        norm = self._clipped_step()
        if before is not None:
            warn_if_updates_vanish(self.model, before, rate)
            self.started = True
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _clipped_step(self) -> Tensor:
        """Clip and update; returns the gradient norm, at the balanced point where the update is made there."""
        limit = self.config.training.clip_norm
        limit = math.inf if limit is None else limit
        if isinstance(self.rebalancer, BalancedUpdate):
            norm = self.rebalancer.step(limit)
            assert norm is not None
            return norm
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        self.optimizer.step()
        return norm

    def _inject(self, at_step: int) -> None:
        imbalance = self.config.imbalance
        if not isinstance(imbalance, ReciprocalImbalance) or imbalance.step != at_step:
            return
        chosen = [pair for pair in self.pairs if pair.kind in imbalance.kinds]
        factor: float | list[float] = imbalance.factor
        if imbalance.distribution == "log_uniform":
            factor = log_uniform_factors(len(chosen), imbalance.factor, derived_seed(self.config.seed, "imbalance"))
        inject_imbalance(self.model, chosen, factor, self.optimizer if imbalance.transport else None)

    # --- what is written ---------------------------------------------------------------------------------------------

    def _ratios(self) -> dict[str, float]:
        """log2(|left| / |right|) by kind and path; a pair with a zero norm has none."""
        if not self.pairs:
            return {}
        values = log2_norm_ratios(self.model, self.pairs).tolist()
        named = zip((f"{p.kind}:{p.path}" for p in self.pairs), values, strict=True)
        return {name: value for name, value in named if math.isfinite(value)}

    def _warn_of_unbalanced(self, step: int) -> None:
        if left := int(getattr(self.rebalancer, "unbalanced", 0)):
            log.warning("step %d: %d pairs could not be balanced; a norm is zero or not finite", step, left)

    def _record_validation(self, run: Run, tracker: Tracker, step: int) -> None:
        settings = self.config.evaluation
        limit = settings.curve_tokens
        tokens = self.validation if limit is None else self.validation[: limit + 1]
        found = evaluate(
            self.model,
            tokens,
            self.config.model.context,
            settings.batch_sequences,
            self.device,
            after_batch=lambda: run.beat(step),
        )
        if not math.isfinite(found.nll_nats):
            raise Diverged(f"the validation loss is {found.nll_nats} at step {step}")
        keep = ("nll_per_token", "perplexity", "tokens")
        row = {"step": step, "validation": {k: v for k, v in found.as_dict().items() if k in keep}}
        run.log(row)
        tracker.log(row)

    def _save(self, run: Run, checkpoints: Path, step: int) -> None:
        rebalancer = self.rebalancer.state_dict() if self.rebalancer is not None else None
        state = {"step": step, "rebalancer": rebalancer, "metrics": run.metrics_mark()}
        checkpoint.save(checkpoints, self.model, self.optimizer, state, self.config.checkpoint.keep)

    def _resume(self, run: Run, checkpoints: Path) -> int:
        """Restore the newest intact checkpoint; returns its step, or 0 with the metrics emptied."""
        saved = checkpoint.load_newest(checkpoints, tidy=True)
        if saved is not None and not run.has_metrics(saved["state"]["metrics"]):
            log.warning("metrics.jsonl has lost rows that %s counted: starting again from step 0", saved["path"])
            checkpoint.set_aside(checkpoints)
            saved = None
        if saved is None:
            run.rewind_metrics(0)
            return 0
        state = saved["state"]
        checkpoint.load_weights(self.model, saved["weights"])
        checkpoint.load_optimizer_state(self.model, self.optimizer, saved["optimizer"])
        if self.rebalancer is not None:
            self.rebalancer.load_state_dict(state["rebalancer"])
        run.rewind_metrics(state["metrics"]["bytes"])
        run.log_timing({"step": state["step"], "resumed_from": saved["path"].name, "time": time.time(),
                        "code": code_version()})  # fmt: skip
        return int(state["step"])


class StepLoss:
    """Loss and gradient of one total batch, in micro-batches weighted by their tokens.

    The gradient is that of (summed loss over all counted targets) / (their number), whatever the micro-batch: averaging
    the means of micro-batches would weight a short one's tokens more. Targets of -100 are not counted.
    """

    def __init__(self, model: nn.Module, training: Training, device: str) -> None:
        forward = hidden_states(model)
        self._forward: Callable[[Tensor], Tensor] = torch.compile(forward) if training.compile else forward
        self._model, self._training, self._device = model, training, device

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate gradients of a batch, each of shape (sequences, context); returns the mean loss in nats.

        A batch without a single counted target has a NaN loss: there is nothing to learn from, and it is not zero.
        """
        counted = int((targets != -100).sum())
        if counted == 0:
            return torch.full((), math.nan)
        size = self._training.micro_batch_sequences or len(inputs)
        total = torch.zeros((), device=self._device)
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            x, y = x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)
            with self._autocast():
                hidden, weight = self._forward(x), head_weight(self._model)
                if self._training.precision == "bf16_autocast":  # the final norm leaves float32 behind
                    hidden, weight = hidden.bfloat16(), weight.bfloat16()
                summed = summed_loss(hidden, weight, y, self._training.loss_chunk_tokens)
            (summed / counted).backward()
            total += summed.detach().float() / counted
        return total

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._training.precision != "bf16_autocast":
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=torch.bfloat16)


def schedule(training: Training, base_rate: float) -> Callable[[int], float]:
    """Learning rate of optimizer step 1 … steps: a pure function, so resuming and accumulation cannot shift it.

    Linear warm-up over `warmup_steps`, then a cosine that reaches `final_rate_fraction` at the last step.
    """
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(())], lr=base_rate)
    cosine = training.schedule == "cosine"
    factor = get_scheduler(
        "cosine_with_min_lr" if cosine else "constant_with_warmup",
        optimizer,
        num_warmup_steps=training.warmup_steps,
        num_training_steps=training.steps,
        scheduler_specific_kwargs={"min_lr_rate": training.final_rate_fraction} if cosine else None,
    ).lr_lambdas[0]
    return lambda step: base_rate * float(factor(step))


def weights_copy(model: nn.Module) -> list[Tensor]:
    """A copy of every parameter."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def warn_if_updates_vanish(model: nn.Module, before: list[Tensor], rate: float) -> float:
    """The share of non-zero weights that a first update moved; warns where most did not move.

    An update below half the spacing of floating-point numbers around a weight leaves it as it was: bfloat16 weights
    (8 bits) do not train at small rates at all, and nothing else would say so.
    """
    moved = total = 0
    for parameter, old in zip(model.parameters(), before, strict=True):
        counted = old != 0
        moved += int(((parameter.detach() != old) & counted).sum())
        total += int(counted.sum())
    share = moved / max(total, 1)
    if share < 0.5:
        log.warning(
            "the first update at rate %g moved %.1f %% of the weights: the rest is below their precision; "
            "use float32 weights or a larger optimizer.learning_rate", rate, 100 * share,
        )  # fmt: skip
    return share


def seed_dropout(config: Config, step: int) -> None:
    """Dropout masks are a function of (seed, step): nothing to save, nothing evaluation could disturb."""
    if getattr(config.model, "dropout", 0.0):
        torch.manual_seed(derived_seed(derived_seed(config.seed, "dropout"), str(step)))


def _require_finite(pending: list[Tensor], step: int) -> None:
    """Raise Diverged for the first of the last steps whose loss or gradient norm is NaN or infinite."""
    for behind, (loss, norm) in zip(range(len(pending) - 1, -1, -1), torch.stack(pending).tolist(), strict=True):
        for what, value in (("training loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise Diverged(f"the {what} is {value} at step {step - behind}")


@dataclass
class _Stop:
    """Which signal asked to stop, if any."""

    asked: str | None = None


@contextlib.contextmanager
def stop_signals() -> Iterator[_Stop]:
    """SIGTERM and SIGINT ask to stop after the current step, with the state saved; a second SIGINT stops at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.asked == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.asked = signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
