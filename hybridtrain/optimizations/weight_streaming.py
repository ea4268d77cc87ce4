"""Weight streaming: blocks wait on the host or on disk and come to the device just in time."""

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
    """Blocks on the device at a time, those on the way included: 1 cannot hide any copy."""
    prefetch_distance: int | None = None
    """Blocks fetched ahead, below max_active_layers, which counts the block at work too. None: 1, or 0 where one layer
    is active."""
    resident_layers: int = 0
    """Blocks that stay on the device beside the streamed ones, spread evenly among them."""
    tier: Literal["host", "disk"] = "host"
    """Where weights live."""
    active_phases: tuple[Phase, ...] = tuple(Phase)
    """Phases with streaming; in others weights are on the device."""

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the weights' place and on the places of active blocks."""
        for phase in claimed_phases(self.active_phases):
            yield Claim("weight.placement", Placement(self.tier), phase)
        yield from setting_claims(self)
        if self.prefetch_distance is None:
            yield Claim("prefetch_distance", min(1, self.max_active_layers - 1))
