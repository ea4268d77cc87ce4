"""Progress on standard error: a bar on a terminal, a line every half minute elsewhere, nothing beside JSON."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")
LINE_SECONDS = 30.0
"""Between two lines of a log: a run of hours leaves hundreds of lines, one of seconds none."""


class LineFile:
    """Takes what a bar draws and passes on a line now and then.

    Args:
        out: Where lines go.
        clock: Returns seconds, monotonic.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._last_s = clock()

    def write(self, drawn: str) -> None:
        """Pass a drawing on as a line, if the last one is long enough ago."""
        line = drawn.strip()
        if line and self._clock() - self._last_s >= LINE_SECONDS:
            self._last_s = self._clock()
            self._out.write(f"{line}\n")

    def flush(self) -> None:
        """Flush the stream."""
        self._out.flush()


def progress_bar(items: Sequence[T], *, shown: bool, unit: str, desc: str = "", initial: int = 0) -> "tqdm[T]":
    """Return ``items`` with a bar on standard error, or with lines where that is no terminal; nothing unless ``shown``.

    Args:
        items: What is gone through, or, for a bar that is updated by hand, anything of the same length.
        shown: False: never.
        unit: What one item is.
        desc: Text before the bar.
        initial: Items that were done before.
    """
    is_terminal = sys.stderr.isatty()
    return tqdm(
        items, desc=desc, unit=unit, total=initial + len(items), initial=initial, leave=False, disable=not shown,
        file=None if is_terminal else LineFile(sys.stderr), ncols=None if is_terminal else 0,
    )  # fmt: skip
