"""One reading of everything a memory profile shows, from the best source this machine has."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch

from hybridtrain.profiler.cuda_memory import CudaMemory, read_cuda_memory
from hybridtrain.profiler.nvml import (
    DeviceIdentity,
    DeviceReader,
    DeviceReadError,
    NvmlReader,
    identify_device,
    open_device_reader,
)
from hybridtrain.profiler.process_memory import ProcessMemory, machine_memory_bytes, read_process_memory

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
