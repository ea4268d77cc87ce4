"""From a profiler's trace to the share of copies that kernels hide."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridvalidation.card_session.record import CopyOverlap

Span = tuple[float, float]
"""Begin and end."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something the card did; times in seconds."""

    name: str
    category: str
    """As torch.profiler writes it: ``kernel``, ``gpu_memcpy``, ``gpu_memset``."""
    start_s: float
    duration_s: float

    @property
    def span(self) -> Span:
        """When it went on."""
        return (self.start_s, self.start_s + self.duration_s)

    def copies(self, direction: str) -> bool:
        """Return whether it is a copy over the bus, ``HtoD`` or ``DtoH``."""
        return self.category == "gpu_memcpy" and direction in self.name


def copy_overlap(events: Sequence[DeviceEvent]) -> CopyOverlap | None:
    """Return how far copies over the bus were hidden; None for a trace in which the card did nothing.

    Fills, and copies that stay on the device, count as kernels: they are work of the compute queue.
    """
    if not events:
        return None
    ins = [event for event in events if event.copies("HtoD")]
    outs = [event for event in events if event.copies("DtoH")]
    copies = [*ins, *outs]
    kernels = [event for event in events if not (event.copies("HtoD") or event.copies("DtoH"))]
    kernel_spans, copy_spans = _merged(kernels), _merged(copies)
    begin, end = min(event.start_s for event in events), max(event.span[1] for event in events)
    return CopyOverlap(
        window_s=end - begin, kernel_s=_length(kernel_spans), copy_in_s=_length(_merged(ins)),
        copy_out_s=_length(_merged(outs)), copy_s=_length(copy_spans), hidden_s=_common(kernel_spans, copy_spans),
        pageable_s=_length(_merged(event for event in copies if "Pageable" in event.name)),
        num_kernels=len(kernels), num_copies=len(copies),
    )  # fmt: skip


def read_chrome_trace(path: Path) -> list[DeviceEvent]:
    """Return what the card did according to a file of ``torch.profiler``'s ``export_chrome_trace``."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    return [
        DeviceEvent(str(event["name"]), str(event["cat"]), float(event["ts"]) * 1e-6, float(event["dur"]) * 1e-6)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}
    ]


def _merged(events: Iterable[DeviceEvent]) -> list[Span]:
    """Return the times in which at least one event went on, in order and apart."""
    spans: list[Span] = []
    for begin, end in sorted(event.span for event in events):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _common(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Return the time in which both went on; both are merged."""
    total, left, right = 0.0, 0, 0
    while left < len(first) and right < len(second):
        total += max(0.0, min(first[left][1], second[right][1]) - max(first[left][0], second[right][0]))
        if first[left][1] <= second[right][1]:
            left += 1
        else:
            right += 1
    return total
