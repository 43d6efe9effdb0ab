"""Checkpoints on disk: inspect, explain, certify and rebalance them, weights and optimizer state, in bounded memory.

layout             what is in a directory; damaged and foreign ones are refused by name
shards, pieces     safetensors, streamed; which file tensor holds which part of a parameter
model              the model of a checkpoint, built without running any of its code
cells              balancing from sums of squares alone
trainer_state      an optimizer's state that is kept by position
output_directory   a result appears whole or not at all
operations         what a user asks for
"""

from saggs.checkpoints.layout import open_checkpoint
from saggs.checkpoints.model import algebra_of_checkpoint, explain_checkpoint, pairs_of_checkpoint
from saggs.checkpoints.operations import (
    PairReport,
    Rebalanced,
    certify_checkpoint,
    inspect_checkpoint,
    rebalance_checkpoint,
)
from saggs.checkpoints.shards import CheckpointError

__all__ = [
    "CheckpointError",
    "PairReport",
    "Rebalanced",
    "algebra_of_checkpoint",
    "certify_checkpoint",
    "explain_checkpoint",
    "inspect_checkpoint",
    "open_checkpoint",
    "pairs_of_checkpoint",
    "rebalance_checkpoint",
]
