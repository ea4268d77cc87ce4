"""One reading of everything a memory profile shows, from the best source this machine has."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch

from hybridtrain.profiler.nvml import (
    DeviceIdentity,
    DeviceReader,
    DeviceReadError,
    NvmlReader,
    identify_device,
    open_device_reader,
)
from hybridtrain.units import KIB


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


_STATUS = "/proc/self/status"
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident set size of this process, in bytes."""

    rss_bytes: int
    peak_rss_bytes: int
    """The largest since the process began."""


def read_process_memory(status: str | Path = _STATUS) -> ProcessMemory | None:
    """Return this process' resident memory; None where the system does not tell.

    Linux tells it in /proc. Elsewhere ``getrusage`` knows only the peak, which then stands for both figures.
    """
    try:
        content = _read(status)
        return ProcessMemory(_kib(content, b"\nVmRSS:") * KIB, _kib(content, b"\nVmHWM:") * KIB)
    except (OSError, ValueError):
        return _from_rusage()


def machine_memory_bytes(limits: tuple[str | Path, ...] = _CGROUP_LIMITS) -> int | None:
    """Return the memory this process may use, in bytes: the machine's, or its container's where that is less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no sysconf on this system, or not these names
        return None
    for path in limits:
        try:
            total = min(total, int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


def _read(path: str | Path) -> bytes:
    """Return the first 64 KiB of a file, without Python's buffers: this runs every step, and takes half the time."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 64 * KIB)
    finally:
        os.close(descriptor)


def _kib(content: bytes, key: bytes) -> int:
    begin = content.index(key) + len(key)
    return int(content[begin : content.index(b"kB", begin)])


def _from_rusage() -> ProcessMemory | None:
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows
        return None
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else KIB
    return ProcessMemory(peak, peak)


_NO_CARD = (
    "no CUDA card is visible to torch, so these are figures of this process' resident memory; for a card's figures "
    "install a CUDA build of torch and the NVIDIA driver, and check CUDA_VISIBLE_DEVICES"
)
_SLOW_SMI = (
    "every reading starts nvidia-smi, which takes tens of milliseconds; install nvidia-ml-py "
    "(pip install 'hybridtrain[cuda]') for readings of microseconds"
)


class MemorySource(StrEnum):
    """Where the figure of used memory comes from."""

    NVML = "NVML"
    """The whole card, all processes."""
    NVIDIA_SMI = "nvidia-smi"
    """The whole card, all processes."""
    ALLOCATOR = "torch allocator"
    """What this process' PyTorch reserved; without the CUDA context and other processes."""
    PROCESS = "process RSS"
    """Resident memory of this process on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """What was read at one moment; all in bytes."""

    used_bytes: int
    total_bytes: int | None
    """None: unknown."""
    source: MemorySource
    allocator: CudaMemory | None = None
    """None without CUDA."""
    process: ProcessMemory | None = None
    """None where the system does not tell."""


MemoryReader = Callable[[], MemoryReading]
"""Reads the memory now; raises OSError, RuntimeError or ValueError when it cannot."""

OpenDeviceReader = Callable[[DeviceIdentity], DeviceReader]


class SystemReader:
    """Reads the card and this process; without a card, this process alone.

    A card that stops answering is read no further: from then on the allocator's figures stand for it.

    Args:
        device: Index of the CUDA device; None: the current one, or the host where torch sees no CUDA.
        open_device: Opens the reader of a card; raises DeviceReadError.
    """

    def __init__(self, device: int | None = None, open_device: OpenDeviceReader = open_device_reader) -> None:
        self.note = ""
        """One sentence when a better source is missing: which, and what to do. Empty: nothing is missing."""
        self._card: DeviceReader | None = None
        self._card_source = MemorySource.NVML
        self._has_cuda = torch.cuda.is_available()
        self._device = 0
        if not self._has_cuda:
            self._total_bytes = machine_memory_bytes()
            self.note = _NO_CARD
            return
        self._device = torch.cuda.current_device() if device is None else device
        properties = torch.cuda.get_device_properties(self._device)
        self._total_bytes = properties.total_memory
        try:
            self._card = open_device(identify_device(self._device, properties))
        except DeviceReadError as error:
            self._leave_card(error)
        else:
            if not isinstance(self._card, NvmlReader):
                self._card_source, self.note = MemorySource.NVIDIA_SMI, _SLOW_SMI

    def __call__(self) -> MemoryReading:
        """Return the figures now; nothing waits for the device.

        Raises:
            OSError: neither a card nor this process' memory can be read on this system.
        """
        process = read_process_memory()
        if not self._has_cuda:
            if process is None:
                raise OSError("this system tells no process its resident memory")
            return MemoryReading(
                used_bytes=process.rss_bytes, total_bytes=self._total_bytes, source=MemorySource.PROCESS,
                process=process,
            )  # fmt: skip
        allocator = read_cuda_memory(self._device)
        if self._card is not None:
            try:
                memory = self._card.read()
            except DeviceReadError as error:
                self.close()
                self._leave_card(error)
            else:
                return MemoryReading(
                    used_bytes=memory.used_bytes, total_bytes=memory.total_bytes, source=self._card_source,
                    allocator=allocator, process=process,
                )  # fmt: skip
        return MemoryReading(
            used_bytes=allocator.reserved_bytes if allocator else 0, total_bytes=self._total_bytes,
            source=MemorySource.ALLOCATOR, allocator=allocator, process=process,
        )  # fmt: skip

    def close(self) -> None:
        """Release the card's reader."""
        if self._card is not None:
            self._card.close()
            self._card = None

    def _leave_card(self, error: DeviceReadError) -> None:
        self.note = f"{error}; used memory is what torch reserved, without the CUDA context and other processes"
