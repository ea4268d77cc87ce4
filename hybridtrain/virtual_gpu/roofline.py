"""Step time from a roofline: each op takes as long as its arithmetic or its memory traffic, whichever is slower.

One compute stream runs the ops in order; two copy streams carry batches in and (with offloading) tensors out. The
efficiencies are assumptions until a card was measured, so every figure from here is ``estimated``.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hybridtrain.profiler.ledger_trace import OpRecord
from hybridtrain.profiler.observer import Stage
from hybridtrain.virtual_gpu.card import Card


class Bound(StrEnum):
    """What a step's time is spent on."""

    COMPUTE = "compute"
    """Matmuls and attention at the arithmetic limit."""
    MEMORY = "memory"
    """Ops at the bandwidth limit of device memory, or at the launch rate."""
    TRANSFER = "transfer"
    """Copies that no computation hides."""
    OPTIMIZER = "optimizer"
    """Clipping and update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Share of a card's peak rates that is reached in practice."""

    matmul: float = 0.75
    """Of the peak arithmetic rate; torch's own runtime estimator assumes the same (runtime_estimator.py)."""
    memory: float = 0.80
    """Of the peak memory bandwidth."""
    bus: float = 0.80
    """Of the theoretical bus rate: about 25 of 31.5 GB/s on PCIe 4.0 x16."""
    launch_seconds: float = 4e-6
    """Shortest time between two kernels launched from Python."""


DEFAULT_EFFICIENCY = Efficiency()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOp:
    """An op on the compute stream."""

    op: OpRecord
    start_s: float
    duration_s: float
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long one optimizer step takes."""

    seconds: float
    seconds_by_bound: dict[Bound, float]
    flops: int
    bytes_moved: int
    upload_seconds: float
    """Time of the copy-in stream, hidden or not."""
    ops: tuple[TimedOp, ...]

    @property
    def bound(self) -> Bound:
        """The largest share."""
        return max(self.seconds_by_bound, key=lambda bound: self.seconds_by_bound[bound])


def estimate_step(
    ops: Iterable[OpRecord], card: Card, *, upload_bytes: int, efficiency: Efficiency = DEFAULT_EFFICIENCY
) -> StepTime:
    """Return the time of a step whose ops are ``ops`` and whose batches have ``upload_bytes``.

    The upload of a step comes before its first op and is not hidden: the trainer asks for it at the step's start.
    """
    rates = {name: rate * efficiency.matmul for name, rate in card.flops_per_second.items()}
    bandwidth = card.memory_bytes_per_second * efficiency.memory
    upload = upload_bytes / (card.bus_bytes_per_second * efficiency.bus)
    by_bound: defaultdict[Bound, float] = defaultdict(float, {Bound.TRANSFER: upload})
    clock = upload
    timed: list[TimedOp] = []
    flops = bytes_moved = 0
    for op in ops:
        if not op.bytes_moved:
            continue
        compute = op.flops / rates.get(op.dtype, rates["float32"])
        memory = max(op.bytes_moved / bandwidth, efficiency.launch_seconds)
        duration = max(compute, memory)
        bound = Bound.COMPUTE if compute >= memory else Bound.MEMORY
        if op.stage is Stage.UPDATE:
            bound = Bound.OPTIMIZER
        timed.append(TimedOp(op=op, start_s=clock, duration_s=duration, bound=bound))
        by_bound[bound] += duration
        clock += duration
        flops += op.flops
        bytes_moved += op.bytes_moved
    return StepTime(
        seconds=clock, seconds_by_bound=dict(by_bound), flops=flops, bytes_moved=bytes_moved, upload_seconds=upload,
        ops=tuple(timed),
    )  # fmt: skip
