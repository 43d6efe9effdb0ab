"""Hyperspectral scenes: read, checked, and made the matrix (pixels, bands) that a study completes.

Preparation, for agreement with the published numbers: divide by the largest value + 1e-12, drop pixels of norm 1e-8 or
less, take `pixels` of the others by a permutation of `pixel_seed`, subtract the mean of every band. In float64.

Source: Singh (2026). Indian Pines: Baumgardner, Biehl and Landgrebe (2015), CC BY 3.0, as tensorly ships it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.checks import ConfigError, nearest
from experiments.study_config import MatScene, Scene


@dataclass(frozen=True)
class Prepared:
    """The matrix (pixels, bands), where each pixel lies in the image (pixels, 2), and what it was made from."""

    matrix: Tensor
    positions: Tensor
    image_shape: tuple[int, int, int]
    fingerprint: str


def load(scene: Scene) -> Prepared:
    """Read and prepare a scene.

    Raises:
        ConfigError: the file or its variable is missing, not a scene, or too small for what is asked.
    """
    cube = _mat(scene) if isinstance(scene, MatScene) else _indian_pines()
    rows, columns, bands = cube.shape
    values = torch.from_numpy(np.ascontiguousarray(cube).astype(np.float64)).view(rows * columns, bands)
    if not bool(torch.isfinite(values).all()):
        raise ConfigError(f"scene={scene.name}: it holds values that are not finite; clean them first")
    values = values / (values.max() + 1e-12)
    kept = torch.nonzero(torch.linalg.vector_norm(values, dim=1) > 1e-8)[:, 0]
    if scene.pixels > len(kept):
        raise ConfigError(f"scene.pixels={scene.pixels}: {scene.name} has only {len(kept)} pixels that are not empty")
    if scene.width > min(scene.pixels, bands):
        raise ConfigError(
            f"scene.width={scene.width}: must not exceed the matrix, {scene.pixels} pixels x {bands} bands"
        )
    chosen = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(scene.pixel_seed))[: scene.pixels]]
    matrix = values[chosen]
    positions = torch.stack([chosen // columns, chosen % columns], dim=1)
    fingerprint = hashlib.sha256(np.ascontiguousarray(cube).tobytes()).hexdigest()
    return Prepared(matrix - matrix.mean(dim=0), positions, (rows, columns, bands), fingerprint)


def _indian_pines() -> np.ndarray:
    from tensorly.datasets import load_indian_pines

    return np.asarray(load_indian_pines().tensor)


def _mat(scene: MatScene) -> np.ndarray:
    from scipy.io import loadmat, whosmat

    path = Path(scene.path)
    if not path.is_file():
        raise ConfigError(f"scene.path={scene.path}: there is no such file; give that of a .mat scene")
    try:
        known = {name: shape for name, shape, _ in whosmat(path)}
    except NotImplementedError:
        raise ConfigError(
            f"scene.path={scene.path}: a MATLAB 7.3 file; save it with -v7, or as an array with scipy.io.savemat"
        ) from None
    except Exception as error:  # whatever the reader makes of a file that is none of its own
        raise ConfigError(f"scene.path={scene.path}: not a MATLAB file ({error})") from None
    if scene.variable not in known:
        listed = ", ".join(f"{name} {shape}" for name, shape in known.items()) or "nothing"
        raise ConfigError(
            f"scene.variable={scene.variable}: {scene.path} has no such variable{nearest(scene.variable, known)}; it "
            f"holds {listed}"
        )
    array = np.asarray(loadmat(path, variable_names=[scene.variable])[scene.variable])
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array) or array.size == 0:
        raise ConfigError(
            f"scene.variable={scene.variable}: shape {array.shape} of {array.dtype}; a scene is an array of real "
            "numbers, (rows, columns, bands)"
        )
    return array


__all__ = ["Prepared", "load"]
