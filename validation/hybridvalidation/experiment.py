"""The loop of every experiment: cases without a valid record are run, and each record is on disk as its run ends.

An experiment says what its cases are, how they become records and where those go; tables are made of all records. One
that is interrupted goes on where it was, since what ended has a record.
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
"""Runs cases and yields each with its record as it ends; one that is out of time yields fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Generic[C, R]):
    """Results after a run of an experiment."""

    answers: Mapping[str, R]
    """The record that holds of each case, new or known, by key."""
    new: tuple[R, ...]
    """Records made now, in the order in which their runs ended."""
    not_run: tuple[C, ...]
    """Cases that would have been beyond a limit, or need a package that is not installed."""


@dataclass(frozen=True, kw_only=True)  # no slots: a call of ``Experiment[Case, Record]`` notes its own types
class Experiment(Generic[C, R]):
    """Cases of one kind, and their conversion to records."""

    name: str
    """In messages."""
    key: Callable[[C], str]
    """Key of the record that answers a case."""
    run: Runner[C, R]
    """``in_children``, or one of its own."""
    file: Callable[[R], str | Path]
    """File that a record is added to, from the folder of records."""
    line: Callable[[C, R], str]
    """The log's line about a run that ended."""
    holds: Callable[[R], bool] = lambda record: not record.why_repeat()
    """Whether a known record answers its case."""
    packages: Callable[[C], tuple[str, ...]] = lambda _: ()
    """Packages without which a case is not run."""

    def run_missing(
        self, cases: Sequence[C] | Callable[[Mapping[str, R]], Iterable[C]], known: Iterable[R], *,
        records: Path | None, say: Callable[[str], None], max_runs: int | None = None,
        on_record: Callable[[R], object] = lambda _: None,
    ) -> Results[C, R]:  # fmt: skip
        """Run all cases that no known record answers.

        Args:
            cases: All of them; or, where later ones depend on earlier ones, a function of the answers so far, by key,
                that returns the cases of the next stage. The run is over when it returns none without an answer.
            known: Records made before, oldest first.
            records: Folder that new records are added to; None: they are only returned.
            say: Takes a line about each stage and each run.
            max_runs: Stop after so many; None: when nothing is missing.
            on_record: Called after a record is on disk, as to write a table anew.
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
    """Return a runner that gives each case a process of its own, ``width`` at a time."""

    def run(cases: Sequence[C]) -> Iterator[tuple[C, R]]:
        for case, ended in run_side_by_side(cases, start, width):
            yield case, record(case, ended)

    return run


def answer_of(ended: ChildResult[A], run: object, experiment: str) -> A:
    """Return a child's answer, for experiments whose crashed runs leave no record.

    Raises:
        HybridTrainError: It has none.
    """
    if ended.answer is None:
        raise HybridTrainError(
            f"{experiment}: {run} has no record: {ended.fault}; finished runs are kept, the same command resumes "
            "behind them"
        )
    return ended.answer


def begin_header() -> Callable[[], dict[str, Any]]:
    """Note time, environment and program; return a function that ends the run and returns a record's header of them."""
    started, begin_s = datetime.now(UTC), time.perf_counter()
    environment, program = read_environment(), program_digest()
    return lambda: {
        "started_at": started.isoformat(timespec="seconds"), "duration_s": round(time.perf_counter() - begin_s, 3),
        "environment": environment, "program": program,
    }  # fmt: skip


def child_header(ended: ChildResult[Any]) -> dict[str, Any]:
    """Return the header of a record about a child that ended; without an answer its outcome is an error."""
    started = datetime.fromtimestamp(time.time() - ended.seconds, UTC)
    return {
        "outcome": Outcome.ERROR if ended.answer is None else Outcome.OK, "message": ended.fault,
        "started_at": started.isoformat(timespec="seconds"), "duration_s": ended.seconds,
        "environment": read_environment(), "program": program_digest(),
    }  # fmt: skip


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return installed versions, empty for what is not installed."""
    return {name: package_version(name) for name in packages}


@cache
def missing_package(packages: tuple[str, ...]) -> str:
    """Return the first package that is not installed; empty: all are."""
    return next((name for name in packages if not package_version(name)), "")
