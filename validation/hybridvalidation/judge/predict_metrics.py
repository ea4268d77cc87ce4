"""Metrics of PREDICT: what the card holds while weights are predicted, and what a predictor remembers."""

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE
from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Codec
from hybridtrain.units import GIB, format_bytes, to_gib
from hybridvalidation.judge.case import Case, Metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.stack_run import MemoryFigures

_STATED_DELTAS = 50
_BYTES = {Codec.FLOAT32: 4.0, Codec.BFLOAT16: 2.0, Codec.INT8_BLOCKS: 1 + 4 / QUANT_GROUP_SIZE}
"""Per parameter and history tensor; an int8 one has a float32 scale per group."""


def predict_reduction(case: Case) -> Metric | None:
    """Return by how much the peak in PREDICT is below the baseline's peak."""
    memory = case.memory
    predicted = None if memory is None else _predict_peak(memory)
    if case.memories is None or predicted is None:
        return None
    own, baseline = case.memories
    remark = (
        f"{to_gib(predicted):.2f} GiB allocated in PREDICT, host {format_bytes(own.host_peak_bytes)}; the peak of the "
        f"whole cycle is {to_gib(own.peak_allocated_bytes):.2f} GiB"
    )
    value = 100 * (1 - predicted / baseline.peak_allocated_bytes)
    return Metric(value, Evidence.PLANNED, "%", fits=own.fits, remark=remark)


def predict_gib(case: Case) -> Metric | None:
    """Return GiB allocated at the peak of PREDICT: weights, state, and what the jump works in."""
    memory = case.memory
    predicted = None if memory is None else _predict_peak(memory)
    if memory is None or predicted is None:
        return None
    remark = f"everything on the card; host {format_bytes(memory.host_peak_bytes)}"
    return Metric(predicted / GIB, Evidence.PLANNED, "GiB", fits=memory.fits, remark=remark)


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


def _predict_peak(memory: MemoryFigures) -> int | None:
    peaks = [step.allocated_bytes for step in memory.steps if step.phase == Phase.PREDICT.value]
    return max(peaks, default=None)
