"""The schema of the second paper's tasks: matrix sensing, hyperspectral completion, rotated attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class RuleGrid:
    """An update rule at several learning rates, one arm of a factorization study; `options` are its own constants."""

    rule: str = MISSING
    rates: list[float] = MISSING
    schedule: str = "constant"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sensing:
    """A matrix of low rank, U* V*^T, to be found as U V^T from Gaussian measurements of it.

    `tail` is the share of energy outside the rank; `holdout` the share of measurements that a second pass leaves out
    of training, to choose rates by them.
    """

    size: int = 40
    rank: int = 3
    measurements: int = 462
    width: int = 40
    tail: float = 0.0
    holdout: float = 0.1
    start_scale: float = 1e-3
    steps: int = 20_000
    stop_loss: float = 1e-7
    check_every: int = 200
    precision: str = "float32"


@dataclass
class Scene:
    """A hyperspectral scene of which a share `density` of the entries is observed, to be completed as U V^T.

    `levels` are the training errors at which runs are compared; at the last one they end. `holdout` is the share of
    observed entries that a second pass leaves out of training, to choose rates by them.
    """

    name: str = MISSING
    pixels: int = 2000
    pixel_seed: int = 2026
    density: float = 0.15
    holdout: float = 0.1
    width: int = 48
    start_scale: float = 1e-2
    steps: int = 30_000
    levels: list[float] = field(default_factory=lambda: [3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5])


@dataclass
class IndianPines(Scene):
    """145 x 145 pixels, 200 bands, as tensorly ships it."""

    name: str = "indian_pines"


@dataclass
class MatScene(Scene):
    """An array (rows, columns, bands) under the name `variable` in the MATLAB file `path`."""

    path: str = MISSING
    variable: str = MISSING


@dataclass
class Attention:
    """A small Transformer trained beside twins: rotated inside every head, not changed, and disturbed by noise."""

    name: str = MISSING
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp_width: int = 256
    steps: int = MISSING
    rotation_seed: int = 777
    noises: list[float] = field(default_factory=lambda: [1e-7, 1e-5])
    precision: str = "float64"


@dataclass
class ModularAddition(Attention):
    """a + b mod `modulus`, a share `train_fraction` of all pairs for training, full batch."""

    name: str = "modular"
    modulus: int = 47
    train_fraction: float = 0.4


@dataclass
class Characters(Attention):
    """The next character of English text; `path` is a text file, or null for that of wikipedia_mini."""

    name: str = "characters"
    path: str | None = None
    context: int = 32
    batch_sequences: int = 32
