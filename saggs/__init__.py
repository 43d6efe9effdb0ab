"""Exact scaling symmetries of a network's weights: find them, certify them, rescale and balance along them.

Two networks that compute the same function can train differently. Three lines keep yours at the balanced one:

    rebalancer = saggs.Rebalancer(model, optimizer, every=10)     # finds and certifies the model's exact pairs
    for batch in batches:
        rebalancer.step()                                         # at the top of every training step
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saggs.balancing import Rebalancer, balance, canonicalize, log2_norm_ratios
    from saggs.certificates import certify
    from saggs.discovery import find_pairs
    from saggs.explanation import Explanation, explain
    from saggs.injection import inject_imbalance, log_uniform_factors
    from saggs.nullspace import Algebra, algebra
    from saggs.pairs import BALANCED_KINDS, KINDS, Certificate, ParameterSlice, ScalePair
    from saggs.probes import OptimizerProbe, probe
    from saggs.rescaling import rescale
    from saggs.trials import CertificationError
    from saggs.virtual import BalancedUpdate

# Where each public name lives. They are imported when asked for, so that `saggs --help` need not wait for torch.
_HOMES = {
    "BALANCED_KINDS": "pairs",
    "KINDS": "pairs",
    "Algebra": "nullspace",
    "BalancedUpdate": "virtual",
    "Certificate": "pairs",
    "CertificationError": "trials",
    "Explanation": "explanation",
    "OptimizerProbe": "probes",
    "ParameterSlice": "pairs",
    "Rebalancer": "balancing",
    "ScalePair": "pairs",
    "algebra": "nullspace",
    "balance": "balancing",
    "canonicalize": "balancing",
    "certify": "certificates",
    "explain": "explanation",
    "find_pairs": "discovery",
    "inject_imbalance": "injection",
    "log2_norm_ratios": "balancing",
    "log_uniform_factors": "injection",
    "probe": "probes",
    "rescale": "rescaling",
}

__all__ = [
    "BALANCED_KINDS",
    "KINDS",
    "Algebra",
    "BalancedUpdate",
    "Certificate",
    "CertificationError",
    "Explanation",
    "OptimizerProbe",
    "ParameterSlice",
    "Rebalancer",
    "ScalePair",
    "algebra",
    "balance",
    "canonicalize",
    "certify",
    "explain",
    "find_pairs",
    "inject_imbalance",
    "log2_norm_ratios",
    "log_uniform_factors",
    "probe",
    "rescale",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"saggs.{_HOMES[name]}"), name)
    try:
        return importlib.import_module(f"saggs.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module 'saggs' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
