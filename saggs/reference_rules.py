"""The slow, literal, float64 version of every update rule, as the papers write it.

One pure function a rule: `step_x(weight, gradient, state, learning_rate, ...) -> (new weight, new state)`. The state is
None before the first step, and a frozen dataclass after it. Rules that need several weights at once take and return
lists. Plain SGD with momentum and AdamW are in `saggs.reference`; `saggs.reference_optimizer` makes a
`torch.optim.Optimizer` of any of them.

Constants are those of Singh (2026) where that paper states them; with eps = 0, damping = 0 and floor = 0 a rule is what
its formula says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from saggs.reference import AdamWState, start_adamw, step_adamw

Betas = tuple[float, float]


@dataclass(frozen=True)
class FirstMoment:
    """An average or a sum of gradients."""

    first: Tensor


@dataclass(frozen=True)
class SecondMoment:
    """An average of squared gradients."""

    second: Tensor


@dataclass(frozen=True)
class FactoredMoment:
    """Averages of the squared gradients' means over each row (one entry a row) and over each column."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class ShampooState:
    """Steps taken, the sums of G G^T and G^T G, and their roots as of when they were last taken."""

    step: int
    left: Tensor
    right: Tensor
    left_root: Tensor
    right_root: Tensor


@dataclass(frozen=True)
class LarsState:
    """A sum of *updates*, rate and trust ratio included: it has the scale of the weight, not of the gradient."""

    velocity: Tensor


def root_mean_square(tensor: Tensor) -> Tensor:
    """sqrt(mean x^2)."""
    return tensor.double().square().mean().sqrt()


def polar_factor(matrix: Tensor) -> Tensor:
    """U V^T of the singular value decomposition U S V^T: all non-zero singular values become 1.

    Singular values below 1e-12 of the largest count as zero and stay zero. Source: Jordan et al. (2024), the exact map
    that Muon's iteration approximates.
    """
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    kept = values > 1e-12 * values[0]
    factor: Tensor = left[:, kept] @ right[kept]
    return factor


def newton_schulz(matrix: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """X = G / (|G| + eps), then `steps` times X <- a X + b (X X^T) X + c (X X^T)^2 X.

    With (a, b, c) = (3.4445, -4.7750, 2.0315). Five steps take singular values above 0.002 |G| to 0.68 ... 1.21, not to
    1. Source: Jordan et al. (2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrix.double() / (matrix.double().norm() + eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def matrix_power(matrix: Tensor, exponent: float, floor: float = 0.0) -> Tensor:
    """A symmetric positive semi-definite matrix to a power, by its eigenvalues, each raised to `floor` first.

    Without a floor it is a pseudo-inverse power: eigenvalues below 1e-12 of the largest count as zero and stay zero.
    Source: Gupta, Koren and Singer (2018); the floor is Singh's (2026).
    """
    symmetric = (matrix.double() + matrix.double().T) / 2
    values, vectors = torch.linalg.eigh(symmetric)
    if floor > 0:
        powers = values.clamp_min(floor).pow(exponent)
    else:
        kept = values > 1e-12 * values[-1]
        powers = torch.where(kept, values.clamp_min(values[-1] * 1e-12).pow(exponent), 0.0)
    result: Tensor = vectors @ torch.diag(powers) @ vectors.T
    return result


def step_gd(weight: Tensor, gradient: Tensor, state: None, learning_rate: float) -> tuple[Tensor, None]:
    """w <- w - lr g. Source: Cauchy (1847)."""
    return weight.double() - learning_rate * gradient.double(), None


def step_adam(
    weight: Tensor,
    gradient: Tensor,
    state: AdamWState | None,
    learning_rate: float,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
) -> tuple[Tensor, AdamWState]:
    """AdamW without its decay; `decay` is coupled here: g <- g + decay w before anything else.

    Source: Kingma and Ba (2015).
    """
    g = gradient.double() + decay * weight.double()
    return step_adamw(weight, g, state or start_adamw(weight), learning_rate, betas, eps, decay=0.0)


def advance_moments(gradient: Tensor, state: AdamWState | None, betas: Betas) -> AdamWState:
    """m <- b1 m + (1 - b1) g and v <- b2 v + (1 - b2) g^2, from zero. Source: Kingma and Ba (2015)."""
    g, before = gradient.double(), state or start_adamw(gradient)
    first = betas[0] * before.first + (1 - betas[0]) * g
    return AdamWState(before.step + 1, first, betas[1] * before.second + (1 - betas[1]) * g * g)


def advance_all_moments(
    gradients: Sequence[Tensor], states: Sequence[AdamWState] | None, betas: Betas
) -> list[AdamWState]:
    """The moments of several weights, each advanced by itself. Source: as above."""
    before: Sequence[AdamWState | None] = states or [None] * len(gradients)
    return [advance_moments(g, s, betas) for g, s in zip(gradients, before, strict=True)]


def correct_moments(state: AdamWState, betas: Betas) -> tuple[Tensor, Tensor]:
    """m / (1 - b1^t) and v / (1 - b2^t): the averages without the weight of their zero start. Source: as above."""
    return state.first / (1 - betas[0] ** state.step), state.second / (1 - betas[1] ** state.step)


def step_unrooted_adam(
    weight: Tensor,
    gradient: Tensor,
    state: AdamWState | None,
    learning_rate: float,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, AdamWState]:
    """w <- w - lr m / (v + eps): Adam without the root, in which the gradient's scale counts inversely.

    Source: ours, as a positive control: its scaling exponent is +1.
    """
    new = advance_moments(gradient, state, betas)
    first, second = correct_moments(new, betas)
    return weight.double() - learning_rate * first / (second + eps), new


def step_scalar_adam(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[AdamWState] | None,
    learning_rate: float,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[list[Tensor], list[AdamWState]]:
    """w <- w - lr m / (s + eps) for every weight, with one s = sqrt(mean of v over all entries of all weights).

    Source: Singh (2026).
    """
    new = advance_all_moments(gradients, states, betas)
    moments = [correct_moments(state, betas) for state in new]
    scale = torch.cat([second.flatten() for _, second in moments]).mean().sqrt()
    moved = [w.double() - learning_rate * m / (scale + eps) for w, (m, _) in zip(weights, moments, strict=True)]
    return moved, new


def step_dial(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[AdamWState] | None,
    learning_rate: float,
    precond_power: float = 0.0,
    mean: Literal["rms", "geometric"] = "rms",
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[list[Tensor], list[AdamWState]]:
    """w <- w - lr m / ( (s_i + eps)^p (s + eps)^(1 - p) + eps ), with s_i = sqrt(v_i) and one s for all weights.

    s is the root mean square of the s_i, or exp(mean log(s_i + eps)). At p = 1 this is Adam with eps counted twice.
    Source: Singh (2026).
    """
    new = advance_all_moments(gradients, states, betas)
    moments = [correct_moments(state, betas) for state in new]
    roots = torch.cat([second.sqrt().flatten() for _, second in moments])
    scale = root_mean_square(roots) if mean == "rms" else torch.exp(torch.log(roots + eps).mean())
    moved = []
    for weight, (first, second) in zip(weights, moments, strict=True):
        denominator = (second.sqrt() + eps).pow(precond_power) * (scale + eps).pow(1 - precond_power) + eps
        moved.append(weight.double() - learning_rate * first / denominator)
    return moved, new


def step_rmsprop(
    weight: Tensor,
    gradient: Tensor,
    state: SecondMoment | None,
    learning_rate: float,
    rho: float = 0.99,
    eps: float = 1e-8,
) -> tuple[Tensor, SecondMoment]:
    """v <- rho v + (1 - rho) g^2, from zero and not corrected for it; w <- w - lr g / (sqrt(v) + eps).

    Source: Tieleman and Hinton (2012).
    """
    g = gradient.double()
    second = (0.0 if state is None else rho * state.second) + (1 - rho) * g * g
    return weight.double() - learning_rate * g / (second.sqrt() + eps), SecondMoment(second)


def step_sign(weight: Tensor, gradient: Tensor, state: None, learning_rate: float) -> tuple[Tensor, None]:
    """w <- w - lr sign(g). Source: Bernstein et al. (2018), signSGD."""
    return weight.double() - learning_rate * gradient.double().sign(), None


def step_signum(
    weight: Tensor, gradient: Tensor, state: FirstMoment | None, learning_rate: float, beta: float = 0.9
) -> tuple[Tensor, FirstMoment]:
    """m <- beta m + (1 - beta) g; w <- w - lr sign(m). Source: Bernstein et al. (2018)."""
    first = (0.0 if state is None else beta * state.first) + (1 - beta) * gradient.double()
    return weight.double() - learning_rate * first.sign(), FirstMoment(first)


def step_lion(
    weight: Tensor,
    gradient: Tensor,
    state: FirstMoment | None,
    learning_rate: float,
    betas: Betas = (0.9, 0.99),
    decay: float = 0.0,
) -> tuple[Tensor, FirstMoment]:
    """w <- w - lr ( sign(b1 m + (1 - b1) g) + decay w ), and only then m <- b2 m + (1 - b2) g.

    Source: Chen et al. (2023).
    """
    w, g = weight.double(), gradient.double()
    before = torch.zeros_like(g) if state is None else state.first
    direction = (betas[0] * before + (1 - betas[0]) * g).sign()
    return w - learning_rate * (direction + decay * w), FirstMoment(betas[1] * before + (1 - betas[1]) * g)


def step_adafactor(
    weight: Tensor,
    gradient: Tensor,
    state: FactoredMoment | None,
    learning_rate: float,
    rho: float = 0.999,
    eps: float = 1e-8,
    clip: float | None = None,
) -> tuple[Tensor, FactoredMoment]:
    """Adafactor of a matrix without relative step: V_ij = r_i c_j / mean(r); u = g / (sqrt(V) + eps); w <- w - lr u.

    r and c are averages of the row and column means of g^2, from zero and not corrected for it. With `clip` = d, u is
    divided by max(1, RMS(u) / d) first. Source: Shazeer and Stern (2018); without clipping, Singh (2026).
    """
    g = gradient.double()
    rows = (0.0 if state is None else rho * state.rows) + (1 - rho) * (g * g).mean(dim=1)
    columns = (0.0 if state is None else rho * state.columns) + (1 - rho) * (g * g).mean(dim=0)
    # A gradient of zeros alone would be 0 / 0 here.
    second = torch.outer(rows, columns) / rows.mean().clamp_min(1e-300)
    update = g / (second.sqrt() + eps)
    if clip is not None:
        update = update / max(1.0, float(root_mean_square(update)) / clip)
    return weight.double() - learning_rate * update, FactoredMoment(rows, columns)


def step_scaled_adafactor(
    weight: Tensor,
    gradient: Tensor,
    state: FactoredMoment | None,
    learning_rate: float,
    floor: float = 1e-3,
    rho: float = 0.999,
    eps: float = 1e-8,
    clip: float | None = 1.0,
) -> tuple[Tensor, FactoredMoment]:
    """Adafactor with a parameter-scaled step: its rate is lr max(floor, RMS(w)). Source: Shazeer and Stern (2018)."""
    rate = learning_rate * max(floor, float(root_mean_square(weight)))
    return step_adafactor(weight, gradient, state, rate, rho, eps, clip)


def step_muon(
    weight: Tensor,
    gradient: Tensor,
    state: FirstMoment | None,
    learning_rate: float,
    momentum: float = 0.9,
    exact: bool = False,
    eps: float = 1e-7,
) -> tuple[Tensor, FirstMoment]:
    """m <- momentum m + g; w <- w - lr O, with O five Newton-Schulz steps from m, or its polar factor where `exact`.

    Source: Jordan et al. (2024), without Nesterov's variant.
    """
    first = (0.0 if state is None else momentum * state.first) + gradient.double()
    direction = polar_factor(first) if exact else newton_schulz(first, eps=eps)
    return weight.double() - learning_rate * direction, FirstMoment(first)


def step_shampoo(
    weight: Tensor,
    gradient: Tensor,
    state: ShampooState | None,
    learning_rate: float,
    exponent: float = -0.25,
    damping: float = 1.0,
    every: int = 20,
    floor: float = 1e-6,
) -> tuple[Tensor, ShampooState]:
    """L <- L + G G^T; R <- R + G^T G; w <- w - lr (L + damping I)^exponent G (R + damping I)^exponent.

    The powers are taken anew at the first step and then every `every` steps. Source: Gupta, Koren and Singer (2018) for
    -1/4; -1/2 on both sides is often used in place of it, and is another rule.
    """
    g = gradient.double()
    left = g @ g.T + (0.0 if state is None else state.left)
    right = g.T @ g + (0.0 if state is None else state.right)
    if state is None or state.step % every == 0:
        eyes = [damping * torch.eye(len(m), dtype=torch.float64, device=m.device) for m in (left, right)]
        roots = [matrix_power(m + eye, exponent, floor) for m, eye in zip((left, right), eyes, strict=True)]
    else:
        roots = [state.left_root, state.right_root]
    moved = weight.double() - learning_rate * roots[0] @ g @ roots[1]
    return moved, ShampooState(1 if state is None else state.step + 1, left, right, roots[0], roots[1])


def step_lars(
    weight: Tensor,
    gradient: Tensor,
    state: LarsState | None,
    learning_rate: float,
    momentum: float = 0.9,
    decay: float = 0.0,
) -> tuple[Tensor, LarsState]:
    """u <- momentum u + lr |w| / (|g| + decay |w|) (g + decay w); w <- w - u, norms of the whole tensor.

    Source: You, Gitman and Ginsburg (2017); their trust coefficient is part of lr.
    """
    w, g = weight.double(), gradient.double()
    trust = w.norm() / (g.norm() + decay * w.norm())
    velocity = (0.0 if state is None else momentum * state.velocity) + learning_rate * trust * (g + decay * w)
    return w - velocity, LarsState(velocity)


def step_lamb(
    weight: Tensor,
    gradient: Tensor,
    state: AdamWState | None,
    learning_rate: float,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-6,
    decay: float = 0.0,
) -> tuple[Tensor, AdamWState]:
    """r = m / (sqrt(v) + eps) + decay w; w <- w - lr |w| / |r| r, the weight norm not clamped.

    Source: You et al. (2020), with the identity for their scaling function.
    """
    w, new = weight.double(), advance_moments(gradient, state, betas)
    first, second = correct_moments(new, betas)
    ratio = first / (second.sqrt() + eps) + decay * w
    return w - learning_rate * w.norm() / ratio.norm() * ratio, new


def step_scaled_gd(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], states: object, learning_rate: float, damping: float = 0.0
) -> tuple[list[Tensor], list[None]]:
    """A <- A - lr G_A (B^T B + damping I)^-1 and B <- B - lr G_B (A^T A + damping I)^-1, both from the old weights.

    For the pair of a product A B^T. Source: Tong, Ma and Chi (2021); for low-rank adapters Zhang and Pilanci (2024).
    """
    a, b = (w.double() for w in weights)
    eye = damping * torch.eye(a.shape[1], dtype=torch.float64, device=a.device)
    step_a = torch.linalg.solve(b.T @ b + eye, gradients[0].double().T).T
    step_b = torch.linalg.solve(a.T @ a + eye, gradients[1].double().T).T
    return [a - learning_rate * step_a, b - learning_rate * step_b], [None, None]
