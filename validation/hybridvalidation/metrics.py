"""From records to the metrics of targets: a value, its interval where it has one, and how it was got."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

from hybridtrain.units import GB, GIB
from hybridvalidation.evidence import Evidence, Outcome
from hybridvalidation.record import AccuracyFigures, MemoryFigures, Record, SeedResult
from hybridvalidation.runner import ScenarioRun
from hybridvalidation.statistics import Interval, mean_interval

BASELINE_STACK = "vanilla"
_LARGEST_EXPONENT = 700.0
"""A difference of losses whose exponential is still a float64."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of one stack."""

    value: float
    evidence: Evidence
    unit: str
    interval: Interval | None = None
    fits: bool = True
    """Whether the stack runs on the scenario's card at all."""
    remark: str = ""
    """What a reader must know beside the value."""


def compute_metric(run: ScenarioRun, name: str, stack: str) -> Metric | None:
    """Return a metric of ``targets.toml`` for a stack, None where there is no evidence."""
    return _METRICS[name](run, stack) if name in _METRICS else None


def accuracy_retention(run: ScenarioRun, stack: str) -> Interval | None:
    """Return validation top-1 accuracy against the baseline's in percent, paired by seed."""
    pairs = _seed_pairs(run, stack)
    if any(baseline.validation_accuracy == 0 for _, baseline in pairs):
        return None
    return _interval([100 * own.validation_accuracy / baseline.validation_accuracy for own, baseline in pairs])


def perplexity_ratio(run: ScenarioRun, stack: str) -> Interval | None:
    """Return validation perplexity against the baseline's in percent, paired by seed; above 100 is worse."""
    pairs = _seed_pairs(run, stack)
    return _interval(
        [100 * exp(min(own.validation_loss - baseline.validation_loss, _LARGEST_EXPONENT)) for own, baseline in pairs]
    )


def _seed_pairs(run: ScenarioRun, stack: str) -> list[tuple[SeedResult, SeedResult]]:
    """Return each seed's run and its baseline; nothing when the two were not made with the same seeds."""
    own, baseline = _accuracy(run, stack), _accuracy(run, BASELINE_STACK)
    if own is None or baseline is None or [seed.seed for seed in own.seeds] != [seed.seed for seed in baseline.seeds]:
        return []
    return list(zip(own.seeds, baseline.seeds, strict=True))


def _interval(samples: list[float]) -> Interval | None:
    return mean_interval(samples) if len(samples) > 1 else None


def _accuracy(run: ScenarioRun, stack: str) -> AccuracyFigures | None:
    record = run.get("accuracy", stack)
    return None if record is None else record.accuracy


def _memory(run: ScenarioRun, stack: str) -> MemoryFigures | None:
    record = run.get("dry_run", stack)
    return None if record is None else record.memory


def _peak(divisor: int, unit: str) -> Callable[[ScenarioRun, str], Metric | None]:
    def metric(run: ScenarioRun, stack: str) -> Metric | None:
        record = run.get("measured", stack)
        memory = _memory(run, stack)
        if record is not None and record.measured is not None:
            return Metric(record.measured.device_used_bytes / divisor, Evidence.MEASURED, unit)
        if memory is None:
            return None
        if _was_refused(record):
            value = memory.device_used_bytes / divisor
            return Metric(value, Evidence.PLANNED, unit, fits=False, remark="the card refused it")
        remark = f"allocated {memory.peak_allocated_bytes / divisor:.2f} {unit}"
        return Metric(memory.device_used_bytes / divisor, Evidence.PLANNED, unit, fits=memory.fits, remark=remark)

    return metric


def _tokens_per_s(run: ScenarioRun, stack: str) -> Metric | None:
    record = run.get("measured", stack)
    memory = _memory(run, stack)
    if record is not None and record.measured is not None:
        return Metric(record.measured.tokens_per_s, Evidence.MEASURED, "tokens/s")
    if memory is None:
        return None
    fits = memory.fits and not _was_refused(record)
    return Metric(memory.tokens_per_s, Evidence.ESTIMATED, "tokens/s", fits=fits)


def _was_refused(record: Record | None) -> bool:
    """Return whether a card ran out of memory where the plan may have said it fits."""
    return record is not None and record.outcome is Outcome.OUT_OF_MEMORY


def _relative_throughput(run: ScenarioRun, stack: str) -> Metric | None:
    own, baseline = _memory(run, stack), _memory(run, BASELINE_STACK)
    if own is None or baseline is None:
        return None
    remark = (
        ""
        if baseline.fits
        else "the unoptimised run does not fit this card; its speed is a roofline of one that holds it"
    )
    return Metric(own.tokens_per_s / baseline.tokens_per_s, Evidence.ESTIMATED, "x", fits=own.fits, remark=remark)


def _retention(run: ScenarioRun, stack: str) -> Metric | None:
    interval = accuracy_retention(run, stack)
    figures = _accuracy(run, stack)
    if interval is None or figures is None:
        return None
    remark = (
        f"proxy of {figures.num_params / 1e6:.2f}M parameters, {len(figures.seeds)} seeds, {figures.num_tokens} tokens"
    )
    return Metric(interval.mean, Evidence.EXECUTED, "%", interval=interval, remark=remark)


def _peak_reduction(run: ScenarioRun, stack: str) -> Metric | None:
    own, baseline = _memory(run, stack), _memory(run, BASELINE_STACK)
    if own is None or baseline is None:
        return None
    value = 100 * (1 - own.peak_allocated_bytes / baseline.peak_allocated_bytes)
    return Metric(value, Evidence.PLANNED, "%", fits=own.fits)


def _optimizer_reduction(run: ScenarioRun, stack: str) -> Metric | None:
    own, baseline = _memory(run, stack), _memory(run, BASELINE_STACK)
    if own is None or baseline is None:
        return None
    value = 100 * (1 - own.by_class["optim_state"] / baseline.by_class["optim_state"])
    return Metric(value, Evidence.PLANNED, "%", fits=own.fits, remark="scales and small fp32 tensors included")


_METRICS: dict[str, Callable[[ScenarioRun, str], Metric | None]] = {
    "peak_vram_gib": _peak(GIB, "GiB"),
    "peak_vram_gb": _peak(GB, "GB"),
    "tokens_per_s": _tokens_per_s,
    "relative_throughput_x": _relative_throughput,
    "accuracy_retention_pct": _retention,
    "peak_vram_reduction_pct": _peak_reduction,
    "optimizer_bytes_reduction_pct": _optimizer_reduction,
}
