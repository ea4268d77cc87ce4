"""Two ledgers' stories side by side: where the first one that differs from the other is."""

from collections.abc import Iterator
from itertools import zip_longest

from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.ledger import LedgerTrace

_Event = tuple[int, int, str, str, int]
"""Storage or ~storage, its bytes, class and unit, and the step, 0 while the model is built."""


def first_difference(planned: LedgerTrace, executed: LedgerTrace) -> str:
    """Return a sentence on the first event in which a dry run and a run differ; empty when none does.

    Compared are every allocation and release in order, each with bytes, class, unit and step.
    """
    for number, (plan, run) in enumerate(zip_longest(_events(planned), _events(executed))):
        if plan != run:
            return f"event {number + 1}: the dry run {_told(plan)}, the execution {_told(run)}"
    starts = [[mark.event for mark in trace.steps] for trace in (planned, executed)]
    if starts[0] != starts[1]:
        return f"steps begin after events {starts[0]} in the dry run, after {starts[1]} in the execution"
    return ""


def _events(trace: LedgerTrace) -> Iterator[_Event]:
    starts = iter([*(mark.event for mark in trace.steps), len(trace.events)])
    step, following = 0, next(starts)
    for number, event in enumerate(trace.events):
        while number >= following:
            step, following = step + 1, next(starts)
        storage = event if event >= 0 else ~event
        yield event, trace.sizes[storage], trace.classes[storage], trace.units[storage], step


def _told(event: _Event | None) -> str:
    if event is None:
        return "has ended"
    storage, size, tensor_class, unit, step = event
    action = "allocates" if storage >= 0 else "releases"
    owner = f" of {unit}" if unit else ""
    when = f"in step {step}" if step else "while the model is built"
    return f"{action} {format_bytes(size)} ({size} bytes) of {tensor_class}{owner} {when}"
