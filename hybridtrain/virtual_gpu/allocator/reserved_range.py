"""The range of reserved bytes when a run differs slightly from its plan: the same trace, replayed with changes.

Allocated bytes of a step do not depend on earlier steps; reserved ones do, because of the allocator's cache. So a dry
run's events are replayed in another order, without running the model again. What is changed, and why it happens:

    driver       segments at falling addresses, as CUDA places most of them; of equal blocks another one is taken
    evaluation   a forward pass alone before the first step, whose tensors leave their segments cached
    more steps   the last step four more times: what fragments keeps fragmenting; omitted for plans that hold them
    lengths      steps of other sequence lengths before, between and after (1/2 to 7/8 of the longest), in rising and in
                 mixed order; what scales is what a step allocates and frees of activations and block inputs
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.replay import (
    SETTLING_STEPS,
    SteadyStateCheck,
    TracePlayer,
    first_matmuls,
    last_cycle,
)
from hybridtrain.virtual_gpu.allocator.segments import Placement, falling

DRIVER, EVALUATION, MORE_STEPS, LENGTHS = "driver", "evaluation", "more steps", "lengths"
_WIDE = 1.1
"""Relative increase with other lengths above which the replay without a cap is not meaningful for a card."""
_RISING = (1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
_MIXED = (3 / 4, 1.0, 1 / 2, 7 / 8, 5 / 8, 1.0)
_SCALES = frozenset({TensorClass.ACTIVATION, TensorClass.BOUNDARY})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedRange:
    """Peak of reserved bytes of a whole run without a cap, and its changes."""

    planned_bytes: int
    by_change: dict[str, int]
    """Peak by change, the largest of its variants. A change is missing if the trace does not allow it: a step that
    leaks cannot be repeated."""
    lengths_fit: bool | None = None
    """Whether steps of other lengths fit under the card's cap, which releases cached segments; None: not tested, or
    little more than equal lengths."""

    @property
    def margin_bytes(self) -> int:
        """Largest increase by a change with steps of equal length, as in this project's trainer."""
        changed = (size for change, size in self.by_change.items() if change != LENGTHS)
        return max(0, *(size - self.planned_bytes for size in changed))

    def as_mapping(self) -> dict[str, object]:
        """Return plain figures."""
        found = {"planned_bytes": self.planned_bytes, "margin_bytes": self.margin_bytes, "by_change": self.by_change}
        return found | ({} if self.lengths_fit is None else {"lengths_fit": self.lengths_fit})

    def as_text(self) -> str:
        """Return one line of text."""
        moves = {change: size - self.planned_bytes for change, size in self.by_change.items()}
        told = ", ".join(f"{change} {_signed(moved)}" for change, moved in moves.items() if change != LENGTHS)
        lengths = f"; steps of mixed lengths {_signed(moves[LENGTHS])}" if LENGTHS in moves else ""
        if self.lengths_fit is not None:
            fits = "fit this card, as torch releases cached segments when it is full"
            refused = "may not fit this card because of fragmentation"
            lengths = f"; steps of mixed lengths {fits if self.lengths_fit else refused}"
        return f"reserved bytes may differ from the plan by: {told}{lengths} (planned, by replaying variants)"


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"


def reserved_range(
    trace: LedgerTrace,
    *,
    workspace_bytes: int,
    config: AllocatorConfig | None = None,
    repeats: int = 0,
    with_lengths: bool = True,
    planned_bytes: int | None = None,
    capacity_bytes: int | None = None,
) -> ReservedRange:
    """Replay a trace as it is and with each change.

    Args:
        trace: Of a whole run, from the model's construction on, with at least one step.
        workspace_bytes: cuBLAS workspace per handle.
        config: Allocator settings.
        repeats: How often the last step is repeated in the plan itself, as ``replay_trace`` does.
        with_lengths: Also try steps of other lengths, which take most of the time.
        planned_bytes: Peak reserved bytes of the unchanged trace, if known.
        capacity_bytes: The card's cap, under which much larger steps of other lengths are tried; None: not tried.
    """
    can_repeat = last_cycle(trace) is not None
    planned = [1.0] * (len(trace.steps) + repeats) if can_repeat and repeats else []

    def peak(
        *, place: Placement | None = None, evaluates: bool = False, lengths: Sequence[float] = planned,
        capacity: int | None = None,
    ) -> int:  # fmt: skip
        run = _Run(trace, CachingAllocator(config, capacity, place=place), workspace_bytes)
        return run.play(evaluates=evaluates, lengths=lengths)

    found = {DRIVER: peak(place=falling()), EVALUATION: peak(evaluates=True)}
    if can_repeat and not repeats:
        found[MORE_STEPS] = peak(lengths=[1.0] * (len(trace.steps) + SETTLING_STEPS))
    known = peak() if planned_bytes is None else planned_bytes
    lengths_fit = None
    if with_lengths and can_repeat:
        found[LENGTHS] = max(peak(lengths=order) for order in (_RISING, _MIXED))
        if capacity_bytes is not None and found[LENGTHS] > _WIDE * known:
            try:
                lengths_fit = all(peak(lengths=order, capacity=capacity_bytes) for order in (_RISING, _MIXED))
            except AllocatorOutOfMemory:
                lengths_fit = False
    return ReservedRange(planned_bytes=known, by_change=found, lengths_fit=lengths_fit)


class _Run(TracePlayer):
    def __init__(self, trace: LedgerTrace, allocator: CachingAllocator, workspace_bytes: int) -> None:
        super().__init__(trace, allocator, workspace_bytes)
        self._matmuls = first_matmuls(trace)
        self._releases = set(trace.cache_releases)

    def play(self, *, evaluates: bool, lengths: Sequence[float]) -> int:
        """Return the peak of the reserved bytes.

        Args:
            evaluates: Start with a forward pass alone.
            lengths: Length of each step as a fraction of the planned one; further ones repeat the last step. Empty: as
            planned.
        """
        trace, last = self._trace, len(self._trace.steps) - 1
        self._run(range(trace.steps[0].event))
        if evaluates:
            self._evaluate()
        cycle, settled = last_cycle(trace) if lengths else None, SteadyStateCheck(self._allocator)
        for step, length in enumerate(lengths or [1.0] * (last + 1)):
            if step < last or cycle is None:
                events = trace.step_range(step)
                self._run(events, self._scaled(trace.events[events.start : events.stop], length))
                continue
            if step > last:
                self._succeed(cycle)
                if settled.now(self._addresses) and {*lengths[step - 1 :]} == {length}:
                    break
            sizes = self._scaled((*trace.events[cycle.body.start : cycle.body.stop], *cycle.tail), length)
            self._run(cycle.body, sizes)
            self._apply(cycle.tail)
        return self._allocator.peak_reserved_bytes

    def _scaled(self, entries: Sequence[int], length: float) -> dict[int, int]:
        """Return other sizes of what a step allocates, frees, and has in proportion to its length."""
        if length == 1.0:
            return {}
        freed = {~entry for entry in entries if entry < 0}
        scaled = (e for e in entries if e >= 0 and e in freed and self._trace.classes[e] in _SCALES)
        return {index: max(1, int(length * self._trace.sizes[index])) for index in scaled}

    def _evaluate(self) -> None:
        """Play the first step until its backward pass begins, then free the storages that it made."""
        trace, start = self._trace, self._trace.steps[0]
        backward = (op.event for op in trace.ops[start.op :] if op.stage in {Stage.BACKWARD, Stage.UPDATE})
        events = range(start.event, next(backward, trace.step_range(0).stop))
        held = set(self._addresses)
        entries = [entry for entry in trace.events[events.start : events.stop] if entry >= 0 or ~entry not in held]
        self._apply(entries)
        for index in [index for index in self._addresses if index not in held]:
            self._allocator.free(self._addresses.pop(index))

    def _run(self, events: range, sizes: dict[int, int] | None = None) -> None:
        begin = events.start
        for stop in sorted({*(p for p in (*self._matmuls, *self._releases) if p in events), events.stop}):
            self._apply(self._trace.events[begin:stop], sizes)
            if stop in self._releases and stop < events.stop:
                self._allocator.empty_cache()
            for _ in range(self._matmuls.count(stop) if stop < events.stop else 0):
                self._allocator.malloc(self._workspace_bytes)
                self._matmuls.remove(stop)
            begin = stop

    def _apply(self, entries: Iterable[int], sizes: dict[int, int] | None = None) -> None:
        malloc, free = self._allocator.malloc, self._allocator.free
        addresses, planned = self._addresses, self._trace.sizes
        for entry in entries:
            if entry < 0:
                free(addresses.pop(~entry))
            else:
                addresses[entry] = malloc(sizes.get(entry, planned[entry]) if sizes else planned[entry])
