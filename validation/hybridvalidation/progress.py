"""Progress bars: on a terminal, never in a log or beside JSON."""

from collections.abc import Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress_bar(items: Sequence[T], *, shown: bool, unit: str, desc: str = "", initial: int = 0) -> "tqdm[T]":
    """Return ``items`` with a bar on standard error; nothing is drawn where that is no terminal, or unless ``shown``.

    Args:
        items: What is gone through, or, for a bar that is updated by hand, anything of the same length.
        shown: False: never.
        unit: What one item is.
        desc: Text before the bar.
        initial: Items that were done before.
    """
    disable = None if shown else True  # None lets tqdm look for a terminal
    return tqdm(items, desc=desc, unit=unit, total=initial + len(items), initial=initial, leave=False, disable=disable)
