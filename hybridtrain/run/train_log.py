"""The log of a training run: a line per step, a summary, the memory profile, metric services."""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch

from hybridtrain.atomic_write import replace_file
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.cycle import HybridResult, HybridTrainer
from hybridtrain.phase import Phase
from hybridtrain.profiler.memory_profiler import DEFAULT_ALERT_BYTES, DEFAULT_SPIKE_FRACTION, MemoryProfiler
from hybridtrain.profiler.metric_loggers import (
    MetricLogger,
    MetricLoggers,
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from hybridtrain.run.precision import CastCounts
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.op_record import Lane

Say = Callable[[str], None]

_TRUE_STEP_COST = 3.0
"""Forward passes that a step without jumps costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One line of the log of a plain run."""

    step: int
    """True steps done."""
    loss: float | None
    """Training loss; None in PREDICT, which has no batch."""
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    peak_bytes: int
    """Peak bytes of the step: from the allocator on CUDA; on the CPU the ledger's count of would-be device memory."""
    effective_batch: int
    """Sequences per update, over all micro-batches and ranks; 0 in PREDICT."""

    @classmethod
    def of(cls, result: HybridResult, peak_bytes: int, effective_batch: int) -> Self:
        """Return the line of a phase step."""
        is_jump = result.phase is Phase.PREDICT
        values: dict[str, Any] = {
            "loss": None if is_jump else result.loss, "tokens_per_s": result.num_tokens / result.seconds,
            "peak_bytes": peak_bytes, "effective_batch": 0 if is_jump else effective_batch,
            "forecast_loss": result.loss if is_jump else None,
            "move_rms": result.move_rms if math.isfinite(result.move_rms) else None,
        }  # fmt: skip
        names = (field.name for field in fields(cls))
        return cls(**{name: values[name] if name in values else getattr(result, name) for name in names})

    def as_metrics(self) -> dict[str, float | None]:
        """Return everything but the step by its name."""
        return {name.name: getattr(self, name.name) for name in fields(StepLog) if name.name != "step"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridStepLog(StepLog):
    """One log line of a hybrid run: a true step, or a separate jump with the number of the step before it."""

    phase: Phase
    seconds: float
    predicted_steps: float
    """Predicted steps of this line's jump, fused or separate; 0: none."""
    move_rms: float | None
    """RMS of the jump's weight change, in learning rates; None if not finite."""
    forecast_loss: float | None
    """In PREDICT: forecast loss of the round that starts."""
    prediction_error: float | None
    """Mean loss of the round that ends here minus its forecast."""
    confidence: float
    scale: float
    is_rolled_back: bool
    cost: float
    """Cost in forward passes."""

    def as_metrics(self) -> dict[str, float | None]:
        """Return the metrics to plot; a jump uses other names than the step with its number."""
        jump: dict[str, float | None] = {}
        if self.predicted_steps:
            jump = {"predicted_steps": self.predicted_steps, "move_rms": self.move_rms}
        if self.phase is Phase.PREDICT:
            return jump | {"forecast_loss": self.forecast_loss, "predict_peak_bytes": self.peak_bytes}
        hybrid = {"prediction_error": self.prediction_error, "confidence": self.confidence, "scale": self.scale}
        return jump | StepLog.as_metrics(self) | hybrid


class TrafficLedger(StorageLedger):  # type: ignore[no-untyped-call]
    """Ledger that also counts copied bytes by lane, on a card too."""

    def __init__(self) -> None:
        super().__init__(record=False)
        self.moved: Counter[Lane] = Counter()
        self.phase = Phase.FULL
        """Phase that casts are counted for."""
        self.casts = CastCounts()

    def cast(self, source: torch.dtype, target: torch.dtype, num_elements: int) -> None:
        """Count a cast."""
        self.casts.add(self.phase, source, target, num_elements)

    def work(self, lane: Lane, num_bytes: int, waits: Sequence[int]) -> int:
        """Count a copy, or CPU work."""
        self.moved[lane] += num_bytes
        return super().work(lane, num_bytes, waits)


@dataclass(slots=True, kw_only=True)
class RunStatistics:
    """Speed and memory of one call's true steps and jumps."""

    tokens_per_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    moved: Counter[Lane] = field(default_factory=Counter)

    def add(self, log: StepLog, moved: Counter[Lane]) -> None:
        """Add a phase step and its copied bytes."""
        if log.loss is not None:
            self.tokens_per_s.append(log.tokens_per_s)
        self.peak_bytes = max(self.peak_bytes, log.peak_bytes)
        self.moved += moved

    def as_mapping(self) -> dict[str, object]:
        """Return plain figures; bytes by lane are per true step."""
        count = len(self.tokens_per_s)
        return {
            "steps": count, "tokens_per_s_median": median(self.tokens_per_s), "peak_bytes": self.peak_bytes,
            "bytes_per_step": {lane.value: size / count for lane, size in self.moved.items()},
        }  # fmt: skip

    def as_text(self) -> str:
        """Return them as a line of output."""
        count, peak = len(self.tokens_per_s), format_bytes(self.peak_bytes)
        text = f"{count} steps: {median(self.tokens_per_s):,.0f} tokens/s (median), peak {peak}"
        words = {
            Lane.COPY_IN: "to the device", Lane.COPY_OUT: "from it", Lane.DISK: "read from or written to disk",
            Lane.HOST: "updated in host memory",
        }  # fmt: skip
        moved = [f"{format_bytes(self.moved[lane] / count)} {word}" for lane, word in words.items() if self.moved[lane]]
        return f"{text}; copied per step: {', '.join(moved)}" if moved else text


def trim_log(path: Path, steps_done: int, next_phase: Phase, say: Say) -> None:
    """Remove the lines of steps that will be repeated, and damaged lines, whose number is reported.

    A jump has the number of the true step before it, and checkpoints precede jumps: if the saved run jumps next, that
    jump's line is removed too.
    """
    kept, num_damaged = list[bytes](), 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line.decode("ascii"))
        except (ValueError, RecursionError):
            entry = None
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int):
            num_damaged += 1
            continue
        jumps_again = next_phase is Phase.PREDICT and entry.get("phase") == Phase.PREDICT
        if step < steps_done or (step == steps_done and not jumps_again):
            kept.append(line + b"\n")
    if num_damaged:
        say(f"{path}: {num_damaged} damaged line{'s' * (num_damaged > 1)} dropped")
    replace_file(path, b"".join(kept))


def hybrid_summary(hybrid: HybridTrainer) -> str:
    """Return a summary of a hybrid run: steps by phase, jumps, rollbacks, cost."""
    done, steps = hybrid.statistics, hybrid.trainer.steps_done
    phases = ", ".join(f"{count} {phase}" for phase, count in done.steps_by_phase.items())
    plain = _TRUE_STEP_COST * steps
    return (
        f"hybrid: steps {phases}\n{_jumps(hybrid)}\n"
        f"  {done.rollbacks} jumps rolled back, {done.divergences} divergences; cost {done.cost:,.0f} forward passes, "
        f"{steps} plain steps cost {plain:,.0f} ({100 * (done.cost / plain - 1):+.1f} %)"
    )


def _jumps(hybrid: HybridTrainer) -> str:
    done, config, controller = hybrid.statistics, hybrid.config, hybrid.controller
    assert config is not None, "a hybrid run"
    assert controller is not None, "a hybrid run"
    if done.jumps:
        fused = max(0, done.jumps - done.steps_by_phase[Phase.PREDICT.value])
        return (
            f"  {done.jumps} jumps, {fused} of them within an update, {done.predicted_steps:,.1f} predicted steps in "
            f"all "
            "(not a measure of speed: compare final losses at equal cost)"
        )
    if config.max_predict_steps == 0:
        why = "max_predict_steps is 0"
    elif controller.state.confidence < config.confidence_threshold:
        why = f"confidence fell to {controller.state.confidence:.2f}, below {config.confidence_threshold:g}"
    else:
        why = "the run ends before the first round does, or divergence was detected; see docs/hybrid-training.md"
    return f"  no jump: {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """Monitors of a run; none by default."""

    profile_csv: Path | None = None
    """CSV file of the snapshots; None: no file."""
    profile_every: int = 1
    alert_bytes: int = DEFAULT_ALERT_BYTES
    """Memory use that triggers an alert."""
    spike_fraction: float = DEFAULT_SPIKE_FRACTION
    """Relative rise over the previous snapshot that counts as a spike."""
    tensorboard: Path | None = None
    wandb_project: str | None = None
    mlflow: Path | None = None


class RunMonitor:
    """Monitors one run: ``with RunMonitor(...) as monitor``. The profile is written at the end, also after an error.

    ``folder`` is for local files of logging services, which store ``settings`` with the run.

    Raises:
        ConfigError: a package is not installed, or a path is unusable.
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
        if wanted.mlflow is not None:
            loggers.append(MlflowLogger(wanted.mlflow, config=settings))
        self._loggers = MetricLoggers(loggers, say)
        self._profiler: MemoryProfiler | None = None
        if loggers or self._csv is not None:
            self._profiler = MemoryProfiler(
                every_n_steps=wanted.profile_every, alert_threshold_bytes=wanted.alert_bytes,
                spike_threshold=wanted.spike_fraction, sinks=[self._loggers] if loggers else [], on_alert=say,
            )  # fmt: skip

    def __enter__(self) -> Self:
        """Start the profile."""
        if self._profiler is not None:
            self._profiler.start()
        return self

    def record_step(self, step: int, phase: Phase, metrics: Mapping[str, float | None]) -> None:
        """Log a step's metrics that are not None, and take a snapshot if one is due."""
        self._log("train", step, metrics)
        if self._profiler is not None:
            self._profiler.record_step(step, phase)

    def record_validation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log an evaluation's metrics that are not None."""
        self._log("validation", step, metrics)

    def _log(self, group: str, step: int, metrics: Mapping[str, float | None]) -> None:
        self._loggers.log(step, {f"{group}/{name}": value for name, value in metrics.items() if value is not None})

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
            self._say(f"memory profile written to {self._csv}")


def _probe(path: Path) -> None:
    if path.is_dir():
        raise ConfigError("--profile-memory", [f"{path} is a folder; give the path of a .csv file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass
