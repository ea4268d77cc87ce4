import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.cli.main import main
from hybridtrain.config.encode import to_toml
from hybridtrain.errors import HybridTrainError, RecordError
from hybridvalidation.child import ChildResult
from hybridvalidation.records.store import append_line, read_lines
from hybridvalidation.study import runner as study_runner
from hybridvalidation.study import trials
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import BASELINE, StudyFile, StudyRecord, StudyRun, read_study, record_path, run_key
from hybridvalidation.study.report import verdict_sentence
from hybridvalidation.study.runner import run_study
from hybridvalidation.study.trials import StudyJob, StudyTrial, run_study_job
from inline_child import InlineChild
from tiny_studies import METHOD, study_of

HYBRID: dict[str, Any] = {"full_steps": 2, "slow": {"beta": 0.9}}
TUNED: dict[str, Any] = {
    "lrs": [0.01, 0.02], "betas": [{"beta1": 0.9, "beta2": 0.95}], "targets": ["speed"],
    "methods": [
        METHOD | {"lrs": [0.01, 0.02]},
        METHOD | {"name": "random", "control": "random", "seeds": [0, 1]},
        METHOD | {"name": "no-jumps", "seeds": [0], "hybrid": {"full_steps": 2, "max_predict_steps": 0.0}},
        {"name": "mean", "description": "-", "control": "average", "seeds": [0]},
    ],
}  # fmt: skip
TARGETS = """\
[[target]]
id = "speed"
source = ["000"]
description = "faster"
metric = "time_to_loss_speedup_pct"
direction = "min"
value = 60.0
"""
NUM_RUNS = 3 + 3 * 3 - 1 + 4 + 2 + 1 + 1
"""Tuning (one of its runs is among the next), horizons, slow_gradient's rates and seeds, controls."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[StudyRun]:
    """Run without processes; return the runs made."""
    runs: list[StudyRun] = []

    def make(job: StudyJob) -> StudyRecord:
        runs.append(job.run)
        # times of a few milliseconds are as good as none
        return replace(run_study_job(job), cpu_seconds=1.0, duration_s=1.0)

    monkeypatch.setattr(trials, "run_study_job", make)
    monkeypatch.setattr(study_runner, "Child", InlineChild)
    return runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of scenarios with the tiny study."""
    (tmp_path / "scenarios/studies").mkdir(parents=True)
    (tmp_path / "scenarios/stacks").mkdir()
    (tmp_path / "scenarios/targets.toml").write_text(TARGETS)
    (tmp_path / "scenarios/studies/tiny.toml").write_text(to_toml(study_of(**TUNED)))
    return tmp_path


def make_run(study: StudyFile, run: StudyRun) -> StudyRecord:
    return run_study_job(StudyJob(study=study, run=run))


def run_of(method: str, seed: int = 0) -> StudyRun:
    return StudyRun(method=method, lr=0.01, beta1=0.9, beta2=0.99, seed=seed, num_steps=12)


def record_of(changes: dict[str, Any], method: str = "slow_gradient") -> StudyRecord:
    return make_run(study_of(largest_harm_pct=2.0, methods=[METHOD | changes]), run_of(method))


def outcome(record: StudyRecord) -> tuple[object, ...]:
    return (record.validation_loss, record.test_loss, record.final_train_loss, record.step_losses)


def command(folder: Path, *arguments: str) -> int:
    return main([*arguments, "--scenarios", str(folder / "scenarios"), "--results", str(folder / "results")])


def test_a_stopped_study_goes_on_where_it_was(
    folder: Path, here: list[StudyRun], capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(**TUNED)
    path = record_path(folder / "results", "tiny")
    for words in (["--verify"], ["--rung", "small"]):
        assert command(folder, "study", "tiny", *words) == 2
        assert f"{words[0]}: is for a ladder only, but" in capsys.readouterr().err
    assert not here
    for count in (2, 7):  # within a stage, and over the end of one
        assert command(folder, "study", "tiny", "--max-runs", str(count - len(here))) == 0
        assert len(here) == count
        assert "Not finished: the registered claim (it gains) is unproven." in capsys.readouterr().out
    before = path.read_bytes()
    assert command(folder, "study", "tiny", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert path.read_bytes().startswith(before), "records are only appended"
    assert max(Counter(here).values()) == 1, "nothing is repeated"
    keys = [record.key for record in read_lines(path, StudyRecord)]
    assert sorted(keys) == sorted(run_key(study, run) for run in here)
    assert len(keys) == NUM_RUNS
    assert told["runs"] == NUM_RUNS
    assert "Not finished" not in told["verdict"]
    made = read_study(folder / "results", study)
    assert next_runs(study, made) == []
    files = {Path(name).name for name in told["files"]}
    names = {"study-tiny.md", "study-tiny-factor.png", "study-tiny-horizon.png", "study-tiny-lr.png"}
    assert files == names
    bytes_of = {name: Path(name).read_bytes() for name in told["files"]}
    table = bytes_of[str(folder / "results/tables/study-tiny.md")].decode()
    for text in ("slow_gradient", "no-jumps", "AdamW's steps", "Registered before the first run: it gains", "speed"):
        assert text in table
    for name in told["files"]:
        Path(name).unlink()
    assert command(folder, "report", "--json") == 0
    rebuilt = {*json.loads(capsys.readouterr().out)["files"]}
    assert rebuilt == {*told["files"], str(folder / "results/tables/targets.md")}
    assert {name: Path(name).read_bytes() for name in told["files"]} == bytes_of, "report rebuilds the same bytes"
    assert command(folder, "study", "tiny") == 0
    assert len(here) == NUM_RUNS, "a complete study makes no run"


def test_runs_before_a_crash_are_kept(tmp_path: Path, here: list[StudyRun], monkeypatch: pytest.MonkeyPatch) -> None:
    class Crashing(InlineChild):
        def poll(self) -> ChildResult[Any]:
            return replace(self._ended, answer=None, fault="out of paper") if len(here) == 5 else self._ended

    monkeypatch.setattr(study_runner, "Child", Crashing)
    with pytest.raises(HybridTrainError, match="out of paper; finished runs are kept"):
        run_study(study_of(), tmp_path, jobs=1, max_runs=None, say=lambda _: None)
    assert len(read_study(tmp_path, study_of())) == 4


def test_runs_on_another_text_are_not_joined(tmp_path: Path, here: list[StudyRun]) -> None:
    study = study_of()
    (record,) = run_study(study, tmp_path, jobs=1, max_runs=1, say=lambda _: None).values()
    append_line(record_path(tmp_path, "tiny"), replace(record, corpus_digest="0123456789"))
    with pytest.raises(RecordError, match="its runs used the text 01234567, this machine has"):
        run_study(study, tmp_path, jobs=1, max_runs=None, say=lambda _: None)
    assert len(here) == 1


def test_without_jumps_the_hybrid_trainer_is_adamw_to_the_bit() -> None:
    plain = record_of({}, BASELINE)
    for fuse in (True, False):
        record = record_of({"hybrid": HYBRID | {"max_predict_steps": 0.0, "fuse": fuse}})
        assert outcome(record) == outcome(plain)
        assert (record.jumps, record.cost) == (0, plain.cost)
    assert outcome(record_of({})) != outcome(plain)


@pytest.mark.parametrize(
    "changes", [{}, {"control": "random"}, {"hybrid": None, "control": "average"}, {"disturbance": "data_shift"}]
)
def test_a_run_is_a_function_of_file_and_seed(changes: dict[str, Any]) -> None:
    changes = changes | {"role": "control"}
    first = record_of(changes)
    torch.rand(7)  # whatever ran before in this process
    assert outcome(record_of(changes)) == outcome(first)
    assert outcome(first) != outcome(record_of({}, BASELINE))


def test_a_run_counts_its_cost() -> None:
    assert record_of({}, BASELINE).cost == 36
    plain = record_of({"hybrid": HYBRID | {"fuse": False}})
    probed = record_of({"hybrid": HYBRID | {"monitor": "probe", "probe_every": 1}})
    assert plain.cost == 36
    assert probed.cost == 36 + 2 * probed.jumps > 36


def test_ademamix_jumps_never_and_differs() -> None:
    record = record_of({"hybrid": None, "slow": {"beta": 0.9}})
    assert (record.jumps, record.cost, record.outcome) == (0, 36, "ok")
    assert outcome(record) != outcome(record_of({}, BASELINE))


def test_validations_on_the_way_do_not_change_a_run() -> None:
    watched = make_run(study_of(validate_every=4), run_of(BASELINE))
    assert [(point.step, point.cost) for point in watched.curve] == [(4, 12), (8, 24), (12, 36)]
    assert watched.validation_loss == record_of({}, BASELINE).validation_loss == watched.curve[-1].loss
    assert watched.step_losses == ()


def test_data_shift_half_way() -> None:
    plain = record_of({}, BASELINE)
    record = record_of({"hybrid": None, "disturbance": "data_shift", "role": "control"})
    assert record.step_losses[:6] == plain.step_losses[:6]
    assert all(one != other for one, other in zip(record.step_losses[6:], plain.step_losses[6:], strict=True))
    assert record.validation_loss != plain.validation_loss


def test_a_gradient_that_is_no_number_stops_adamw() -> None:
    record = record_of({"hybrid": None, "disturbance": "nan_gradients", "role": "control"})
    assert record.outcome == "diverged"
    assert "nan" in record.message
    assert (record.validation_loss, record.test_loss, record.final_train_loss) == (None, None, None)


def test_it_is_survived_right_after_a_jump_only() -> None:
    nan = {"disturbance": "nan_gradients", "role": "control"}
    record = record_of(nan)  # warm-up of 2, then a jump after every 2 steps: one stands before step 7
    assert (record.outcome, record.rollbacks) == ("ok", 1)
    assert record.cost == 36 + 3, "the step that was refused is paid"
    assert record_of(nan | {"hybrid": HYBRID | {"full_steps": 5}}).outcome == "diverged"


@pytest.mark.parametrize("place", ["_halves", "curve"])
def test_a_loss_that_is_no_number_is_an_outcome(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    # written down it would make the file of records unreadable, and crash the study
    monkeypatch.setattr(StudyTrial, "_mean_loss", lambda *_: float("nan"))
    record = make_run(study_of(validate_every=4 if place == "curve" else 0), run_of(BASELINE))
    assert record.outcome == "diverged"
    assert "validation loss nan" in record.message
    assert record.validation_loss is None
    assert all(point.loss == point.loss for point in record.curve)


def test_a_real_study_of_harm(tmp_path: Path, here: list[StudyRun]) -> None:
    nan = {"disturbance": "nan_gradients"}
    study = study_of(
        largest_harm_pct=50.0, horizons=[12],
        methods=[
            {"name": "adamw-nan", "description": "-", "role": "control", **nan}, METHOD,
            METHOD | {"name": "nan", "against": "adamw-nan", **nan},
        ],
    )  # fmt: skip
    made = run_study(study, tmp_path, jobs=1, max_runs=None, say=lambda _: None)
    assert len(here) == 12
    assert "is kept by every setting: worst mean harm" in verdict_sentence(study, made)
    strict = replace(study, largest_harm_pct=-99.0)
    assert "is broken by slow_gradient; worst" in verdict_sentence(strict, made)
    (tmp_path / "scenarios/studies").mkdir(parents=True)
    (tmp_path / "scenarios/targets.toml").write_text(TARGETS)
    (tmp_path / "scenarios/studies/tiny.toml").write_text(to_toml(study))
    assert main(["report", "--scenarios", str(tmp_path / "scenarios"), "--results", str(tmp_path)]) == 0
    table = (tmp_path / "tables/study-tiny.md").read_text()
    assert table.startswith("# Harm: a tiny model")
    assert "stopped" in table
    assert (tmp_path / "plots/study-tiny-harm.png").stat().st_size > 1000


def test_a_study_under_a_constant_rate(tmp_path: Path, here: list[StudyRun]) -> None:
    schedule = {"kind": "constant", "warmup_steps": 2, "total_steps": 12}
    study = study_of(schedule=schedule, horizons=[24], validate_every=4)
    made = run_study(study, tmp_path, jobs=1, max_runs=None, say=lambda _: None)
    assert len(here) == 7  # the first stage has the study's own length
    (tmp_path / "scenarios/studies").mkdir(parents=True)
    (tmp_path / "scenarios/targets.toml").write_text(TARGETS)
    (tmp_path / "scenarios/studies/tiny.toml").write_text(to_toml(study))
    assert main(["report", "--scenarios", str(tmp_path / "scenarios"), "--results", str(tmp_path)]) == 0
    assert "compute factor of" in (tmp_path / "tables/study-tiny.md").read_text()
    assert (tmp_path / "plots/study-tiny-cost.png").exists()
    assert all(record.outcome == "ok" for record in made.values())
