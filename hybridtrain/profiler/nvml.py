"""Used and total memory of a graphics card, over all processes, from NVML (the package nvidia-ml-py).

Used is total - free, so that the driver's own reserve counts as used.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch


class DeviceReadError(RuntimeError):
    """The card's memory could not be read; the message states the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a whole card, all processes together, in bytes."""

    used_bytes: int
    total_bytes: int


class DeviceReader:
    """Reads the memory of a visible CUDA device, in microseconds; raises ``DeviceReadError`` if it cannot."""

    def __init__(self, index: int) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise DeviceReadError(
                "the card's used memory cannot be read: install the package nvidia-ml-py (pip install "
                "'hybridtrain[cuda]')"
            ) from None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise DeviceReadError(f"NVML does not start ({error}); install the NVIDIA driver") from None
        try:
            self._handle = self._find(torch.cuda.get_device_properties(index))
            self.read()
        except DeviceReadError:
            self.close()
            raise

    def read(self) -> DeviceMemory:
        """Return used and total bytes; raises ``DeviceReadError`` where the card does not answer."""
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            raise DeviceReadError(f"NVML does not read this card's memory ({error})") from None
        return DeviceMemory(memory.total - memory.free, memory.total)

    def close(self) -> None:
        """Shut down this reader's use of NVML, which counts its users."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return  # the driver went away first

    def _find(self, properties: Any) -> Any:
        """Return NVML's handle by what names a card outside of CUDA, where CUDA_VISIBLE_DEVICES does not count."""
        nvml = self._nvml
        if not hasattr(properties, "uuid"):  # a virtual card
            raise DeviceReadError("torch's device is not a physical card, so NVML cannot read its memory")
        uuid = str(properties.uuid).removeprefix("GPU-").removeprefix("MIG-").lower()
        bus = f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
        by_uuid, by_bus = nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetHandleByPciBusId
        fault = ""
        for find, name in ((by_uuid, f"GPU-{uuid}"), (by_uuid, f"MIG-{uuid}"), (by_bus, bus)):
            try:
                return find(name)
            except nvml.NVMLError as error:
                fault = f"NVML does not know the card {name} ({error})"
        raise DeviceReadError(fault)
