"""Metrics of dry runs: bytes planned, times estimated, of PREDICT what the card holds while weights are predicted."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE
from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Codec
from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.units import GB, GIB, format_bytes, to_gib
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridvalidation.judge.case import Case, Decider, Metric
from hybridvalidation.judge.time_error import time_error_of, waiting_text, within_error
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import BASELINE_STACK

_OVERSIZE = "does not fit; its speed is a roofline of a machine that holds it"
_STATED_DELTAS = 50
_BYTES = {Codec.FLOAT32: 4.0, Codec.BFLOAT16: 2.0, Codec.INT8_BLOCKS: 1 + 4 / QUANT_GROUP_SIZE}
"""Per parameter and history tensor; an int8 one has a float32 scale per group."""


def peak_reduction(case: Case) -> Metric | None:
    """Return by how much the peak of allocated bytes is below the baseline's."""
    return _reduction(case, lambda memory: memory.peak_allocated_bytes)


def optimizer_reduction(case: Case) -> Metric | None:
    """Return by how much the optimizer's state is below the baseline's."""
    return _reduction(case, lambda memory: memory.by_class[TensorClass.OPTIM_STATE])


def weight_peak_reduction(case: Case) -> Metric | None:
    """Return by how much the most bytes of weights on the card are below the baseline's."""
    return _reduction(case, lambda memory: _own_peak(memory, (TensorClass.WEIGHT,)), "embedding and head included")


def kept_bytes_reduction(case: Case) -> Metric | None:
    """Return by how much the most bytes of activations and kept block inputs are below the baseline's."""
    return _reduction(case, lambda memory: _own_peak(memory, (TensorClass.ACTIVATION, TensorClass.BOUNDARY)))


def relative_throughput(case: Case) -> Metric | None:
    """Return tokens per second against the baseline's, at as many tokens a step."""
    return _speed_of_equal_steps(case, lambda ratio: ratio)


def slowdown(case: Case) -> Metric | None:
    """Return how many times as long a step takes as the baseline's, of as many tokens."""
    return _speed_of_equal_steps(case, lambda ratio: 1 / ratio)


def time_overhead(case: Case) -> Metric | None:
    """Return by how much a step takes longer than the baseline's."""
    return _speed(case, "%", lambda ratio: 100 * (1 / ratio - 1))


def predict_reduction(case: Case) -> Metric | None:
    """Return by how much the peak in PREDICT is below the baseline's peak; the peak of the whole cycle decides."""
    memory = case.memory
    predicted = None if memory is None else _predict_peak(memory)
    if case.memories is None or predicted is None:
        return None
    own, baseline = case.memories
    whole = 100 * (1 - own.peak_allocated_bytes / baseline.peak_allocated_bytes)
    decider = Decider(whole, Evidence.PLANNED, "is of one phase", "the peak of the whole cycle")
    remark = (
        f"{to_gib(predicted):.2f} GiB allocated in PREDICT, {to_gib(own.peak_allocated_bytes):.2f} GiB in the whole "
        f"cycle, host {format_bytes(own.host_peak_bytes)}"
    )
    value = 100 * (1 - predicted / baseline.peak_allocated_bytes)
    return Metric(value, Evidence.PLANNED, "%", fits=own.fits, remark=remark, decider=decider)


def predict_gib(case: Case) -> Metric | None:
    """Return GiB allocated at the peak of PREDICT: weights, state, and what the jump works in."""
    memory = case.memory
    predicted = None if memory is None else _predict_peak(memory)
    if memory is None or predicted is None:
        return None
    remark = (
        f"everything on the card; the peak of the whole cycle is {to_gib(memory.peak_allocated_bytes):.2f} GiB, host "
        f"{format_bytes(memory.host_peak_bytes)}"
    )
    return Metric(predicted / GIB, Evidence.PLANNED, "GiB", fits=memory.fits, remark=remark, decimal=predicted / GB)


def delta_reduction(case: Case) -> Metric | None:
    """Return what one accumulator saves against as many float32 deltas as stated."""
    record = case.dry_run
    codec = None if record is None else record.plan.get("history_codec")
    if record is None or record.memory is None or codec is None:
        return None
    kept = int(case.model.num_params * _BYTES[Codec(codec)] * int(record.plan["history_tensors"]))
    deltas = _STATED_DELTAS * 4 * case.model.num_params
    remark = (
        f"{format_bytes(kept)} as {codec} whatever the number of predicted steps, against {_STATED_DELTAS} float32 "
        f"deltas of {format_bytes(deltas // _STATED_DELTAS)}; the jump itself is never stored"
    )
    return Metric(100 * (1 - kept / deltas), Evidence.ARITHMETIC, "%", remark=remark)


def _reduction(case: Case, size: Callable[[MemoryFigures], int | None], remark: str = "") -> Metric | None:
    if case.memories is None:
        return None
    own, baseline = (size(memory) for memory in case.memories)
    if own is None or not baseline:
        return None
    return Metric(
        100 * (1 - own / baseline), Evidence.PLANNED, "%", fits=case.memories[0].fits,
        remark="; ".join(filter(None, (remark, _against(case)))),
    )  # fmt: skip


def _speed_of_equal_steps(case: Case, express: Callable[[float], float]) -> Metric | None:
    """Express a speed in the baseline's, with that in fp32's beside it."""
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
            f" with {plain.tokens_per_step:,} tokens a step; at {own.tokens_per_step:,} tokens a step, a batch whose "
            "quality is judged nowhere"
        )
    return replace(metric, remark=f"{metric.remark}; {beside}")


def _speed(case: Case, unit: str, express: Callable[[float], float]) -> Metric | None:
    """Express tokens per second over the baseline's."""
    if case.memories is None:
        return None
    own, baseline = case.memories
    waits = waiting_text(own)
    remarks = [
        _against(case) or f"against {case.baseline}",
        "" if baseline.fits else f"{case.baseline} {_OVERSIZE}",
        waits,
    ]
    error = within_error(own.tokens_per_s / baseline.tokens_per_s, express, error=time_error_of(own, baseline))
    return Metric(
        error.mean, Evidence.ESTIMATED, unit, error=error, fits=own.fits, is_untested=bool(waits),
        remark="; ".join(filter(None, remarks)),
    )  # fmt: skip


def _own_peak(memory: MemoryFigures, classes: Sequence[TensorClass]) -> int | None:
    """Return the most bytes that some classes hold together at any moment of the last step."""
    if memory.timeline is None:
        return None
    totals: list[int] = [sum(sizes) for sizes in zip(*(memory.timeline.sizes(name) for name in classes), strict=True)]
    return max(totals)


def _against(case: Case) -> str:
    """Name the baseline where it is not fp32, or has other batches."""
    assert case.memories is not None, "asked of two runs"
    own, baseline = (memory.tokens_per_step for memory in case.memories)
    batches = "" if own == baseline else f", {own:,} tokens a step against {baseline:,}"
    return f"against {case.baseline}{batches}" if batches or case.baseline != BASELINE_STACK else ""


def _predict_peak(memory: MemoryFigures) -> int | None:
    peaks = [step.allocated_bytes for step in memory.steps if step.phase == Phase.PREDICT.value]
    return max(peaks, default=None)
