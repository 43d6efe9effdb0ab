"""What the manifests of the studies say: runs without a language model, on a CPU, one thread each."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from experiments.code_version import code_version
from experiments.config import Config


def facts_of(config: Config, seeds: dict[str, int], data: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a run depends on, beside its settings.

    Args:
        config: of the run.
        seeds: of each generator, by what it draws.
        data: name, fingerprint and the like of data from outside; None where all is drawn.
    """
    return {
        # A language model's; the labels of other tasks say nothing here.
        **dict.fromkeys(("model", "arm", "optimizer", "learning_rate")),
        "seeds": seeds,
        "data": data,
        "code": code_version(),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": platform.machine(),
            "threads": 1,
            "host_cores": os.cpu_count(),
        },
    }
