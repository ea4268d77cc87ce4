"""The gate of recorded figures: an error that worsens by the last digit fails, and so does one that is better."""

from pathlib import Path

import pytest
from hybridvalidation.gate.recorded_gate import RecordedGateResult, run_recorded_gate

from hybridvalidation.cli.main import main
from hybridvalidation.gate.gate import GateExit, write_baselines
from hybridvalidation.recorded.planned import PlannedRun, append_planned, job_of
from hybridvalidation.recorded.source import read_sources
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.outcome import Evidence, Outcome

SCENARIOS, RECORDS, BASELINES = Path("scenarios"), Path("results/records"), Path("results/baselines")
SOURCE = """\
title = "t"
where = "w"
engine = "peft"
card = "l40s"
versions = ""
protocol = "p"
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
    plan(peak=103.0, oom=0.0)
    write_baselines({"recorded": run().replacement}, BASELINES, accept=True)


def plan(outcome: Outcome = Outcome.OK, **figures: float) -> None:
    [found] = read_sources(SCENARIOS).values()
    append_planned(
        RECORDS,
        PlannedRun(
            key=job_of("mine", found, found.runs[0]).key, evidence=Evidence.PLANNED, outcome=outcome, message="no room",
            started_at="2026-11-22T00:00:00+00:00", duration_s=1.0, environment=read_environment(), source="mine",
            run="a", figures=figures, packages={},
        ),
    )  # fmt: skip


def run() -> RecordedGateResult:
    result = run_recorded_gate(SCENARIOS, RECORDS, BASELINES)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("figures", "code", "says"),
    [
        ({"peak": 103.0, "oom": 0.0}, None, ""),
        ({"peak": 103.001, "oom": 0.0}, GateExit.REGRESSED, "peak: error +3.000 % -> +3.001 %"),
        ({"peak": 96.0, "oom": 0.0}, GateExit.REGRESSED, "peak: error +3.000 % -> -4.000 %"),
        ({"peak": 98.0, "oom": 0.0}, GateExit.IMPROVED, "peak: error +3.000 % -> -2.000 %"),
        ({"peak": 103.0, "oom": 1.0}, GateExit.REGRESSED, "oom: error +0.000 % -> +100.000 %"),
        ({"oom": 0.0}, GateExit.COULD_NOT_MEASURE, "peak: planned no more: not among the plan's figures"),
    ],
)
def test_an_error_that_moves_is_found(figures: dict[str, float], code: GateExit | None, says: str) -> None:
    plan(**figures)
    found = [(finding.exit, finding.message) for finding in run().findings]
    assert found == ([] if code is None else [(code, says)])


def test_a_plan_that_fails_and_a_recipe_that_changes_are_told() -> None:
    plan(Outcome.ERROR)
    assert {finding.message for finding in run().findings} == {
        "peak: planned no more: the plan failed: no room", "oom: planned no more: the plan failed: no room",
    }  # fmt: skip
    path = SCENARIOS / "recorded" / "mine.toml"
    path.write_text(SOURCE.replace('id = "a"', 'id = "c"'))
    assert {(finding.stack, finding.exit) for finding in run().findings} == {("a", GateExit.COULD_NOT_MEASURE)}


def test_the_command_fails_and_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "recorded"]) == GateExit.OK
    assert "gate: ok, 2 errors of recorded figures compared" in capsys.readouterr().out
    plan(peak=105.0, oom=0.0)
    assert main(["gate"]) == GateExit.REGRESSED  # it is among what is compared when nothing is named
    out = capsys.readouterr().out
    assert "regressed: recorded mine a: peak: error +3.000 % -> +5.000 %" in out
    assert main(["gate", "recorded", "--accept"]) == GateExit.OK
    assert main(["gate", "recorded"]) == GateExit.OK


def test_without_sources_there_is_nothing_to_compare(tmp_path: Path) -> None:
    assert run_recorded_gate(tmp_path, RECORDS, BASELINES) is None
