"""Metric loggers of a run: TensorBoard, Weights & Biases, MLflow, or anything with ``log`` and ``close``.

The packages are optional and imported on first use.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from hybridtrain.errors import ConfigError

_EXPERIMENT = "hybridtrain"
WandbMode = Literal["online", "offline", "disabled"]


class MetricLogger(Protocol):
    """Protocol of a logger: receives numbers by name."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step; steps must not decrease."""
        ...

    def close(self) -> None:
        """Flush remaining metrics."""
        ...


class TensorBoardLogger:
    """Writes scalars to an event file in ``folder``, created if missing; view with ``tensorboard --logdir FOLDER``.

    Raises ``ConfigError`` if TensorBoard is not installed, ``OSError`` if the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        tensorboard = _import_optional("torch.utils.tensorboard", "TensorBoard", extra="tensorboard")
        self._writer: Any = tensorboard.SummaryWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one scalar per metric; a thread of TensorBoard writes them."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the queue and close the file."""
        self._writer.close()


class WandbLogger:
    """Sends metrics to a run of Weights & Biases.

    Args:
        project: Name of the project there.
        folder: Parent of its local folder ``wandb``; None: the current folder.
        mode: ``offline`` stores the run locally until ``wandb sync``; None: WANDB_MODE, else online.
        config: Settings that are stored with the run.

    Raises ``ConfigError`` if the package is not installed, or the run cannot be started.
    """

    def __init__(
        self,
        project: str,
        *,
        folder: Path | None = None,
        mode: WandbMode | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        wandb = _import_optional("wandb", "Weights & Biases", extra="wandb")
        try:
            self._run: Any = wandb.init(
                project=project, dir=None if folder is None else str(folder), mode=mode, config=dict(config or {})
            )
        except wandb.Error as error:
            fault = f"the run does not start ({error}); run wandb login, or set WANDB_MODE=offline to sync later"
            raise ConfigError("Weights & Biases", [fault]) from None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run; an offline one is complete on disk at the end of the process."""
        self._run.finish()


class MlflowLogger:
    """Writes metrics to a run of MLflow in a folder of this machine; see them with ``mlflow ui``.

    ``config`` is stored with the run as a file ``config.json``; the folder is made if missing. Raises ``ConfigError``
    if the package is not installed, or the store cannot be used.
    """

    def __init__(self, folder: Path, *, config: Mapping[str, object] | None = None) -> None:
        mlflow = _import_optional("mlflow", "MLflow", extra="mlflow")
        # MLflow 3 maintains its file store no more than it must, and refuses a folder without this word.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=folder.resolve().as_uri())
            known = self._client.get_experiment_by_name(_EXPERIMENT)
            experiment = self._client.create_experiment(_EXPERIMENT) if known is None else known.experiment_id
            self._run: str = self._client.create_run(experiment).info.run_id
            self._client.log_dict(self._run, dict(config or {}), "config.json")
        except mlflow.MlflowException as error:
            raise ConfigError("MLflow", [f"{folder} cannot be used ({error}); choose another folder"]) from None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        entities = importlib.import_module("mlflow.entities")
        now = time.time_ns() // 1_000_000
        self._client.log_batch(
            self._run, metrics=[entities.Metric(name, value, now, step) for name, value in metrics.items()]
        )

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class MetricLoggers:
    """Several loggers as one. A failing logger is dropped, with a sentence for ``on_fault``, and the run continues."""

    def __init__(self, loggers: Sequence[MetricLogger], on_fault: Callable[[str], None]) -> None:
        self._loggers = list(loggers)
        self._on_fault = on_fault

    def __bool__(self) -> bool:
        """Return whether any logger is left."""
        return bool(self._loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step to every logger."""
        for logger in tuple(self._loggers):
            self._try(logger, f"stopped at step {step}", partial(logger.log, step, metrics))

    def close(self) -> None:
        """Close every logger."""
        for logger in tuple(self._loggers):
            self._try(logger, "did not close", logger.close)
        self._loggers.clear()

    def _try(self, logger: MetricLogger, event: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  whatever a logging service raises, training is worth more
            self._loggers.remove(logger)
            self._on_fault(f"{type(logger).__name__} {event} ({error}); training continues without it")


def _import_optional(module: str, name: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fault = f"it cannot be imported ({error}); install it with: pip install 'hybridtrain[{extra}]'"
        raise ConfigError(name, [fault]) from None
