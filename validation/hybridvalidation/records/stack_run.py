"""One run of a scenario under one stack, planned, trained as a proxy or measured. Bytes are integers, times seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybridtrain.planning.figures import MemoryFigures
from hybridvalidation.records.record import Record

RunKind = Literal["dry_run", "accuracy", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """One training run of the proxy."""

    seed: int
    validation_loss: float
    """Validation loss, nats per token."""
    validation_accuracy: float
    """Top-1 accuracy on validation tokens, 0 to 1."""
    final_train_loss: float
    """Mean loss of the last tenth of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyFigures:
    """Results of training the proxy."""

    num_params: int
    """Parameters of the proxy."""
    num_tokens: int
    """Training tokens per seed."""
    num_validation_tokens: int
    corpus: str
    corpus_digest: str
    seeds: tuple[SeedResult, ...]
    accumulation_difference: float | None = None
    """Relative norm of the difference in final weights between fp32 accumulation and the large batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFigures:
    """Measurements of a CUDA card under a hard cap of the scenario card's size."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    num_alloc_retries: int
    step_times_s: tuple[float, ...]
    """Times of all counted steps."""
    tokens_per_s: float
    """Tokens per step over the median step time."""
    cap_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRun(Record):
    """One run, with figures of its kind only; none if unsuccessful."""

    kind: RunKind
    scenario: str
    stack: str
    asked: Mapping[str, str]
    """Model, card, link, host, workload and optimizer, resolved to values, by path."""
    plan: Mapping[str, str]
    memory: MemoryFigures | None = None
    accuracy: AccuracyFigures | None = None
    measured: MeasuredFigures | None = None
