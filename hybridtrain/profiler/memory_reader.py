"""Readings of all memory figures, from the best source of this machine."""

import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from hybridtrain.profiler.nvml import DeviceReader, DeviceReadError
from hybridtrain.units import KIB

_STATUS = "/proc/self/status"
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1
_NO_CARD = (
    "no CUDA card is visible to torch, so this is the process's resident memory; to profile a card install a CUDA "
    "build of torch and the NVIDIA driver, and check CUDA_VISIBLE_DEVICES"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaMemory:
    """The allocator's counters of one device, in bytes. Peaks count from the last ``reset_peak_memory_stats``."""

    allocated_bytes: int
    """Bytes in live tensors."""
    reserved_bytes: int
    """Bytes taken from the driver: live tensors, cached blocks and gaps."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int

    @property
    def free_bytes(self) -> int:
        """Reserved bytes without a tensor, reused without the driver."""
        return self.reserved_bytes - self.allocated_bytes


def read_cuda_memory(device: int | None = None) -> CudaMemory | None:
    """Return the allocator's counters of a device, by default the current one; None before CUDA is used here.

    One call into the allocator: ``torch.cuda.memory_allocated`` and its sisters each collect and flatten all of its
    counters to return one. Nothing waits for the device.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return CudaMemory(
        allocated_bytes=allocated["current"], reserved_bytes=reserved["current"],
        peak_allocated_bytes=allocated["peak"], peak_reserved_bytes=reserved["peak"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident set size of this process, in bytes."""

    rss_bytes: int
    peak_rss_bytes: int
    """Peak since the process started."""


def read_process_memory(status: str | Path = _STATUS) -> ProcessMemory:
    """Return this process' resident memory.

    On Linux from /proc; elsewhere ``getrusage`` has only the peak, which is used for both figures.
    """
    try:
        descriptor = os.open(status, os.O_RDONLY)  # without Python's buffers: this runs every step
        try:
            content = os.read(descriptor, 64 * KIB)
        finally:
            os.close(descriptor)
        return ProcessMemory(_kib(content, b"\nVmRSS:") * KIB, _kib(content, b"\nVmHWM:") * KIB)
    except (OSError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KIB)
        return ProcessMemory(peak, peak)


def _kib(content: bytes, key: bytes) -> int:
    begin = content.index(key) + len(key)
    return int(content[begin : content.index(b"kB", begin)])


def machine_memory_bytes(limits: tuple[str | Path, ...] = _CGROUP_LIMITS) -> int | None:
    """Return the memory limit of this process in bytes: the machine's or, if less, its container's."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):  # this system has not these names
        return None
    for path in limits:
        try:
            total = min(total, int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


class MemorySource(StrEnum):
    """The source of the figure of used memory."""

    NVML = "NVML"
    """Used memory of the whole card, all processes."""
    ALLOCATOR = "torch allocator"
    """Bytes reserved by PyTorch in this process, without CUDA context and other processes."""
    PROCESS = "process RSS"
    """Resident memory of this process on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Memory at one moment, in bytes."""

    used_bytes: int
    total_bytes: int | None
    """None: unknown."""
    source: MemorySource
    """Source of ``used_bytes``."""
    allocator: CudaMemory | None
    """The allocator's counters; None without CUDA."""
    process: ProcessMemory


MemoryReader = Callable[[], MemoryReading]
"""A function that reads the memory; raises OSError, RuntimeError or ValueError."""


class SystemReader:
    """Reads the card and this process; without a card, this process alone.

    If the card stops answering, the allocator's figures are used from then on.
    """

    def __init__(self) -> None:
        self.note = ""
        """Note on a better source that is missing, and the remedy; empty: none."""
        self._card: DeviceReader | None = None
        self._device: int | None = None
        if not torch.cuda.is_available():
            self._total_bytes = machine_memory_bytes()
            self.note = _NO_CARD
            return
        self._device = torch.cuda.current_device()
        self._total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        try:
            self._card = DeviceReader(self._device)
        except DeviceReadError as error:
            self._leave_card(error)

    def __call__(self) -> MemoryReading:
        """Return the figures now; nothing waits for the device."""
        process = read_process_memory()
        used_bytes, total_bytes, source = process.rss_bytes, self._total_bytes, MemorySource.PROCESS
        allocator = None
        if self._device is not None:
            allocator = read_cuda_memory(self._device)
            used_bytes, source = allocator.reserved_bytes if allocator else 0, MemorySource.ALLOCATOR
        if self._card is not None:
            try:
                memory = self._card.read()
                used_bytes, total_bytes, source = memory.used_bytes, memory.total_bytes, MemorySource.NVML
            except DeviceReadError as error:
                self.close()
                self._leave_card(error)
        return MemoryReading(
            used_bytes=used_bytes, total_bytes=total_bytes, source=source, allocator=allocator, process=process
        )

    def close(self) -> None:
        """Release the card's reader."""
        if self._card is not None:
            self._card.close()
            self._card = None

    def _leave_card(self, error: DeviceReadError) -> None:
        self.note = f"{error}; used memory is what torch reserved, without the CUDA context and other processes"
