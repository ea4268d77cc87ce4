"""Replays a ledger's events in the allocator model: requested bytes -> allocated, active and reserved bytes."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, holders
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator, Segment
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.segments import AllocatorEvent
from hybridtrain.virtual_gpu.cards.card import Card

SETTLING_STEPS = 4
"""Repetitions after which reserved bytes were never observed to rise; fragmentation shows within two or three steps."""
ClassBytes = dict[TensorClass, int]
UnitBytes = dict[tuple[TensorClass, str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """The allocator's bytes at one moment, with their holders."""

    step: int
    """Step, from 1; 0 during construction of the model."""
    stage: Stage
    """Stage of the step."""
    unit: str
    requested_bytes: int
    allocated_bytes: int
    """``torch.cuda.memory_allocated``: blocks in use, rounding included."""
    reserved_bytes: int
    """``torch.cuda.memory_reserved``: segments taken from the driver."""
    by_class: ClassBytes
    """Allocated bytes by holder."""
    by_unit: UnitBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory(HeldMemory):
    """Peaks of one optimizer step; stage and holders at the peak of allocated bytes.

    ``requested_bytes`` equal the ledger's count plus library workspaces.
    """

    active_bytes: int
    """Allocated, and freed blocks that wait for another stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(HeldMemory):
    """The state at a request of ``requested_bytes`` that did not fit."""

    capacity_bytes: int

    @classmethod
    def of(
        cls, refusal: AllocatorOutOfMemory, step: int, place: tuple[Stage, str], held: tuple[ClassBytes, UnitBytes]
    ) -> Self:
        """Return the error with stage, unit and holders of the allocated bytes."""
        return cls(
            step=step, stage=place[0], unit=place[1], requested_bytes=refusal.requested_bytes,
            allocated_bytes=refusal.allocated_bytes, reserved_bytes=refusal.reserved_bytes,
            capacity_bytes=refusal.capacity_bytes or 0, by_class=held[0], by_unit=held[1],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of replaying a whole trace."""

    steps: tuple[StepMemory, ...]
    oom: OutOfMemory | None
    num_alloc_retries: int
    history: tuple[AllocatorEvent, ...] = ()
    owners: dict[int, int] = field(default_factory=dict)
    """Ordinal of an ``alloc`` -> storage index, without library workspaces; empty without history."""
    segments: tuple[Segment, ...] = ()
    live_by_class: tuple[tuple[int, ClassBytes], ...] = ()
    """For the last step: (ledger event, allocated bytes by class after it)."""


def replay_trace(
    trace: LedgerTrace,
    *,
    workspace_bytes: int,
    config: AllocatorConfig | None = None,
    capacity_bytes: int | None = None,
    record_history: bool = False,
    repeats: int = 0,
) -> Replay:
    """Run every event of ``trace`` through the allocator.

        >>> import torch
        >>> from hybridtrain.virtual_gpu import StorageLedger
        >>> ledger = StorageLedger()
        >>> with ledger, torch.device("meta"):
        ...     weight = torch.empty(1000, 1000)
        ...     ledger.begin_step()
        ...     out = weight @ weight
        >>> step = replay_trace(ledger.trace(), workspace_bytes=0).steps[0]
        >>> step.requested_bytes, step.allocated_bytes, step.reserved_bytes
        (8000000, 8000512, 20971520)

    Args:
        trace: Trace of a whole run, from the model's construction on.
        workspace_bytes: cuBLAS workspace per handle; one is taken by the first matmul of a forward pass, one by the
            first of a backward pass, which torch runs on a thread with a handle of its own.
        config: Allocator settings.
        capacity_bytes: Cap on the reserved bytes; None: no cap.
        record_history: Keep what snapshots need.
        repeats: Repetitions of the last step, for the reserved bytes of a longer run; they count as one step and are
        not in the history. A step that leaks is not repeated.
    """
    allocator = CachingAllocator(config, capacity_bytes, record_history=record_history)
    run = _Run(trace, allocator, workspace_bytes)
    oom = run.play()
    return run.finish(run.repeat(repeats) if oom is None else oom)


def replay_on_card(
    trace: LedgerTrace,
    card: Card,
    *,
    config: AllocatorConfig | None = None,
    record_history: bool = False,
    repeats: int = 0,
) -> tuple[Replay, Replay]:
    """Replay a trace without and with the card's cap; one replay serves as both if it fits.

    The history is that without a cap.
    """
    workspace, capacity = card.cublas_workspace_bytes, card.allocator_capacity_bytes
    uncapped = replay_trace(
        trace, workspace_bytes=workspace, config=config, record_history=record_history, repeats=repeats
    )
    if max(step.reserved_bytes for step in uncapped.steps) <= capacity:
        return uncapped, uncapped
    return uncapped, replay_trace(
        trace, workspace_bytes=workspace, config=config, capacity_bytes=capacity, repeats=repeats
    )


def first_matmuls(trace: LedgerTrace) -> list[int]:
    """Return the events of the first matmul of the forward and of the backward thread."""
    stages = (Stage.FORWARD, Stage.BACKWARD)
    firsts = (next((op.event for op in trace.ops if op.is_matmul and op.stage is stage), None) for stage in stages)
    return [event for event in firsts if event is not None]


class TracePlayer:
    """Plays a trace's events on an allocator."""

    def __init__(self, trace: LedgerTrace, allocator: CachingAllocator, workspace_bytes: int) -> None:
        self._trace = trace
        self._allocator = allocator
        self._workspace_bytes = workspace_bytes
        self._addresses: dict[int, int] = {}

    def _succeed(self, cycle: "StepCycle") -> None:
        """Map the storages left by a step to those that the next step starts with."""
        self._addresses.update({old: self._addresses.pop(new) for old, new in cycle.successors.items()})


class _Run(TracePlayer):
    def __init__(self, trace: LedgerTrace, allocator: CachingAllocator, workspace_bytes: int) -> None:
        super().__init__(trace, allocator, workspace_bytes)
        self._workspaces: list[tuple[int, int]] = []
        """(event, block bytes) of library workspaces."""
        self._block_bytes: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._position = -1
        self._steps: list[dict[str, int]] = []
        """Peaks of each step with the event of the peak; the first entry is before any step."""
        self._segments: tuple[Segment, ...] = ()

    def play(self) -> OutOfMemory | None:
        """Replay the trace to its end or to the first out-of-memory error."""
        starts = [mark.event for mark in self._trace.steps]
        matmuls = first_matmuls(self._trace)
        releases = iter((*self._trace.cache_releases, None))
        release = next(releases)
        peak = (-1, 0)
        try:
            for position, event in enumerate(self._trace.events):
                if starts and position == starts[0]:
                    self._close_step(peak[0])
                    starts.pop(0)
                    peak = (position - 1, self._allocator.allocated_bytes)
                while release == position:
                    self._allocator.empty_cache()
                    release = next(releases)
                for _ in range(matmuls.count(position)):
                    self._take_workspace(position)
                self._apply(event)
                self._position = position
                if self._allocator.allocated_bytes > peak[1]:
                    peak = (position, self._allocator.allocated_bytes)
        except AllocatorOutOfMemory as refusal:
            return self._report(refusal)
        for _ in starts:  # steps whose first request was refused
            self._close_step(peak[0])
            peak = (self._position, self._allocator.allocated_bytes)
        self._close_step(peak[0])
        return None

    def repeat(self, count: int) -> OutOfMemory | None:
        """Repeat the last step, and record the largest reserved bytes."""
        allocator, history = self._allocator, self._allocator.history
        if history is not None:
            self._segments = allocator.segments()
        cycle = last_cycle(self._trace) if count else None
        if cycle is None:
            return None
        length = 0 if history is None else len(history)
        try:
            settled = SteadyStateCheck(allocator)
            for _ in range(count):
                self._succeed(cycle)
                if settled.now(self._addresses):
                    break
                for self._position in cycle.body:
                    self._request(self._trace.events[self._position])
                for event in cycle.tail:
                    self._request(event)
        except AllocatorOutOfMemory as refusal:
            return self._report(refusal)
        finally:
            if history is not None:
                del history[length:]
        last = self._steps[-1]
        last["reserved_bytes"] = max(last["reserved_bytes"], allocator.peak_reserved_bytes)
        return None

    def finish(self, oom: OutOfMemory | None) -> Replay:
        """Return the replay's results; after an out-of-memory error only of completed steps."""
        steps = []
        for number, peaks in enumerate(self._steps[1:], 1):
            event = peaks.pop("event")
            (by_class, by_unit), (stage, unit) = self._holders(event), self._place(event)
            steps.append(StepMemory(step=number, **peaks, by_class=by_class, by_unit=by_unit, stage=stage, unit=unit))
        return Replay(
            steps=tuple(steps),
            oom=oom,
            num_alloc_retries=self._allocator.num_alloc_retries,
            history=tuple(self._allocator.history or ()),
            owners=self._owners,
            segments=self._segments,
            live_by_class=tuple(self._walk_last_step()) if oom is None and self._trace.steps else (),
        )

    def _take_workspace(self, event: int) -> None:
        before = self._allocator.allocated_bytes
        self._allocator.malloc(self._workspace_bytes)
        self._workspaces.append((event, self._allocator.allocated_bytes - before))

    def _request(self, event: int) -> None:
        if event < 0:
            self._allocator.free(self._addresses.pop(~event))
        else:
            self._addresses[event] = self._allocator.malloc(self._trace.sizes[event], self._trace.stream_of(event))

    def _apply(self, event: int) -> None:
        """Make a request for the first time; note the block that serves it."""
        before = self._allocator.allocated_bytes
        self._request(event)
        if event >= 0:
            self._block_bytes[event] = self._allocator.allocated_bytes - before
            if self._allocator.history is not None:
                self._owners[self._allocator.history[-1].ordinal] = event

    def _close_step(self, peak_event: int) -> None:
        kinds = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes")
        peaks = {kind: getattr(self._allocator, f"peak_{kind}") for kind in kinds}
        self._steps.append(peaks | {"event": peak_event})
        self._allocator.reset_peaks()

    def _report(self, refusal: AllocatorOutOfMemory) -> OutOfMemory:
        event = self._position + 1
        step = sum(mark.event <= event for mark in self._trace.steps)
        held = self._holders(self._position, workspaces_before=event)
        return OutOfMemory.of(refusal, step, self._place(event), held)

    def _place(self, event: int) -> tuple[Stage, str]:
        """Return stage and unit of the op that made ``event``: the last one that started at or before it."""
        place = (Stage.BUILD, "")
        for op in self._trace.ops:
            if op.event > event:
                break
            place = (op.stage, op.unit)
        return place

    def _holders(self, event: int, *, workspaces_before: int | None = None) -> tuple[ClassBytes, UnitBytes]:
        """Return the holders of bytes after ``event``, with the workspaces taken until then or until a later event."""
        by_class, by_unit = holders(self._trace, event, self._block_bytes)
        until = event if workspaces_before is None else workspaces_before
        size = sum(size for first, size in self._workspaces if first <= until)
        if size:
            by_class[TensorClass.WORKSPACE] += size
            by_unit[TensorClass.WORKSPACE, "cublas"] = size
        return by_class, by_unit

    def _walk_last_step(self) -> Iterator[tuple[int, ClassBytes]]:
        start = self._trace.steps[-1].event
        by_class, _ = self._holders(start - 1)
        for position in range(start, len(self._trace.events)):
            entry = self._trace.events[position]
            index = entry if entry >= 0 else ~entry
            size = self._block_bytes[index]
            by_class[TensorClass.WORKSPACE] += sum(taken for first, taken in self._workspaces if first == position)
            by_class[self._trace.classes[index]] += size if entry >= 0 else -size
            yield position, dict(by_class)


@dataclass(frozen=True, slots=True)
class StepCycle:
    """The last step as a repeatable cycle."""

    body: range
    """Its events up to its last allocation."""
    tail: tuple[int, ...]
    """Later releases of the step's own storages, without those at the end of the script."""
    successors: dict[int, int]
    """Which storage at its end takes the role of which one that it found and released."""


class SteadyStateCheck:
    """Detects that repeated steps have settled: allocator and storages equal those before the step."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._before: object = None

    def now(self, addresses: Mapping[int, int]) -> bool:
        """Return whether the state equals the last call's; ``addresses``: by storage, at the start of the next step."""
        layout = self._allocator.layout()
        before = self._before
        self._before = None if layout is None else (layout, dict(addresses), self._allocator.num_alloc_retries)
        return self._before is not None and self._before == before


def last_cycle(trace: LedgerTrace) -> StepCycle | None:
    """Return the last step as a cycle; None if it leaks memory."""
    step = trace.step_range(len(trace.steps) - 1)
    stop = next((position + 1 for position in reversed(step) if trace.events[position] >= 0), step.start)
    body, trailing = range(step.start, stop), trace.events[stop : step.stop]
    made, released = dict.fromkeys(trace.events[p] for p in body if trace.events[p] >= 0), list[int]()
    for entry in (trace.events[p] for p in body if trace.events[p] < 0):
        if ~entry in made:
            del made[~entry]
        else:
            released.append(~entry)
    late = {~entry for entry in trailing}

    def kind(index: int) -> tuple[TensorClass, str, int]:
        return trace.classes[index], trace.units[index], trace.sizes[index]

    of_kind = defaultdict[tuple[TensorClass, str, int], deque[int]](deque)
    for index in sorted(made, key=lambda index: index in late):  # what stays alive is a successor first of all
        of_kind[kind(index)].append(index)
    if Counter(map(kind, released)) - Counter(map(kind, made)):
        return None
    successors = {index: of_kind[kind(index)].popleft() for index in released}
    rest = made.keys() - set(successors.values())
    return StepCycle(body, tuple(e for e in trailing if ~e in rest), successors) if rest <= late else None
