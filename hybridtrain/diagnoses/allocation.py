"""Parses the failed allocation in error messages of torch and numpy.

torch's caching allocator has two formats, before and since 2.1; cudaMallocAsync and host memory have their own.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hybridtrain.units import GIB, format_bytes

_SIZE: Final = r"(\d{1,30}\.?\d{0,9}) ?((?:[KMGTPE]i?)?B|bytes)\b"
_UNITS: Final = {"bytes": 1, "B": 1} | {
    f"{letter}{middle}B": base**power
    for middle, base in (("i", 1024), ("", 1000))
    for power, letter in enumerate("KMGTPE", 1)
}
_BEGIN: Final = re.compile(r"out of memory(?=[.\s(])|Allocation on device \d|DefaultCPUAllocator|Unable to allocate")
_DECORATION: Final = re.compile(r"[\u2502\u256d\u2570\u256e\u256f\u2500]+|\[rank\d+\]:")
_MESSAGE_LENGTH: Final = 1500
"""Characters, with the names of some other processes."""
_PATTERNS: Final = {
    name: re.compile("|".join(pattern.replace("SIZE", _SIZE) for pattern in patterns))
    for name, patterns in {
        "asked": (r"(?:[Tt]ried|Unable) to allocate (?:more than )?SIZE", r"Requested\s*: SIZE"),
        "capacity": (r"total capac\w+ of SIZE", r"SIZE total capacity", r"Device limit\s*: SIZE"),
        "free": (r"of which SIZE is free", r"SIZE free", r"Free \(according to CUDA\)\s*: SIZE"),
        "allocated": (
            r"SIZE is allocated by PyTorch", r"SIZE already allocated", r"(?:Currently|MPS) allocated\s*: SIZE",
        ),
        "reserved": (r"SIZE reserved in total",),
        "unused": (r"SIZE (?:is )?reserved by PyTorch but unallocated", r"SIZE cached"),
        "process": (r"this process has SIZE memory in use",),
        "allowed": (r"SIZE allowed", r"memory fraction\)\s*: SIZE"),
    }.items()
}  # fmt: skip
_GPU: Final = re.compile(r"(?:GPU|on device) ?(\d+)")
_PROCESS: Final = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_CONTEXT: Final = GIB
"""Default memory of a process beyond what torch reserved: 0.3 to 1 GiB for the context, cuBLAS and NCCL."""
_LARGE: Final = 0.1
"""Share that counts as large: unused of reserved memory, or other processes' of the card."""
_FULL: Final = 0.02
"""Free share below which a card counts as full."""
_ABSURD: Final = 20
"""Multiple of the card's memory that counts as absurd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAllocation:
    """Figures of an error message, in bytes; None: not stated."""

    gpu: int | None = None
    asked: int
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None
    """Bytes of torch's live tensors."""
    reserved: int | None = None
    """Bytes that torch reserved, allocated ones included."""
    others: int | None = None
    """Bytes of other processes on the card."""
    allowed: int | None = None
    """Limit below the card's memory, in bytes."""

    @property
    def unused(self) -> int:
        """Bytes reserved but not allocated."""
        return 0 if self.reserved is None or self.allocated is None else self.reserved - self.allocated

    @property
    def is_absurd(self) -> bool:
        """Whether the request exceeds any card."""
        return self.asked >= _ABSURD * (self.capacity or 51 * GIB)

    @property
    def is_limited(self) -> bool:
        """Whether a memory limit, not the card, was exceeded."""
        return self.allowed is not None and (self.reserved or self.allocated or 0) + self.asked > self.allowed

    @property
    def is_refused_beside_free_memory(self) -> bool:
        """Whether the card has enough free memory for it."""
        full = _FULL * (self.capacity or 0)
        return self.free is not None and self.allowed is None and self.free >= self.asked + full

    @property
    def is_shared(self) -> bool:
        """Whether other processes use much of the card, and it would fit without them."""
        if self.others is None or self.capacity is None or self.free is None:
            return False
        return self.others >= _LARGE * self.capacity and self.others + self.free >= self.asked

    @property
    def is_fragmented(self) -> bool:
        """Whether much reserved memory is unused, and it would fit there."""
        return self.reserved is not None and self.unused >= max(self.asked, _LARGE * self.reserved)

    def __str__(self) -> str:
        card = "the card" if self.gpu is None else f"GPU {self.gpu}"
        others = self.others if self.others and self.others >= _FULL * (self.capacity or 0) else None
        told = {
            "asked for": self.asked, f"{card} has": self.capacity, "free": self.free, "in tensors": self.allocated,
            "reserved and unused": self.unused or None, "held by others": others, "limit": self.allowed,
        }  # fmt: skip
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in told.items() if size is not None)


@lru_cache(maxsize=1)
def failed_allocation(text: str) -> FailedAllocation | None:
    """Return the first failed allocation in a log that states its size."""
    for begin in _BEGIN.finditer(text):
        end = begin.end() + _MESSAGE_LENGTH
        following = _BEGIN.search(text, begin.end(), end)
        message = text[begin.start() : following.start() if following else end]
        message = " ".join(_DECORATION.sub(" ", message).split())
        sizes = {name: _first(pattern, message) for name, pattern in _PATTERNS.items()}
        asked = sizes["asked"]
        if asked is not None:
            return _allocation(sizes, asked, message)
    return None


def _allocation(sizes: dict[str, int | None], asked: int, message: str) -> FailedAllocation:
    capacity, free, allocated, reserved = (sizes[name] for name in ("capacity", "free", "allocated", "reserved"))
    if reserved is None and allocated is not None and sizes["unused"] is not None:
        reserved = allocated + sizes["unused"]
    gpu, allowed = _GPU.search(message), sizes["allowed"]
    if allowed is not None and capacity is not None and allowed >= capacity:
        allowed = None  # without a limit cudaMallocAsync tells 2**64
    listed = [_bytes(match.groups()) for match in _PROCESS.finditer(message)]
    return FailedAllocation(
        gpu=int(gpu[1]) if gpu else None, asked=asked, capacity=capacity, free=free, allocated=allocated,
        reserved=reserved, allowed=allowed, others=_others(sizes, reserved or allocated, listed),
    )  # fmt: skip


def _others(sizes: dict[str, int | None], reserved: int | None, listed: list[int]) -> int | None:
    """Return the bytes of other processes; in a container torch names its own process by another number."""
    capacity, free, process = sizes["capacity"], sizes["free"], sizes["process"]
    if capacity is None or free is None or reserved is None:
        return None
    if process is None or process > capacity:  # under WSL 2**64
        itself = [size for size in listed if reserved <= size <= reserved + _CONTEXT]
        process = min(itself, default=reserved + _CONTEXT)
    return max(0, capacity - free - process)


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else _bytes(found.groups())


def _bytes(groups: tuple[str | None, ...]) -> int:
    number, unit = filter(None, groups)
    return int(float(number) * _UNITS[unit])
