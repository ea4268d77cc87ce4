"""``hybridtrain train`` with a memory profile and metric loggers."""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.cli.main import main
from hybridtrain.errors import DivergenceError
from hybridtrain.run import train_log
from hybridtrain.trainer import Trainer
from tiny_files import training_file

TRAIN = training_file(num_blocks=2, more="[optimizer]\nlr = 1e-3\n[schedule]\nwarmup_steps = 0\ntotal_steps = 10\n")


class FakeWandb:
    """Weights & Biases without the service."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **asked: Any) -> "FakeWandb":
        self.asked = asked
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.lines.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same runs with a card and without
    Path("train.toml").write_text(TRAIN)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def train(*arguments: str) -> int:
    return main(["train", "train.toml", "--data", "text.txt", "--out", "run", *arguments])


def steps(path: str = "memory.csv") -> list[int]:
    with Path(path).open(encoding="utf-8") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("arguments", "taken"), [([], [1, 2, 3, 4]), (["--profile-every", "3"], [1, 3])])
def test_the_profile_is_written_and_the_report_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], taken: list[int]
) -> None:
    assert train("--profile-memory", "memory.csv", *arguments) == 0
    assert steps() == taken
    out = capsys.readouterr().out
    assert f"memory profile: {len(taken)} snapshots of 4 steps" in out
    assert "memory profile written to memory.csv" in out


def test_without_the_options_nothing_is_profiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_log, "MemoryProfiler", None)
    assert train() == 0
    assert "memory profile" not in capsys.readouterr().out


def test_the_profile_changes_no_loss() -> None:
    def losses(folder: str, *arguments: str) -> list[float]:
        assert main(["train", "train.toml", "--data", "text.txt", "--out", folder, *arguments]) == 0
        return [json.loads(line)["loss"] for line in Path(folder, "log.jsonl").read_text().splitlines()]

    assert losses("bare") == losses("profiled", "--profile-memory", "memory.csv")


@pytest.mark.parametrize(("options", "percent"), [((), "10"), (("--spike-percent", "25.5"), "25.5")])
def test_what_a_spike_is_can_be_said(
    options: tuple[str, ...], percent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--profile-memory", "memory.csv", *options) == 0
    assert f"spikes of more than {percent} % above the snapshot before" in capsys.readouterr().out


def test_a_spike_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--profile-memory", "memory.csv", "--spike-percent", "0") == 2
    assert "--spike-percent" in capsys.readouterr().err


def test_json_stays_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--profile-memory", "memory.csv", "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert any("memory profile: 4 snapshots" in text for text in json.loads(out)["said"])


def test_wandb_gets_the_runs_metrics_memory_and_settings(wandb: FakeWandb, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--wandb", "mine") == 0
    assert (wandb.asked["project"], wandb.asked["dir"], wandb.finished) == ("mine", "run", 1)
    assert wandb.asked["config"]["train"]["num_steps"] == 4
    named: dict[int, set[str]] = {}
    for step, metrics in wandb.lines:
        named.setdefault(step, set()).update(metrics)
    assert list(named) == [1, 2, 3, 4]
    for names in named.values():
        assert {
            "train/loss",
            "train/lr",
            "train/tokens_per_s",
            "train/effective_batch",
            "memory/used_gb",
            "memory/rss_gb",
        } <= names
    assert "memory profile: 4 snapshots" in capsys.readouterr().out


def test_a_run_that_fails_leaves_its_profile(
    wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.step

    def diverge(trainer: Trainer, batches: Any, **kwargs: Any) -> Any:
        if trainer.steps_done == 2:
            raise DivergenceError("step 3: loss is nan")
        return step(trainer, batches, **kwargs)

    monkeypatch.setattr(Trainer, "step", diverge)
    assert train("--profile-memory", "memory.csv", "--wandb", "mine") == 1
    assert steps() == [1, 2]
    assert wandb.finished == 1
    assert "loss is nan" in capsys.readouterr().err


def test_a_resumed_run_profiles_its_own_steps_and_a_finished_one_keeps_the_profile() -> None:
    assert train("--profile-memory", "memory.csv") == 0
    Path("train.toml").write_text(TRAIN.replace("num_steps = 4", "num_steps = 6"))
    assert train("--profile-memory", "memory.csv", "--resume") == 0
    assert steps() == [5, 6]
    assert train("--profile-memory", "memory.csv", "--resume") == 0  # nothing left to do
    assert steps() == [5, 6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--profile-memory", "folder"], "folder is a folder"),
        (["--profile-memory", "text.txt/memory.csv"], "text.txt"),
        (["--profile-every", "0"], "must be at least 1"),
        (["--alert-gb", "-1"], "must be at least 1"),
        (["--tensorboard", "events"], "pip install 'hybridtrain[tensorboard]'"),
        (["--wandb", "mine"], "pip install 'hybridtrain[wandb]'"),
    ],
)
def test_what_cannot_be_is_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    Path("folder").mkdir()
    for module in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    assert train(*arguments) != 0
    assert words in capsys.readouterr().err
    assert not Path("run", "log.jsonl").exists()


def test_an_alert_is_said_while_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hybridtrain.units.GB", 1)  # a threshold of bytes instead of gigabytes
    assert train("--profile-memory", "memory.csv", "--alert-gb", "1000") == 0
    out = capsys.readouterr().out
    assert out.index("memory alert:") < out.index("memory profile: 4 snapshots")
    assert out.count("memory alert:") == 1
