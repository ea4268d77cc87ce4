"""Record of one benchmark case: every provider's figures, or why there are none. Bytes are integers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hybridvalidation.kernel_bench.case import Clock, Mode
from hybridvalidation.kernel_bench.timing import Times
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

KERNELS_FILE = "kernels.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderResult:
    """One provider in one case."""

    provider: str
    is_ours: bool
    is_choosable: bool
    """Whether the op can choose it by this name."""
    outcome: Outcome
    message: str = ""
    error: float | None = None
    """Largest difference from the definition over its largest value, of the output nearest to its tolerance."""
    allowed_error: float | None = None
    """Tolerance: twice plain torch's error in the same dtype, plus one rounding of the largest value."""
    times: Times | None = None
    peak_bytes: int | None = None
    """Peak of one call in the allocator's memory above what was held before; None: not counted (CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord(Record):
    """One case."""

    op: str
    choice: str
    """Name of the op in choices.toml."""
    shape: str
    dtype: str
    mode: Mode
    clock: Clock
    num_bytes: int
    """Least traffic in bytes (arithmetic)."""
    flops: int
    """Least arithmetic."""
    uses_tensor_cores: bool
    results: tuple[ProviderResult, ...]
    card: str
    """Name of the CUDA card, or of the CPU."""
    driver: str
    """Version of the card's driver; empty if unknown."""
    triton: str
    """Version of Triton; empty if not installed."""

    @property
    def name(self) -> str:
        """The case's name in messages and baselines."""
        return f"{self.op} {self.shape} {self.dtype} {self.mode}"

    @property
    def is_on_card(self) -> bool:
        """Whether a CUDA card was measured."""
        return self.evidence is Evidence.MEASURED

    def timed(self) -> list[tuple[ProviderResult, Times]]:
        """Return the successful providers, the fastest first."""
        pairs = [
            (result, result.times)
            for result in self.results
            if result.outcome is Outcome.OK and result.times is not None
        ]
        return sorted(pairs, key=lambda pair: pair[1].q50_s)

    def fastest(self, wanted: Callable[[ProviderResult], bool]) -> tuple[ProviderResult, Times] | None:
        """Return the fastest successful one of the given providers."""
        return next((pair for pair in self.timed() if wanted(pair[0])), None)


def append_kernel(records: Path, record: KernelRecord) -> Path:
    """Add a record to the folder's file at once; raises ``RecordError`` when the file's last line was cut short."""
    return append_record(records, KERNELS_FILE, record)


def read_kernels(records: Path) -> list[KernelRecord]:
    """Return all records, oldest first; raises ``RecordError`` for an invalid line."""
    return read_lines(records / KERNELS_FILE, KernelRecord)


def newest_kernels(records: Iterable[KernelRecord]) -> list[KernelRecord]:
    """Return the newest record of each case and card, in the order of first appearance."""
    return list({record.key: record for record in records}.values())
