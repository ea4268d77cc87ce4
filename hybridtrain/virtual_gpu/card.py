"""Graphics cards: the catalogue, and any card a user describes in a TOML file; and the machine around the card."""

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path

from hybridtrain.config.decode import decode, load_toml
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.units import GB, GIB, MIB

_HOPPER = 9
_DATA_CENTER = frozenset({"8.0", "9.0"})
"""A100, H100, H200."""
_GEFORCE = frozenset({"8.6", "8.9", "12.0"})
"""RTX 30, 40 and 50; workstation cards of the same chips have other names and other power limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Facts about one card, from its vendor."""

    name: str
    """As nvidia-smi has it: GeForce cards are told by it."""
    memory_mib: int
    """Total memory as nvidia-smi reports it."""
    compute_capability: str
    """As '8.9'."""
    tflops_bf16: float
    """Dense tensor-core rate with fp32 accumulation."""
    tflops_fp32: float
    """Rate of the CUDA cores, which fp32 matmuls use unless TF32 is allowed."""
    memory_gbps: float
    """GB/s of device memory."""
    pcie_gbps: float
    """GB/s of the bus in one direction, theoretical."""
    sms: int = 0
    """Multiprocessors; 0: unknown, nothing planned depends on it."""
    l2_mib: int = 0
    """Second-level cache; 0: unknown, every op is taken to read device memory."""
    tops_int8: float = 0.0
    """0: unknown."""
    context_mib: int = 426
    """CUDA context, outside the allocator. The default was read on an RTX 6000 Ada with torch 2.10;
    published figures go from 274 to about 430 with lazy module loading."""

    def __post_init__(self) -> None:
        numbers = ("memory_mib", "tflops_bf16", "tflops_fp32", "memory_gbps", "pcie_gbps")
        faults = [f"{name}: {getattr(self, name)} must be above 0" for name in numbers if getattr(self, name) <= 0]
        if self.context_mib < 0 or self.context_mib >= self.memory_mib:
            faults.append(f"context_mib: {self.context_mib} must be at least 0 and below memory_mib")
        if not re.fullmatch(r"\d+\.\d+", self.compute_capability):
            faults.append(f"compute_capability: '{self.compute_capability}' must read like '8.9'")
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def family(self) -> str:
        """Cards that reach about the same shares of their peak rates; ``other`` where nothing is known of them."""
        if self.compute_capability in _DATA_CENTER:
            return "data_center"
        is_geforce = "GeForce" in self.name and self.compute_capability in _GEFORCE
        return "geforce" if is_geforce else "other"

    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes."""
        return self.memory_mib * MIB

    @property
    def context_bytes(self) -> int:
        """Bytes of the CUDA context."""
        return self.context_mib * MIB

    @property
    def allocator_capacity_bytes(self) -> int:
        """What is left for the allocator."""
        return self.memory_bytes - self.context_bytes

    @property
    def cublas_workspace_bytes(self) -> int:
        """Per handle and stream, inside the allocator (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
        major = int(self.compute_capability.split(".")[0])
        return 33_554_432 if major >= _HOPPER else 8_519_680

    @property
    def flops_per_second(self) -> dict[str, float]:
        """Peak rate by element type."""
        tensor_cores = self.tflops_bf16 * 1e12
        return {"bfloat16": tensor_cores, "float16": tensor_cores, "float32": self.tflops_fp32 * 1e12}

    @property
    def memory_bytes_per_second(self) -> float:
        """Peak rate of device memory."""
        return self.memory_gbps * GB

    @property
    def bus_bytes_per_second(self) -> float:
        """Peak rate of the bus, one direction."""
        return self.pcie_gbps * GB


@cache
def card_catalogue() -> dict[str, Card]:
    """Return every known card by its short name."""
    text = resources.files("hybridtrain.virtual_gpu").joinpath("hardware.toml").read_text(encoding="utf-8")
    return {name: decode(Card, table, source=f"hardware.toml [{name}]") for name, table in tomllib.loads(text).items()}


def find_card(name: str) -> Card:
    """Return a card by short name, or read it from a TOML file when ``name`` ends in ``.toml``.

        >>> card = find_card("rtx-4090")
        >>> card.name, card.memory_bytes, card.tflops_bf16
        ('NVIDIA GeForce RTX 4090', 25757220864, 165.2)

    A name in the catalogue is a table of ``hardware.toml``; a file of your own has the same entries.

    Raises:
        ConfigError: unknown name (the nearest one is suggested), or a faulty file.
    """
    if name.endswith(".toml"):
        return load_toml(Card, Path(name))
    catalogue = card_catalogue()
    if name not in catalogue:
        known = unknown_name("card", name, catalogue)
        raise ConfigError("card", [f"{known} Your own card: a .toml file with its figures."])
    return catalogue[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts about a machine. The defaults are a desktop with two channels of DDR5 and one PCIe 4.0 drive (assumed)."""

    memory_gib: float | None = None
    """None: as much as a run asks for."""
    reserved_gib: float = 4.0
    """Of the memory: what system, libraries and the process itself take beside tensors (assumed)."""
    memory_gbps: float = 60.0
    """GB/s of host memory, read and written together; an update on the host is bound by it."""
    disk_gib: float | None = None
    """Free space; None: as much as a run asks for."""
    disk_gbps: float = 4.0
    """GB/s of the drive, one direction at a time."""

    def __post_init__(self) -> None:
        faults = [
            f"{name}: {value} must be above 0"
            for name in ("memory_gib", "memory_gbps", "disk_gib", "disk_gbps")
            if (value := getattr(self, name)) is not None and value <= 0
        ]
        if self.reserved_gib < 0:
            faults.append(f"reserved_gib: {self.reserved_gib} must be at least 0")
        if self.memory_gib is not None and self.memory_gib <= self.reserved_gib:
            faults.append(f"memory_gib: {self.memory_gib} must be above reserved_gib ({self.reserved_gib})")
        if faults:
            raise ValueError("\n".join(faults))

    def shared(self, ranks: int) -> "Host":
        """Return the machine as each of so many ranks finds it that use its memory and its disk alike."""
        if ranks == 1:
            return self
        names = ("memory_gib", "reserved_gib", "memory_gbps", "disk_gib", "disk_gbps")
        whole = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value / ranks for name, value in whole.items() if value is not None})

    @property
    def tensor_bytes(self) -> float:
        """Host memory that tensors may take."""
        return float("inf") if self.memory_gib is None else (self.memory_gib - self.reserved_gib) * GIB

    @property
    def disk_bytes(self) -> float:
        """Space that files may take."""
        return float("inf") if self.disk_gib is None else self.disk_gib * GIB

    @property
    def memory_bytes_per_second(self) -> float:
        """Rate of host memory."""
        return self.memory_gbps * GB

    @property
    def disk_bytes_per_second(self) -> float:
        """Rate of the drive."""
        return self.disk_gbps * GB
