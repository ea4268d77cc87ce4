"""Tables: their style, and the folder they are written to.

GitHub shows at most seven columns well, and sentences better below a table than within.
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file

TERMINAL, MARKDOWN = "simple", "github"
_MOST_COLUMNS = 7


def write_page(results: Path, name: str, text: str) -> Path:
    """Write a page of Markdown as ``tables/NAME.md`` below the folder of results."""
    path = results / "tables" / f"{name}.md"
    replace_file(path, f"{text}\n".encode())
    return path


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], style: str, *, keys: int = 1) -> str:
    """Return a table; in Markdown a wide one becomes several, each with the first ``keys`` columns."""
    room = _MOST_COLUMNS - keys if style == MARKDOWN else len(headers)
    count = max(1, ceil((len(headers) - keys) / room))
    width = ceil((len(headers) - keys) / count)
    starts = range(keys, len(headers), width) if count > 1 else [keys]
    return "\n\n".join(
        tabulate(
            [[*row[:keys], *row[start : start + width]] for row in rows],
            headers=[*headers[:keys], *headers[start : start + width]], tablefmt=style, disable_numparse=True,
        )
        for start in starts
    )  # fmt: skip


def table_with_notes(
    headers: Sequence[str], rows: Sequence[Sequence[str]], style: str, *, widths: Sequence[int | None] = ()
) -> str:
    """Return a table whose last column is sentences or empty: in Markdown they are numbered below it.

    A wide one is cut as ``table`` does. A terminal's cells are wrapped at ``widths``, in letters.
    """
    if style != MARKDOWN:
        wrapped = list(widths) if widths and style == TERMINAL else None
        return tabulate(rows, headers=headers, tablefmt=style, maxcolwidths=wrapped, disable_numparse=True)
    notes = list(dict.fromkeys(row[-1] for row in rows if row[-1]))
    short = [[*row[:-1], str(notes.index(row[-1]) + 1) if row[-1] else ""] for row in rows]
    shown = table([*headers[:-1], "note"], short, style)
    return "\n\n".join([shown, *(["\n".join(f"{n}. {note}" for n, note in enumerate(notes, 1))] if notes else [])])
