"""AdEMAMix (Pagliardini et al., 2409.03137): AdamW with a second, slow momentum."""

from dataclasses import dataclass, field, fields
from typing import ClassVar

from hybridtrain.optim.adamw import AdamWConfig
from hybridtrain.optim.slow_average import SlowMomentum, SlowStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AdEMAMix(AdamWConfig):
    """AdamW with a slow average, which needs 'predictor_state' in the stack."""

    kind: ClassVar[str] = "ademamix"

    slow: SlowMomentum = field(default_factory=SlowMomentum)
    """Settings of the slow average, a table of its own."""

    @classmethod
    def beside(cls, adamw: AdamWConfig, slow: SlowMomentum) -> "AdEMAMix":
        """Return AdEMAMix with the settings of an AdamW."""
        return cls(**{field.name: getattr(adamw, field.name) for field in fields(adamw)}, slow=slow)

    def step_hook(self, number: int, total_steps: int) -> SlowStep:
        """Return the average's decay, and the move."""
        return SlowStep(self.slow.beta_at(number, total_steps, self.beta1), self.slow.alpha_at(number, total_steps))
