"""Two concurrent writers: runs in one folder, and appends to one file of records."""

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from faults.campaign import Campaign, Order, Tally
from faults.runs import KINDS, TOLD, Run, ended, fork, go_unbroken, telling
from hybridvalidation.records.store import append_line, read_lines

_WRITERS: Final = 3
_LINES: Final = 20


@dataclass(frozen=True, slots=True)
class _Line:
    writer: int
    number: int
    filling: str
    """Long enough that a write is not one block of the disk."""


def _append(path: Path, writer: int) -> None:
    for number in range(_LINES):
        append_line(path, _Line(writer, number, "f" * 3000))


def _records(folder: Path) -> tuple[str, str]:
    path = folder / "records.jsonl"
    path.unlink(missing_ok=True)
    writers = [fork(lambda writer=writer: _append(path, writer)) for writer in range(_WRITERS)]  # type: ignore[misc]
    codes = [ended(writer) for writer in writers]
    found = sorted((line.writer, line.number) for line in read_lines(path, _Line))
    wanted = sorted((writer, number) for writer in range(_WRITERS) for number in range(_LINES))
    return (
        ("whole", "")
        if found == wanted and not any(codes)
        else ("lost", f"{len(found)} of {len(wanted)} lines, {codes}")
    )


def _runs(run: Run, wait_s: float, wanted: tuple[object, ...]) -> tuple[str, str]:
    shutil.rmtree(run.folder, ignore_errors=True)
    first = fork(telling(run.go))
    time.sleep(wait_s)
    codes = {ended(process) for process in (first, fork(telling(run.go)))}
    if not codes <= {0, TOLD}:
        return "traceback", f"codes {sorted(codes)}, the second after {wait_s:.3f} s"
    if run.outcome() != wanted:
        return "other values", f"the second after {wait_s:.3f} s"
    return "one was told" if TOLD in codes else "one after the other", ""


def _write(order: Order) -> Tally:
    tally, draw = Tally(), random.Random(order.seed)  # noqa: S311  not a secret
    subjects = ["records", *KINDS]
    for number, subject in enumerate(subjects):
        end = order.count * (number + 1) // len(subjects)
        whole = Run(subject, order.folder / subject / "whole")
        if subject == "records":
            whole.folder.parent.mkdir(parents=True)
        else:
            begin = time.monotonic()
            go_unbroken(whole)
            seconds, wanted = time.monotonic() - begin, whole.outcome()
        while tally.num_attempts < end:
            if subject == "records":
                tally.add(subject, *_records(whole.folder.parent))
            else:
                run = Run(subject, order.folder / subject / "run")
                tally.add(subject, *_runs(run, draw.uniform(0, seconds), wanted))
        order.say(f"{subject}: {tally.counts.get(subject, {})}")
    return tally


TWO_WRITERS: Final = Campaign(
    name="two-writers",
    description=(
        "Three processes append twenty records each to one file; a second run begins in the folder of a running one. "
        "Passed: every line is complete. One of the runs ends with the undisturbed run's tensors and losses, to the "
        "bit; the other gets a message, or comes after it."
    ),
    count=100,
    run=_write,
)
