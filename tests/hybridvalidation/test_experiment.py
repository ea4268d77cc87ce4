"""The loop of experiments: resumption, stages, limits of number and time, crashes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.errors import HybridTrainError
from hybridvalidation.child import ChildResult
from hybridvalidation.experiment import Experiment, answer_of, begin_header, in_children, missing_package, versions_of
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Square(Record):
    evidence: Evidence = Evidence.EXECUTED
    value: int = 0


class Children:
    """Stands in for ``Child``: ends at once, and notes how many are at work."""

    def __init__(self, fault_of: int | None = None) -> None:
        self.fault_of, self.working, self.largest = fault_of, 0, 0

    def start(self, case: int) -> Any:
        self.working += 1
        self.largest = max(self.largest, self.working)
        children = self

        class _Child:
            def poll(self) -> ChildResult[int]:
                children.working -= 1
                failed = case == children.fault_of
                return ChildResult(
                    answer=None if failed else case * case, fault="it crashed" if failed else "", seconds=1.0,
                    peak_rss_bytes=0, log="",
                )  # fmt: skip

            def stop(self) -> None:
                children.working -= 1

        return _Child()


def record_of(case: int, ended: ChildResult[int] | None = None) -> Square:
    value = case * case if ended is None else answer_of(ended, case, "squares")
    return Square(key=str(case), value=value, **begin_header()())


def one_by_one(cases: Sequence[int]) -> Iterator[tuple[int, Square]]:
    return ((case, record_of(case)) for case in cases)


def squares(run: Any, **options: Any) -> Experiment[int, Square]:
    return Experiment(
        name="squares", key=str, run=run, file=lambda _: "squares.jsonl",
        line=lambda case, record: f"{case}: {record.value}", **options,
    )  # fmt: skip


def run(
    experiment: Experiment[int, Square], cases: Sequence[int] | Callable[[Mapping[str, Square]], list[int]],
    folder: Path, **options: Any,
) -> tuple[list[str], Any]:  # fmt: skip
    lines: list[str] = []
    known = read_lines(folder / "squares.jsonl", Square)
    return lines, experiment.run_missing(cases, known, records=folder, say=lines.append, **options)


def test_runs_that_have_a_record_are_not_repeated(tmp_path: Path) -> None:
    children = Children()
    experiment = squares(in_children(children.start, record_of, 2))
    lines, first = run(experiment, [1, 2, 3, 2], tmp_path, max_runs=2)
    assert lines == ["squares: 3 runs are missing", "1: 1", "2: 4"]
    assert ([record.value for record in first.new], first.not_run) == ([1, 4], (3,))
    lines, second = run(experiment, [1, 2, 3], tmp_path)
    assert lines == ["squares: 1 runs are missing", "3: 9"]
    assert {key: record.value for key, record in second.answers.items()} == {"1": 1, "2": 4, "3": 9}
    assert [record.value for record in read_lines(tmp_path / "squares.jsonl", Square)] == [1, 4, 9]
    assert children.largest == 2
    assert run(experiment, [1, 2, 3], tmp_path, max_runs=0)[0] == []


def test_records_that_do_not_hold_are_made_anew_and_none_need_be_kept() -> None:
    failed = Square(key="1", outcome=Outcome.ERROR, message="no", **begin_header()())
    experiment = squares(one_by_one)
    results = experiment.run_missing([1], [failed], records=None, say=lambda _: None)
    assert [record.value for record in results.new] == [1]
    kept = squares(one_by_one, holds=lambda _: True)
    assert kept.run_missing([1], [failed], records=None, say=lambda _: None).answers == {"1": failed}


def test_cases_whose_packages_are_missing_are_left() -> None:
    experiment = squares(one_by_one, packages=lambda case: ("no-such-package",) * (case == 1))
    results = experiment.run_missing([1, 2], [], records=None, say=lambda _: None)
    assert ([record.key for record in results.new], results.not_run) == (["2"], (1,))


def test_a_package_of_another_version_is_missing() -> None:
    here = version("torch")
    assert missing_package(("torch", f"torch=={here}")) == ""
    assert missing_package(("torch", "torch==0.1")) == "torch==0.1"
    assert missing_package(("no-such-package==1",)) == "no-such-package==1"
    assert versions_of(["torch==0.1", "no-such-package"]) == {"torch": here, "no-such-package": ""}


def test_later_stages_follow_from_earlier_answers(tmp_path: Path) -> None:
    def stage(answers: Mapping[str, Square]) -> list[int]:
        return [1, 2] if len(answers) < 2 else [sum(record.value for record in answers.values())] * (len(answers) < 3)

    seen: list[int] = []
    lines, results = run(squares(one_by_one), stage, tmp_path, on_record=lambda one: seen.append(one.value))
    assert lines == ["squares: 2 runs are missing", "1: 1", "2: 4", "squares: 1 runs are missing", "5: 25"]
    assert (seen, results.not_run) == ([1, 4, 25], ())


def test_cases_that_a_runner_has_no_time_for_are_left(tmp_path: Path) -> None:
    _, results = run(squares(lambda cases: one_by_one(cases[:2])), [1, 2, 3], tmp_path)
    assert ([record.value for record in results.new], results.not_run) == ([1, 4], (3,))


def test_a_crash_ends_the_experiment_and_keeps_what_ended(tmp_path: Path) -> None:
    children = Children(fault_of=2)
    with pytest.raises(HybridTrainError, match="squares: 2 failed: it crashed; finished runs are kept"):
        run(squares(in_children(children.start, record_of, 1)), [1, 2, 3], tmp_path)
    assert [record.value for record in read_lines(tmp_path / "squares.jsonl", Square)] == [1]
    assert children.working == 0
