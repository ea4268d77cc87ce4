"""Gradient checkpointing: drop activations in the forward pass, recompute them in the backward pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, Presets, claimed_phases, setting_claims
from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointing(Optimization):
    """Keep one block input per ``recompute_every`` blocks; costs one more forward pass."""

    kind: ClassVar[str] = "gradient_checkpointing"
    SWITCH: ClassVar[str] = "recompute_every"
    PRESETS: ClassVar[Presets] = {"conservative": {"recompute_every": 8}, "aggressive": {"recompute_every": 1}}

    recompute_every: int = 8
    """Blocks per kept boundary: 1 needs the least memory during recomputation, larger values keep fewer boundaries."""
    kept_blocks: int = 0
    """Number of last blocks that keep all activations; they are freed first, so they cost the least memory."""
    keep_attention: bool = False
    """Keep the output of each recomputed block's attention, with its log-sum-exp, beside the block's input, so that it
    is computed once, not twice. Needs ``recompute_every = 1``."""
    active_phases: tuple[Phase, ...] = tuple(Phase)
    """Phases with checkpointing; others keep everything. PREDICT has no backward pass and keeps nothing."""

    def claims(self) -> Iterable[Claim]:
        """Return the claims on recomputation."""
        for phase in claimed_phases(self.active_phases):
            yield from setting_claims(self, phase)
