"""Progress on standard error: a bar on a terminal, else a line every half minute; nothing with JSON output."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")
LINE_SECONDS = 30.0
"""Seconds between two lines: hundreds of lines for hours, none for seconds."""


class LineFile:
    """File for a progress bar that writes a line to ``out`` now and then; ``clock`` returns seconds."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._last_s = clock()

    def write(self, drawn: str) -> None:
        """Write the bar as a line, if enough time has passed."""
        line = drawn.strip()
        if line and self._clock() - self._last_s >= LINE_SECONDS:
            self._last_s = self._clock()
            self._out.write(f"{line}\n")

    def flush(self) -> None:
        """Flush the stream."""
        self._out.flush()


def progress_bar(items: Sequence[T], *, shown: bool, unit: str, desc: str = "", initial: int = 0) -> "tqdm[T]":
    """Return ``items`` with a progress bar on standard error (lines if it is not a terminal), if ``shown``.

    For manual updates any sequence of that length will do. ``initial``: items done before.
    """
    is_terminal = sys.stderr.isatty()
    return tqdm(
        items, desc=desc, unit=unit, total=initial + len(items), initial=initial, leave=False, disable=not shown,
        file=None if is_terminal else LineFile(sys.stderr), ncols=None if is_terminal else 0,
    )  # fmt: skip
