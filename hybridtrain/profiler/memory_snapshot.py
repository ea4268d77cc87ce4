"""The memory after one step: what is used of what, by which source, in the units people read."""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, fields

from hybridtrain.phase import Phase
from hybridtrain.profiler.cuda_memory import CudaMemory
from hybridtrain.profiler.memory_reader import MemorySource
from hybridtrain.units import GB

_MB_PER_GB = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """The memory after one step, in bytes."""

    step: int
    phase: Phase
    elapsed_s: float
    """Seconds since the profiler's start."""
    source: MemorySource
    """Where ``used_bytes`` comes from."""
    used_bytes: int
    total_bytes: int | None
    """None: unknown."""
    allocator: CudaMemory | None
    """None without CUDA."""
    rss_bytes: int | None
    """Resident memory of the process; None where the system does not tell."""
    peak_rss_bytes: int | None
    """Its largest since the process began."""

    @property
    def used_mb(self) -> float:
        """Used memory in MB (10**6 bytes)."""
        return self.used_gb * _MB_PER_GB

    @property
    def used_gb(self) -> float:
        """Used memory in GB (10**9 bytes)."""
        return self.used_bytes / GB

    @property
    def utilization_percent(self) -> float | None:
        """Used memory in percent of the total; None: the total is unknown."""
        return 100.0 * self.used_bytes / self.total_bytes if self.total_bytes else None

    def as_row(self) -> dict[str, object]:
        """Return every figure by its column in the CSV file; what is unknown is None."""
        utilization = self.utilization_percent
        return {
            "step": self.step,
            "phase": self.phase.value,
            "elapsed_s": f"{self.elapsed_s:.6f}",
            "source": self.source.value,
            "used_bytes": self.used_bytes,
            "total_bytes": self.total_bytes,
            "used_mb": f"{self.used_mb:.3f}",
            "used_gb": f"{self.used_gb:.6f}",
            "utilization_percent": None if utilization is None else f"{utilization:.3f}",
            **self._allocator_bytes(),
            "allocator_free_bytes": None if self.allocator is None else self.allocator.free_bytes,
            "rss_bytes": self.rss_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
        }

    def as_metrics(self) -> dict[str, float]:
        """Return what is known by its metric's name: GB and percent."""
        sizes = {"used_bytes": self.used_bytes, **self._allocator_bytes(), "rss_bytes": self.rss_bytes}
        metrics = {
            f"memory/{name.removesuffix('_bytes')}_gb": size / GB for name, size in sizes.items() if size is not None
        }
        utilization = self.utilization_percent
        if utilization is not None:
            metrics["memory/utilization_percent"] = utilization
        return metrics

    def _allocator_bytes(self) -> dict[str, int | None]:
        allocator = self.allocator
        return {name: None if allocator is None else getattr(allocator, name) for name in _ALLOCATOR_FIELDS}


_ALLOCATOR_FIELDS = tuple(field.name for field in fields(CudaMemory))


def to_csv(snapshots: Iterable[MemorySnapshot]) -> str:
    """Return the snapshots as CSV, one row each under a header; unknown figures are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(snapshot.as_row() for snapshot in snapshots)
    return text.getvalue()


_COLUMNS = tuple(
    MemorySnapshot(
        step=0, phase=Phase.FULL, elapsed_s=0.0, source=MemorySource.PROCESS, used_bytes=0, total_bytes=None,
        allocator=None, rss_bytes=None, peak_rss_bytes=None,
    ).as_row()
)  # fmt: skip
