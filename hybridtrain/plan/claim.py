"""A claim: one optimization's wish for one cell or setting of the memory plan."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Codec, Placement


class Schedule(StrEnum):
    """In which order micro-batches and blocks are visited within one optimizer step."""

    HORIZONTAL = "horizontal"
    """Each micro-batch passes all blocks before the next one starts."""
    VERTICAL = "vertical"
    """All micro-batches pass a block before the next block is touched."""


class UpdateDevice(StrEnum):
    """Where the optimizer's arithmetic runs."""

    DEVICE = "device"
    HOST = "host"


class Attention(StrEnum):
    """How attention is computed."""

    FLASH = "flash"
    """By a kernel that never holds the scores of all pairs of tokens."""
    UNFUSED = "unfused"
    """By plain ops, one of which makes them."""


PlanValue = int | Placement | Codec | Schedule | UpdateDevice | Attention

CELL_PATHS = tuple(
    f"{tensor_class}.{column}"
    for tensor_class in ("weight", "master", "grad", "optim_state", "boundary")
    for column in ("placement", "codec")
)
SETTING_PATHS = (
    "compute_dtype",
    "recompute_every",
    "kept_blocks",
    "grad_accum_steps",
    "schedule",
    "visit_micro_batches",
    "loss_chunk_tokens",
    "max_active_layers",
    "prefetch_distance",
    "resident_layers",
    "static_scales",
    "update_on",
    "attention",
    "history_codec",
    "history_tensors",
)
PLAN_PATHS = CELL_PATHS + SETTING_PATHS


@dataclass(frozen=True, slots=True)
class Claim:
    """One value for one path of the plan, for one phase or for all of them."""

    path: str
    """One of ``PLAN_PATHS``."""
    value: PlanValue
    phase: Phase | None = None
    """None: every phase."""

    def __post_init__(self) -> None:
        assert self.path in PLAN_PATHS, f"no such path in the memory plan: {self.path}"


def claimed_phases(active: Iterable[Phase]) -> list[Phase | None]:
    """Return the phases that an optimization claims for: None alone where it acts in every one."""
    chosen = [phase for phase in Phase if phase in set(active)]
    return [None] if len(chosen) == len(Phase) else list(chosen)


def no_phase_faults(active: Iterable[Phase]) -> list[str]:
    """Return the fault of an optimization that acts nowhere."""
    return [] if list(active) else ["active_phases: empty; name at least one phase or drop the optimization"]
