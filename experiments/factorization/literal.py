"""One member of a sensing study at a time, as the formulas stand: autograd, float64, the literal rules of `saggs`.

Slow on purpose. The batched engine is held against it.
"""

from __future__ import annotations

from torch import Tensor, nn

from experiments.factorization.sensing import Drawn
from experiments.factorization.steppers import rate_factor
from experiments.study_config import RuleGrid
from saggs.reference_optimizer import RULES, ReferenceOptimizer


def descend(
    drawn: Drawn, grid: RuleGrid, rate: float, steps: int, horizon: int, measurements: int | None = None
) -> tuple[Tensor, Tensor]:
    """U and V after `steps` steps.

    Args:
        drawn: the problem and its start.
        grid: rule, options and schedule.
        rate: one learning rate.
        steps: how many to take.
        horizon: of the schedule.
        measurements: how many of the first ones are trained on; all where None.
    """
    factors = [nn.Parameter(drawn.u.double().clone()), nn.Parameter(drawn.v.double().clone())]
    a, b = drawn.measurements[:measurements].double(), drawn.values[:measurements].double()
    optimizer = ReferenceOptimizer(factors, RULES[grid.rule], lr=rate, **grid.options)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate * rate_factor(grid.schedule, step, horizon)
        optimizer.zero_grad()
        loss = (a @ (factors[0] @ factors[1].T).flatten() - b).square().mean()
        loss.backward()
        optimizer.step()
    return factors[0].detach(), factors[1].detach()


__all__ = ["descend"]
