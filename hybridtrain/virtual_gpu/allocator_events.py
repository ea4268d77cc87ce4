"""What the allocator did, one event at a time, and how it says that memory ran out."""

from typing import Literal, NamedTuple

from hybridtrain.errors import OutOfMemoryError
from hybridtrain.units import format_bytes

Action = Literal[
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
]
"""Names as in torch's memory snapshots."""


# A tuple and not a dataclass: up to two are built per call, and a frozen dataclass takes three times as long.
class AllocatorEvent(NamedTuple):
    """One step of the allocator."""

    ordinal: int
    """Place in the history, from 0; the key under which exporters keep times, categories and stack frames."""
    action: Action
    address: int
    """Start of the block, segment or mapped range; for ``oom`` the bytes still free under the capacity."""
    size: int
    """Requested bytes of alloc and free; bytes of the segment or mapped range; rounded bytes of ``oom``."""
    stream: int


def record(history: list[AllocatorEvent] | None, action: Action, address: int, size: int, stream: int) -> None:
    """Append an event with the next ordinal; do nothing when no history is kept."""
    if history is not None:
        history.append(AllocatorEvent(len(history), action, address, size, stream))


class AllocatorOutOfMemory(OutOfMemoryError):  # noqa: N818  an outcome that planners report, named like one
    """The capacity does not hold a request, even with every cached segment given back. Fields are bytes."""

    def __init__(
        self, *, requested_bytes: int, reserved_bytes: int, allocated_bytes: int, capacity_bytes: int | None
    ) -> None:
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes
        self.capacity_bytes = capacity_bytes
        limit = "less than 1 EiB" if capacity_bytes is None else format_bytes(capacity_bytes)
        super().__init__(
            f"virtual GPU: no room for {format_bytes(requested_bytes)}, with {format_bytes(allocated_bytes)} "
            f"allocated and {format_bytes(reserved_bytes)} reserved; the limit is {limit}; shrink "
            "the step, or use expandable_segments when much more is reserved than allocated."
        )
