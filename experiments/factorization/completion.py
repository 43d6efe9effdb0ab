"""Completion: a matrix X of which some entries are observed, to be found as U V^T.

The loss is the mean of (U V^T - X)^2 over the entries that are trained on. Draws, for agreement number for number with
the published ones: an entry is observed where a uniform float32 draw of a generator of seed + 7 lies below the density;
U, then V are standard normal float32 draws of one of seed + 1000, times `start_scale`, then taken to float64. Ours: the
second pass leaves out those observed entries whose draw of a generator of seed + 13 lies below `holdout`.

Source: Singh (2026).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.factorization.sensing import effective_rank
from experiments.study_config import Scene

BLOCK = 250
"""Rows at a time: what is computed of them stays in the cache until it has been used."""


@dataclass(frozen=True)
class Masks:
    """Entries as 0 and 1, (pixels, bands): trained on, left out by the second pass, and never observed."""

    train: Tensor
    held_out: Tensor
    test: Tensor


def draw_masks(shape: tuple[int, int], scene: Scene, seed: int, second_pass: bool) -> Masks:
    """What is observed, and what of it is trained on."""
    observed = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 7)) < scene.density
    left_out = torch.zeros(shape, dtype=torch.bool)
    if second_pass:
        left_out = observed & (torch.rand(shape, generator=torch.Generator().manual_seed(seed + 13)) < scene.holdout)
    return Masks((observed & ~left_out).double(), left_out.double(), (~observed).double())


def draw_start(shape: tuple[int, int], scene: Scene, seed: int) -> tuple[Tensor, Tensor]:
    """U (pixels, width) and V (bands, width)."""
    generator = torch.Generator().manual_seed(seed + 1000)
    u, v = (torch.randn(size, scene.width, generator=generator) * scene.start_scale for size in shape)
    return u.double(), v.double()


class Problem:
    """Loss and gradients of one member, written out by hand: with R the masked residuals, dU = 2 R V / n."""

    def __init__(self, matrix: Tensor, masks: Masks) -> None:
        self.matrix, self.masks = matrix, masks
        self.observed = int(masks.train.sum())
        self._blocks = list(zip(matrix.split(BLOCK), masks.train.split(BLOCK), strict=True))

    def loss_and_gradients(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The training error and its gradients at U V^T, block by block of rows."""
        loss, du, dv = torch.zeros((), dtype=u.dtype), torch.empty_like(u), torch.zeros_like(v)
        rows = zip(self._blocks, u.split(BLOCK), du.split(BLOCK), strict=True)
        for (truth, mask), own, gradient in rows:
            residual = torch.addmm(truth, own, v.T, beta=-1).mul_(mask)
            loss += torch.dot(residual.view(-1), residual.view(-1))
            torch.mm(residual, v, out=gradient)
            dv.addmm_(residual.T, own)
        return loss.div_(self.observed), du.mul_(2 / self.observed), dv.mul_(2 / self.observed)

    def assess(self, u: Tensor, v: Tensor) -> dict[str, float | None]:
        """Root mean squared error on entries never observed and on those left out, and the effective rank."""
        residual = u @ v.T - self.matrix
        found: dict[str, float | None] = {}
        for name, mask in (("test_rmse", self.masks.test), ("held_out_rmse", self.masks.held_out)):
            count = float(mask.sum())
            value = math.sqrt(float((residual * mask).square().sum()) / count) if count else math.nan
            found[name] = value if math.isfinite(value) else None
        # The singular values of U V^T are those of the small matrix between the orthonormal factors.
        small = torch.linalg.qr(u).R @ torch.linalg.qr(v).R.T
        found["effective_rank"] = effective_rank(torch.linalg.svdvals(small)) if bool(small.isfinite().all()) else None
        return found


__all__ = ["Masks", "Problem", "draw_masks", "draw_start"]
