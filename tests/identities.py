"""A pair of factors and a loss of their product, in float64, on which literal rules train: what the identities use.

Every test of an identity has a statement that holds to one of these bounds, and a control that misses it by `APART`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saggs import reference
from saggs.reference_optimizer import RULES, Rule

EXACT = 1e-11
EIGEN = 1e-9  # rules that take eigenvectors or singular vectors at every step
APART = 1e-3

ROWS, COLUMNS, RANK = 6, 5, 3

# With these a rule is what its formula says: nothing is added to a denominator.
PURE: Mapping[str, dict[str, Any]] = {
    "gd": {},
    "momentum": {},
    "adam": {"eps": 0.0},
    "scalar_adam": {"eps": 0.0},
    "dial": {"eps": 0.0},
    "unrooted_adam": {"eps": 0.0},
    "rmsprop": {"eps": 0.0},
    "sign": {},
    "signum": {},
    "lion": {},
    "adafactor": {"eps": 0.0},
    "scaled_adafactor": {"eps": 0.0, "floor": 0.0},
    "muon": {"eps": 0.0},
    "polar": {},
    "shampoo": {"damping": 0.0, "floor": 0.0, "every": 1},
    "shampoo_half": {"damping": 0.0, "floor": 0.0, "every": 1},
    "lars": {},
    "lamb": {"eps": 0.0},
    "scaled_gd": {},
}
SPECTRAL = ("polar", "shampoo", "shampoo_half")

# How the update of c A scales, at one rate and with what the rule keeps carried along: c^exponent.
EXPONENTS: Mapping[str, int] = {
    "gd": -1, "momentum": -1,
    "adam": 0, "rmsprop": 0, "sign": 0, "signum": 0, "lion": 0, "adafactor": 0, "muon": 0, "polar": 0, "shampoo": 0,
    "lars": 1, "lamb": 1, "scaled_adafactor": 1, "unrooted_adam": 1, "shampoo_half": 1, "scaled_gd": 1,
}  # fmt: skip
OF: Mapping[int, list[str]] = {e: [name for name, exponent in EXPONENTS.items() if exponent == e] for e in (-1, 0, 1)}

# A rate at which each rule moves the pair of these tests by some per cent a step.
RATES = {
    "gd": 0.05, "momentum": 0.02, "adam": 0.02, "scalar_adam": 0.02, "dial": 0.02, "unrooted_adam": 0.005,
    "rmsprop": 0.005, "sign": 0.02, "signum": 0.02, "lion": 0.02, "adafactor": 0.001, "scaled_adafactor": 0.02,
    "muon": 0.02, "polar": 0.02, "shampoo": 0.05, "shampoo_half": 0.1, "lars": 0.02, "lamb": 0.02, "scaled_gd": 0.05,
    "adamw": 0.02,
}  # fmt: skip

Edit = Callable[[list[Tensor], list[Tensor], int], list[Tensor]]
Loss = Callable[[Tensor, int], Tensor]


def draw(seed: int, *shape: int) -> Tensor:
    """Standard normal entries, a pure function of the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factors(seed: int = 0) -> list[Tensor]:
    """A (6 x 3) and B (5 x 3)."""
    return [draw(seed, ROWS, RANK), draw(seed + 1, COLUMNS, RANK)]


def product(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] @ weights[1].T


def batch_loss(w: Tensor, step: int) -> Tensor:
    """A loss that is neither quadratic nor symmetric, on a minibatch that is a pure function of the step."""
    x, y = draw(2 * step + 1000, 8, ROWS), draw(2 * step + 1001, 8, COLUMNS)
    outputs = x @ w
    return (0.5 * (outputs - y).square() + torch.nn.functional.softplus(outputs)).mean()


def whole_loss(w: Tensor, step: int = 0) -> Tensor:
    """The same loss at every step."""
    return batch_loss(w, 0)


def gradients(weights: Sequence[Tensor], step: int = 0, loss: Loss = batch_loss) -> list[Tensor]:
    """Gradients of loss(A B^T) by the two factors."""
    leaves = [w.detach().requires_grad_() for w in weights]
    return list(torch.autograd.grad(loss(product(leaves), step), leaves))


def relu_gradients(weights: Sequence[Tensor], step: int, power: int = 2) -> list[Tensor]:
    """Of the squared error of B relu(A x)^power, A (rows x 3) and B (5 x rows), on a minibatch of the step."""
    x, y = draw(2 * step + 300, 9, RANK), draw(2 * step + 301, 9, COLUMNS)
    leaves = [w.detach().requires_grad_() for w in weights]
    loss = (torch.relu(x @ leaves[0].T) ** power @ leaves[1].T - y).square().mean()
    return list(torch.autograd.grad(loss, leaves))


def step_adamw(
    weight: Tensor, gradient: Tensor, state: Any, learning_rate: float, amsgrad: bool = False, **settings: Any
) -> tuple[Tensor, Any]:
    """`reference.step_adamw` from no state at all."""
    before = state or reference.start_adamw(weight, amsgrad)
    return reference.step_adamw(weight, gradient, before, learning_rate, **settings)


ADAMW = Rule(step_adamw, reference.AdamWState)


@dataclasses.dataclass
class Run:
    """Two factors in training: a rule, weights, what it keeps of each, a rate and settings for each."""

    rule: Rule
    weights: list[Tensor]
    rates: tuple[float, float]
    settings: tuple[dict[str, Any], dict[str, Any]]
    states: list[Any] = dataclasses.field(default_factory=lambda: [None, None])
    done: int = 0

    def advance(self, steps: int, edit: Edit | None = None, loss: Loss = batch_loss) -> Run:
        """Take so many steps; `edit` may change the gradients, given the weights and the step. Returns itself."""
        for _ in range(steps):
            found = gradients(self.weights, self.done, loss)
            self.apply(found if edit is None else edit(self.weights, found, self.done))
        return self

    def apply(self, found: Sequence[Tensor]) -> None:
        """One step with these gradients."""
        if self.rule.joint:
            assert self.rates[0] == self.rates[1]
            states = None if self.states[0] is None else self.states
            self.weights, self.states = self.rule.step(self.weights, found, states, self.rates[0], **self.settings[0])
        else:
            results = [
                self.rule.step(w, g, s, rate, **settings)
                for w, g, s, rate, settings in zip(
                    self.weights, found, self.states, self.rates, self.settings, strict=True
                )
            ]
            self.weights, self.states = [r[0] for r in results], [r[1] for r in results]
        self.done += 1

    def copy(self, **changes: Any) -> Run:
        """A second run from here; tensors are shared, for no rule writes into one."""
        fresh: dict[str, Any] = {"weights": list(self.weights), "states": list(self.states), **changes}
        return dataclasses.replace(self, **fresh)

    @property
    def product(self) -> Tensor:
        return product(self.weights)


def start(name: str, weights: Sequence[Tensor] | None = None, rate: float | None = None, **settings: Any) -> Run:
    """A run of a rule by name, pure but for the settings given, from `factors()` unless told otherwise."""
    chosen = RATES[name] if rate is None else rate
    merged = {**PURE.get(name, {"eps": 0.0, "decay": 0.0}), **settings}
    return Run(
        ADAMW if name == "adamw" else RULES[name], list(weights or factors()), (chosen, chosen), (merged, dict(merged))
    )


def distance(first: Tensor, second: Tensor) -> float:
    """|first - second| / |second|, and exactly 0 for equal bits."""
    if torch.equal(first, second):
        return 0.0
    return float((first - second).norm() / second.norm())


def orthogonal(size: int, seed: int = 777) -> Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(draw(seed, size, size)).Q


def rescaled(weights: Sequence[Tensor], factor: float) -> list[Tensor]:
    """(c A, B / c)."""
    return [weights[0] * factor, weights[1] / factor]


# How each entry of a state answers where its weight is multiplied by c: c^degree.
DEGREES: Mapping[str, int] = {
    "momentum_buffer": -1, "first": -1, "second": -2, "maximum": -2, "rows": -2, "columns": -2, "left": -2, "right": -2,
    "velocity": 1,
}  # fmt: skip


def tensors(state: Any) -> dict[str, Tensor]:
    """What a state holds, by name; a bare momentum buffer is called so."""
    if state is None or isinstance(state, Tensor):
        return {} if state is None else {"momentum_buffer": state}
    held = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def times_power(tensor: Tensor, factor: float, degree: float) -> Tensor:
    """tensor * c^degree by products and quotients: what `pow` rounds is not the same for c and 8 c."""
    if degree not in (-2, -1, 0, 1):
        return tensor * factor**degree
    return {-2: tensor / (factor * factor), -1: tensor / factor, 0: tensor, 1: tensor * factor}[int(degree)]


def carry(name: str, state: Any, factor: float) -> Any:
    """The state of a rule with its weight multiplied by `factor`."""
    # A root of L has the degree of L times its exponent.
    root = {"shampoo": 0.5, "shampoo_half": 1.0}.get(name, 0.0)
    degrees = {**DEGREES, "left_root": root, "right_root": root}
    held = {key: times_power(value, factor, degrees[key]) for key, value in tensors(state).items()}
    return held.get("momentum_buffer") if isinstance(state, Tensor | None) else dataclasses.replace(state, **held)


def moved(name: str, run: Run, factor: float, carried: bool = True) -> Run:
    """A second run at (c A, B / c), with what the rule keeps carried along or left alone."""
    states = [carry(name, s, f) for s, f in zip(run.states, (factor, 1 / factor), strict=True)]
    return run.copy(weights=rescaled(run.weights, factor), states=states if carried else list(run.states))


def balanced(name: str, run: Run, damping: float = 1.0, carried: bool = True) -> Run:
    """A second run at (c A, B / c), c = (|B| / |A|)^(damping / 2): by `sqrt`, which rounds c and 8 c alike."""
    ratio = run.weights[1].norm() / run.weights[0].norm()
    factor = ratio.sqrt() if damping == 1.0 else ratio ** (damping / 2)
    return moved(name, run, float(factor), carried)


def clipping(limit: float, factor: float = 1.0) -> Edit:
    """Scale all gradients so that their joint norm, measured at (A / factor, factor B), is at most the limit."""

    def edit(weights: list[Tensor], found: list[Tensor], step: int) -> list[Tensor]:
        norm = torch.sqrt((factor * found[0]).square().sum() + (found[1] / factor).square().sum())
        return [g * min(1.0, limit / float(norm)) for g in found]

    return edit
