"""Metrics of dry runs: bytes planned, times estimated, and bytes held during PREDICT."""

from collections.abc import Callable
from dataclasses import replace

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE
from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Codec
from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.units import GB, GIB, format_bytes, to_gib
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridvalidation.judge.case import Case, Decider, Metric, MetricOf, joined
from hybridvalidation.judge.time_error import time_error_of, waiting_text, within_error
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import BASELINE_STACK

_OVERSIZE = "does not fit; its speed is estimated for a card with enough memory"
_STATED_DELTAS = 50
_BYTES = {Codec.FLOAT32: 4.0, Codec.BFLOAT16: 2.0, Codec.INT8_BLOCKS: 1 + 4 / QUANT_GROUP_SIZE}
"""Bytes per parameter and history tensor; int8 has a float32 scale per group."""


def _reduction(size: Callable[[MemoryFigures], int | None], remark: str = "") -> MetricOf:
    """Return the metric: reduction of a size against the baseline's, in percent."""

    def metric(case: Case) -> Metric | None:
        if case.memories is None:
            return None
        own, baseline = (size(memory) for memory in case.memories)
        if own is None or not baseline:
            return None
        text, fits = joined(remark, _against(case)), case.memories[0].fits
        return Metric(100 * (1 - own / baseline), Evidence.PLANNED, "%", fits=fits, remark=text)

    return metric


def _own_peak(*classes: TensorClass) -> Callable[[MemoryFigures], int | None]:
    """Return the most bytes that some classes hold together at any moment of the last step."""

    def peak(memory: MemoryFigures) -> int | None:
        if memory.timeline is None:
            return None
        return max(map(sum, zip(*(memory.timeline.sizes(name) for name in classes), strict=True)))

    return peak


peak_reduction = _reduction(lambda memory: memory.peak_allocated_bytes)
optimizer_reduction = _reduction(lambda memory: memory.by_class[TensorClass.OPTIM_STATE])
weight_peak_reduction = _reduction(_own_peak(TensorClass.WEIGHT), "embedding and head included")
kept_bytes_reduction = _reduction(_own_peak(TensorClass.ACTIVATION, TensorClass.BOUNDARY))


def time_overhead(case: Case) -> Metric | None:
    """Return the overhead of a step's time over the baseline's, in percent."""
    return _speed(case, "%", lambda ratio: 100 * (1 / ratio - 1))


def relative_throughput(case: Case) -> Metric | None:
    """Return tokens per second over the baseline's, at equal tokens per step."""
    return _speed_of_equal_steps(case, lambda ratio: ratio)


def slowdown(case: Case) -> Metric | None:
    """Return a step's time over the baseline's, at equal tokens per step."""
    return _speed_of_equal_steps(case, lambda ratio: 1 / ratio)


def predict_reduction(case: Case) -> Metric | None:
    """Return the reduction of the peak in PREDICT against the baseline's; the peak of the whole cycle decides."""
    if case.memories is None or (predicted := _predict_peak(case.memories[0])) is None:
        return None
    own, baseline = case.memories
    whole, value = (100 * (1 - size / baseline.peak_allocated_bytes) for size in (own.peak_allocated_bytes, predicted))
    decider = Decider(whole, Evidence.PLANNED, "is of one phase", "the peak of the whole cycle")
    remark = (
        f"{to_gib(predicted):.2f} GiB allocated in PREDICT, {to_gib(own.peak_allocated_bytes):.2f} GiB in the whole "
        f"cycle, host {format_bytes(own.host_peak_bytes)}"
    )
    return Metric(value, Evidence.PLANNED, "%", fits=own.fits, remark=remark, decider=decider)


def predict_gib(case: Case) -> Metric | None:
    """Return GiB allocated at the peak of PREDICT: weights, state, and the jump's scratch."""
    memory = case.memory
    if memory is None or (predicted := _predict_peak(memory)) is None:
        return None
    remark = (
        f"everything on the card; the peak of the whole cycle is {to_gib(memory.peak_allocated_bytes):.2f} GiB, host "
        f"{format_bytes(memory.host_peak_bytes)}"
    )
    return Metric(predicted / GIB, Evidence.PLANNED, "GiB", fits=memory.fits, remark=remark, decimal=predicted / GB)


def delta_reduction(case: Case) -> Metric | None:
    """Return the reduction by one accumulator against the stated number of float32 deltas, in percent."""
    record = case.dry_run
    codec = None if record is None else record.plan.get("history_codec")
    if record is None or codec is None:
        return None
    kept = int(case.model.num_params * _BYTES[Codec(codec)] * int(record.plan["history_tensors"]))
    deltas = _STATED_DELTAS * 4 * case.model.num_params
    remark = (
        f"{format_bytes(kept)} as {codec} whatever the number of predicted steps, against {_STATED_DELTAS} float32 "
        f"deltas of {format_bytes(deltas // _STATED_DELTAS)}; the jump itself is never stored"
    )
    return Metric(100 * (1 - kept / deltas), Evidence.ARITHMETIC, "%", remark=remark)


def _speed_of_equal_steps(case: Case, express: Callable[[float], float]) -> Metric | None:
    """Express a speed relative to the baseline's, and to that of fp32 beside it."""
    metric = _speed(case, "x", express)
    if metric is None or case.memories is None:
        return None
    own, baseline = case.memories
    if own.tokens_per_step != baseline.tokens_per_step:
        return None
    plain = case.run.memory(BASELINE_STACK)
    if plain is None or case.baseline == BASELINE_STACK:
        return metric
    beside = f"{express(own.tokens_per_s / plain.tokens_per_s):.2f} x against {BASELINE_STACK}"
    if plain.tokens_per_step != own.tokens_per_step:
        beside += (
            f" with {plain.tokens_per_step:,} tokens per step; at {own.tokens_per_step:,} tokens per step, a batch "
            "whose quality is judged nowhere"
        )
    return replace(metric, remark=f"{metric.remark}; {beside}")


def _speed(case: Case, unit: str, express: Callable[[float], float]) -> Metric | None:
    """Express tokens per second relative to the baseline's."""
    if case.memories is None:
        return None
    own, baseline = case.memories
    waits, oversize = waiting_text(own), "" if baseline.fits else f"{case.baseline} {_OVERSIZE}"
    error = within_error(own.tokens_per_s / baseline.tokens_per_s, express, error=time_error_of(own, baseline))
    return Metric(
        error.mean, Evidence.ESTIMATED, unit, error=error, fits=own.fits, is_untested=bool(waits),
        remark=joined(_against(case) or f"against {case.baseline}", oversize, waits),
    )  # fmt: skip


def _against(case: Case) -> str:
    """Name the baseline where it is not fp32, or has other batches."""
    assert case.memories is not None, "asked of two runs"
    own, baseline = (memory.tokens_per_step for memory in case.memories)
    batches = "" if own == baseline else f", {own:,} tokens per step against {baseline:,}"
    return f"against {case.baseline}{batches}" if batches or case.baseline != BASELINE_STACK else ""


def _predict_peak(memory: MemoryFigures) -> int | None:
    return max((step.allocated_bytes for step in memory.steps if step.phase == Phase.PREDICT.value), default=None)
