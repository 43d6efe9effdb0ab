"""The update rules of Singh (2026) as optimizers, each over any number of independent members; see `saggs.rules.rule`.

`RULES` has them by a short name.
"""

from __future__ import annotations

from collections.abc import Mapping

from saggs.rules.dial import Adam, Dial, ScalarAdam
from saggs.rules.elementwise import GradientDescent, Lion, Momentum, RMSProp, Signum
from saggs.rules.flow_adam import FlowAdam
from saggs.rules.matrices import Adafactor, Muon, ScaledGD, Shampoo
from saggs.rules.rule import Rule

RULES: Mapping[str, type[Rule]] = {
    "gd": GradientDescent,
    "momentum": Momentum,
    "adam": Adam,
    "scalar_adam": ScalarAdam,
    "dial": Dial,
    "rmsprop": RMSProp,
    "signum": Signum,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
    "shampoo": Shampoo,
    "scaled_gd": ScaledGD,
    "flow_adam": FlowAdam,
}
"""Every rule by its short name."""

__all__ = [
    "RULES",
    "Adafactor",
    "Adam",
    "Dial",
    "FlowAdam",
    "GradientDescent",
    "Lion",
    "Momentum",
    "Muon",
    "RMSProp",
    "Rule",
    "ScalarAdam",
    "ScaledGD",
    "Shampoo",
    "Signum",
]
