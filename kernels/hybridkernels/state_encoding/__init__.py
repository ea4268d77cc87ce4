"""Histories of a training run to one feature vector, and optimizer moments to the sums it takes."""

from hybridkernels.state_encoding.moments import MomentCodes, Moments
from hybridkernels.state_encoding.op import encode_state, encode_training_state, moment_statistics
from hybridkernels.state_encoding.reference import (
    GRAD_NORM_STEPS,
    LOSS_STEPS,
    NUM_FEATURES,
    NUM_MOMENT_STATISTICS,
    NUM_PHASES,
    NUM_SCALARS,
    moments_of_sums,
)

__all__ = [
    "GRAD_NORM_STEPS",
    "LOSS_STEPS",
    "NUM_FEATURES",
    "NUM_MOMENT_STATISTICS",
    "NUM_PHASES",
    "NUM_SCALARS",
    "MomentCodes",
    "Moments",
    "encode_state",
    "encode_training_state",
    "moment_statistics",
    "moments_of_sums",
]
