"""The factor of the loss that keeps float16 gradients within their range (Micikevicius et al., 1710.03740)."""

from dataclasses import dataclass

from hybridtrain.config.rules import added_field

_GROWTH_STEPS = 2000
_LEAST = 1.0


@dataclass(slots=True)
class LossScale:
    """Halved when gradients overflow, doubled after 2000 steps in which none did: torch.amp.GradScaler's numbers.

    A step whose gradients overflow is not left out, as there, but run again: no batch is lost, and the number of steps
    stays that of the updates.
    """

    value: float = 2.0**16
    good_steps: int = 0
    """Since it last changed."""
    overflows: int = added_field(0)
    """Steps that were run again, each time."""

    def overflowed(self) -> bool:
        """Halve the scale; return whether the step may be tried again."""
        self.value, self.good_steps, self.overflows = self.value / 2, 0, self.overflows + 1
        return self.value >= _LEAST

    def succeeded(self) -> None:
        """Count a step."""
        self.good_steps += 1
        if self.good_steps == _GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
