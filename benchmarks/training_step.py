"""How fast a mini training step is, as ratios measured in one run: ours against a bare loop, SAGGS against a step.

    python benchmarks/training_step.py        # or: make bench

The bare loop is what one writes with transformers alone: `model(input_ids, labels=…).loss`, `backward`, clipping, and
the default AdamW. It shares our initial weights, batches, activation kernel, sdpa attention, precision, threads, rates
and decay groups. Steps of both alternate, so that a busy machine slows both; ratios are of medians. The losses of the
two are compared at every step: a faster step that computes something else would not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from experiments.config import Config  # noqa: E402
from experiments.files import write_json  # noqa: E402
from experiments.language_model.batches import Batches  # noqa: E402
from experiments.language_model.data import load_data  # noqa: E402
from experiments.language_model.model import build_model  # noqa: E402
from experiments.language_model.optimizers import build_optimizer  # noqa: E402
from experiments.language_model.training import StepLoss, schedule  # noqa: E402
from experiments.sweep import expand  # noqa: E402
from saggs import BALANCED_KINDS, Rebalancer, find_pairs  # noqa: E402

COMPARED_STEPS = 20
FIRST_STEP_TOLERANCE, TOLERANCE = 1e-6, 1e-5


class BareLoop:
    """A plain loop over the same transformers model, with its own loss and the default AdamW."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": config.optimizer.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        optimizer: Any = config.optimizer
        betas = (optimizer.beta1, optimizer.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=betas, eps=optimizer.eps)
        self.model, self.clip = model, config.training.clip_norm or float("inf")

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> float:
        loss = self.model(input_ids=inputs, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class OurStep:
    """The step of `experiments.language_model.training`, without its logging."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.optimizer = build_optimizer(model, config.optimizer)
        self.loss = StepLoss(model, config.training, "cpu")
        self.model, self.clip = model, config.training.clip_norm or float("inf")

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> float:
        loss = self.loss.backward(inputs, targets)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


def measure(model_name: str, steps: int) -> dict[str, Any]:
    """Medians of alternating steps, the ratio, the losses' largest relative gap, and the cost of SAGGS."""
    config = expand([f"model={model_name}", "scale=mini", "progress=false"])[0].config
    data = load_data(config)
    sequences = config.training.total_batch_tokens // config.model.context
    batches = Batches(data.train, config.model.context, data_seed=0)
    ours = OurStep(build_model(config, data.end_of_text_id), config)
    bare = BareLoop(build_model(config, data.end_of_text_id), config)
    rate_at = schedule(config.training, config.optimizer.learning_rate)
    rebalancer = Rebalancer(ours.model, ours.optimizer, find_pairs(ours.model, BALANCED_KINDS), every=10)
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    gaps = []
    for step in range(1, steps + 1):
        inputs, targets = batches.sample((step - 1) * sequences, sequences)
        losses = {}
        order = [("ours", ours), ("bare", bare)] if step % 2 else [("bare", bare), ("ours", ours)]
        for name, loop in order:
            begun = time.perf_counter()
            losses[name] = loop.step(inputs, targets, rate_at(step))  # type: ignore[attr-defined]
            seconds[name].append(time.perf_counter() - begun)
        gaps.append(abs(losses["ours"] - losses["bare"]) / losses["bare"])
    events = []
    for _ in range(50):  # with full optimizer state; every call balances
        begun = time.perf_counter()
        rebalancer.rebalance()
        events.append(time.perf_counter() - begun)
    step_seconds, bare_seconds = statistics.median(seconds["ours"]), statistics.median(seconds["bare"])
    event = statistics.median(events)
    return {
        "model": model_name,
        "step_ms": 1e3 * step_seconds,
        "bare_loop_ms": 1e3 * bare_seconds,
        "speed_ratio": bare_seconds / step_seconds,
        "first_step_gap": gaps[0],
        "largest_gap": max(gaps[:COMPARED_STEPS]),
        "rebalance_ms": 1e3 * event,
        "rebalance_share_at_period_10": event / 10 / step_seconds,
    }


def main() -> int:
    """Exit code 1 where the two loops do not compute the same losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks" / "training_step.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, max(chosen.steps, COMPARED_STEPS)) for name in ("mini_gpt2", "mini_llama")]
    print(f"{'model':<12}{'our step':>10}{'bare loop':>11}{'ratio':>7}{'loss gap at 1':>15}{'in 20':>10}"
          f"{'SAGGS event':>13}{'at period 10':>14}")  # fmt: skip
    for r in rows:
        print(f"{r['model']:<12}{r['step_ms']:>7.1f} ms{r['bare_loop_ms']:>8.1f} ms{r['speed_ratio']:>7.2f}"
              f"{r['first_step_gap']:>15.1e}{r['largest_gap']:>10.1e}{r['rebalance_ms']:>10.2f} ms"
              f"{r['rebalance_share_at_period_10']:>13.3%}")  # fmt: skip
    machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": 1, "steps": chosen.steps}
    write_json(chosen.output, {"environment": machine, "rows": rows})
    print(f"written: {chosen.output}")
    agree = all(r["first_step_gap"] <= FIRST_STEP_TOLERANCE and r["largest_gap"] <= TOLERANCE for r in rows)
    if not agree:
        print(json.dumps({"losses disagree": rows}), file=sys.stderr)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
