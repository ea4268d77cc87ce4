"""Mixed precision: forward and backward in 16 bits, the update in fp32."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, Presets, claimed_phases, no_phase_faults, setting_claims
from hybridtrain.plan.placement import Codec, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Store and compute weights in 16 bits, and say what the optimizer updates.

    float16 has a loss scale that adapts itself; bfloat16, with the range of float32, needs none.
    """

    kind: ClassVar[str] = "mixed_precision"
    PRESETS: ClassVar[Presets] = {"conservative": {"master": "float32"}, "aggressive": {"master": "absent"}}

    compute_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    master: Literal["float32", "split16", "absent"] = "float32"
    """float32: a separate copy, 4 bytes a parameter. split16: the same exact fp32 value as the bfloat16 weight plus
    16 more bits, 2 bytes. absent: none, weights are rounded stochastically after the update, 0 bytes."""
    active_phases: tuple[Phase, ...] = tuple(Phase)
    """Phases in 16 bits; others store and compute float32. PREDICT without FULL: the master, which must not be absent
    then, waits on the host, and exact values come back to the bit."""

    def __post_init__(self) -> None:
        faults = no_phase_faults(self.active_phases)
        if self.compute_dtype == "float16" and self.master != "float32":
            faults.append(f"master: '{self.master}' goes with bfloat16 only; float16 needs 'float32'")
        if faults:
            raise ValueError("\n".join(faults))

    def claims(self) -> Iterable[Claim]:
        """Return the claims on precision and master copy."""
        for phase in claimed_phases(self.active_phases):
            yield from setting_claims(self, phase)
            yield Claim("master.codec", Codec(self.master), phase)
        if Phase.PREDICT in self.active_phases and Phase.FULL not in self.active_phases:
            yield Claim("master.placement", Placement.HOST, Phase.PREDICT)
