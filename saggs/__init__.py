"""Exact scaling symmetries of a network's weights: find them, certify them, rescale and balance along them.

Two networks that compute the same function can train differently. Three lines keep yours at the balanced one:

    rebalancer = saggs.Rebalancer(model, optimizer, every=10)     # finds and certifies the model's exact pairs
    for batch in batches:
        rebalancer.step()                                         # at the top of every training step
"""

from saggs.balancing import Rebalancer, balance, log2_norm_ratios
from saggs.certificates import CertificationError, certify
from saggs.discovery import find_pairs
from saggs.injection import inject_imbalance, log_uniform_factors
from saggs.pairs import BALANCED_KINDS, KINDS, Certificate, ParameterSlice, ScalePair
from saggs.rescaling import rescale

__all__ = [
    "BALANCED_KINDS",
    "KINDS",
    "Certificate",
    "CertificationError",
    "ParameterSlice",
    "Rebalancer",
    "ScalePair",
    "balance",
    "certify",
    "find_pairs",
    "inject_imbalance",
    "log2_norm_ratios",
    "log_uniform_factors",
    "rescale",
]
