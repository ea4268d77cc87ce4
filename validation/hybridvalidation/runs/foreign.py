"""Jobs that need packages of others, each in a fresh process: which can run here, and the records of those that did."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, TypeVar

from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.runs.child import Child, Ended, run_side_by_side

J = TypeVar("J")
T = TypeVar("T")
R = TypeVar("R", bound=Record)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return installed versions; raises ``PackageNotFoundError``, with its name, for the first one missing."""
    return {name: metadata.version(name) for name in packages}


def missing_package(packages: Iterable[str]) -> str:
    """Return the first package that is not installed; empty: all are."""
    try:
        versions_of(packages)
    except metadata.PackageNotFoundError as absent:
        return absent.name
    return ""


def run_jobs(
    jobs: Sequence[J], start: Callable[[J], Child[T]], record_of: Callable[[J, Ended[T]], R], width: int,
    append: Callable[[R], object] | None,
) -> Iterator[tuple[J, R]]:  # fmt: skip
    """Yield each job with its record, ``width`` processes at a time.

    Args:
        jobs: What is run.
        start: Makes the process of a job.
        record_of: Makes a record of how it ended.
        width: Processes at a time.
        append: Adds a record to its file; None: nothing is written.
    """
    for job, ended in run_side_by_side(jobs, start, width):
        record = record_of(job, ended)
        if append is not None:
            append(record)
        yield job, record


def header(key: str, evidence: Evidence, ended: Ended[Any]) -> dict[str, Any]:
    """Return what every record says of a child that ended; without an answer its outcome is an error."""
    started = datetime.fromtimestamp(time.time() - ended.seconds, UTC)
    return {
        "key": key, "evidence": evidence, "outcome": Outcome.ERROR if ended.answer is None else Outcome.OK,
        "message": ended.fault, "started_at": started.isoformat(timespec="seconds"), "duration_s": ended.seconds,
        "environment": read_environment(), "program": program_digest(),
    }  # fmt: skip
