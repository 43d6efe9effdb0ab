"""How fast the batched sensing study is, as ratios measured in one run: one batch against one member at a time.

    python benchmarks/matrix_sensing.py        # or: make bench

The peer is a plain loop over one member at a time: autograd, the same rules as optimizers, the same precision, problem
and start, one thread. Both make the first steps of the published grid (nine rules, 36 rates, three seeds: 108 members);
ratios are per member and step. The errors of the two after those steps are compared: a faster step that computes
something else would not count. Then the whole grid runs to its end, two processes beside each other.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from experiments.factorization.descent import Descent  # noqa: E402
from experiments.factorization.sensing import Drawn, draw  # noqa: E402
from experiments.factorization.steppers import rate_factor  # noqa: E402
from experiments.files import write_json  # noqa: E402
from experiments.study_config import RuleGrid, Sensing  # noqa: E402
from experiments.sweep import expand  # noqa: E402
from saggs.rules import RULES  # noqa: E402

SEEDS = (42, 123, 456)
STEPS = 100
TOLERANCE = 1e-3


def study() -> tuple[Sensing, dict[str, RuleGrid]]:
    """The published grid without a second pass."""
    config = expand(["study=nine", "sensing.holdout=0"])[0].config
    return config.sensing, config.rules


def batched(seed: int, steps: int) -> tuple[float, dict[tuple[str, float], float]]:
    """Seconds of all members' first steps, and where they are then."""
    settings, rules = study()
    descent = Descent(settings, rules, draw(settings, seed))
    begun = time.perf_counter()
    while descent.step < steps:
        descent.advance()
    seconds = time.perf_counter() - begun
    tensors, facts = descent.state()
    norms = (tensors["u"].double() @ tensors["v"].double().mT).flatten(1).norm(dim=1).tolist()
    return seconds, {(m["arm"], m["rate"]): norm for m, norm in zip(facts["members"], norms, strict=True)}


def plain(drawn: Drawn, settings: Sensing, grid: RuleGrid, rate: float, steps: int) -> tuple[float, float]:
    """The same of one member."""
    factors = [nn.Parameter(drawn.u.clone()), nn.Parameter(drawn.v.clone())]
    optimizer = RULES[grid.rule](factors, lr=rate, **grid.options)
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate * rate_factor(grid.schedule, step, settings.steps)
        optimizer.zero_grad()
        loss = (drawn.measurements @ (factors[0] @ factors[1].T).flatten() - drawn.values).square().mean()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - begun
    return seconds, float((factors[0].detach().double() @ factors[1].detach().double().T).norm())


def whole(seed: int) -> float:
    """Seconds of a seed's grid to its end."""
    torch.set_num_threads(1)
    settings, rules = study()
    begun = time.perf_counter()
    descent = Descent(settings, rules, draw(settings, seed))
    while not descent.ended:
        descent.advance()
    return time.perf_counter() - begun


def main() -> int:
    """Exit code 1 where batch and loop disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks" / "matrix_sensing.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    settings, rules = study()
    ratios: dict[str, float] = {}
    seconds: dict[str, float] = {"batched": 0.0, "plain": 0.0}
    gaps = []
    members = sum(len(grid.rates) for grid in rules.values())
    for seed in SEEDS:
        drawn = draw(settings, seed)
        ours, norms = batched(seed, STEPS)
        seconds["batched"] += ours
        for arm, grid in rules.items():
            for rate in grid.rates:
                own, norm = plain(drawn, settings, grid, rate, STEPS)
                seconds["plain"] += own
                if math.isfinite(norm) and norm < 1e3:  # those that are about to diverge magnify rounding
                    gaps.append(abs(norms[arm, rate] / norm - 1))
    ratios["plain_over_batched"] = seconds["plain"] / seconds["batched"]
    begun = time.perf_counter()
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        each = list(pool.map(whole, SEEDS))
    wall = time.perf_counter() - begun
    found: dict[str, Any] = {
        "members": members * len(SEEDS),
        "steps": STEPS,
        "microseconds_per_member_step": {
            name: 1e6 * value / (members * len(SEEDS) * STEPS) for name, value in seconds.items()
        },
        **ratios,
        "median_gap": statistics.median(gaps),
        "whole_grid_wall_seconds_two_processes": wall,
        "whole_grid_cpu_seconds": sum(each),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    write_json(chosen.out, found)
    for name, value in found.items():
        print(f"{name}: {value}")
    return 0 if statistics.median(gaps) < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
