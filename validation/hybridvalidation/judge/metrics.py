"""Metrics of targets from records: value, interval (if any) and evidence."""

from math import exp

from hybridtrain.units import GB, GIB
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge import arithmetic, planned
from hybridvalidation.judge.case import Case, Metric, MetricOf, joined
from hybridvalidation.judge.statistics import Interval, mean_interval
from hybridvalidation.judge.time_error import time_error_of, waiting_text, within_error
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.stack_run import AccuracyFigures, SeedResult, StackRun
from hybridvalidation.scenario import BASELINE_STACK

_LARGEST_EXPONENT = 700.0
"""Largest difference of losses whose exponential is finite in float64."""

_SHOWN_BYTES = 10**8
"""Bytes on host or disk that are not mentioned: the batch in transfer."""


def compute_metric(case: Case) -> Metric | None:
    """Return the metric of a target for a stack; None without evidence."""
    name = case.target.metric
    return METRICS[name](case) if name in METRICS else None


def accuracy_retention(run: ScenarioRun, stack: str, baseline: str = BASELINE_STACK) -> Interval | None:
    """Return validation top-1 accuracy against the baseline's in percent, paired by seed."""
    pairs = _seed_pairs(run, stack, baseline)
    if any(other.validation_accuracy == 0 for _, other in pairs):
        return None
    return _interval([100 * own.validation_accuracy / other.validation_accuracy for own, other in pairs])


def perplexity_ratio(run: ScenarioRun, stack: str) -> Interval | None:
    """Return validation perplexity against the baseline's in percent, paired by seed; above 100 is worse."""
    pairs = _seed_pairs(run, stack, BASELINE_STACK)
    return _interval(
        [100 * exp(min(own.validation_loss - baseline.validation_loss, _LARGEST_EXPONENT)) for own, baseline in pairs]
    )


def _seed_pairs(run: ScenarioRun, stack: str, baseline: str) -> list[tuple[SeedResult, SeedResult]]:
    """Return each seed's run and its baseline; nothing when the two were not made with the same seeds and text."""
    own, other = _accuracy(run, stack), _accuracy(run, baseline)
    if own is None or other is None or own.corpus_digest != other.corpus_digest:
        return []
    if [seed.seed for seed in own.seeds] != [seed.seed for seed in other.seeds]:
        return []
    return list(zip(own.seeds, other.seeds, strict=True))


def _interval(samples: list[float]) -> Interval | None:
    return mean_interval(samples) if len(samples) > 1 else None


def _accuracy(run: ScenarioRun, stack: str) -> AccuracyFigures | None:
    record = run.get("accuracy", stack)
    return None if record is None else record.accuracy


def _peak(divisor: int, unit: str) -> MetricOf:
    def figure(num_bytes: int, evidence: Evidence, *, fits: bool = True, remark: str = "") -> Metric:
        decimal = None if divisor == GB else num_bytes / GB
        return Metric(num_bytes / divisor, evidence, unit, fits=fits, remark=remark, decimal=decimal)

    def metric(case: Case) -> Metric | None:
        record, memory = case.run.get("measured", case.stack), case.memory
        if record is not None and record.measured is not None:
            return figure(record.measured.device_used_bytes, Evidence.MEASURED)
        if memory is None:
            return None
        if _was_refused(record):
            return figure(memory.device_used_bytes, Evidence.PLANNED, fits=False, remark="out of memory on the card")
        sizes = {"host": memory.host_peak_bytes, "disk": memory.disk_peak_bytes}
        remark = f"allocated {memory.peak_allocated_bytes / divisor:.2f} {unit}" + "".join(
            f", {name} {size / divisor:.2f} {unit}" for name, size in sizes.items() if size >= _SHOWN_BYTES
        )
        remark = joined(_batch_text(case), remark)
        return figure(memory.device_used_bytes, Evidence.PLANNED, fits=memory.fits, remark=remark)

    return metric


def _batch_text(case: Case) -> str:
    """Return a remark on the tokens per step where they differ from the scenario's; empty where not."""
    own, workload = case.memory, case.run.scenario.workload
    asked = workload.batch_size * workload.seq_len
    if own is None or own.tokens_per_step == asked:
        return ""
    return f"at {own.tokens_per_step:,} tokens per step, while the scenario has {asked:,}"


def _tokens_per_s(case: Case) -> Metric | None:
    record, memory = case.run.get("measured", case.stack), case.memory
    if record is not None and record.measured is not None:
        return Metric(record.measured.tokens_per_s, Evidence.MEASURED, "tokens/s")
    if memory is None:
        return None
    fits = memory.fits and not _was_refused(record)
    error = within_error(memory.tokens_per_s, error=time_error_of(memory))
    waits = waiting_text(memory)
    return Metric(
        memory.tokens_per_s, Evidence.ESTIMATED, "tokens/s", error=error, fits=fits, is_untested=bool(waits),
        remark=joined(_batch_text(case), waits),
    )  # fmt: skip


def _was_refused(record: StackRun | None) -> bool:
    """Return whether a card ran out of memory where the plan may have said it fits."""
    return record is not None and record.outcome is Outcome.OUT_OF_MEMORY


def _retention(case: Case) -> Metric | None:
    interval = accuracy_retention(case.run, case.stack, case.baseline)
    figures = _accuracy(case.run, case.stack)
    if interval is None or figures is None:
        return None
    remark = (
        f"proxy of {figures.num_params / 1e6:.2f}M parameters, {len(figures.seeds)} seeds, {figures.num_tokens} tokens"
    )
    return Metric(interval.mean, Evidence.EXECUTED, "%", interval=interval, remark=remark)


def _accuracy_loss(case: Case) -> Metric | None:
    kept = _retention(case)
    if kept is None or kept.interval is None:
        return None
    interval = Interval(100 - kept.interval.mean, 100 - kept.interval.high, 100 - kept.interval.low)
    return Metric(interval.mean, kept.evidence, "%", interval=interval, remark=kept.remark)


def _weight_difference(case: Case) -> Metric | None:
    figures = _accuracy(case.run, case.stack)
    if figures is None or figures.accumulation_difference is None:
        return None
    remark = (
        f"norm of the difference over norm of the weights, {figures.num_tokens} tokens, {figures.num_params} weights"
    )
    return Metric(figures.accumulation_difference, Evidence.EXECUTED, "of the weights", remark=remark)


METRICS: dict[str, MetricOf] = {
    "peak_vram_gib": _peak(GIB, "GiB"),
    "peak_vram_gb": _peak(GB, "GB"),
    "tokens_per_s": _tokens_per_s,
    "accuracy_retention_pct": _retention,
    "accuracy_loss_pct": _accuracy_loss,
    "relative_weight_difference": _weight_difference,
    "relative_throughput_x": planned.relative_throughput,
    "slowdown_x": planned.slowdown,
    "step_time_overhead_pct": planned.time_overhead,
    "peak_vram_reduction_pct": planned.peak_reduction,
    "optimizer_bytes_reduction_pct": arithmetic.int8_state_reduction,
    "parameter_peak_reduction_pct": planned.weight_peak_reduction,
    "activation_peak_reduction_pct": planned.kept_bytes_reduction,
    "stored_activation_reduction_pct": arithmetic.stored_activation_reduction,
    "time_averaged_activation_reduction_pct": arithmetic.averaged_activation_reduction,
    "weight_bytes_reduction_pct": arithmetic.int8_weight_reduction,
    "time_averaged_weight_reduction_pct": arithmetic.phase_aware_weight_reduction,
    "bytes_per_layer_mb": arithmetic.bytes_per_layer_mb,
    "sum_of_parts_gb": arithmetic.sum_of_parts_gb,
    "predict_phase_vram_reduction_pct": planned.predict_reduction,
    "predict_phase_model_vram_gib": planned.predict_gib,
    "delta_bytes_reduction_pct": planned.delta_reduction,
    "peak_vram_gb_per_gpu": _peak(GB, "GB"),
}
"""Metrics by the name in ``targets.toml``."""
