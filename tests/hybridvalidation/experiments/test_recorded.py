"""Figures of others: their files, the rows that hold plans against them, and what the command says of both."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridtrain.errors import ConfigError
from hybridtrain.run.environment import read_environment
from hybridvalidation.experiments.recorded import (
    PlannedRun,
    RecordedRun,
    Role,
    Source,
    job_of,
    peak_scores,
    read_sources,
    rows_of,
    scores,
)
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.show.pages.recorded import by_kind, headline, label_of, peak_table

SCENARIOS = Path("scenarios")


def run(name: str, role: Role = Role.PREDICT, why: str = "", **recorded: float) -> RecordedRun:
    return RecordedRun(id=name, role=role, recorded=recorded, why=why, config=json.dumps({"name": name}))


def source(*runs: RecordedRun) -> Source:
    return Source(
        title="t", where="w", engine="peft", card="l40s", versions="", protocol="p", runs=runs, packages=("nowhere",)
    )


def planned(found: Source, of: RecordedRun, outcome: Outcome = Outcome.OK, **figures: float) -> PlannedRun:
    return PlannedRun(
        key=job_of("s", found, of).key, evidence=Evidence.PLANNED, outcome=outcome, message="why not",
        started_at="2026-11-22T00:00:00+00:00", duration_s=1.0, environment=read_environment(), source="s", run=of.id,
        figures=figures, packages={},
    )  # fmt: skip


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if "--" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_rows_say_what_was_recorded_planned_and_missed() -> None:
    runs = (
        run("fit", Role.CALIBRATE, peak=100.0), run("near", peak=200.0, oom=0), run("refused", oom=1),
        run("broken", peak=50.0), run("out", Role.LEFT_OUT, "no weights", peak=10.0), run("new", peak=1.0),
    )  # fmt: skip
    found = source(*runs)
    records = [
        planned(found, runs[0], peak=100.0), planned(found, runs[1], peak=1.0),
        planned(found, runs[1], peak=206.0, oom=0), planned(found, runs[2], oom=0),
        planned(found, runs[3], Outcome.ERROR),
    ]  # fmt: skip
    rows = {(row.id, row.quantity): row for row in rows_of({"s": found}, records)}
    assert rows["near", "peak"].error == pytest.approx(0.03)  # of the newest plan
    assert (rows["near", "oom"].error, rows["refused", "oom"].error) == (0.0, 1.0)
    assert rows["broken", "peak"].why == "the plan failed: why not"
    assert (rows["out", "peak"].why, rows["new", "peak"].why) == ("no weights", "not planned yet")
    by_quantity = {score.quantity: score for score in scores(rows.values())}
    assert (by_quantity["peak"].count, by_quantity["peak"].worst.id) == (1, "near")  # what was fitted on does not count
    assert by_quantity["oom"].mean_absolute == 0.5


def test_figures_seen_before_stand_apart() -> None:
    blind, known = (
        source(run("a", peak=100.0, oom=0)),
        replace(source(run("b", peak=100.0, oom=1)), seen=("peak", "oom")),
    )
    later = planned(known, known.runs[0], peak=50.0, oom=0)
    later = replace(later, source="t", key=job_of("t", known, known.runs[0]).key)
    rows = rows_of({"s": blind, "t": known}, [planned(blind, blind.runs[0], peak=103.0, oom=0), later])
    assert [row.role for row in rows] == [Role.PREDICT, Role.PREDICT, Role.SEEN, Role.SEEN]
    assert headline(rows) == (
        "Predicted before they were seen: 1 peaks of CUDA memory of 1 publications, mean error 3.00 %, each "
        "publication the same. Of 1 outcomes 1 are right (1 fit, 0 ran out of memory)."
    )
    assert cells(peak_table(rows))[1:] == [
        ["s", "1", "3.00 %", "3.00 %", "-", "3.00 %", "+3.00 % (a)"],
        ["t, seen before", "1", "50.00 %", "50.00 %", "-", "50.00 %", "-50.00 % (b)"],
    ]
    with pytest.raises(ValueError, match="seen: quantity 'speed' is unknown"):
        replace(blind, seen=("speed",))


def test_peaks_stand_by_publication_beside_a_null_model_and_the_first_plans() -> None:
    found = source(run("a", peak=100.0, allocated_mean=100.0), run("b", peak=400.0, step_seconds=1.0, some_params=2.0))
    first, second = found.runs
    plans = [
        planned(found, first, Outcome.ERROR), planned(found, first, peak=150.0), planned(found, second, peak=400.0),
        planned(found, first, peak=104.0, allocated_mean=50.0),
        planned(found, second, peak=400.0, step_seconds=9.0, some_params=9.0),
    ]  # fmt: skip
    rows = rows_of({"s": found}, plans)
    [score] = peak_scores(rows)
    assert score.errors == pytest.approx((0.04, 0.0))  # neither means nor seconds nor counts
    assert score.null == pytest.approx((3.0 + 0.75) / 2)  # each is taken for the other
    assert score.first == pytest.approx(0.25)
    parts = [replace(row, source=name) for name in ("s", "s-more", "t-more") for row in rows]
    assert [(one.name, len(one.errors)) for one in peak_scores(parts)] == [("s", 4), ("t-more", 2)]


def test_a_single_run_may_be_seen() -> None:
    found = source(run("a", peak=100.0), run("b", Role.SEEN, peak=100.0))
    plans = [planned(found, found.runs[0], peak=101.0), planned(found, found.runs[1], peak=150.0)]
    rows = rows_of({"s": found}, plans)
    assert {score.worst.role: round(score.mean_error, 2) for score in scores(rows)} == {
        Role.PREDICT: 0.01,
        Role.SEEN: 0.5,
    }
    assert "1 peaks of CUDA memory of 1 publications, mean error 1.00 %" in headline(rows)
    assert [score.name for score in peak_scores(rows, Role.SEEN)] == ["s"]
    assert [label_of(points) for points in by_kind(rows)] == ["s: peak (1)", "s: peak (1, seen before)"]


def test_a_plan_of_another_recipe_does_not_count() -> None:
    old, new = run("a", peak=1.0), RecordedRun(id="a", role=Role.PREDICT, recorded={"peak": 1.0}, config='{"x": 1}')
    [row] = rows_of({"s": source(new)}, [planned(source(old), old, peak=1.0)])
    assert row.planned is None


def test_a_source_keeps_the_rules_of_a_fair_comparison() -> None:
    with pytest.raises(ValueError, match=r"id 'a' appears twice\nruns: more than one has the role 'calibrate'"):
        source(run("a", Role.CALIBRATE, x=1.0), run("a", Role.CALIBRATE, x=1.0))
    with pytest.raises(ValueError, match="why: missing"):
        run("a", Role.LEFT_OUT, x=1.0)
    with pytest.raises(ConfigError, match="source 'pefft' is unknown; did you mean 'peft'"):
        read_sources(SCENARIOS, "pefft")


def test_the_files_hold_what_their_sources_published() -> None:
    sources = read_sources(SCENARIOS)
    figures = [value for found in sources.values() for one in found.runs for value in one.recorded.values()]
    assert len(figures) >= 120
    lora = next(one for one in sources["peft"].runs if one.id == "lora/rank32")
    assert lora.role is Role.CALIBRATE
    assert (lora.recorded["reserved_max"], lora.recorded["trainable_params"]) == (22292725760, 9175040)
    for found in sources.values():
        json.loads(found.common)
        assert all(isinstance(json.loads(one.config), dict) for one in found.runs)


def test_the_command_prints_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "scenarios"
    (folder / "recorded").mkdir(parents=True)
    (folder / "recorded" / "mine.toml").write_text(
        'title = "t"\nwhere = "w"\nengine = "peft"\ncard = "l40s"\nversions = ""\nprotocol = "p"\n'
        'packages = ["no-such-package"]\n[[runs]]\nid = "a"\nrole = "predict"\nrecorded = { peak = 5e9 }\n'
    )
    common = ["--scenarios", str(folder), "--results", str(tmp_path / "results")]
    assert main(["recorded", "mine", "--json", *common]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "source": "mine", "id": "a", "quantity": "peak", "role": "predict", "recorded": 5e9, "planned": None,
            "first": None, "error": None, "why": "not planned yet",
        }
    ]  # fmt: skip
    assert main(["recorded", *common]) == 0
    assert "no-such-package is not installed" in capsys.readouterr().out
