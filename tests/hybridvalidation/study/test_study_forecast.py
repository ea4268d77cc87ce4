import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.cli.main import main
from hybridtrain.config.encode import to_toml
from hybridtrain.errors import HybridTrainError
from hybridtrain.hybrid.forecast.catalogue import FORECASTERS
from hybridtrain.reports.tables import MARKDOWN
from hybridvalidation.child import ChildResult
from hybridvalidation.records.store import append_line
from hybridvalidation.study import forecast as study_forecast
from hybridvalidation.study.forecast import (
    forecast_text,
    read_forecasts,
    score_study,
    signals_of,
    write_forecasts,
)
from hybridvalidation.study.protocol import StudyFile, StudyRecord, StudyRun, record_path
from inline_child import InlineChild
from tiny_studies import METHOD, finished, study_of

LENGTH = 720
LONG: dict[str, Any] = {
    "num_steps": LENGTH, "horizons": [600, LENGTH], "seeds": [0, 1, 2, 3],
    "schedule": {"warmup_steps": 20, "total_steps": LENGTH, "final_fraction": 0.0},
    "methods": [METHOD, {"name": "mean", "description": "-", "control": "average", "seeds": [0]}],
}  # fmt: skip
QUICK = ("ema", "power_law")
STEP_CPU_S = 2.0


def loss_after(step: int, seed: int) -> float:
    return 2.0 + 2.0 / math.sqrt(step) + 0.01 * math.sin(7.0 * step + seed)


def with_losses(study: StudyFile) -> dict[str, StudyRecord]:
    def told(record: StudyRecord) -> StudyRecord:
        if record.run.num_steps != LENGTH:
            return record
        return replace(record, step_losses=tuple(loss_after(step, record.run.seed) for step in range(1, LENGTH + 1)))

    return {key: told(record) for key, record in finished(study, lambda _: 2.0).items()}


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Leave out processes, a step of a real model, and forecasters that learn; return the steps asked for."""
    steps: list[float] = []

    def step_cpu_s() -> float:
        steps.append(STEP_CPU_S)
        return STEP_CPU_S

    before = torch.get_num_threads()
    monkeypatch.setattr(study_forecast, "_step_cpu_s", step_cpu_s)
    monkeypatch.setattr(study_forecast, "Child", InlineChild)
    monkeypatch.setattr(study_forecast, "FORECASTERS", {kind: FORECASTERS[kind] for kind in QUICK})
    yield steps
    torch.set_num_threads(before)


def test_runs_are_scored_once(tmp_path: Path, slow: list[float]) -> None:
    study = study_of(**LONG)
    made = with_losses(study)
    said: list[str] = []
    records = score_study(study, made, tmp_path, said.append)
    assert [(record.method, record.seed) for record in records] == [
        (method, seed) for method in ("adamw", "slow_gradient") for seed in (0, 1, 2)
    ]
    assert len(said) == 6
    assert slow == [STEP_CPU_S]
    assert read_forecasts(tmp_path) == records
    for record in records:
        assert [(score.kind, score.horizon) for score in record.scores] == [
            (kind, horizon) for kind in QUICK for horizon in (50, 100, 200, 400)
        ]
        assert min(score.num_forecasts for score in record.scores) == 1, "after step 300, for 400 steps"
    again = score_study(study, made, tmp_path, said.append)
    assert again == records
    assert (len(said), len(slow)) == (6, 1), "nothing is scored or measured twice"


def test_only_what_is_new_is_scored(tmp_path: Path) -> None:
    study = study_of(**LONG)
    made = with_losses(study)
    part = {key: record for key, record in made.items() if record.run.seed != 1}
    assert len(score_study(study, part, tmp_path, lambda _: None)) == 4
    said: list[str] = []
    records = score_study(study, made, tmp_path, said.append)
    assert said == [f"forecasts of {method}, seed 1: scored" for method in ("adamw", "slow_gradient")]
    assert len({record.key for record in records}) == len(records) == 6


def test_a_process_that_fails_leaves_what_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(**LONG)

    class Failing(InlineChild):
        def wait(self) -> ChildResult[Any]:
            seed = self._ended.answer.seed
            return replace(self._ended, answer=None, fault="no oracle") if seed == 1 else self._ended

    monkeypatch.setattr(study_forecast, "Child", Failing)
    with pytest.raises(HybridTrainError, match=r"adamw .* seed 1 .* failed: .*oracle.*; finished runs are"):
        score_study(study, with_losses(study), tmp_path, lambda _: None)
    assert [record.seed for record in read_forecasts(tmp_path)] == [0]


def test_a_run_without_losses_is_not_scored(tmp_path: Path, slow: list[float]) -> None:
    # too short, or validated on its way: scores would be no numbers, which no record can hold
    study = study_of(**LONG)
    assert score_study(study, finished(study, lambda _: 2.0), tmp_path, lambda _: None) == []
    assert slow == []
    assert not list(tmp_path.iterdir())
    assert forecast_text([], MARKDOWN).startswith("No run to score: forecasts need at least 700 true")
    assert write_forecasts(tmp_path) == []


def test_signals_are_the_true_steps_with_their_rates() -> None:
    study = study_of(**LONG)
    run = StudyRun(method="adamw", lr=0.01, beta1=0.9, beta2=0.99, seed=0, num_steps=LENGTH)
    record = next(record for record in with_losses(study).values() if record.run == run)
    signals = signals_of(study, record)
    assert [signal.step for signal in signals] == list(range(1, LENGTH + 1))
    assert signals[-1].loss == record.step_losses[-1]
    assert max(signal.lr for signal in signals) <= 0.01
    assert signals[-1].lr == pytest.approx(0.0, abs=1e-12)
    assert signals[9].lr == pytest.approx(0.01 * 10 / 21)


def test_the_table_has_means_over_runs(tmp_path: Path) -> None:
    study = study_of(**LONG)
    records = score_study(study, with_losses(study), tmp_path, lambda _: None)
    text = forecast_text(records, MARKDOWN)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "| ema" in line]
    scores = [score for record in records for score in record.scores if (score.kind, score.horizon) == ("ema", 50)]
    row = [cell for row in rows if row[1] == "50" for cell in row[2:]]  # of two tables
    assert row[0] == f"{sum(score.mean_absolute_error for score in scores) / 6:.4f}"
    assert row[3] == str(sum(score.num_forecasts for score in scores))
    share = sum(score.cpu_s_per_step for score in scores) / 6
    assert row[4:] == [f"{1000 * share:.2f}", f"{100 * share / STEP_CPU_S:.3f}"]
    step_s = share / 0.25
    of_card = forecast_text(records, MARKDOWN, step_s)
    assert [line for line in of_card.splitlines() if "| ema" in line][4].split("|")[-2].strip() == "25.00"
    assert f"4 x 1024 tokens as {1000 * step_s:.0f} ms, without overlap" in of_card
    assert text.startswith("Smallest mean error over all horizons and 6 runs: ")
    (path,) = write_forecasts(tmp_path)
    assert path.read_text().startswith(f"# Forecasts of the loss\n\n{text}\n\nRecords: 6 by program ")


def test_a_forecaster_that_came_later_does_not_break_old_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of(**LONG)
    records = score_study(study, with_losses(study), tmp_path, lambda _: None)
    monkeypatch.setattr(study_forecast, "FORECASTERS", {**FORECASTERS, "oracle": FORECASTERS["ema"]})
    assert "oracle" not in forecast_text(records, MARKDOWN)


def test_the_command_scores_a_recorded_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_of(**LONG)
    for record in with_losses(study).values():
        append_line(record_path(tmp_path / "results", "tiny"), record)
    (tmp_path / "targets.toml").write_text("target = []\n")
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies/tiny.toml").write_text(to_toml(study))
    folders = ["--scenarios", str(tmp_path), "--results", str(tmp_path / "results")]
    assert main(["study", "tiny", "--forecasts", "--json", *folders]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["runs"]) == 6
    table = tmp_path / "results/tables/forecasts.md"
    assert told["files"] == [table.as_posix()]
    before = table.read_bytes()
    table.unlink()
    assert main(["report", "--json", *folders]) == 0
    assert table.as_posix() in json.loads(capsys.readouterr().out)["files"]
    assert table.read_bytes() == before
