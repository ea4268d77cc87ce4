"""AdEMAMix (Pagliardini et al., 2409.03137): AdamW that also moves along a slow average of the gradients."""

from dataclasses import dataclass, field, fields
from typing import ClassVar

from hybridtrain.optim.adamw import AdamWConfig
from hybridtrain.optim.slow_average import SlowMomentum, SlowStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AdEMAMix(AdamWConfig):
    """The average is kept where the plan says: an optimization of kind 'predictor_state' must be in the stack."""

    kind: ClassVar[str] = "ademamix"

    slow: SlowMomentum = field(default_factory=SlowMomentum)
    """The slow average, a table of its own."""

    @classmethod
    def beside(cls, adamw: AdamWConfig, slow: SlowMomentum) -> "AdEMAMix":
        """Return AdamW with a slow average."""
        return cls(**{field.name: getattr(adamw, field.name) for field in fields(adamw)}, slow=slow)

    def step_hook(self, number: int, total_steps: int) -> SlowStep:
        """Return the average's decay, and the move."""
        return SlowStep(self.slow.beta_at(number, total_steps, self.beta1), self.slow.alpha_at(number, total_steps))
