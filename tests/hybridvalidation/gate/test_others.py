"""Plans of others' trainers are planned again and held to their records, where their packages are installed."""

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridtrain.run.environment import read_environment
from hybridvalidation.child import ChildResult
from hybridvalidation.experiments.recorded import PlannedFigures, PlannedRun, append_planned, job_of, read_sources
from hybridvalidation.gate import others
from hybridvalidation.gate.gate import GateExit
from hybridvalidation.records.outcome import Evidence, Outcome

SCENARIOS, RECORDS = Path("scenarios"), Path("results/records")
SOURCE = """\
title = "t"
where = "w"
engine = "peft"
card = "l40s"
versions = ""
protocol = "p"
packages = ["torch"]
[[runs]]
id = "a"
role = "predict"
recorded = { peak = 100.0, oom = 0 }
[[runs]]
id = "b"
role = "left_out"
why = "eight cards"
recorded = { peak = 1.0 }
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (SCENARIOS / "recorded").mkdir(parents=True)
    (SCENARIOS / "stacks").mkdir()  # by which the folder is found
    (SCENARIOS / "recorded" / "mine.toml").write_text(SOURCE)
    keep(peak=103.0, oom=0.0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let every process that plans find some figures, or fail."""

    def find(fault: str = "", **figures: float) -> None:
        answer = None if fault else PlannedFigures(figures=figures)
        ended = ChildResult(answer=answer, fault=fault, seconds=1.0, peak_rss_bytes=0, log="")

        def side_by_side(plans: object, _start: object, _width: int) -> Iterator[object]:
            yield from ((plan, ended) for plan in plans)  # type: ignore[attr-defined]

        monkeypatch.setattr(others, "run_side_by_side", side_by_side)

    return find


def keep(packages: dict[str, str] | None = None, outcome: Outcome = Outcome.OK, **figures: float) -> None:
    [found] = read_sources(SCENARIOS).values()
    append_planned(
        RECORDS,
        PlannedRun(
            key=job_of("mine", found, found.runs[0]).key, evidence=Evidence.PLANNED, outcome=outcome, message="no room",
            started_at="2026-11-22T00:00:00+00:00", duration_s=1.0, environment=read_environment(), source="mine",
            run="a", figures=figures, packages=packages or {"torch": version("torch")},
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "code", "description"),
    [
        ({"peak": 103.0, "oom": 0.0}, GateExit.OK, "gate: ok, 1 plans of other trainers compared"),
        ({"peak": 103.5, "oom": 0.0}, GateExit.REGRESSED, "regressed: recorded/mine a: peak: 103 -> 103.5"),
        ({"peak": 98.0, "oom": 0.0}, GateExit.IMPROVED, "improved: recorded/mine a: peak: 103 -> 98"),
        ({"peak": 103.0, "oom": 1.0}, GateExit.REGRESSED, "oom: 0 -> 1"),
        ({"oom": 0.0}, GateExit.IMPROVED, "peak: 103 -> absent"),
    ],
)
def test_a_figure_that_moves_is_found(
    figures: dict[str, float],
    code: GateExit,
    description: str,
    now: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    now(**figures)
    assert main(["gate", "recorded"]) == code
    assert description in capsys.readouterr().out


def test_figures_of_another_version_are_not_compared_unless_they_are_equal(
    now: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    keep({"torch": "0.1"}, peak=103.0, oom=0.0)
    now(peak=103.0, oom=0.0)
    assert main(["gate", "recorded"]) == GateExit.OK
    now(peak=104.0, oom=0.0)
    assert main(["gate", "recorded"]) == GateExit.COULD_NOT_MEASURE
    assert f"planned with torch 0.1, now {version('torch')}:" in capsys.readouterr().out


def test_a_plan_that_fails_and_one_without_a_record_are_told(
    now: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    now(fault="no room")
    assert main(["gate", "recorded", "--accept", "--reason", "a test"]) == GateExit.COULD_NOT_MEASURE
    assert "could_not_measure: recorded/mine a: no room" in capsys.readouterr().out
    now(peak=103.0, oom=0.0)
    path = SCENARIOS / "recorded" / "mine.toml"
    path.write_text(path.read_text().replace('card = "l40s"', 'card = "rtx-4090"'))
    assert main(["gate", "recorded/mine"]) == GateExit.COULD_NOT_MEASURE
    assert "recorded/mine a: there is no record to compare with" in capsys.readouterr().out


def test_what_is_accepted_is_appended_with_its_reason(now: Callable[..., None]) -> None:
    now(peak=105.0, oom=0.0)
    assert main(["gate", "recorded", "--accept"]) == 2
    assert main(["gate", "recorded", "--accept", "--reason", "newer PEFT"]) == GateExit.OK
    assert main(["gate", "recorded"]) == GateExit.OK
    lines = [json.loads(line) for line in (RECORDS / "recorded/planned.jsonl").read_text().splitlines()]
    assert [(line["figures"]["peak"], line.get("accepted", "")) for line in lines] == [(103, ""), (105, "newer PEFT")]


def test_what_cannot_be_planned_here_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    path = SCENARIOS / "recorded" / "mine.toml"
    path.write_text(SOURCE.replace('packages = ["torch"]', 'packages = ["nowhere"]'))
    assert main(["gate", "recorded"]) == GateExit.OK
    out = capsys.readouterr().out
    assert "recorded/mine: nowhere is not installed, 1 plans are not verified here" in out
    assert "gate: ok, 0 plans of other trainers compared" in out


def test_a_name_that_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "recorded/mime"]) == 2
    assert "did you mean 'recorded/mine'?" in capsys.readouterr().err
