"""Metrics reach TensorBoard and Weights & Biases; a package that is missing or a service that fails is told."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtrain.errors import ConfigError
from hybridtrain.profiler.metric_loggers import MetricLogger, MetricLoggers, TensorBoardLogger, WandbLogger


class Kept:
    """Keeps what it gets; fails when told to."""

    def __init__(self, fails_at: int | None = None, *, fails_to_close: bool = False) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._fails_at, self._fails_to_close = fails_at, fails_to_close

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("the service is away")
        self.lines.append((step, dict(metrics)))

    def close(self) -> None:
        if self._fails_to_close:
            raise OSError("disk full")
        self.closed += 1


class FakeWriter:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


class FakeWandb:
    class Error(Exception):
        pass

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.asked: dict[str, Any] = {}
        self.lines: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def init(self, **asked: Any) -> "FakeWandb":
        if self.fault:
            raise self.Error(self.fault)
        self.asked = asked
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.lines.append((metrics, step))

    def finish(self) -> None:
        self.finished = True


def test_tensorboard_gets_a_scalar_per_metric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writers: list[FakeWriter] = []

    def make(folder: str) -> FakeWriter:
        writers.append(FakeWriter(folder))
        return writers[-1]

    module = SimpleNamespace(SummaryWriter=make)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)  # type: ignore[arg-type]
    logger = TensorBoardLogger(tmp_path)
    logger.log(7, {"loss": 1.5, "lr": 0.1})
    logger.close()
    (writer,) = writers
    assert writer.folder == str(tmp_path)
    assert writer.scalars == [("loss", 1.5, 7), ("lr", 0.1, 7)]
    assert writer.closed


@pytest.mark.parametrize("mode", ["offline", None])
def test_wandb_gets_project_folder_mode_and_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Any) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    logger = WandbLogger("mine", folder=tmp_path, mode=mode, config={"seed": 3})
    logger.log(7, {"loss": 1.5})
    logger.close()
    assert fake.asked == {"project": "mine", "dir": str(tmp_path), "mode": mode, "config": {"seed": 3}}
    assert fake.lines == [({"loss": 1.5}, 7)]
    assert fake.finished


def test_a_wandb_run_that_does_not_start_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("no API key"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no API key.*wandb login.*WANDB_MODE=offline"):
        WandbLogger("mine")


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoardLogger(Path("never")), "tensorboard"),
        ("wandb", lambda: WandbLogger("mine"), "wandb"),
    ],
)
def test_a_missing_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, module: str, make: Callable[[], MetricLogger], extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'hybridtrain\[{extra}\]'"):
        make()


def test_a_logger_that_fails_is_dropped_and_the_others_go_on() -> None:
    said: list[str] = []
    good, bad = Kept(), Kept(fails_at=2)
    loggers = MetricLoggers([bad, good], said.append)
    for step in (1, 2, 3):
        loggers.log(step, {"loss": 0.5})
    loggers.close()
    assert [step for step, _ in good.lines] == [1, 2, 3]
    assert [step for step, _ in bad.lines] == [1]
    assert (good.closed, bad.closed) == (1, 0)
    assert said == ["Kept stopped at step 2 (the service is away); training continues without it"]


def test_a_logger_that_does_not_close_is_told_once() -> None:
    said: list[str] = []
    good = Kept()
    loggers = MetricLoggers([Kept(fails_to_close=True), good], said.append)
    loggers.close()
    loggers.close()
    assert good.closed == 1
    assert said == ["Kept did not close (disk full); training continues without it"]


def test_real_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path)
    for step in (1, 2):
        logger.log(step, {"memory/used_gb": step / 4})
    logger.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("memory/used_gb")] == [(1, 0.25), (2, 0.5)]


def test_a_real_offline_run_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logger = WandbLogger("mine", folder=tmp_path, mode="offline", config={"seed": 3})
    logger.log(1, {"loss": 0.5})
    logger.close()
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"loss" in log.read_bytes()
