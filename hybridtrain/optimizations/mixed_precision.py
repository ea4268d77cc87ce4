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
    """Store and compute weights in 16 bits, and choose the master weights.

    float16 uses dynamic loss scaling; bfloat16, with float32's range, needs none.
    """

    kind: ClassVar[str] = "mixed_precision"
    PRESETS: ClassVar[Presets] = {"conservative": {"master": "float32"}, "aggressive": {"master": "absent"}}

    compute_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    master: Literal["float32", "split16", "absent"] = "float32"
    """float32: a master copy, 4 bytes per parameter. split16: the same fp32 value as the bfloat16 weight plus 16 bits,
    2 bytes. absent: stochastic rounding, 0 bytes."""
    active_phases: tuple[Phase, ...] = tuple(Phase)
    """Phases in 16 bits; others are float32. PREDICT without FULL: the required master is kept on the host and restored
    bit-exactly."""
    warmup_dtype: ComputeDtype | None = added_field(None)
    """Compute dtype of WARMUP; None: ``compute_dtype`` if the phase is active, else float32."""
    full_dtype: ComputeDtype | None = added_field(None)
    """Compute dtype of FULL, likewise."""
    predict_dtype: ComputeDtype | None = added_field(None)
    """Compute dtype of PREDICT, likewise."""
    correct_dtype: ComputeDtype | None = added_field(None)
    """Compute dtype of CORRECT, likewise."""

    def __post_init__(self) -> None:
        faults = []
        used = {self.dtype_in(phase) for phase in Phase}
        if self.active_phases and used == {"float32"}:
            faults.append("compute_dtype: float32 in every phase needs no mixed_precision; drop the optimization")
        if "float16" in used and self.master != "float32":
            faults.append(f"master: '{self.master}' works with bfloat16 only; float16 needs 'float32'")
        check_settings(self, faults)

    def dtype_in(self, phase: Phase) -> ComputeDtype:
        """Return the compute dtype of a phase."""
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
