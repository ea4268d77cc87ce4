"""Findings of a gate, exit codes, and CI output: Markdown and GitHub annotations."""

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
    """A stack no longer fits its card."""
    REGRESSED = 4
    IMPROVED = 5
    """Better than the record: accept it, or later losses go unnoticed."""
    COULD_NOT_MEASURE = 6

    @property
    def word(self) -> str:
        """Name of the code in reports."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One changed figure, or a failed run."""

    scenario: str
    stack: str
    exit: GateExit
    message: str
    settled_by_accept: bool = True
    """Whether accepting the new figures resolves it; a failed run has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Subjects to compare, and how to handle differences."""

    names: tuple[str, ...] = ()
    """Scenarios, ``recorded``, ``peers``, ``kernels``, a part of these (``recorded/peft``), ``atlas``; empty: all
    scenarios and the atlas."""
    accept: bool = False
    """Whether to accept the new figures."""
    reason: str = ""
    """Reason for changed figures, stored in the new records."""
    processes: int | None = None
    """Parallel processes; None: one per core, fewer for few runs."""
    trusts_verified: bool = False
    """Whether to skip plans that this program version has verified."""
    keeps_verified: bool = False
    """Whether to record the verification."""
    progress: bool = False
    """Whether to show a progress bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of one kind of figures."""

    subject: str
    """Compared subjects with their number, in words."""
    findings: Sequence[Finding]
    notes: Sequence[str] = ()
    """Subjects not compared now, and the reasons."""
    accept: Callable[[], list[Path]]
    """Accepts the new figures; returns the written files."""
    written: Sequence[Path] = ()


def worst_exit(findings: Iterable[Finding]) -> GateExit:
    """Return the code of the most serious finding."""
    order = (GateExit.COULD_NOT_MEASURE, GateExit.OVER_BUDGET, GateExit.REGRESSED, GateExit.IMPROVED)
    found = {finding.exit for finding in findings}
    return next((code for code in order if code in found), GateExit.OK)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a GitHub Markdown table; line breaks in cells are kept."""
    cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def write_markdown(text: str, file: Path | None) -> None:
    """Write a report to the given file, and append it to GitHub's step summary, if any."""
    if file is not None:
        replace_file(file, text.encode())
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as stream:
            stream.write(text)


def annotation(message: str, *, title: str, file: Path | None = None, line: int = 1) -> str:
    """Return a GitHub error annotation, at ``file`` if given; empty outside of GitHub.

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
