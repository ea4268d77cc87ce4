"""Resident memory of this process, and how much memory the machine lets it have."""

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.units import KIB

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
