"""Histories of a training run to one feature vector, and optimizer moments to the sums it takes."""

from hybridkernels.state_encoding.reference import (
    GRAD_NORM_STEPS,
    LOSS_STEPS,
    NUM_FEATURES,
    NUM_MOMENT_STATISTICS,
    NUM_PHASES,
    NUM_SCALARS,
    encode_state,
    moment_statistics,
)

__all__ = [
    "GRAD_NORM_STEPS",
    "LOSS_STEPS",
    "NUM_FEATURES",
    "NUM_MOMENT_STATISTICS",
    "NUM_PHASES",
    "NUM_SCALARS",
    "encode_state",
    "moment_statistics",
]
