"""What torch's own CPU allocator held during a run: a witness beside the ledger, which shares no code with it."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

_MEMORY = "[memory]"
_CPU = 0


@dataclass(slots=True)
class AllocatorPeak:
    """Most bytes at once, of allocations made meanwhile; 0 until the context ends."""

    num_bytes: int = 0


@contextmanager
def allocator_peak() -> Iterator[AllocatorPeak]:
    """Record torch's events of allocation and release on the CPU, and yield what they add up to at most.

    Every op is recorded too, so that a long run would fill memory: some kB an op.
    """
    found = AllocatorPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    moves = [event for event in events if event["name"] == _MEMORY and event["args"]["Device Type"] == _CPU]
    held = 0
    for event in sorted(moves, key=lambda event: float(event["ts"])):
        held += int(event["args"]["Bytes"])
        found.num_bytes = max(found.num_bytes, held)
