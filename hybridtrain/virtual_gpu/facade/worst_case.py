"""The worst case of a script: its longest rows in every batch, and the peak of each of its phases."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from torch import Tensor

from hybridtrain.units import format_bytes, format_count
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace
from hybridtrain.virtual_gpu.allocator.allocator_config import round_size

STEP, EVALUATION, SAVING, RESUMING = "step", "evaluation", "saving", "resuming"
_NOT_SEEN = {
    EVALUATION: "the script did not run its model without gradients in these steps; let it, by its own options",
    SAVING: "the script did not save in these steps; let it, by its own options",
    RESUMING: "the script did not load an optimizer's state; run it again with its own option to resume",
}
_MOST_ROWS = 20_000
"""Rows of a dataset that are read for their lengths."""


@dataclass(slots=True)
class WorstCase:
    """What is seen of phases and rows."""

    marks: list[tuple[int, str]] = field(default_factory=list)
    """Event at which a phase begins, and its name; it lasts until the next."""
    longest: list[str] = field(default_factory=list)
    """A sentence about the rows of each loader."""

    def begin(self, phase: str, event: int) -> None:
        """Note that a phase begins."""
        if not self.marks or self.marks[-1][1] != phase:
            self.marks.append((event, phase))

    def of_longest(self, batches: Iterator[Any], dataset: Any) -> Iterator[Any]:
        """Return as many batches, of the same sizes, each of the longest rows; the same where these can't be told."""
        found = list(islice(batches, _MOST_ROWS))
        rows = [row for batch in found for row in batch] if all(isinstance(one, list) for one in found) else []
        if not rows or len(rows) > _MOST_ROWS:
            self._say(f"not tried: a loader has no batches of rows, or more than {_MOST_ROWS:,} rows")
            return chain(found, batches)
        lengths = {row: _length(dataset[row]) for row in dict.fromkeys(rows)}
        longest = max(lengths.values())
        if longest == min(lengths.values()):
            self._say(f"rows are alike, in {format_count(longest)} elements")
            return iter(found)
        row = max(lengths, key=lambda one: lengths[one])
        self._say(f"row {row} of {len(lengths):,}, {format_count(longest)} elements: every batch has the longest rows")
        ranked = sorted(rows, key=lambda one: -lengths[one])
        return iter([ranked[: len(batch)] for batch in found])

    def rows(self, trace: LedgerTrace) -> Mapping[str, str]:
        """Return a line for each phase, and for the longest row."""
        peaks = phase_peaks(trace, self.marks)
        shown = {
            phase: f"{format_bytes(peaks[phase])} of tensors at its peak" if phase in peaks else f"not seen: {missing}"
            for phase, missing in {STEP: "no forward pass with gradients ran", **_NOT_SEEN}.items()
        }
        rows = "; ".join(self.longest) or "not tried: the script has no DataLoader of rows that can be chosen"
        return {STEP: shown.pop(STEP), "longest row": rows, **shown}

    def _say(self, text: str) -> None:
        if text not in self.longest:
            self.longest.append(text)


def phase_peaks(trace: LedgerTrace, marks: Sequence[tuple[int, str]]) -> dict[str, int]:
    """Return the most bytes of live tensors, as the allocator rounds them, by phase."""
    peaks: dict[str, int] = {}
    live, waiting, phase = 0, iter([*marks, (-1, "")]), ""
    begin, following = next(waiting)
    for event, entry in enumerate([*trace.events, None]):
        while begin == event:
            phase = following
            peaks[phase] = max(peaks.get(phase, 0), live)
            begin, following = next(waiting)
        if entry is not None:
            live += round_size(trace.sizes[entry]) if entry >= 0 else -round_size(trace.sizes[~entry])
        if phase:
            peaks[phase] = max(peaks[phase], live)
    return peaks


def _length(row: Any) -> int:
    """Return the most elements of any part of a row: of a tensor or an array all, of a list its length."""
    if isinstance(row, Mapping):
        return max(map(_length, row.values()), default=0)
    if isinstance(row, tuple):
        return max(map(_length, row), default=0)
    if isinstance(row, Tensor):
        return row.numel()
    size = getattr(row, "size", None)
    if isinstance(size, int):
        return size
    return len(row) if isinstance(row, list) else 0
