"""Findings of a gate, its exit codes, and its output in a pipeline: Markdown, and annotations on GitHub."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file


class GateExit(IntEnum):
    """Exit codes of the gate, worst first in precedence."""

    OK = 0
    OVER_BUDGET = 3
    """A stack that fitted its card does not fit any more."""
    REGRESSED = 4
    IMPROVED = 5
    """Better than what is kept: accept the win, or it can be lost unseen."""
    COULD_NOT_MEASURE = 6

    @property
    def word(self) -> str:
        """Name of the code in reports."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure that changed, or a run that could not be made."""

    scenario: str
    stack: str
    exit: GateExit
    message: str
    settled_by_accept: bool = True
    """Whether keeping today's figures answers it; a run that failed has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Subjects to compare, and the handling of differences."""

    names: tuple[str, ...] = ()
    """Scenarios, ``recorded``, ``peers``, ``kernels``, a part of these (``recorded/peft``), ``atlas``; empty: all
    scenarios and the atlas."""
    accept: bool = False
    """Keep today's figures."""
    reason: str = ""
    """Why kept figures may change; it stands in the records that replace them."""
    processes: int | None = None
    """At a time; None: one for each core, unless the runs are few."""
    trusts_verified: bool = False
    """Plan nothing again that this very program has found again before."""
    keeps_verified: bool = False
    """Append to the records that this program has found them again."""
    progress: bool = False
    """Show a bar on standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of one kind of figures."""

    subject: str
    """Compared subjects, and their number."""
    findings: Sequence[Finding]
    notes: Sequence[str] = ()
    """Subjects not compared now, and the reasons."""
    accept: Callable[[], list[Path]]
    """Keeps today's figures; returns the files."""
    written: Sequence[Path] = ()


def worst_exit(findings: Iterable[Finding]) -> GateExit:
    """Return the code of the most serious finding."""
    order = (GateExit.COULD_NOT_MEASURE, GateExit.OVER_BUDGET, GateExit.REGRESSED, GateExit.IMPROVED)
    found = {finding.exit for finding in findings}
    return next((code for code in order if code in found), GateExit.OK)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as GitHub reads it; a cell's lines are kept apart."""
    cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def write_markdown(text: str, file: Path | None) -> None:
    """Write a report to the requested file, and append it to GitHub's step summary where there is one."""
    if file is not None:
        replace_file(file, text.encode())
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as stream:
            stream.write(text)


def annotation(message: str, *, title: str, file: Path | None = None, line: int = 1) -> str:
    """Return a line that GitHub shows as an error, at ``file`` where one is named; empty elsewhere.

    Source of the form and its escapes: docs.github.com, Workflow commands; actions/toolkit, command.ts.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return ""
    named = {"title": title}
    if file is not None:
        root = os.environ.get("GITHUB_WORKSPACE") or "."
        named |= {"file": Path(os.path.relpath(file, root)).as_posix(), "line": str(line)}
    properties = ",".join(
        f"{name}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for name, value in named.items()
    )
    return f"::error {properties}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
