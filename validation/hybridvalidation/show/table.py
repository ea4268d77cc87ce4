"""Tables as GitHub shows them well: at most seven columns, sentences below instead of within."""

from collections.abc import Sequence
from math import ceil

from tabulate import tabulate

from hybridvalidation.show.tables import MARKDOWN, TERMINAL

_MOST_COLUMNS = 7


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
    """Return a table whose last column is sentences: in Markdown they are numbered below it.

    Args:
        headers: Of all columns.
        rows: The last cell may be empty.
        style: Of tabulate.
        widths: Letters from which on a terminal's cells are wrapped.
    """
    if style != MARKDOWN:
        wrapped = list(widths) if widths and style == TERMINAL else None
        return tabulate(rows, headers=headers, tablefmt=style, maxcolwidths=wrapped, disable_numparse=True)
    notes = list(dict.fromkeys(row[-1] for row in rows if row[-1]))
    short = [[*row[:-1], str(notes.index(row[-1]) + 1) if row[-1] else ""] for row in rows]
    shown = tabulate(short, headers=[*headers[:-1], "note"], tablefmt=style, disable_numparse=True)
    return "\n\n".join([shown, *(["\n".join(f"{n}. {note}" for n, note in enumerate(notes, 1))] if notes else [])])
