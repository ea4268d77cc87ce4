"""Step time from a roofline: each op takes as long as its arithmetic or its memory traffic, whichever is slower.

One compute stream runs the ops in order; two copy streams carry tensors in and out, the bus being full duplex; the
processor and the disk have a lane each. A lane waits for another where the ledger says so, and the time in which the
compute stream waits belongs to what it waits for. Every figure from here is ``estimated``.
"""

import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources

from hybridtrain.config.decode import decode
from hybridtrain.virtual_gpu.card import Card, Host
from hybridtrain.virtual_gpu.ledger import OpRecord
from hybridtrain.virtual_gpu.observer import Lane, Stage


class Bound(StrEnum):
    """What a step's time is spent on."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Share of a card's peak rates that is reached in practice.

    It may be above 1: a vendor's rate holds at the boost clock on the box, and GeForce cards run faster.
    """

    matmul: float = 0.75
    """Of the peak arithmetic rate; torch's own runtime estimator assumes the same (runtime_estimator.py)."""
    memory: float = 0.80
    """Of the peak memory bandwidth."""
    bus: float = 0.80
    """Of the theoretical bus rate: about 25 of 31.5 GB/s on PCIe 4.0 x16."""
    launch_seconds: float = 4e-6
    """Shortest time between two kernels launched from Python."""

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in ("matmul", "memory", "bus")}
        faults = [f"{name}: {share} must be above 0" for name, share in shares.items() if share <= 0]
        if self.launch_seconds < 0:
            faults.append(f"launch_seconds: {self.launch_seconds} must be at least 0")
        if faults:
            raise ValueError("\n".join(faults))


DEFAULT_EFFICIENCY = Efficiency()


def efficiency_of(card: Card) -> Efficiency:
    """Return the shares of its peak rates that a card reaches: those of its family, or the assumed ones."""
    return _efficiency_by_family().get(card.family, DEFAULT_EFFICIENCY)


@cache
def _efficiency_by_family() -> dict[str, Efficiency]:
    text = resources.files("hybridtrain.virtual_gpu").joinpath("efficiency.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return {name: decode(Efficiency, table, source=f"efficiency.toml [{name}]") for name, table in tables.items()}


_BOUND_OF_LANE = {
    Lane.COPY_IN: Bound.TRANSFER,
    Lane.COPY_OUT: Bound.TRANSFER,
    Lane.HOST: Bound.HOST,
    Lane.DISK: Bound.DISK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOp:
    """An op on its lane."""

    op: OpRecord
    start_s: float
    duration_s: float
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long one optimizer step takes."""

    seconds: float
    """Until every lane has done its work."""
    seconds_by_bound: dict[Bound, float]
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
    def bound(self) -> Bound:
        """The largest share."""
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
        (137438953472, '1.90 ms', <Bound.COMPUTE: 'compute'>)

    Args:
        ops: The step's, in the order in which they were given to their lanes.
        card: Its rates.
        upload_bytes: Of the step's batches, copied in before the first op.
        first: Number of the first op, by which ``waits`` count; what lies before it is done.
        host: The machine around the card.
        efficiency: Shares of the peak rates; None: those of the card's family.
    """
    rates = _Rates(card, host or Host(), efficiency or efficiency_of(card))
    upload = upload_bytes / rates.bus
    clocks = dict.fromkeys(Lane, upload)
    busy: defaultdict[Lane, float] = defaultdict(float, {Lane.COPY_IN: upload})
    by_bound: defaultdict[Bound, float] = defaultdict(float, {Bound.TRANSFER: upload})
    ends: list[float] = []
    causes: list[Bound] = []
    timed: list[TimedOp] = []
    flops = bytes_moved = 0
    for op in ops:
        duration, bound = rates.duration(op)
        start, waited_for = clocks[op.lane], None
        for number in op.waits:
            if number >= first and ends[number - first] > start:
                start, waited_for = ends[number - first], causes[number - first]
        if op.lane is Lane.COMPUTE:
            if waited_for is not None:
                by_bound[waited_for] += start - clocks[op.lane]
            by_bound[bound] += duration
            flops += op.flops
            bytes_moved += op.bytes_moved
        is_held_up = waited_for not in {None, Bound.COMPUTE, Bound.MEMORY, Bound.OPTIMIZER}
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


class _Rates:
    """What one card and machine reach in practice."""

    def __init__(self, card: Card, host: Host, efficiency: Efficiency) -> None:
        self._flops = {name: rate * efficiency.matmul for name, rate in card.flops_per_second.items()}
        self._bandwidth = card.memory_bytes_per_second * efficiency.memory
        self._launch = efficiency.launch_seconds
        self._lanes = {
            Lane.COPY_IN: card.bus_bytes_per_second * efficiency.bus,
            Lane.COPY_OUT: card.bus_bytes_per_second * efficiency.bus,
            Lane.HOST: host.memory_bytes_per_second,
            Lane.DISK: host.disk_bytes_per_second,
        }
        self.bus = self._lanes[Lane.COPY_IN]

    def duration(self, op: OpRecord) -> tuple[float, Bound]:
        """Return the seconds an op keeps its lane, and what limits it."""
        if op.lane is not Lane.COMPUTE:
            return max(op.bytes_moved / self._lanes[op.lane], self._launch), _BOUND_OF_LANE[op.lane]
        if not op.bytes_moved:
            return 0.0, Bound.MEMORY
        compute = op.flops / self._flops.get(op.dtype, self._flops["float32"])
        memory = max(op.bytes_moved / self._bandwidth, self._launch)
        if op.stage is Stage.UPDATE:
            return max(compute, memory), Bound.OPTIMIZER
        return max(compute, memory), Bound.COMPUTE if compute >= memory else Bound.MEMORY
