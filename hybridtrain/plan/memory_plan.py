"""The memory plan: where each tensor class lives, how it is stored, and the few settings of the step loop."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridtrain.errors import ConfigError
from hybridtrain.phase import Phase
from hybridtrain.plan.claim import Attention, PlanValue, Schedule, UpdateDevice
from hybridtrain.plan.placement import Codec, Placement


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
    kept_blocks: int
    """Last blocks whose activations are kept all the same, where the others' are recomputed."""
    grad_accum_steps: int
    """Micro-batches per optimizer step."""
    schedule: Schedule
    visit_micro_batches: int
    """Micro-batches that a vertical schedule takes through a block per visit; 0: all of the step."""
    loss_chunk_tokens: int
    """Tokens per slice of the logits; 0 computes them in one piece."""
    max_active_layers: int
    """Blocks whose weights are on the device at a time, where weights live elsewhere; the ones on the way included."""
    prefetch_distance: int
    """Blocks fetched ahead of the one at work; below ``max_active_layers``."""
    resident_layers: int
    """Blocks whose weights stay on the device, where the others' live elsewhere."""
    static_scales: bool
    """int8 weights keep the scales of their first values."""
    update_on: UpdateDevice
    attention: Attention
    history_codec: Codec
    """How tensors that remember the trajectory of a weight are stored; they live where the optimizer state does."""
    history_tensors: int
    """How many of them a parameter has: 0 without a predictor that needs them."""


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
        "grad": compute_dtype,
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
        kept_blocks=int(claims.get("kept_blocks", 0)),
        grad_accum_steps=int(claims.get("grad_accum_steps", 1)),
        schedule=Schedule(str(claims.get("schedule", Schedule.HORIZONTAL))),
        visit_micro_batches=int(claims.get("visit_micro_batches", 0)),
        loss_chunk_tokens=int(claims.get("loss_chunk_tokens", 0)),
        max_active_layers=int(claims.get("max_active_layers", 2)),
        prefetch_distance=min(int(claims.get("prefetch_distance", 1)), int(claims.get("max_active_layers", 2)) - 1),
        resident_layers=int(claims.get("resident_layers", 0)),
        static_scales=bool(claims.get("static_scales", 0)),
        update_on=UpdateDevice(str(claims.get("update_on", UpdateDevice.DEVICE))),
        attention=Attention(str(claims.get("attention", Attention.FLASH))),
        history_codec=Codec(str(claims.get("history_codec", Codec.ABSENT))),
        history_tensors=int(claims.get("history_tensors", 0)),
    )


def check_history(plan: PhasePlan, is_needed: bool, owner: str, *, num_tensors: int = 1) -> None:
    """Raise ``ConfigError`` unless a plan keeps the history that ``owner`` needs."""
    if is_needed and plan.history_tensors != num_tensors:
        fault = (
            f"needs {num_tensors} tensor{'s' * (num_tensors > 1)} per parameter to remember the trajectory, the stack "
            f"keeps {plan.history_tensors}; add an optimization of kind 'predictor_state' for this predictor"
        )
        raise ConfigError(owner, [fault])
