"""Step time from a roofline: each op takes as long as its arithmetic or its memory traffic, whichever is slower.

One compute stream runs the ops in order; two copy streams carry tensors in and out, the bus being full duplex; the
processor, the disk and the link to other cards have a lane each. A lane waits for another where the ledger says so, and
the time in which the compute stream waits belongs to what it waits for. The program issues one kernel after the other,
ahead of the card: a kernel starts when the stream is free and it has been issued. Copies share memory: each takes its
rate from the device's, and lanes that use host memory at a time share that. Every figure from here is ``estimated``.

How long a kernel takes by itself is told by kernels.py. A step's spread follows from those of its classes of kernels
and from what recorded steps leave unexplained beside them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import exp, hypot

from hybridtrain.virtual_gpu.account.op_record import Lane, OpRecord, Stage
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridtrain.virtual_gpu.cards.catalogue import read_catalogue
from hybridtrain.virtual_gpu.cards.kernels import Curves, Kernel, KernelTimes, curves_of


class Bottleneck(StrEnum):
    """The bottleneck of a step."""

    COMPUTE = "compute"
    """Matmuls and attention at the arithmetic limit."""
    MEMORY = "memory"
    """Ops at the bandwidth limit of device memory, or at the launch rate."""
    TRANSFER = "transfer"
    """Copies over the bus that no computation hides."""
    OPTIMIZER = "optimizer"
    """Clipping and update on the device."""
    HOST = "host"
    """Work of the processor that nothing hides."""
    DISK = "disk"
    """Reading and writing files that nothing hides."""
    LINK = "link"
    """Other cards: collectives that nothing hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedAccuracy:
    """The error of estimated seconds of steps that were left out of the fit: over the recorded ones, less 1."""

    runs: int
    sources: int
    mean: float
    mean_absolute: float
    """Of sources, each the same; of rows kept back and of runs that wait, each the same."""
    largest: float
    """Of a source's mean."""
    spread: float
    """What the spreads of its kernels leave of a step's."""
    covered: float
    """Share of the runs within their interval of 80 %."""


@cache
def time_errors() -> dict[str, SpeedAccuracy]:
    """Return the errors of steps: their source left out, kept back, waiting for copies, and of ratios."""
    return read_catalogue(SpeedAccuracy, "time_error.toml")


WIDTH_OF_80 = 1.2816
"""Standard deviations on either side that hold 80 % of a normal distribution."""
_BOUND_OF_LANE = {
    Lane.COPY_IN: Bottleneck.TRANSFER,
    Lane.COPY_OUT: Bottleneck.TRANSFER,
    Lane.HOST: Bottleneck.HOST,
    Lane.DISK: Bottleneck.DISK,
    Lane.LINK: Bottleneck.LINK,
}


@dataclass(frozen=True, slots=True)
class TimedOp:
    """An op on its lane."""

    op: OpRecord
    start_s: float
    duration_s: float
    bound: Bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of one optimizer step, and its parts."""

    seconds: float
    """Until every lane has done its work."""
    seconds_by_bound: dict[Bottleneck, float]
    """Of the compute stream, waiting included; they add up to ``seconds``."""
    busy_seconds: dict[Lane, float]
    """Of each lane, hidden or not."""
    flops: int
    bytes_moved: int
    """Of device memory."""
    upload_seconds: float
    """The step's batch on the copy-in stream, before its first op."""
    ops: tuple[TimedOp, ...]
    spread: float
    """Standard deviation of the logarithm of the true seconds over ``seconds``."""

    @property
    def interval_s(self) -> tuple[float, float]:
        """Seconds between which four steps of five are."""
        return self.seconds / exp(WIDTH_OF_80 * self.spread), self.seconds * exp(WIDTH_OF_80 * self.spread)

    @property
    def bound(self) -> Bottleneck:
        """The bottleneck: the largest share."""
        return max(self.seconds_by_bound, key=lambda bound: self.seconds_by_bound[bound])


def estimate_step(
    ops: Sequence[OpRecord],
    card: Card,
    *,
    upload_bytes: int,
    first: int = 0,
    host: Host | None = None,
    curves: Curves | None = None,
) -> StepTime:
    """Return the time of a step.

        >>> import torch
        >>> from hybridtrain.virtual_gpu import StorageLedger, find_card
        >>> with StorageLedger() as ledger, torch.device("meta"):
        ...     out = torch.empty(4096, 4096) @ torch.empty(4096, 4096)
        >>> time = estimate_step(ledger.trace().ops, find_card("rtx-4090"), upload_bytes=0)
        >>> time.flops, f"{1000 * time.seconds:.2f} ms", time.bound
        (137438953472, '2.62 ms', <Bottleneck.COMPUTE: 'compute'>)

    Args:
        ops: The step's, in the order in which they were given to their lanes.
        card: Its rates.
        upload_bytes: Of the step's batches, copied in before the first op.
        first: Number of the first op, by which ``waits`` count; what lies before it is done.
        host: The machine around the card.
        curves: What its kernels reach; None: by kernel_curves.toml.
    """
    rates = Rates(card, host or Host(), curves or curves_of(card))
    upload = upload_bytes / rates.bus
    issued, beside_until = 0.0, upload
    clocks = dict.fromkeys(Lane, upload)
    busy: defaultdict[Lane, float] = defaultdict(float, {Lane.COPY_IN: upload})
    by_bound: defaultdict[Bottleneck, float] = defaultdict(float, {Bottleneck.TRANSFER: upload})
    ends: list[float] = []
    causes: list[Bottleneck] = []
    timed: list[TimedOp] = []
    by_kernel: defaultdict[str, float] = defaultdict(float)
    flops = bytes_moved = 0
    for op in ops:
        lane, waited_for = op.lane, None
        start = free = clocks[lane]
        if op.waits and (last_end := max(ends[i - first] if i >= first else 0.0 for i in op.waits)) > start:
            start = last_end
            waited_for = next(causes[i - first] for i in op.waits if i >= first and ends[i - first] == last_end)
        if lane is Lane.COMPUTE and op.bytes_moved:
            if issued > start:
                start, waited_for = issued, Bottleneck.MEMORY
            issued += rates.launch
        beside = [other for other in _HOST_LANES if clocks[other] > start] if beside_until > start else ()
        duration, bound, kernel = rates.duration(op, beside)
        end = clocks[lane] = start + duration
        if lane is Lane.COMPUTE:
            if waited_for is not None:
                by_bound[waited_for] += start - free
            by_bound[bound] += duration
            by_kernel[kernel] += duration
            flops += op.flops
            bytes_moved += op.bytes_moved
        elif end > beside_until and lane in _HOST_LANES:
            beside_until = end
        causes.append(bound if waited_for is None or waited_for in _NO_DELAY else waited_for)
        ends.append(end)
        busy[lane] += duration
        if duration:
            timed.append(TimedOp(op, start, duration, bound))
    last = max(clocks, key=lambda lane: clocks[lane])
    if last is not Lane.COMPUTE:
        by_bound[_BOUND_OF_LANE[last]] += clocks[last] - clocks[Lane.COMPUTE]
    return StepTime(
        seconds=clocks[last], seconds_by_bound=dict(by_bound), busy_seconds=dict(busy), flops=flops,
        bytes_moved=bytes_moved, upload_seconds=upload, ops=tuple(timed), spread=rates.spread(by_kernel, clocks[last]),
    )  # fmt: skip


_NO_DELAY = frozenset({Bottleneck.COMPUTE, Bottleneck.MEMORY, Bottleneck.OPTIMIZER})
"""Causes of waiting that an op does not hand on to those that wait for it."""
_COPIES = (Lane.COPY_IN, Lane.COPY_OUT)
_HOST_LANES = (*_COPIES, Lane.HOST)
_OTHER = Kernel.ELEMENTWISE.value


class Rates:
    """The rates that one card and machine reach in practice."""

    def __init__(self, card: Card, host: Host, curves: Curves) -> None:
        self._curves, self._kernels = curves, KernelTimes(card, curves)
        self._host = host.memory_bytes_per_second
        self._disk = host.disk_bytes_per_second
        self.launch = curves.launch_seconds
        self.bus = card.bus_bytes_per_second * curves.bus

    def duration(self, op: OpRecord, beside: Sequence[Lane]) -> tuple[float, Bottleneck, str]:
        """Return the seconds for which an op occupies its lane, its bottleneck, and the class of its kernel.

        Args:
            op: The op.
            beside: Other lanes that use host memory meanwhile.
        """
        least = self._curves.kernel_seconds
        taken = self.bus * sum(lane in _COPIES for lane in beside) if beside else 0.0
        if op.lane is Lane.LINK:
            memory = op.bytes_moved / self._kernels.memory_rate(op.bytes_moved, taken)
            return max(op.link_seconds, memory, least), Bottleneck.LINK, _OTHER
        if op.lane is not Lane.COMPUTE:
            seconds = max(op.bytes_moved / self._rate(op.lane, beside), least)
            return seconds, _BOUND_OF_LANE[op.lane], _OTHER
        if not op.bytes_moved:
            return 0.0, Bottleneck.MEMORY, _OTHER
        compute, memory, kernel = self._kernels.seconds(op, taken)
        if op.stage is Stage.UPDATE:
            return max(compute, memory), Bottleneck.OPTIMIZER, kernel
        return max(compute, memory), Bottleneck.COMPUTE if compute >= memory else Bottleneck.MEMORY, kernel

    def spread(self, by_kernel: Mapping[str, float], seconds: float) -> float:
        """Return the spread of a step: each class errs by itself, for its part of the seconds; waiting as a whole."""
        waits = max(seconds - sum(by_kernel.values()), 0.0) / (seconds or 1.0)
        parts = (part / (seconds or 1.0) * self._curves.spread[kernel] for kernel, part in by_kernel.items())
        return hypot(time_errors()["source_out"].spread, waits * time_errors()["waiting"].spread, *parts)

    def _rate(self, lane: Lane, beside: Sequence[Lane]) -> float:
        if lane is Lane.DISK:
            return self._disk
        even = self._host / (1 + len(beside))
        return max(even, self._host - self.bus * len(beside)) if lane is Lane.HOST else min(self.bus, even)
