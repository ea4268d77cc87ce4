"""Gradient checkpointing: drop activations in the forward pass, recompute them in the backward pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.config.rules import below_least
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, claimed_phases, no_phase_faults


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointing:
    """Keep one block input per ``interval`` blocks; costs one more forward pass of every block."""

    kind: ClassVar[str] = "gradient_checkpointing"

    interval: int = 8
    """Blocks per kept boundary. 1 holds the least while a block is recomputed, larger values keep fewer boundaries."""

    keep_last: int = 0
    """Last blocks that keep everything: their backward pass comes first, so what they hold is the cheapest to hold."""
    active_phases: tuple[Phase, ...] = tuple(Phase)
    """Phases with it; in others everything is kept. PREDICT runs no backward pass and keeps nothing either way."""

    def __post_init__(self) -> None:
        faults = below_least(self, ("keep_last",), least=0)
        if self.interval < 1:
            faults.append(f"interval: {self.interval} must be at least 1; drop the optimization to keep everything")
        faults += no_phase_faults(self.active_phases)
        if faults:
            raise ValueError("\n".join(faults))

    def claims(self) -> Iterable[Claim]:
        """Return the claims on recomputation."""
        for phase in claimed_phases(self.active_phases):
            yield Claim("recompute_every", self.interval, phase)
            yield Claim("kept_blocks", self.keep_last, phase)
