"""The loss scale that keeps float16 gradients within range (Micikevicius et al., 1710.03740)."""

from dataclasses import dataclass

from hybridtrain.config.rules import added_field

_GROWTH_STEPS = 2000
_LEAST = 1.0


@dataclass(slots=True)
class LossScale:
    """Halves the loss scale when gradients overflow and doubles it after 2000 steps without (torch.amp.GradScaler).

    Unlike there, an overflowed step is not skipped but repeated: no batch is lost, and each step has an update.
    """

    value: float = 2.0**16
    good_steps: int = 0
    """Steps since it last changed."""
    overflows: int = added_field(0)
    """Repetitions of steps."""

    def overflowed(self) -> bool:
        """Halve the scale; return whether the step may be repeated."""
        self.value, self.good_steps, self.overflows = self.value / 2, 0, self.overflows + 1
        return self.value >= _LEAST

    def succeeded(self) -> None:
        """Count a step without overflow."""
        self.good_steps += 1
        if self.good_steps == _GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
