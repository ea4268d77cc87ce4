"""What one call of the hybrid trainer did, and what all of them did together."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridtrain.phase import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridResult:
    """One phase step: a true step, or a jump of its own."""

    step: int
    """True steps done."""
    phase: Phase
    loss: float | None
    """Nats per token of the step's batch; of PREDICT the forecast one, None where nothing forecasts."""
    lr: float
    grad_norm: float | None
    num_tokens: int
    """Trained on; 0 in PREDICT."""
    predicted_steps: float = 0.0
    """P jumped in this call, within the update or on its own."""
    move_rms: float = 0.0
    """Root mean square of that jump, in learning rates."""
    prediction_error: float | None = None
    """Mean loss of the block that ended with this step minus what was forecast; None in between."""
    confidence: float = 1.0
    scale: float = 1.0
    """Strength of jumps in force, 1 unless the controller is careful."""
    is_rolled_back: bool = False
    """The jump before this step was taken back."""
    cost: float = 3.0
    """Forward passes' worth of work: a forward pass of the step's batch is 1, a backward pass 2."""
    seconds: float = 0.0

    @property
    def is_predicted(self) -> bool:
        """Whether the call made a jump."""
        return self.predicted_steps > 0


@dataclass(slots=True)
class HybridStatistics:
    """Sums over a run. Predicted steps and avoided backward passes are diagnostics: they are no speed-up."""

    steps_by_phase: dict[str, int] = field(default_factory=lambda: {phase.value: 0 for phase in Phase})
    predicted_steps: float = 0.0
    """Backward passes that as many true steps would have taken."""
    jumps: int = 0
    rollbacks: int = 0
    divergences: int = 0
    """Steps refused right after a jump."""
    cost: float = 0.0

    def count(self, result: HybridResult) -> None:
        """Add one result."""
        self.steps_by_phase[result.phase.value] += 1
        self.predicted_steps += result.predicted_steps
        self.jumps += result.is_predicted
        self.rollbacks += result.is_rolled_back
        self.cost += result.cost

    def state_dict(self) -> dict[str, object]:
        """Return the sums as plain values."""
        return {
            "steps_by_phase": dict(self.steps_by_phase), "predicted_steps": self.predicted_steps, "jumps": self.jumps,
            "rollbacks": self.rollbacks, "divergences": self.divergences, "cost": self.cost,
        }  # fmt: skip

    def load_state_dict(self, values: Mapping[str, object]) -> None:
        """Take over sums."""
        for name, value in values.items():
            setattr(self, name, value)
