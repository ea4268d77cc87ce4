"""The phases of hybrid predictive training. Plans may differ from phase to phase; plain training stays in FULL."""

from enum import StrEnum


class Phase(StrEnum):
    """Phase of a step in the hybrid cycle."""

    WARMUP = "warmup"
    """Ordinary steps before the first cycle."""
    FULL = "full"
    """Ordinary steps: forward, backward, update."""
    PREDICT = "predict"
    """Predicted steps: no backward pass."""
    CORRECT = "correct"
    """True steps right after a jump."""
