"""The memory plan: where each tensor class lives, how it is stored, and the few settings of the step loop."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridtrain.phase import Phase
from hybridtrain.plan.claim import PlanValue, Schedule
from hybridtrain.plan.tensor_class import Codec, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Placement and storage format of one tensor class."""

    placement: Placement
    codec: Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The whole table for one phase."""

    weight: Cell
    master: Cell
    grad: Cell
    optim_state: Cell
    boundary: Cell
    compute_dtype: Codec
    """Element type of the forward and backward arithmetic."""
    recompute_every: int
    """Keep one boundary per this many blocks and recompute the rest in the backward pass; 0 keeps everything."""
    grad_accum_steps: int
    """Micro-batches per optimizer step."""
    schedule: Schedule
    loss_chunk_tokens: int
    """Tokens per slice of the logits; 0 computes them in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One table per phase."""

    phases: Mapping[Phase, PhasePlan]

    def for_phase(self, phase: Phase) -> PhasePlan:
        """Return the table that is in force during ``phase``."""
        return self.phases[phase]


def resolve(claims: Mapping[str, PlanValue]) -> PhasePlan:
    """Fill every cell that nobody claimed.

    Weights are stored in the compute dtype, gradients and boundaries too; a master copy exists only where the
    stored weights are less exact than fp32; moments are fp32.
    """
    compute_dtype = Codec(str(claims.get("compute_dtype", Codec.FLOAT32)))
    weight_codec = Codec(str(claims.get("weight.codec", compute_dtype)))
    default_codecs = {
        "weight": weight_codec,
        "master": Codec.ABSENT if weight_codec is Codec.FLOAT32 else Codec.FLOAT32,
        "grad": weight_codec,
        "optim_state": Codec.FLOAT32,
        "boundary": compute_dtype,
    }

    def cell(name: str) -> Cell:
        return Cell(
            placement=Placement(str(claims.get(f"{name}.placement", Placement.DEVICE))),
            codec=Codec(str(claims.get(f"{name}.codec", default_codecs[name]))),
        )

    return PhasePlan(
        weight=cell("weight"),
        master=cell("master"),
        grad=cell("grad"),
        optim_state=cell("optim_state"),
        boundary=cell("boundary"),
        compute_dtype=compute_dtype,
        recompute_every=int(claims.get("recompute_every", 0)),
        grad_accum_steps=int(claims.get("grad_accum_steps", 1)),
        schedule=Schedule(str(claims.get("schedule", Schedule.HORIZONTAL))),
        loss_chunk_tokens=int(claims.get("loss_chunk_tokens", 0)),
    )
