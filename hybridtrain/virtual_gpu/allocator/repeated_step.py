"""The last step of a trace, again: what a longer run would ask of the allocator, without running the model longer."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from hybridtrain.virtual_gpu.account.ledger import LedgerTrace
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator import CachingAllocator

SETTLING_STEPS = 4
"""Repetitions after which reserved bytes were never seen to rise: what fragments does so within two or three steps."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """The last step as one that can follow itself."""

    body: range
    """Its events up to its last allocation."""
    tail: tuple[int, ...]
    """Releases after it of what the step itself made; what the end of a script lets go of is left out."""
    successors: dict[int, int]
    """Which storage of its end plays the part of which one that it found and released."""


class Settled:
    """Tells when a repeated step has nothing new to ask: allocator and storages are as they were before it.

    Args:
        allocator: That answers the step.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._before: object = None

    def now(self, addresses: Mapping[int, int]) -> bool:
        """Return whether all is as at the last call; ``addresses`` by storage, as the next step finds them."""
        layout = self._allocator.layout()
        before = self._before
        self._before = None if layout is None else (layout, dict(addresses), self._allocator.num_alloc_retries)
        return self._before is not None and self._before == before


def last_cycle(trace: LedgerTrace) -> Cycle | None:
    """Return the last step's cycle; None where its end is not what it began with, as in a step that keeps something."""
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
    return Cycle(body, tuple(e for e in trailing if ~e in rest), successors) if rest <= late else None
