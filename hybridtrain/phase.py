"""The phases of hybrid predictive training. Plans may differ from phase to phase; plain training stays in FULL."""

from enum import StrEnum


class Phase(StrEnum):
    """Where in the hybrid cycle a step stands."""

    WARMUP = "warmup"
    """Ordinary steps before the first cycle."""
    FULL = "full"
    """Ordinary steps: forward, backward, update."""
    PREDICT = "predict"
    """Predicted steps: no backward pass."""
    CORRECT = "correct"
    """True gradients that correct what was predicted."""
