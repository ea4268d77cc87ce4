"""What the ledger saw: every storage with its bytes and purpose, every allocation and release in order."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hybridtrain.virtual_gpu.observer import Lane, Stage
from hybridtrain.virtual_gpu.tensor_class import TensorClass


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One op as the dispatcher saw it."""

    name: str
    event: int
    """Events recorded before it; its outputs come next."""
    stage: Stage
    unit: str
    is_matmul: bool
    flops: int
    """Floating point operations by torch's flop counter; 0 for everything that is no matmul or attention."""
    bytes_moved: int
    """Bytes of inputs and outputs."""
    dtype: str
    """Element type of the first floating point operand."""
    lane: Lane = Lane.COMPUTE
    waits: tuple[int, ...] = ()
    """Numbers of earlier ops, on other lanes, that must be done before this one starts."""


@dataclass(frozen=True, slots=True)
class StepMark:
    """The state at the beginning of a step."""

    event: int
    op: int


@dataclass(frozen=True, slots=True)
class LedgerTrace:
    """The whole story. A storage is its index; an event is ``index`` for an allocation and ``~index`` for a release."""

    sizes: tuple[int, ...]
    """Bytes of each storage, as requested."""
    classes: tuple[TensorClass, ...]
    units: tuple[str, ...]
    """``embedding``, ``block.3``, ``head`` or empty."""
    events: tuple[int, ...]
    ops: tuple[OpRecord, ...]
    steps: tuple[StepMark, ...]
    """Where each optimizer step begins."""

    def step_range(self, step: int) -> range:
        """Return the events of one step, counted from 0."""
        end = self.steps[step + 1].event if step + 1 < len(self.steps) else len(self.events)
        return range(self.steps[step].event, end)

    def step_ops(self, step: int) -> tuple[OpRecord, ...]:
        """Return the ops of one step, counted from 0."""
        end = self.steps[step + 1].op if step + 1 < len(self.steps) else len(self.ops)
        return self.ops[self.steps[step].op : end]

    def live_bytes(self) -> Iterator[int]:
        """Yield the live bytes after each event."""
        live = 0
        for event in self.events:
            live += self.sizes[event] if event >= 0 else -self.sizes[~event]
            yield live


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment with the most live bytes."""

    total_bytes: int
    event: int
    by_class: dict[TensorClass, int]
    by_unit: dict[tuple[TensorClass, str], int]


def find_peak(trace: LedgerTrace, events: range) -> Peak:
    """Return the first moment of greatest live bytes within ``events``, and who held them."""
    live = peak = 0
    peak_event = events.start - 1
    for position, event in enumerate(trace.events[: events.stop]):
        live += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        if position >= events.start - 1 and live > peak:
            peak, peak_event = live, position
    return Peak(peak, peak_event, *holders(trace, peak_event))


def holders(trace: LedgerTrace, event: int) -> tuple[dict[TensorClass, int], dict[tuple[TensorClass, str], int]]:
    """Return live bytes by class, and by class and unit, right after ``event``."""
    alive: set[int] = set()
    for entry in trace.events[: event + 1]:
        if entry >= 0:
            alive.add(entry)
        else:
            alive.discard(~entry)
    by_class: dict[TensorClass, int] = dict.fromkeys(TensorClass, 0)
    by_unit: defaultdict[tuple[TensorClass, str], int] = defaultdict(int)
    for index in alive:
        by_class[trace.classes[index]] += trace.sizes[index]
        by_unit[trace.classes[index], trace.units[index]] += trace.sizes[index]
    return by_class, dict(by_unit)
