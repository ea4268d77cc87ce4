"""What PyTorch's CUDA caching allocator holds: allocated, reserved, their peaks, and what it can still hand out."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class CudaModule(Protocol):
    """The part of ``torch.cuda`` that is read here."""

    def is_initialized(self) -> bool:
        """Say whether this process has a CUDA context."""
        ...

    def memory_stats_as_nested_dict(self, device: int | None = None) -> dict[str, Any]:
        """Return the allocator's counters."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaMemory:
    """The allocator's counters of one device, in bytes. Peaks count from the last ``reset_peak_memory_stats``."""

    allocated_bytes: int
    """In live tensors."""
    reserved_bytes: int
    """Taken from the driver: live tensors, cached blocks and the gaps between them."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int

    @property
    def free_bytes(self) -> int:
        """Reserved but in no tensor: handed out again without asking the driver."""
        return self.reserved_bytes - self.allocated_bytes


def read_cuda_memory(device: int | None = None, *, cuda: CudaModule = torch.cuda) -> CudaMemory | None:
    """Return the allocator's counters; None before CUDA is used in this process, and where there is none.

    One call into the allocator: ``torch.cuda.memory_allocated`` and its sisters each collect and flatten all of its
    counters to return one. Nothing waits for the device.

    Args:
        device: Index among the visible devices; None: the current device.
        cuda: What is asked.
    """
    if not cuda.is_initialized():
        return None
    stats = cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return CudaMemory(
        allocated_bytes=allocated["current"], reserved_bytes=reserved["current"],
        peak_allocated_bytes=allocated["peak"], peak_reserved_bytes=reserved["peak"],
    )  # fmt: skip
