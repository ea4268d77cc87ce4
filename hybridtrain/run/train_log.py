"""What a training run leaves to read: a line per step, what a hybrid run did, the memory profile, metric services."""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from hybridtrain.virtual_gpu.account.observer import Lane

Say = Callable[[str], None]

_TRUE_STEP_COST = 3.0
"""Forward passes' worth of a step without any of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One line of the log of a plain run."""

    step: int
    """True steps done."""
    loss: float | None
    """None in PREDICT, which looks at no batch."""
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    peak_bytes: int
    """Of the step: the allocator's on CUDA, on the CPU the ledger's count of what would be device memory."""
    effective_batch: int
    """Sequences of one update: of all micro-batches of all ranks; 0 in PREDICT."""

    @classmethod
    def of(cls, result: HybridResult, peak_bytes: int, effective_batch: int) -> Self:
        """Return the line of a phase step."""
        is_jump = result.phase is Phase.PREDICT
        return cls(
            step=result.step, loss=None if is_jump else result.loss, lr=result.lr, grad_norm=result.grad_norm,
            tokens_per_s=result.num_tokens / result.seconds, peak_bytes=peak_bytes,
            effective_batch=0 if is_jump else effective_batch, **cls._more(result),
        )  # fmt: skip

    @classmethod
    def _more(cls, _result: HybridResult) -> dict[str, Any]:
        """Return the fields that a subclass adds."""
        return {}

    def as_metrics(self) -> dict[str, float | None]:
        """Return everything but the step by its name."""
        return {
            "loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "tokens_per_s": self.tokens_per_s,
            "peak_bytes": self.peak_bytes, "effective_batch": self.effective_batch,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridStepLog(StepLog):
    """One line of the log of a hybrid run: a true step, or a jump of its own, which has the step before it."""

    phase: Phase
    seconds: float
    predicted_steps: float
    """Of the jump in this line, within the update or on its own; 0: none."""
    move_rms: float | None
    """Root mean square of the jump's move of a weight, in learning rates; None if it is no number."""
    forecast_loss: float | None
    """In PREDICT: of the block that begins."""
    prediction_error: float | None
    """Mean loss of the block that ends here minus its forecast."""
    confidence: float
    scale: float
    is_rolled_back: bool
    cost: float
    """In forward passes."""

    @classmethod
    def _more(cls, result: HybridResult) -> dict[str, Any]:
        names = (
            "phase",
            "seconds",
            "predicted_steps",
            "prediction_error",
            "confidence",
            "scale",
            "is_rolled_back",
            "cost",
        )
        return {name: getattr(result, name) for name in names} | {
            "move_rms": result.move_rms if math.isfinite(result.move_rms) else None,
            "forecast_loss": result.loss if result.phase is Phase.PREDICT else None,
        }

    def as_metrics(self) -> dict[str, float | None]:
        """Return the metrics to draw; a jump has its step's number, so it repeats none of the step's names."""
        jump: dict[str, float | None] = {}
        if self.predicted_steps:
            jump = {"predicted_steps": self.predicted_steps, "move_rms": self.move_rms}
        if self.phase is Phase.PREDICT:
            return jump | {"forecast_loss": self.forecast_loss, "predict_peak_bytes": self.peak_bytes}
        hybrid = {"prediction_error": self.prediction_error, "confidence": self.confidence, "scale": self.scale}
        return jump | StepLog.as_metrics(self) | hybrid


class TrafficLedger(StorageLedger):  # type: ignore[no-untyped-call]
    """Counts bytes of copies too, by lane; on a card as well, where storage is the allocator's to count."""

    def __init__(self) -> None:
        super().__init__(record=False)
        self.moved: Counter[Lane] = Counter()
        self.phase = Phase.FULL
        """To which casts are counted."""
        self.casts = CastCounts()

    def cast(self, source: torch.dtype, target: torch.dtype, num_elements: int) -> None:
        """Count a cast."""
        self.casts.add(self.phase, source, target, num_elements)

    def work(self, lane: Lane, num_bytes: int, waits: Sequence[int]) -> int:
        """Count a copy, or arithmetic of the host."""
        self.moved[lane] += num_bytes
        return super().work(lane, num_bytes, waits)


@dataclass(slots=True, kw_only=True)
class RunStatistics:
    """Of the true steps of one call, and the jumps between them."""

    tokens_per_s: list[float] = field(default_factory=list)
    """Of each true step."""
    peak_bytes: int = 0
    moved: Counter[Lane] = field(default_factory=Counter)

    def add(self, log: StepLog, moved: Counter[Lane]) -> None:
        """Count a phase step, and what was copied in it."""
        if log.loss is not None:
            self.tokens_per_s.append(log.tokens_per_s)
        self.peak_bytes = max(self.peak_bytes, log.peak_bytes)
        self.moved += moved

    def as_mapping(self) -> dict[str, object]:
        """Return plain figures; bytes by lane are a true step's share."""
        count = len(self.tokens_per_s)
        return {
            "steps": count, "tokens_per_s_median": median(self.tokens_per_s), "peak_bytes": self.peak_bytes,
            "bytes_per_step": {lane.value: size / count for lane, size in self.moved.items()},
        }  # fmt: skip

    def as_text(self) -> str:
        """Return them for a reader."""
        count = len(self.tokens_per_s)
        told = (
            f"{count} steps: {median(self.tokens_per_s):,.0f} tokens/s (median), peak {format_bytes(self.peak_bytes)}"
        )
        ways = {
            Lane.COPY_IN: "to the device", Lane.COPY_OUT: "from it", Lane.DISK: "read from or written to disk",
            Lane.HOST: "of host memory updated",
        }  # fmt: skip
        moved = [f"{format_bytes(self.moved[lane] / count)} {way}" for lane, way in ways.items() if self.moved[lane]]
        return f"{told}; copied a step: {', '.join(moved)}" if moved else told


def trim_log(path: Path, steps_done: int, next_phase: Phase, say: Say) -> None:
    """Drop lines of steps that were not saved and will be done again, and lines that are damaged, which is said.

    A jump has the number of the true step before it, and a state is saved before the jump: where the saved run would
    jump next, the line of that jump goes too.
    """

    def is_saved(entry: Mapping[str, object], step: int) -> bool:
        jumps_again = next_phase is Phase.PREDICT and entry.get("phase") == Phase.PREDICT
        return step < steps_done or (step == steps_done and not jumps_again)

    lines = path.read_bytes().splitlines() if path.exists() else []
    entries = [(line, _entry(line)) for line in lines]
    kept = [line + b"\n" for line, found in entries if found is not None and is_saved(*found)]
    num_damaged = sum(found is None for _, found in entries)
    if num_damaged:
        say(f"{path}: {num_damaged} damaged line{'s' * (num_damaged > 1)} dropped")
    replace_file(path, b"".join(kept))


def _entry(line: bytes) -> tuple[Mapping[str, object], int] | None:
    """Return a line's content and its step; None for one that was not written like this."""
    try:
        entry = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    step = entry.get("step") if isinstance(entry, dict) else None
    return (entry, step) if isinstance(step, int) else None


def hybrid_summary(hybrid: HybridTrainer) -> str:
    """Return a summary of a hybrid run: steps by phase, jumps, rollbacks, cost."""
    done, steps = hybrid.statistics, hybrid.trainer.steps_done
    phases = ", ".join(f"{count} {phase}" for phase, count in done.steps_by_phase.items())
    lines = [f"hybrid: steps {phases}", _jumps(hybrid)]
    plain = _TRUE_STEP_COST * steps
    lines.append(
        f"  {done.rollbacks} jumps taken back, {done.divergences} divergences; cost {done.cost:,.0f} forward passes, "
        f"{steps} plain steps cost {plain:,.0f} ({100 * (done.cost / plain - 1):+.1f} %)"
    )
    return "\n".join(lines)


def _jumps(hybrid: HybridTrainer) -> str:
    done, config, controller = hybrid.statistics, hybrid.config, hybrid.controller
    assert config is not None, "a hybrid run"
    assert controller is not None, "a hybrid run"
    if done.jumps:
        fused = max(0, done.jumps - done.steps_by_phase[Phase.PREDICT.value])
        return (
            f"  {done.jumps} jumps, {fused} of them within an update, over {done.predicted_steps:,.1f} predicted steps "
            "(a diagnostic, no speed-up: compare final losses at equal cost)"
        )
    if config.max_predict_steps == 0:
        why = "max_predict_steps is 0"
    elif controller.state.confidence < config.confidence_threshold:
        why = f"confidence fell to {controller.state.confidence:.2f}, below {config.confidence_threshold:g}"
    else:
        why = "warm-up and the first block are longer than the run, or losses gave alarm; see docs/hybrid-training.md"
    return f"  no jump: {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """What the user asked for; nothing by default."""

    profile_csv: Path | None = None
    """Where the snapshots go; None: to no file."""
    profile_every: int = 1
    """Steps between snapshots."""
    alert_bytes: int = DEFAULT_ALERT_BYTES
    """Memory use above this is told at once."""
    spike_fraction: float = DEFAULT_SPIKE_FRACTION
    """Rise over the snapshot before, as a fraction of it, above which the report lists a spike."""
    tensorboard: Path | None = None
    """Folder of the event file."""
    wandb_project: str | None = None
    mlflow: Path | None = None
    """Folder of the file store."""

    @property
    def anything(self) -> bool:
        """Whether anything is to be watched."""
        return any(asked is not None for asked in (self.profile_csv, self.tensorboard, self.wandb_project, self.mlflow))


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
        if wanted.mlflow is not None:
            loggers.append(MlflowLogger(wanted.mlflow, config=settings))
        self._loggers = MetricLoggers(loggers, say)
        self._profiler: MemoryProfiler | None = None
        if wanted.anything:
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
        """Log a step's metrics, without those that are None, and take a snapshot if one is due."""
        known = {f"train/{name}": value for name, value in metrics.items() if value is not None}
        self._loggers.log(step, known)
        if self._profiler is not None:
            self._profiler.record_step(step, phase)

    def record_validation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log an evaluation's metrics, without those that are None."""
        self._loggers.log(step, {f"validation/{name}": value for name, value in metrics.items() if value is not None})

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
