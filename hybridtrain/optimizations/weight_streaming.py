"""Weight streaming: blocks are on host or disk, and are prefetched to the device."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, Presets, claimed_phases, setting_claims
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStreaming(Optimization):
    """Keep ``max_active_layers`` blocks on the device; embedding and head always stay there."""

    kind: ClassVar[str] = "weight_streaming"
    PRESETS: ClassVar[Presets] = {
        "conservative": {"max_active_layers": 4, "prefetch_distance": 2},
        "aggressive": {"max_active_layers": 1, "prefetch_distance": 0},
    }

    max_active_layers: int = 2
    """Blocks on the device at a time, including those in transfer; 1 hides no copy."""
    prefetch_distance: int | None = None
    """Blocks fetched ahead; below max_active_layers, which includes the current block. None: 1, or 0 if
    max_active_layers is 1."""
    resident_layers: int = 0
    """Resident blocks, spread evenly among the streamed ones."""
    tier: Literal["host", "disk"] = "host"
    """Tier of the weights."""
    active_phases: tuple[Phase, ...] = tuple(Phase)
    """Phases with streaming; in others weights are on the device."""

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the weights' placement and the block slots."""
        for phase in claimed_phases(self.active_phases):
            yield Claim("weight.placement", Placement(self.tier), phase)
        yield from setting_claims(self)
        if self.prefetch_distance is None:
            yield Claim("prefetch_distance", min(1, self.max_active_layers - 1))
