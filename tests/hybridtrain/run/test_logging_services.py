"""TensorBoard, Weights & Biases and MLflow themselves, where they are installed: what was logged can be read back."""

from pathlib import Path

import pytest

from hybridtrain.phase import Phase
from hybridtrain.run.train_log import Monitoring, RunMonitor

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that are not ours
LOSSES = {1: 2.5, 2: 2.0}


def log(wanted: Monitoring, folder: Path) -> list[str]:
    told: list[str] = []
    with RunMonitor(wanted, folder, {"train": {"seed": 3}}, told.append) as monitor:
        for step, loss in LOSSES.items():
            monitor.record_step(step, Phase.FULL, {"loss": loss, "grad_norm": None})
    assert not [line for line in told if "training continues without it" in line]
    return told


def test_tensorboard_has_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    log(Monitoring(tensorboard=tmp_path / "logs"), tmp_path)
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert {event.step: event.value for event in found.Scalars("train/loss")} == LOSSES
    assert any(name.startswith("memory/") for name in found.Tags()["scalars"])


def test_mlflow_has_every_step_and_the_settings(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    for _ in range(2):  # the second run finds the experiment of the first
        log(Monitoring(mlflow=tmp_path / "runs"), tmp_path)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "runs").as_uri())
    runs = client.search_runs([client.get_experiment_by_name("hybridtrain").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    for run in runs:
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert {metric.step: metric.value for metric in history} == LOSSES
        assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["config.json"]


def test_weights_and_biases_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log(Monitoring(wandb_project="tried"), tmp_path)
    wandb.teardown()  # its service, which writes the file, ends; so it does with the process
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert content.count(b"train/loss") >= len(LOSSES)
    assert b"seed" in content
