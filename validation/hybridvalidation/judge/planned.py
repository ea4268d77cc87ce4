"""Metrics that compare two dry runs: bytes planned, times estimated."""

from collections.abc import Callable, Sequence

from hybridtrain.virtual_gpu.tensor_class import TensorClass
from hybridvalidation.judge.case import Case, Metric
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.stack_run import MemoryFigures
from hybridvalidation.scenario import BASELINE_STACK

_OVERSIZE = "does not fit; its speed is a roofline of a machine that holds it"


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
    """Return tokens per second against the baseline's."""
    return _speed(case, "x", lambda ratio: ratio)


def slowdown(case: Case) -> Metric | None:
    """Return how many times as long a step takes as the baseline's."""
    return _speed(case, "x", lambda ratio: 1 / ratio)


def time_overhead(case: Case) -> Metric | None:
    """Return by how much a step takes longer than the baseline's."""
    return _speed(case, "%", lambda ratio: 100 * (1 / ratio - 1))


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


def _speed(case: Case, unit: str, express: Callable[[float], float]) -> Metric | None:
    """Express tokens per second over the baseline's."""
    if case.memories is None:
        return None
    own, baseline = case.memories
    remarks = [_against(case), "" if baseline.fits else f"{case.baseline} {_OVERSIZE}"]
    value = express(own.tokens_per_s / baseline.tokens_per_s)
    return Metric(value, Evidence.ESTIMATED, unit, fits=own.fits, remark="; ".join(filter(None, remarks)))


def _own_peak(memory: MemoryFigures, classes: Sequence[TensorClass]) -> int | None:
    """Return the most bytes that some classes hold together at any moment of the last step."""
    if memory.timeline is None:
        return None
    totals: list[int] = [
        sum(sizes) for sizes in zip(*(memory.timeline.by_class[name] for name in classes), strict=True)
    ]
    return max(totals)


def _against(case: Case) -> str:
    """Name the baseline where it is not the usual one, or has other batches."""
    assert case.memories is not None, "asked of two runs"
    own, baseline = (memory.tokens_per_step for memory in case.memories)
    batches = "" if own == baseline else f", {own:,} tokens a step against {baseline:,}"
    return f"against {case.baseline}{batches}" if batches or case.baseline != BASELINE_STACK else ""
