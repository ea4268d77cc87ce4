"""What torch's own CPU allocator did while something ran, and what a run of allocations and frees amounts to."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def profiled_events(work: Callable[[], None]) -> list[Any]:
    """Do the work under torch's profiler; return its events, in the order of their starts.

    The profiler tells when a block is freed that an earlier profile knew: what other tests left goes before.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        work()
    assert profiled.profiler is not None, "it has run"
    return sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())


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
