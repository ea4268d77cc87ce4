"""8-bit weights: matrices of the blocks in int8, with a scale per 256 elements or one range per matrix."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.config.rules import added_field
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, Presets, claimed_phases, setting_claims
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.memory_plan import DynamicRange, WidenBy
from hybridtrain.plan.placement import Codec, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weights(Optimization):
    """Store the blocks' matrices in 1.02 bytes per parameter, on the device or wherever weights live.

    They are widened to the compute dtype when their block is visited, or matrix by matrix. With a master copy they are
    its rounding to nearest; without one they are what is trained, and each update is rounded stochastically.
    """

    kind: ClassVar[str] = "int8_weights"
    PRESETS: ClassVar[Presets] = {"conservative": {"master": "float32"}, "aggressive": {"master": "absent"}}

    master: Literal["float32", "absent"] | None = None
    """float32: the codes are a rounding of an exact copy. absent: they are what is trained. None: as mixed precision
    says, a float32 copy without it; float32 where FULL is not among ``active_phases``."""
    static_scales: bool = False
    """Keep the scales of the first values, doubled for room, instead of taking them anew at each update."""
    symmetric: bool = added_field(True)
    """Codes from -127 to 127 stand for a range about zero. false: about the middle of its values, 4 more bytes per 256
    elements; better where values lie to one side."""
    dynamic_range: DynamicRange = added_field(DynamicRange.GROUP)
    """group: 256 elements share a range. tensor: a whole matrix does, and is updated in one piece; coarser, and its
    scale is kept per 256 elements all the same, so that it saves no bytes."""
    widen_by: WidenBy = added_field(WidenBy.BLOCK)
    """block: once a visit. matrix: one at a time, anew in the backward pass."""
    active_phases: tuple[Phase, ...] = tuple(Phase)
    """Phases with 8-bit weights. PREDICT without FULL: exact values wait on the host and come back to the bit."""

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the weights' storage."""
        is_guest = Phase.FULL not in self.active_phases
        master = "float32" if self.master is None and is_guest else self.master
        for phase in claimed_phases(self.active_phases):
            yield Claim("weight.codec", Codec.INT8_BLOCKS, phase)
            if master is not None:
                yield Claim("master.codec", Codec(master), phase)
            yield from setting_claims(self, phase)
        if is_guest and Phase.PREDICT in self.active_phases and master == "float32":
            yield Claim("master.placement", Placement.HOST, Phase.PREDICT)
