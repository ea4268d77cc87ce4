"""The loop of every experiment: run the cases without a valid record, and write each record as its run ends.

An experiment defines its cases, their conversion to records, and the records' file; tables use all records. An
interrupted experiment continues, as finished runs have records.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from hybridtrain.errors import HybridTrainError
from hybridtrain.run.environment import package_version, read_environment
from hybridtrain.run.program import program_digest
from hybridvalidation.child import Child, ChildResult, run_side_by_side
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record

A = TypeVar("A")
C = TypeVar("C")
R = TypeVar("R", bound=Record)

Runner: TypeAlias = Callable[[Sequence[C]], Iterator[tuple[C, R]]]
"""Runs cases and yields each with its record as it ends; fewer if time runs out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Generic[C, R]):
    """Results after a run of an experiment."""

    answers: Mapping[str, R]
    """The valid record of each case, by key."""
    new: tuple[R, ...]
    """New records, in the order of completion."""
    not_run: tuple[C, ...]
    """Cases beyond a limit, or without a required package."""


@dataclass(frozen=True, kw_only=True)  # no slots: a call of ``Experiment[Case, Record]`` notes its own types
class Experiment(Generic[C, R]):
    """Cases of one kind, and their conversion to records."""

    name: str
    """Name in messages."""
    key: Callable[[C], str]
    """Key of a case's record."""
    run: Runner[C, R]
    """The runner: ``in_children``, or its own."""
    file: Callable[[R], str | Path]
    """Appends a record to its file in the folder of records."""
    line: Callable[[C, R], str]
    """Returns the log line of a finished run."""
    holds: Callable[[R], bool] = lambda record: not record.why_repeat()
    """Whether a known record is valid for its case."""
    packages: Callable[[C], tuple[str, ...]] = lambda _: ()
    """Packages that a case requires."""

    def run_missing(
        self, cases: Sequence[C] | Callable[[Mapping[str, R]], Iterable[C]], known: Iterable[R], *,
        records: Path | None, say: Callable[[str], None], max_runs: int | None = None,
        on_record: Callable[[R], object] = lambda _: None,
    ) -> Results[C, R]:  # fmt: skip
        """Run all cases without a valid record.

        Args:
            cases: All cases; or, if later ones depend on earlier ones, a function of the records so far, by key, that
            returns the next stage's cases. It ends when none of them is missing.
            known: Earlier records, oldest first.
            records: Folder for new records; None: they are only returned.
            say: Called with a line about each stage and each run.
            max_runs: Most runs to make; None: all.
            on_record: Called after a record is on disk, for example to rebuild a table.
        """
        answers = {record.key: record for record in known if self.holds(record)}
        new = list[R]()
        stage = cases if callable(cases) else lambda _: cases
        while missing := self._missing(stage(answers), answers):
            possible = [case for case in missing if not missing_package(self.packages(case))]
            chosen, before = possible[: None if max_runs is None else max_runs - len(new)], len(new)
            if chosen:
                say(f"{self.name}: {len(possible)} runs are missing")
            for case, record in self.run(chosen) if chosen else ():
                if records is not None:
                    append_record(records, self.file(record), record)
                answers[self.key(case)] = record
                new.append(record)
                say(self.line(case, record))
                on_record(record)
            if len(new) - before < len(missing):
                return Results(answers=answers, new=tuple(new), not_run=tuple(self._missing(missing, answers)))
        return Results(answers=answers, new=tuple(new), not_run=())

    def _missing(self, cases: Iterable[C], answers: Mapping[str, R]) -> list[C]:
        by_key = {self.key(case): case for case in cases}
        return [case for key, case in by_key.items() if key not in answers]


def in_children(start: Callable[[C], Child[A]], record: Callable[[C, ChildResult[A]], R], width: int) -> Runner[C, R]:
    """Return a runner with one process per case, ``width`` at a time."""

    def run(cases: Sequence[C]) -> Iterator[tuple[C, R]]:
        for case, ended in run_side_by_side(cases, start, width):
            yield case, record(case, ended)

    return run


def answer_of(ended: ChildResult[A], run: object, experiment: str) -> A:
    """Return a child's answer, for experiments whose crashed runs leave no record.

    Raises:
        HybridTrainError: The child has no answer.
    """
    if ended.answer is None:
        raise HybridTrainError(
            f"{experiment}: {run} failed: {ended.fault}; finished runs are kept, repeat the command to continue"
        )
    return ended.answer


def begin_header() -> Callable[[], dict[str, Any]]:
    """Record start time, environment and program; return a function that returns the record's header at the end."""
    started, begin_s = datetime.now(UTC), time.perf_counter()
    environment, program = read_environment(), program_digest()
    return lambda: {
        "started_at": started.isoformat(timespec="seconds"), "duration_s": round(time.perf_counter() - begin_s, 3),
        "environment": environment, "program": program,
    }  # fmt: skip


def child_header(ended: ChildResult[Any]) -> dict[str, Any]:
    """Return the record header of a finished child; without an answer its outcome is an error."""
    started = datetime.fromtimestamp(time.time() - ended.seconds, UTC)
    return {
        "outcome": Outcome.ERROR if ended.answer is None else Outcome.OK, "message": ended.fault,
        "started_at": started.isoformat(timespec="seconds"), "duration_s": ended.seconds,
        "environment": read_environment(), "program": program_digest(),
    }  # fmt: skip


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages, empty for missing ones; ``packages`` as of ``missing_package``."""
    return {name: package_version(name) for name in (package.partition("==")[0] for package in packages)}


@cache
def missing_package(packages: tuple[str, ...]) -> str:
    """Return the first package that is not installed, as ``torch`` or ``torch==2.13.0``; empty: all are."""
    for package in packages:
        name, _, wanted = package.partition("==")
        found = package_version(name)
        if not found or wanted not in {"", found}:
            return package
    return ""
