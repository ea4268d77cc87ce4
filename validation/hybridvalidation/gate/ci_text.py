"""What a pipeline shows of a gate: Markdown for a pull request and GitHub's step summary, and annotations."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as GitHub reads it; a cell's lines are kept apart."""
    cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def write_markdown(text: str, file: Path | None) -> None:
    """Write a report where it was asked for, and append it to GitHub's step summary where there is one."""
    if file is not None:
        replace_file(file, text.encode())
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as stream:
            stream.write(text)


def annotation(message: str, *, title: str, file: Path | None = None, line: int = 1) -> str:
    """Return a line that GitHub shows as an error, beside ``file`` where one is named; empty elsewhere.

    Source of the form and its escapes: docs.github.com, Workflow commands; actions/toolkit, command.ts.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return ""
    said = {"title": title}
    if file is not None:
        root = os.environ.get("GITHUB_WORKSPACE") or "."
        said |= {"file": Path(os.path.relpath(file, root)).as_posix(), "line": str(line)}
    properties = ",".join(
        f"{name}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for name, value in said.items()
    )
    return f"::error {properties}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
