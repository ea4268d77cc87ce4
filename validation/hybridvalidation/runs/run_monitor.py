"""What watches a training run beside its log: the memory profile, TensorBoard, Weights & Biases."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from hybridtrain.errors import ConfigError
from hybridtrain.phase import Phase
from hybridtrain.profiler.memory_profiler import DEFAULT_ALERT_BYTES, MemoryProfiler
from hybridtrain.profiler.metric_loggers import MetricLogger, MetricLoggers, TensorBoardLogger, WandbLogger

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """What the user asked for; nothing by default."""

    profile_csv: Path | None = None
    """Where the snapshots go; None: to no file."""
    profile_every: int = 1
    """Steps between snapshots."""
    alert_bytes: int = DEFAULT_ALERT_BYTES
    """Memory use above this is told at once."""
    tensorboard: Path | None = None
    """Folder of the event file."""
    wandb_project: str | None = None

    @property
    def anything(self) -> bool:
        """Whether anything is to be watched."""
        return (self.profile_csv, self.tensorboard, self.wandb_project) != (None, None, None)


class RunMonitor:
    """Watches one run: ``with RunMonitor(...) as monitor``. At the end, also a bad one, the profile is written.

    Args:
        wanted: What the user asked for.
        folder: The run's folder, for local files of a logging service.
        settings: Stored with a logging service's run.
        say: Receives the report, alerts and what went wrong.

    Raises:
        ConfigError: a package is not installed, a path cannot serve.
        OSError: a folder cannot be written.
    """

    def __init__(self, wanted: Monitoring, folder: Path, settings: Mapping[str, object], say: Say) -> None:
        self._csv = wanted.profile_csv
        self._say = say
        if self._csv is not None:
            _probe(self._csv)
        loggers: list[MetricLogger] = []
        if wanted.tensorboard is not None:
            loggers.append(TensorBoardLogger(wanted.tensorboard))
        if wanted.wandb_project is not None:
            loggers.append(WandbLogger(wanted.wandb_project, folder=folder, config=settings))
        self._loggers = MetricLoggers(loggers, say)
        self._profiler: MemoryProfiler | None = None
        if wanted.anything:
            self._profiler = MemoryProfiler(
                every_n_steps=wanted.profile_every, alert_threshold_bytes=wanted.alert_bytes,
                sinks=[self._loggers] if loggers else [], on_alert=say,
            )  # fmt: skip

    def __enter__(self) -> Self:
        """Start the profile."""
        if self._profiler is not None:
            self._profiler.start()
        return self

    def record_step(self, step: int, phase: Phase, metrics: Mapping[str, float | None]) -> None:
        """Log a step's metrics, without those that are None, and take a snapshot if one is due."""
        known = {f"train/{name}": value for name, value in metrics.items() if value is not None}
        self._loggers.log(step, known)
        if self._profiler is not None:
            self._profiler.record_step(step, phase)

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Write the profile, say the report, close the loggers."""
        self._loggers.close()
        if self._profiler is None:
            return
        self._profiler.stop()
        if not self._profiler.num_steps:
            return  # nothing was done: an older profile stays
        self._say(self._profiler.report())
        if self._csv is None:
            return
        try:
            self._profiler.write_csv(self._csv)
        except OSError as fault:
            if error is None:
                raise
            self._say(f"the memory profile was not written: {fault}")  # the run's own error is the one to raise
        else:
            self._say(f"memory profile written: {self._csv}")


def _probe(path: Path) -> None:
    """Find out before the first step whether a file can be written there."""
    if path.is_dir():
        raise ConfigError("--profile-memory", [f"{path} is a folder; give the path of a .csv file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass
