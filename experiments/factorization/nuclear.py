"""The matrix of least nuclear norm that fits the measurements: what a convex method would give.

    minimise |X|_*  subject to  A vec(X) = b

by Douglas-Rachford splitting (Lions and Mercier 1979): alternately soft-threshold the singular values of X and project
on the affine space of all matrices that fit. Both are exact, so that only the number of rounds is approximate.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 3000
TOLERANCE = 1e-10


def least_nuclear_norm(measurements: Tensor, values: Tensor, size: int, rounds: int = ROUNDS) -> tuple[Tensor, float]:
    """The solution, in float64, and how far the last round still moved it, relative to its norm.

    Args:
        measurements: (count, size^2), of full row rank.
        values: (count,).
        size: of the square matrix.
        rounds: at most; ends when a round moves the solution by less than 1e-10.

    Raises:
        ValueError: measurements that depend on each other: no unique projection.
    """
    a, b = measurements.double(), values.double()
    orthonormal, triangle = torch.linalg.qr(a.T)
    if float(triangle.diagonal().abs().min()) < 1e-10 * float(triangle.diagonal().abs().max()):
        raise ValueError(f"{len(b)} measurements of {size} x {size} entries depend on each other; draw fewer")
    wanted = torch.linalg.solve_triangular(triangle.T, b[:, None], upper=False)[:, 0]
    point = orthonormal @ wanted
    threshold = float(torch.linalg.svdvals(point.view(size, size)).mean())
    solution, moved = point, float("inf")
    for _ in range(rounds):
        before = solution
        left, singular, right = torch.linalg.svd(point.view(size, size))
        shrunk = (left * (singular - threshold).clamp_min(0)) @ right
        reflected = 2 * shrunk.flatten() - point
        solution = reflected - orthonormal @ (orthonormal.T @ reflected - wanted)
        point = point + solution - shrunk.flatten()
        moved = float((solution - before).norm() / solution.norm())
        if moved < TOLERANCE:
            break
    return solution.view(size, size), moved


__all__ = ["least_nuclear_norm"]
