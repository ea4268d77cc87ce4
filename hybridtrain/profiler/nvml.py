"""Used and total memory of a graphics card, whatever allocates there: NVML first, ``nvidia-smi`` as the fallback.

Both sources give used = total - free, so that the driver's own reserve counts as used with either; ``memory.used`` of
``nvidia-smi`` leaves it out.
"""

import importlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hybridtrain.units import MIB

_SMI_QUERY = ("nvidia-smi", "--query-gpu=uuid,pci.bus_id,memory.total,memory.free", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S = 10.0  # a healthy driver answers within half a second

RunCommand = Callable[[Sequence[str]], str]
"""Runs a command and returns its output; raises OSError or subprocess.SubprocessError."""


class DeviceReadError(RuntimeError):
    """The card's memory could not be read; the message is a clause that says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a whole card, all processes together, in bytes."""

    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """What names a card outside of CUDA, where ``CUDA_VISIBLE_DEVICES`` does not count."""

    uuid: str = ""
    """Without the prefix ``GPU-`` or ``MIG-``; empty: unknown."""
    pci_bus_id: str = ""
    """``domain:bus:device.function`` in upper-case hexadecimal digits, eight of them for the domain; empty: unknown."""
    index: int = 0
    """In NVML's order, which is the order of PCI bus ids; used only where nothing better is known."""


class DeviceReader(Protocol):
    """Reads one card."""

    def read(self) -> DeviceMemory:
        """Return used and total bytes.

        Raises:
            DeviceReadError: the card does not answer.
        """
        ...

    def close(self) -> None:
        """Release what the reader holds."""
        ...


def identify_device(index: int, properties: Any = None, environ: Mapping[str, str] = os.environ) -> DeviceIdentity:
    """Return what names the visible device ``index`` outside of CUDA.

    Args:
        index: Among the visible devices, as in ``cuda:1``.
        properties: Its ``torch.cuda.get_device_properties``; None: read it if torch sees CUDA.
        environ: Where ``CUDA_VISIBLE_DEVICES`` is looked up when the properties name neither UUID nor bus.
    """
    if properties is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(index)
    uuid = _bare_uuid(str(getattr(properties, "uuid", "")))
    bus = getattr(properties, "pci_bus_id", None)
    if uuid or bus is not None:
        domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        return DeviceIdentity(uuid=uuid, pci_bus_id="" if bus is None else f"{domain:08X}:{bus:02X}:{device:02X}.0")
    entries = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    entry = entries[index] if index < len(entries) else str(index)
    return DeviceIdentity(index=int(entry)) if entry.isdigit() else DeviceIdentity(uuid=_bare_uuid(entry))


def open_device_reader(
    identity: DeviceIdentity, *, import_nvml: Callable[[], Any] | None = None, run: RunCommand | None = None
) -> DeviceReader:
    """Return the best reader that answers for this card: NVML, then ``nvidia-smi``.

    Args:
        identity: The card.
        import_nvml: Returns the module ``pynvml``; raises ImportError.
        run: Runs ``nvidia-smi``.

    Raises:
        DeviceReadError: neither answers; one sentence names what is missing from both and what to install.
    """
    try:
        return NvmlReader(identity, (import_nvml or _import_nvml)())
    except ImportError:
        nvml_fault = "NVML needs the package nvidia-ml-py (pip install 'hybridtrain[cuda]')"
    except DeviceReadError as error:
        nvml_fault = str(error)
    try:
        reader = NvidiaSmiReader(identity, run or _run)
        reader.read()
    except DeviceReadError as error:
        raise DeviceReadError(f"the card's used memory cannot be read: {nvml_fault}; {error}") from None
    return reader


class NvmlReader:
    """Reads a card through the driver's library; microseconds per reading.

    Raises:
        DeviceReadError: no driver, or NVML does not know the card.
    """

    def __init__(self, identity: DeviceIdentity, pynvml: Any) -> None:
        self._pynvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise DeviceReadError(f"NVML does not start ({error}); install the NVIDIA driver") from None
        try:
            self._handle = self._find(identity)
            self.read()
        except DeviceReadError:
            self.close()
            raise

    def read(self) -> DeviceMemory:
        """Return used and total bytes of the whole card."""
        try:
            memory = self._pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._pynvml.NVMLError as error:
            raise DeviceReadError(f"NVML does not read this card's memory ({error})") from None
        return DeviceMemory(used_bytes=memory.total - memory.free, total_bytes=memory.total)

    def close(self) -> None:
        """End the use of NVML that began with this reader; NVML counts its users."""
        try:
            self._pynvml.nvmlShutdown()
        except self._pynvml.NVMLError:
            return  # the driver went away first

    def _find(self, identity: DeviceIdentity) -> Any:
        nvml = self._pynvml
        ways: list[tuple[Callable[[Any], Any], str | int]] = []
        if identity.uuid:
            ways += [(nvml.nvmlDeviceGetHandleByUUID, f"{kind}-{identity.uuid}") for kind in ("GPU", "MIG")]
        if identity.pci_bus_id:
            ways.append((nvml.nvmlDeviceGetHandleByPciBusId, identity.pci_bus_id))
        if not ways:
            ways.append((nvml.nvmlDeviceGetHandleByIndex, identity.index))
        fault = ""
        for find, name in ways:
            try:
                return find(name)
            except nvml.NVMLError as error:
                fault = f"NVML does not know the card {name} ({error})"
        raise DeviceReadError(fault)


class NvidiaSmiReader:
    """Reads a card by running ``nvidia-smi``: a new process and tens of milliseconds per reading."""

    def __init__(self, identity: DeviceIdentity, run: RunCommand) -> None:
        self._identity = identity
        self._run = run

    def read(self) -> DeviceMemory:
        """Return used and total bytes of the whole card; nvidia-smi rounds to MiB."""
        try:
            output = self._run(_SMI_QUERY)
        except FileNotFoundError:
            raise DeviceReadError("nvidia-smi is not on the PATH (install the NVIDIA driver's tools)") from None
        except (OSError, subprocess.SubprocessError) as error:
            raise DeviceReadError(f"nvidia-smi fails ({error})") from None
        rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
        row = self._choose([row for row in rows if len(row) == 4])
        try:
            total_bytes, free_bytes = int(row[2]) * MIB, int(row[3]) * MIB
        except ValueError:
            raise DeviceReadError(f"nvidia-smi gives no memory for card {row[0]} ({row[2]}, {row[3]})") from None
        return DeviceMemory(used_bytes=total_bytes - free_bytes, total_bytes=total_bytes)

    def close(self) -> None:
        """Do nothing: each reading was a process of its own."""

    def _choose(self, rows: list[list[str]]) -> list[str]:
        card = self._identity
        for row in rows:
            if card.uuid and _bare_uuid(row[0]).startswith(card.uuid):
                return row
        for row in rows:
            if card.pci_bus_id and row[1].upper() == card.pci_bus_id:
                return row
        if not card.uuid and not card.pci_bus_id and card.index < len(rows):
            return rows[card.index]
        raise DeviceReadError(f"nvidia-smi does not list the card {card.uuid or card.pci_bus_id or card.index}")


def _bare_uuid(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def _import_nvml() -> Any:
    return importlib.import_module("pynvml")


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(  # noqa: S603  a fixed command without user input
        command, capture_output=True, text=True, check=True, timeout=_SMI_TIMEOUT_S
    )
    return done.stdout
