"""What torch's own CPU allocator did while something ran, and what a run of allocations and frees amounts to."""

from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def profiled_changes(work: Callable[[], None], without: tuple[str, ...] = ()) -> list[int]:
    """Do the work under torch's profiler; return bytes allocated and freed (negative), in the order of their times.

    What the profile did not see allocated is left out when freed: the profiler tells some frees of older blocks too,
    whenever another thread or the collector of garbage comes to them. Left out as well is what an operation of a name
    that begins with one of ``without`` allocated.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        work()
    assert profiled.profiler is not None, "it has run"
    changes: list[int] = []
    counted: set[int] = set()  # addresses of blocks that are there
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    for event in sorted(_flat(tree), key=attrgetter("start_time_ns")):
        if event.tag != _EventType.Allocation:
            continue
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0 and not _inside(event, without):
            counted.add(address)
            changes.append(size)
        elif size < 0 and address in counted:
            counted.remove(address)
            changes.append(size)
    return changes


def _flat(events: Iterable[Any]) -> list[Any]:
    """Return the events and all below them."""
    found = list(events)
    for event in found:  # grows while it is read
        found.extend(event.children)
    return found


def _inside(event: Any, names: tuple[str, ...]) -> bool:
    while event := event.parent:
        if event.name.startswith(names):
            return True
    return False


def summary(changes: Iterable[int], small: int) -> tuple[dict[int, int], int, int]:
    """Return allocations by size, the peak above the start, and what is left; of more than ``small`` bytes each."""
    live = peak = 0
    sizes: Counter[int] = Counter()
    for change in changes:
        if abs(change) > small:
            live += change
            peak = max(peak, live)
            sizes[change] += change > 0
    return dict(+sizes), peak, live
