"""Mixed precision: forward and backward in 16 bits, the update in fp32."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.config.rules import added_field
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Claim, Presets, check_settings, claimed_phases
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Codec, Placement

ComputeDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision(Optimization):
    """Store and compute weights in 16 bits, and choose the values that the optimizer updates.

    float16 has a loss scale that adapts itself; bfloat16, with the range of float32, needs none.
    """

    kind: ClassVar[str] = "mixed_precision"
    PRESETS: ClassVar[Presets] = {"conservative": {"master": "float32"}, "aggressive": {"master": "absent"}}

    compute_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    master: Literal["float32", "split16", "absent"] = "float32"
    """float32: a separate copy, 4 bytes per parameter. split16: the same exact fp32 value as the bfloat16 weight plus
    16 more bits, 2 bytes. absent: none, weights are rounded stochastically after the update, 0 bytes."""
    active_phases: tuple[Phase, ...] = tuple(Phase)
    """Phases in 16 bits; others store and compute float32. PREDICT without FULL: the master, which must not be absent
    then, waits on the host, and exact values come back to the bit."""
    warmup_dtype: ComputeDtype | None = added_field(None)
    """Of WARMUP, where it is another than ``compute_dtype`` in an active phase and float32 in the others."""
    full_dtype: ComputeDtype | None = added_field(None)
    """Likewise of FULL."""
    predict_dtype: ComputeDtype | None = added_field(None)
    """Likewise of PREDICT."""
    correct_dtype: ComputeDtype | None = added_field(None)
    """Likewise of CORRECT."""

    def __post_init__(self) -> None:
        faults = []
        used = {self.dtype_in(phase) for phase in Phase}
        if self.active_phases and used == {"float32"}:
            faults.append("compute_dtype: float32 in every phase is plain training; drop the optimization instead")
        if "float16" in used and self.master != "float32":
            faults.append(f"master: '{self.master}' goes with bfloat16 only; float16 needs 'float32'")
        check_settings(self, faults)

    def dtype_in(self, phase: Phase) -> ComputeDtype:
        """Return the element type of the arithmetic of a phase."""
        own: ComputeDtype | None = getattr(self, f"{phase}_dtype")
        return own or (self.compute_dtype if phase in self.active_phases else "float32")

    def claims(self) -> Iterable[Claim]:
        """Return the claims on precision and master copy."""
        dtypes = {phase: self.dtype_in(phase) for phase in Phase}
        short = [phase for phase in Phase if dtypes[phase] != "float32"]
        for phase in claimed_phases(short) if len(set(dtypes.values())) == 1 else short:
            yield Claim("compute_dtype", Codec(dtypes[phase or Phase.FULL]), phase)
            yield Claim("master.codec", Codec(self.master), phase)
        if Phase.PREDICT in short and Phase.FULL not in short:
            yield Claim("master.placement", Placement.HOST, Phase.PREDICT)
