"""One op of a step: what it does, where it runs, and what it waits for."""

from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """The stage of a step."""

    BUILD = "build"
    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Lane(StrEnum):
    """Parallel lanes: each works in order, and waits for others only where recorded."""

    COMPUTE = "compute"
    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    HOST = "host"
    """CPU arithmetic."""
    DISK = "disk"
    LINK = "link"
    """Collectives between cards, and their side-stream work."""


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One op, as seen by the dispatcher."""

    name: str
    event: int
    """Number of events before it; its outputs follow."""
    stage: Stage
    unit: str
    is_matmul: bool
    flops: int
    """Floating point operations by torch's flop counter; 0 except for matmuls and attention."""
    bytes_moved: int
    """Bytes of inputs and outputs."""
    dtype: str
    """Dtype of the first floating-point operand."""
    lane: Lane = Lane.COMPUTE
    waits: tuple[int, ...] = ()
    """Numbers of earlier ops on other lanes that must complete first."""
    shape: tuple[int, int, int] | None = None
    """Rows, columns and inner dimension of a matmul, rows of a batch added. Of attention heads of all sequences, length
    and head size."""
    link_seconds: float = 0.0
    """Seconds that a collective occupies the link."""


def placed(record: OpRecord, event: int, stage: Stage, unit: str, waits: tuple[int, ...]) -> OpRecord:
    """Return an op of the compute lane renumbered."""
    return OpRecord(
        record.name, event, stage, unit, record.is_matmul, record.flops, record.bytes_moved, record.dtype,
        Lane.COMPUTE, waits, record.shape,
    )  # fmt: skip
