"""Step time from a roofline: each op takes as long as its arithmetic or its memory traffic, whichever is slower.

One compute stream runs the ops in order; two copy streams carry tensors in and out, the bus being full duplex; the
processor, the disk and the link to other cards have a lane each. A lane waits for another where the ledger says so, and
the time in which the compute stream waits belongs to what it waits for. The program issues one kernel after the other,
ahead of the card: a kernel starts when the stream is free and it has been issued. Copies share memory: each takes its
rate from the device's, and lanes that use host memory at a time share that. Every figure from here is ``estimated``.

A product of M x K and K x N reaches ``matmul * K / (K + inner_half) * W / (W + waves_half)`` of the peak, W being its
tiles of 128 x 128 for each multiprocessor: the pipeline of a tile fills and drains once per K, and the last wave of
tiles is not full (NVIDIA, "Matrix Multiplication Background User's Guide", wave and tile quantization). One narrower
than a tensor core's 16 rows or columns is read, not multiplied, in time: neither term holds for it.

An op whose operands are few finds them where the op before left them, in the second-level cache: up to a quarter of it,
``cached`` times the rate of device memory.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.account.ledger import OpRecord
from hybridtrain.virtual_gpu.account.observer import Lane, Stage
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridtrain.virtual_gpu.cards.catalogue import figure_faults, raise_faults, read_catalogue


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
class Efficiency:
    """Share of a card's peak rates that is reached in practice.

    It may be above 1: a vendor's rate holds at the boost clock on the box, and GeForce cards run faster.
    """

    matmul: float = 0.75
    """Of the peak arithmetic rate, by large matrices."""
    inner_half: float = 0.0
    """Inner dimension of a product at which half of that is reached."""
    waves_half: float = 0.0
    """Tiles for each multiprocessor at which half of that is reached."""
    attention: float = 0.7
    """Of ``matmul``, by attention kernels: assumed, after a fit to all runs of benchmarks/peer_runs.toml gave 0.70."""
    memory: float = 0.80
    """Of the peak memory bandwidth."""
    cached: float = 2.1
    """How many times faster than device memory small operands are read and written: fitted on one recorded run, the
    LoRA of rank 32 of PEFT's comparison on an L40S (results/tables/recorded.md tells how others are met)."""
    bus: float = 0.80
    """Of the theoretical bus rate: about 25 of 31.5 GB/s on PCIe 4.0 x16."""
    launch_seconds: float = 4e-6
    """Time to issue a kernel."""
    kernel_seconds: float = 2e-6
    """Shortest time that a kernel or a copy takes."""

    def __post_init__(self) -> None:
        shares = ("matmul", "attention", "memory", "cached", "bus")
        others = ("inner_half", "waves_half", "launch_seconds", "kernel_seconds")
        raise_faults(figure_faults(self, above_0=shares, at_least_0=others))


DEFAULT_EFFICIENCY = Efficiency()


def efficiency_of(card: Card) -> Efficiency:
    """Return the shares of its peak rates that a card reaches: its own, those of its family, or the assumed ones."""
    known = _efficiencies()
    return known.get(card.name) or known.get(card.family, DEFAULT_EFFICIENCY)


@cache
def _efficiencies() -> dict[str, Efficiency]:
    return read_catalogue(Efficiency, "efficiency.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedAccuracy:
    """The error of estimated tokens/s against recorded ones that were left out of the fit: their ratio less 1."""

    runs: int
    mean: float
    mean_absolute: float
    largest: float


@cache
def time_errors() -> dict[str, SpeedAccuracy]:
    """Return the errors of ``leave_one_card_out`` and ``leave_one_size_out``."""
    return read_catalogue(SpeedAccuracy, "time_error.toml")


_BOUND_OF_LANE = {
    Lane.COPY_IN: Bottleneck.TRANSFER,
    Lane.COPY_OUT: Bottleneck.TRANSFER,
    Lane.HOST: Bottleneck.HOST,
    Lane.DISK: Bottleneck.DISK,
    Lane.LINK: Bottleneck.LINK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
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
    efficiency: Efficiency | None = None,
) -> StepTime:
    """Return the time of a step.

        >>> import torch
        >>> from hybridtrain.virtual_gpu import StorageLedger, find_card
        >>> with StorageLedger() as ledger, torch.device("meta"):
        ...     out = torch.empty(4096, 4096) @ torch.empty(4096, 4096)
        >>> time = estimate_step(ledger.trace().ops, find_card("rtx-4090"), upload_bytes=0)
        >>> time.flops, f"{1000 * time.seconds:.2f} ms", time.bound
        (137438953472, '1.74 ms', <Bottleneck.COMPUTE: 'compute'>)

    Args:
        ops: The step's, in the order in which they were given to their lanes.
        card: Its rates.
        upload_bytes: Of the step's batches, copied in before the first op.
        first: Number of the first op, by which ``waits`` count; what lies before it is done.
        host: The machine around the card.
        efficiency: Shares of the peak rates; None: those of the card's family.
    """
    rates = Rates(card, host or Host(), efficiency or efficiency_of(card))
    upload = upload_bytes / rates.bus
    issued = 0.0
    clocks = dict.fromkeys(Lane, upload)
    busy: defaultdict[Lane, float] = defaultdict(float, {Lane.COPY_IN: upload})
    by_bound: defaultdict[Bottleneck, float] = defaultdict(float, {Bottleneck.TRANSFER: upload})
    ends: list[float] = []
    causes: list[Bottleneck] = []
    timed: list[TimedOp] = []
    flops = bytes_moved = 0
    for op in ops:
        start, waited_for = clocks[op.lane], None
        for number in op.waits:
            if number >= first and ends[number - first] > start:
                start, waited_for = ends[number - first], causes[number - first]
        if op.lane is Lane.COMPUTE and op.bytes_moved:
            if issued > start:
                start, waited_for = issued, Bottleneck.MEMORY
            issued += rates.launch
        beside = [lane for lane in _HOST_LANES if lane is not op.lane and clocks[lane] > start]
        duration, bound = rates.duration(op, beside)
        if op.lane is Lane.COMPUTE:
            if waited_for is not None:
                by_bound[waited_for] += start - clocks[op.lane]
            by_bound[bound] += duration
            flops += op.flops
            bytes_moved += op.bytes_moved
        is_held_up = waited_for not in {None, Bottleneck.COMPUTE, Bottleneck.MEMORY, Bottleneck.OPTIMIZER}
        causes.append(waited_for if is_held_up and waited_for is not None else bound)
        clocks[op.lane] = start + duration
        ends.append(start + duration)
        busy[op.lane] += duration
        if duration:
            timed.append(TimedOp(op=op, start_s=start, duration_s=duration, bound=bound))
    last = max(clocks, key=lambda lane: clocks[lane])
    if last is not Lane.COMPUTE:
        by_bound[_BOUND_OF_LANE[last]] += clocks[last] - clocks[Lane.COMPUTE]
    return StepTime(
        seconds=clocks[last], seconds_by_bound=dict(by_bound), busy_seconds=dict(busy), flops=flops,
        bytes_moved=bytes_moved, upload_seconds=upload, ops=tuple(timed),
    )  # fmt: skip


_COPIES = (Lane.COPY_IN, Lane.COPY_OUT)
_HOST_LANES = (*_COPIES, Lane.HOST)
_TILE = 128 * 128
_NARROW = 16
_CACHED_SHARE = 4


class Rates:
    """The rates that one card and machine reach in practice."""

    def __init__(self, card: Card, host: Host, efficiency: Efficiency) -> None:
        self._card, self._efficiency = card, efficiency
        self._flops = card.flops_per_second
        self._bandwidth = card.memory_bytes_per_second * efficiency.memory
        self._cached_bytes = card.l2_mib * MIB // _CACHED_SHARE
        self._host = host.memory_bytes_per_second
        self._disk = host.disk_bytes_per_second
        self.launch = efficiency.launch_seconds
        self.bus = card.bus_bytes_per_second * efficiency.bus
        self._shares: dict[tuple[int, int, int], float] = {}

    def duration(self, op: OpRecord, beside: Sequence[Lane]) -> tuple[float, Bottleneck]:
        """Return the seconds for which an op occupies its lane, and its bottleneck.

        Args:
            op: The op.
            beside: Other lanes that use host memory meanwhile.
        """
        least = self._efficiency.kernel_seconds
        if op.lane is Lane.LINK:
            memory = op.bytes_moved / self._memory_rate(op.bytes_moved, beside)
            return max(op.link_seconds, memory, least), Bottleneck.LINK
        if op.lane is not Lane.COMPUTE:
            return max(op.bytes_moved / self._rate(op.lane, beside), least), _BOUND_OF_LANE[op.lane]
        if not op.bytes_moved:
            return 0.0, Bottleneck.MEMORY
        compute = op.flops / (self._peak(op) * self._share(op)) if op.flops else 0.0
        memory = max(op.bytes_moved / self._memory_rate(op.bytes_moved, beside), least)
        if op.stage is Stage.UPDATE:
            return max(compute, memory), Bottleneck.OPTIMIZER
        return max(compute, memory), Bottleneck.COMPUTE if compute >= memory else Bottleneck.MEMORY

    def _peak(self, op: OpRecord) -> float:
        """Return the peak arithmetic rate; attention without a flash kernel is taken to have that of fp32."""
        is_slow = "attention" in op.name and not self._card.has_bfloat16_tensor_cores
        return self._flops["float32"] if is_slow else self._flops.get(op.dtype, self._flops["float32"])

    def _memory_rate(self, num_bytes: int, beside: Sequence[Lane]) -> float:
        if num_bytes <= self._cached_bytes:
            return self._bandwidth * self._efficiency.cached
        return max(self._bandwidth - self.bus * sum(lane in _COPIES for lane in beside), self._bandwidth / 2)

    def _rate(self, lane: Lane, beside: Sequence[Lane]) -> float:
        if lane is Lane.DISK:
            return self._disk
        even = self._host / (1 + len(beside))
        return max(even, self._host - self.bus * len(beside)) if lane is Lane.HOST else min(self.bus, even)

    def _share(self, op: OpRecord) -> float:
        """Return the share of the peak arithmetic rate that an op reaches."""
        efficiency = self._efficiency
        if op.shape is None:
            return efficiency.matmul * (efficiency.attention if "attention" in op.name else 1.0)
        if op.shape not in self._shares:
            rows, columns, inner = op.shape
            if min(rows, columns) < _NARROW:
                return efficiency.matmul
            waves = rows * columns / _TILE / max(self._card.sms, 1)
            fill = inner / (inner + efficiency.inner_half)
            self._shares[op.shape] = efficiency.matmul * fill * waves / (waves + efficiency.waves_half)
        return self._shares[op.shape]
