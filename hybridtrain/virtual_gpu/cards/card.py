"""Graphics cards: the catalogue, and any card a user describes in a TOML file; and the machine around the card."""

import re
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache
from math import floor

from hybridtrain.config.decode import decode
from hybridtrain.config.rules import added_field
from hybridtrain.errors import ConfigError
from hybridtrain.units import GB, GIB, MIB, format_bytes
from hybridtrain.virtual_gpu.cards.card_names import unknown_card
from hybridtrain.virtual_gpu.cards.catalogue import figure_faults, find_entry, raise_faults, tables

MARGIN_SHARE = 0.05
"""Of a card's memory: a plan that leaves less of it free fits barely, on every card and in every answer.

A plan cannot know the driver (published capacities of one card differ by up to 0.8 %, of one with 4 GB by 4 %), how
large context and libraries are (published figures of one card differ by up to 1 %), and what else draws on the card: a
display takes 0.2 to 0.5 GiB, 1 to 3 % of 16 GB (assumed).
"""
NOT_FOUND = "not found"
"""The mark of a source that was searched for in vain."""
_KEPT_MIB, _KEPT_SHARE = 384, 0.01
"""What CUDA keeps of nvidia-smi's total where it is not known: no card with a source keeps as much."""
_HOPPER = 9
_BFLOAT16_TENSOR_CORES = (8, 0)
"""Compute capability from which tensor cores multiply bfloat16 (CUDA C++ Programming Guide), and flash attention runs
(flash_attn/flash_api.cpp)."""
_FLOAT8_TENSOR_CORES = (8, 9)
"""Likewise float8 (aten/src/ATen/native/cuda/Blas.cpp, ``_scaled_mm_allowed_device``)."""
_EVERY_WHEEL = (7, 5)
"""The least compute capability of torch's CUDA wheels but cu126 (https://github.com/pytorch/pytorch/pull/175253)."""


class FitVerdict(StrEnum):
    """Whether a plan fits a card."""

    FITS = "fits"
    BARELY = "fits barely"
    """The planned run fits, and leaves less than the margin."""
    NO = "does not fit"


class CardLimit(StrEnum):
    """What an answer about a card must say."""

    CAPACITY = "no published capacity: nvidia-smi's total less 1 % and 384 MiB is taken"
    CONTEXT = "no published CUDA context: the largest known of its generation, or of all, is taken"
    BFLOAT16 = "no tensor cores for bfloat16: it is priced at the rate of fp32"
    WHEELS = "torch 2.11 to 2.13 has kernels for it in CUDA 12.6 wheels alone (cu126)"


MARGIN_TOLD = (
    f"{FitVerdict.BARELY}, within the margin of {100 * MARGIN_SHARE:g} % for other drivers, libraries and a display"
)
"""For a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Facts about one card: rates from its vendor, memory as CUDA gives it.

    What has no source is on the safe side: memory of the catalogue is 384 MiB and 1 % less than nvidia-smi's total, a
    context that is left out the largest known of cards with the same compute capability. Tensor cores below compute
    capability 8.0 multiply no bfloat16: it is priced at the rate of fp32.
    """

    name: str
    """As nvidia-smi has it: GeForce cards are told by it."""
    memory_mib: int
    """Total MiB as CUDA gives it: torch's ``get_device_properties(0).total_memory``; nvidia-smi shows more."""
    compute_capability: str
    """As '8.9'."""
    tflops_bf16: float = None  # type: ignore[assignment]  # filled in below
    """Dense tensor-core rate with fp32 accumulation, of float16 too; left out below compute capability 8.0."""
    tflops_fp32: float
    """Rate of the CUDA cores, which fp32 matmuls use unless TF32 is allowed."""
    memory_gbps: float
    """GB/s of device memory."""
    pcie_gbps: float
    """GB/s of the bus in one direction, theoretical."""
    tflops_fp16: float = added_field(0.0)
    """The same of float16, below compute capability 8.0; 0: none."""
    year: int = field(default=0, compare=False)
    """Of release; 0: unknown."""
    sms: int = 0
    """Multiprocessors; 0: unknown, nothing planned depends on it."""
    l2_mib: int = 0
    """Second-level cache; 0: unknown, every op is taken to read device memory."""
    tops_int8: float = 0.0
    """Dense rate of int8 products added in int32; 0: unknown."""
    context_mib: int = None  # type: ignore[assignment]  # filled in below
    """CUDA context and libraries in MiB, outside the allocator: what a process holds beside reserved bytes."""
    nvidia_smi_mib: int = field(default=0, compare=False)
    """Total memory in MiB as nvidia-smi reports it; 0: unknown."""
    memory_source: str = field(default="", compare=False)
    """Range in GiB and where it was published; ``not found`` or empty: none."""
    context_source: str = field(default="", compare=False)
    """Likewise of the context."""

    def __post_init__(self) -> None:
        if self.context_mib is None:
            object.__setattr__(self, "context_mib", safe_context_mib(self.compute_capability))
        rates = ("tflops_bf16", "tflops_fp32", "memory_gbps", "pcie_gbps")
        faults = figure_faults(self, above_0=("memory_mib", *rates), at_least_0=("tflops_fp16",))
        if self.context_mib < 0 or self.context_mib >= self.memory_mib:
            faults.append(f"context_mib: {self.context_mib} must be at least 0 and below memory_mib")
        if not re.fullmatch(r"\d+\.\d+", self.compute_capability):
            faults.append(f"compute_capability: '{self.compute_capability}' must read like '8.9'")
        else:
            faults += self._fill_in_bfloat16()
        raise_faults(faults)

    def _fill_in_bfloat16(self) -> list[str]:
        """Set the rate of bfloat16 where tensor cores do not multiply it, and return faults of the rates of 16 bits."""
        if self.has_bfloat16_tensor_cores:
            missing = "tflops_bf16: missing; give the dense rate of the tensor cores with fp32 accumulation"
            return [missing] if self.tflops_bf16 is None else []
        if self.tflops_bf16 is None:
            object.__setattr__(self, "tflops_bf16", self.tflops_fp32)
        elif self.tflops_bf16 > self.tflops_fp32:
            told = f"tflops_bf16: {self.tflops_bf16} must be left out at compute capability {self.compute_capability}"
            return [f"{told}: tensor cores multiply bfloat16 from 8.0 on; give the rate of float16 as tflops_fp16"]
        return []

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability as numbers."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    @property
    def generation(self) -> str:
        """Cards that reach about the same shares of their peak rates: a vendor halves GeForce cards' tensor cores."""
        return f"{self.compute_capability} GeForce" if "GeForce" in self.name else self.compute_capability

    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes, as CUDA gives it."""
        return self.memory_mib * MIB

    @property
    def context_bytes(self) -> int:
        """Bytes of the CUDA context."""
        return self.context_mib * MIB

    @property
    def allocator_capacity_bytes(self) -> int:
        """The bytes left for the allocator."""
        return self.memory_bytes - self.context_bytes

    @property
    def margin_bytes(self) -> int:
        """Bytes that a plan must leave free to fit plainly."""
        return round(MARGIN_SHARE * self.memory_bytes)

    def verdict(self, used_bytes: float, *, fits: bool = True) -> FitVerdict:
        """Return whether a plan of ``used_bytes``, context included, fits."""
        if not fits:
            return FitVerdict.NO
        return FitVerdict.FITS if used_bytes <= self.memory_bytes - self.margin_bytes else FitVerdict.BARELY

    def told(self, verdict: FitVerdict) -> str:
        """Return a verdict as text, with the margin's size where only that is exceeded."""
        return f"{MARGIN_TOLD} ({format_bytes(self.margin_bytes)})" if verdict is FitVerdict.BARELY else verdict.value

    @property
    def has_bfloat16_tensor_cores(self) -> bool:
        """Whether tensor cores multiply bfloat16, and flash attention runs."""
        return self.capability >= _BFLOAT16_TENSOR_CORES

    @property
    def has_float8_tensor_cores(self) -> bool:
        """Whether tensor cores multiply float8."""
        return self.capability >= _FLOAT8_TENSOR_CORES

    @property
    def low_bit_formats(self) -> tuple[str, ...]:
        """Formats in which tensor cores multiply 8 bits, as of optimization ``low_bit_matmul``."""
        has_int8 = self.tops_int8 > 0 and self.has_bfloat16_tensor_cores
        return ("float8",) * self.has_float8_tensor_cores + ("int8",) * has_int8

    @property
    def limits(self) -> tuple[CardLimit, ...]:
        """Return what an answer about this card must say."""
        holds = {
            CardLimit.CAPACITY: self.memory_source == NOT_FOUND,
            CardLimit.CONTEXT: self.context_source == NOT_FOUND,
            CardLimit.BFLOAT16: not self.has_bfloat16_tensor_cores,
            CardLimit.WHEELS: self.capability < _EVERY_WHEEL,
        }
        return tuple(limit for limit, is_so in holds.items() if is_so)

    @property
    def note(self) -> str:
        """Return a sentence on the card's limits, with the figures taken; empty: it has none."""
        figures = (
            (f"capacity ({format_bytes(self.memory_bytes)})", self.memory_source),
            (f"CUDA context ({format_bytes(self.context_bytes)})", self.context_source),
        )
        found = {
            "no published figure for {}: a safe one is taken": [
                told for told, source in figures if source == NOT_FOUND
            ],
            "its file states no source for {}": [told for told, source in figures if not source],
        }
        notes = [note.format(" and ".join(missing)) for note, missing in found.items() if missing]
        if CardLimit.BFLOAT16 in self.limits:
            notes.append(f"{CardLimit.BFLOAT16}, {self.tflops_bf16:g} TFLOPS (float16: {self._float16_tflops:g})")
        notes += [limit for limit in self.limits if limit is CardLimit.WHEELS]
        return f"{self.name}: {'; '.join(notes)}" if notes else ""

    @property
    def threads_per_multiprocessor(self) -> int:
        """The most resident threads (CUDA C++ Programming Guide, technical specifications by compute capability)."""
        known = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (11, 0): 1536, (12, 0): 1536, (12, 1): 1536}
        return known.get(self.capability, 2048)

    @property
    def cublas_workspace_bytes(self) -> int:
        """Per handle and stream, inside the allocator (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
        return 33_554_432 if self.capability[0] >= _HOPPER else 8_519_680

    @property
    def flops_per_second(self) -> dict[str, float]:
        """Peak rate by element type; of float8 twice that of bfloat16 (vendor whitepapers); int8 where it is known."""
        rates = {"bfloat16": self.tflops_bf16, "float16": self._float16_tflops, "float32": self.tflops_fp32}
        if self.has_float8_tensor_cores:
            rates |= {"float8_e4m3fn": 2 * self.tflops_bf16, "float8_e5m2": 2 * self.tflops_bf16}
        if self.tops_int8:
            rates["int8"] = self.tops_int8
        return {name: tflops * 1e12 for name, tflops in rates.items()}

    @property
    def _float16_tflops(self) -> float:
        return self.tflops_fp16 or self.tflops_bf16

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
    found = {}
    for name, table in tables("hardware.toml").items():
        filled = table if "memory_mib" in table else table | {"memory_mib": safe_memory_mib(table["nvidia_smi_mib"])}
        found[name] = decode(Card, filled, source=f"hardware.toml [{name}]")
    return found


def safe_memory_mib(nvidia_smi_mib: int) -> int:
    """Return MiB that CUDA gives at least of a total that nvidia-smi reports; no card with a source gives less."""
    return floor(nvidia_smi_mib * (1 - _KEPT_SHARE)) - _KEPT_MIB


def safe_context_mib(compute_capability: str) -> int:
    """Return the largest context in MiB known of cards of a compute capability; of none: of all cards."""
    cards = [table for table in tables("hardware.toml").values() if "context_mib" in table]
    known: list[tuple[str, int]] = [(card["compute_capability"], card["context_mib"]) for card in cards]
    alike = [size for capability, size in known if capability == compute_capability]
    return max(alike or [size for _capability, size in known])


def find_card(name: "Card | str") -> Card:
    """Return a card by short name, or from a TOML file when ``name`` ends in ``.toml``; a card is returned as it is.

        >>> card = find_card("rtx-4090")
        >>> card.name, card.memory_bytes, card.tflops_bf16
        ('NVIDIA GeForce RTX 4090', 25249710080, 165.2)

    A name in the catalogue is a table of ``hardware.toml``; a file of your own has the same entries.

    Raises:
        ConfigError: unknown name (cards of that model are suggested), a card that is no CUDA card, or a faulty file.
    """
    if not isinstance(name, str):
        return name
    cards = card_catalogue()
    if not name.endswith(".toml") and name not in cards:
        reported = {known: (card.name, card.nvidia_smi_mib) for known, card in cards.items()}
        raise ConfigError("card", [unknown_card(name, reported)])
    return find_entry(Card, "card", name, cards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts about a machine. The defaults are a desktop with two channels of DDR5 and one PCIe 4.0 drive (assumed)."""

    memory_gib: float | None = None
    """None: unlimited."""
    reserved_gib: float = 4.0
    """Of the memory: what system, libraries and the process itself take beside tensors (assumed)."""
    memory_gbps: float = 60.0
    """GB/s of host memory, read and written together; the bottleneck of an update on the host."""
    disk_gib: float | None = None
    """Free space; None: unlimited."""
    disk_gbps: float = 4.0
    """GB/s of the drive, one direction at a time."""

    def __post_init__(self) -> None:
        amounts = ("memory_gib", "memory_gbps", "disk_gib", "disk_gbps")
        faults = figure_faults(self, above_0=amounts, at_least_0=("reserved_gib",))
        if self.memory_gib is not None and self.memory_gib <= self.reserved_gib:
            faults.append(
                f"memory_gib: {self.memory_gib:g} GiB must be above the {self.reserved_gib:g} GiB (reserved_gib) that "
                "system and process take"
            )
        raise_faults(faults)

    def shared(self, ranks: int) -> "Host":
        """Return one rank's equal share of the machine's memory and disk."""
        if ranks == 1:
            return self
        return replace(self, **{name: value / ranks for name, value in asdict(self).items() if value is not None})

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
