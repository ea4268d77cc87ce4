"""What one true optimizer step tells a predictor: scalars only."""

from dataclasses import dataclass

from hybridtrain.phase import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentStatistics:
    """Means over all elements of the optimizer's moments."""

    m_mean: float
    m_rms: float
    v_mean: float
    """Of the second moment, already a square: its root compares with ``m_rms``."""
    v_rms: float
    slow_rms: float = 0.0
    """Of the slow gradient average; 0 where there is none."""
    slow_cosine: float = 0.0
    """Cosine between first moment and slow average; 0 where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSignal:
    """One true optimizer step."""

    step: int
    """Counted from 1."""
    loss: float
    """Nats per token."""
    grad_norm: float | None
    """Global L2 norm before clipping; None when it is not known."""
    lr: float
    phase: Phase
    predicted_steps: float = 0.0
    """Steps jumped right after this one."""
    moments: MomentStatistics | None = None
