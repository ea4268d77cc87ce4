"""What ``hybridtrain train`` writes down: one line per step, and what a hybrid run did at its end."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hybridtrain.atomic_write import replace_file
from hybridtrain.hybrid.cycle import HybridResult, HybridTrainer
from hybridtrain.phase import Phase

_TRUE_STEP_COST = 3.0
"""Forward passes' worth of a step without any of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One line of the log of a plain run."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    peak_bytes: int
    """Of the step: the allocator's on CUDA, on the CPU the ledger's count of what would be device memory."""

    @classmethod
    def of(cls, result: HybridResult, peak_bytes: int) -> Self:
        """Return the line of a step."""
        assert result.loss is not None, "a plain run has true steps only"
        return cls(
            step=result.step, loss=result.loss, lr=result.lr, grad_norm=result.grad_norm,
            tokens_per_s=result.num_tokens / result.seconds, peak_bytes=peak_bytes,
        )  # fmt: skip

    def as_metrics(self) -> dict[str, float | None]:
        """Return everything but the step by its name."""
        return {
            "loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "tokens_per_s": self.tokens_per_s,
            "peak_bytes": self.peak_bytes,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridStepLog:
    """One line of the log of a hybrid run: a true step, or a jump of its own, which has the step before it."""

    step: int
    """True steps done."""
    phase: Phase
    loss: float | None
    """None in PREDICT, which looks at no batch."""
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    seconds: float
    peak_bytes: int
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
    """Forward passes' worth of work."""

    @classmethod
    def of(cls, result: HybridResult, peak_bytes: int) -> Self:
        """Return the line of a phase step."""
        is_jump = result.phase is Phase.PREDICT
        return cls(
            step=result.step, phase=result.phase, loss=None if is_jump else result.loss, lr=result.lr,
            grad_norm=result.grad_norm, tokens_per_s=result.num_tokens / result.seconds, seconds=result.seconds,
            peak_bytes=peak_bytes, predicted_steps=result.predicted_steps,
            move_rms=result.move_rms if math.isfinite(result.move_rms) else None,
            forecast_loss=result.loss if is_jump else None, prediction_error=result.prediction_error,
            confidence=result.confidence, scale=result.scale, is_rolled_back=result.is_rolled_back, cost=result.cost,
        )  # fmt: skip

    def as_metrics(self) -> dict[str, float | None]:
        """Return what a metric logger should draw. A jump has its step's number: it repeats none of its names."""
        jump: dict[str, float | None] = {}
        if self.predicted_steps:
            jump = {"predicted_steps": self.predicted_steps, "move_rms": self.move_rms}
        if self.phase is Phase.PREDICT:
            return jump | {"forecast_loss": self.forecast_loss, "predict_peak_bytes": self.peak_bytes}
        return jump | {
            "loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "tokens_per_s": self.tokens_per_s,
            "peak_bytes": self.peak_bytes, "prediction_error": self.prediction_error, "confidence": self.confidence,
            "scale": self.scale,
        }  # fmt: skip


def trim_log(path: Path, steps_done: int, next_phase: Phase) -> None:
    """Drop lines of steps that were not saved and will be done again.

    A jump has the number of the true step before it, and a state is saved before the jump: where the saved run would
    jump next, the line of that jump goes too.
    """

    def is_saved(entry: dict[str, object]) -> bool:
        step = entry["step"]
        assert isinstance(step, int)
        jumps_again = next_phase is Phase.PREDICT and entry.get("phase") == Phase.PREDICT
        return step < steps_done or (step == steps_done and not jumps_again)

    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if line.endswith("}") and is_saved(json.loads(line))]
    replace_file(path, "".join(f"{line}\n" for line in kept).encode())


def hybrid_summary(hybrid: HybridTrainer) -> str:
    """Return what a hybrid run did, in a few lines."""
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
