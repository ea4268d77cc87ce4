"""8-bit weights: matrices of the blocks in int8, with a range per 256 elements, per row or per matrix."""

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
    """Store the blocks' matrices in 1.02 bytes per parameter, on any tier.

    They are dequantized to the compute dtype per block visit, or matrix by matrix. With a master they are its rounding
    to nearest; without one each update is rounded stochastically.
    """

    kind: ClassVar[str] = "int8_weights"
    PRESETS: ClassVar[Presets] = {"conservative": {"master": "float32"}, "aggressive": {"master": "absent"}}

    master: Literal["float32", "absent"] | None = None
    """float32: a master weight is kept. absent: the codes themselves are trained. None: as mixed_precision sets it;
    float32 without it, or if FULL is not in ``active_phases``."""
    static_scales: bool = False
    """Keep twice the initial scales instead of new scales at each update."""
    symmetric: bool = added_field(True)
    """Whether ranges are symmetric about zero. false: a zero point per 256 elements (4 bytes more), better for
    one-sided values."""
    dynamic_range: DynamicRange = added_field(DynamicRange.GROUP)
    """group: 256 elements share a range. row: a row of a matrix does, and int8 matmuls take the codes as they are.
    tensor: a whole matrix does, which is coarser. With row and tensor a matrix is updated in one piece."""
    widen_by: WidenBy = added_field(WidenBy.BLOCK)
    """Unit of dequantization. block: once per visit. matrix: one at a time, again in the backward pass."""
    active_phases: tuple[Phase, ...] = tuple(Phase)
    """Phases with 8-bit weights. PREDICT without FULL: exact values are kept on the host and restored bit-exactly."""

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
