"""The cycle around the trainer: true steps in WARMUP, FULL and CORRECT, a jump in PREDICT.

A cycle is K true steps and one jump over P predicted steps: no forward pass, no backward pass, no gradients. The true
gradients of the next steps correct it. One call of ``advance`` is one phase step; it loads a batch if it needs one.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hybridtrain.data.batches import TokenBatch
from hybridtrain.engine.step import StepLimits, StepResult
from hybridtrain.errors import ConfigError, DivergenceError
from hybridtrain.hybrid.config import HybridConfig, check_hybrid, refuses_before_update
from hybridtrain.hybrid.controller import PhaseController
from hybridtrain.hybrid.forecast.base import TrainingSignal
from hybridtrain.hybrid.predictors import make_predictor
from hybridtrain.hybrid.predictors.weight_predictor import Jump
from hybridtrain.hybrid.rollback_copy import RollbackCopy
from hybridtrain.hybrid.stateful import State, Stateful
from hybridtrain.optim.slow_average import SlowStep
from hybridtrain.phase import Phase
from hybridtrain.trainer import Trainer

Batches = Sequence[TokenBatch]
LoadBatches = Callable[[int], Batches]
"""Returns the micro-batches of a step, counted from 0; equal for equal steps."""

_FORWARD, _TRUE_STEP = 1.0, 3.0
"""Cost in forward passes; a backward pass counts as two (measured 1.9 to 2.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridResult:
    """The result of one phase step: a true step, or a separate jump."""

    step: int
    """True steps done."""
    phase: Phase
    loss: float | None
    """Nats per token of the step's batch; in PREDICT the forecast, None without a forecaster."""
    lr: float
    grad_norm: float | None
    num_tokens: int
    """Tokens trained on; 0 in PREDICT."""
    predicted_steps: float = 0.0
    """Predicted steps P of this call's jump, fused or separate."""
    move_rms: float = 0.0
    """RMS of the jump's weight change, in learning rates."""
    prediction_error: float | None = None
    """Mean loss of the round that ended with this step minus its forecast; None within a round."""
    confidence: float = 1.0
    scale: float = 1.0
    """Present strength factor of jumps; 1 unless the controller has lowered it."""
    is_rolled_back: bool = False
    """Whether the jump before this step was rolled back."""
    cost: float = 3.0
    """Work in forward passes: a forward pass of the step's batch is 1, a backward pass 2."""
    seconds: float = 0.0

    @property
    def is_predicted(self) -> bool:
        """Whether the call jumped."""
        return self.predicted_steps > 0


@dataclass(slots=True)
class HybridStatistics(Stateful):
    """Sums over a run. Predicted steps are diagnostics, not a speed-up."""

    steps_by_phase: dict[str, int] = field(default_factory=lambda: {phase.value: 0 for phase in Phase})
    predicted_steps: float = 0.0
    """Backward passes of as many true steps."""
    jumps: int = 0
    rollbacks: int = 0
    divergences: int = 0
    """Steps rejected right after a jump."""
    cost: float = 0.0

    def count(self, result: HybridResult) -> None:
        """Add one result."""
        self.steps_by_phase[result.phase.value] += 1
        self.predicted_steps += result.predicted_steps
        self.jumps += result.is_predicted
        self.rollbacks += result.is_rolled_back
        self.cost += result.cost


class HybridTrainer(Stateful):
    """Runs a trainer through the cycle of phases.

    Args:
        trainer: The trainer; its stack stores the predictor's state.
        config: Phases, predictor, guard; None: plain training, bit-equal to the trainer's own.
        load_probe: Returns the n-th batch of the probe split, which is separate from training data; needed by monitors,
        linear and probe gradients.

    Raises:
        ConfigError: the stack does not store the predictor's state, or the probe split is missing.
    """

    _pending: Jump | None
    """The last jump, if it can still be rolled back."""

    def __init__(self, trainer: Trainer, config: HybridConfig | None, load_probe: LoadBatches | None = None) -> None:
        self.trainer = trainer
        self.config = config
        self.statistics = HybridStatistics()
        self._load_probe = load_probe
        self.num_probes = 0
        """Probe batches used so far."""
        self._last_lr = 0.0
        self._steps_after = 0.0
        """Predicted steps of the current jump that remain after CORRECT."""
        self._pending = None
        self._rollback: RollbackCopy | None = None
        self.controller: PhaseController | None = None
        if config is None:
            return
        check_hybrid(trainer, config, has_probe=load_probe is not None)
        schedule = trainer.config.schedule
        self.controller = PhaseController(
            config, schedule.warmup_steps if config.warmup_steps is None else config.warmup_steps
        )
        from hybridtrain.hybrid.watch import LossWatch  # noqa: PLC0415  plain training imports no forecaster

        self.watch = LossWatch(config, trainer.config.seed, trainer.lr_at, schedule.total_steps)
        self.predictor = make_predictor(config, trainer)

    @property
    def phase(self) -> Phase:
        """The phase of the next call."""
        return Phase.FULL if self.controller is None else self.controller.phase

    def advance(self, load_batches: LoadBatches, limits: StepLimits | None = None) -> HybridResult:
        """Run the next phase step; ``limits`` apply to plain training only, a cycle has its own.

        Raises:
            SpikeError: a limit is exceeded; nothing was applied.
            DivergenceError: loss or gradient norm is not finite, and not because of a jump; weights and optimizer state
            are those before the step.
        """
        begin = time.perf_counter()
        if self.controller is None:
            done = self.trainer.step(load_batches(self.trainer.steps_done), limits=limits)
            result = _result(done, Phase.FULL)
        elif self.phase is Phase.PREDICT:
            result = self._predict(self.controller)
        else:
            result = self._true_step(self.controller, load_batches)
        result = replace(result, seconds=time.perf_counter() - begin)
        self.statistics.count(result)
        return result

    def _true_step(self, controller: PhaseController, load_batches: LoadBatches) -> HybridResult:
        phase, number = controller.phase, self.trainer.steps_done + 1
        self.trainer.enter_phase(phase)
        probes = phase is Phase.CORRECT and self._config.correction == "probe_gradients"
        batches = self._next_probe() if probes else load_batches(number - 1)
        slow, jumps = self._slow_step(controller, number)
        done, is_rolled_back = self._guarded_step(controller, batches, slow)
        self._last_lr = done.lr
        signal = TrainingSignal(
            step=done.step, loss=done.loss, grad_norm=done.grad_norm, lr=done.lr, phase=phase,
            predicted_steps=0.0 if slow is None else slow.predicted_steps,
            moments=None if controller.state.block_steps else self.watch.moments(self.trainer, done),
        )  # fmt: skip
        error = self.watch.observe(signal, controller)
        controller.count_step(number)
        if controller.state.block_steps == 1:
            self.predictor.begin_round()
        result = _result(done, phase)
        if jumps and slow is not None:
            jump = self.predictor.fused_jump(slow, done.lr)
            self._jumped(controller, jump)
            result = replace(result, predicted_steps=jump.predicted_steps, move_rms=jump.rms)
        controller.update(number, self.watch.monitor.level)
        return replace(
            result, prediction_error=error, confidence=controller.state.confidence, scale=controller.scale_at(number),
            is_rolled_back=is_rolled_back, cost=_TRUE_STEP * (1 + is_rolled_back),
        )  # fmt: skip

    def _slow_step(self, controller: PhaseController, number: int) -> tuple[SlowStep | None, bool]:
        """Return the update's hook for the predictor, and whether it jumps."""
        config, plans = self._config, self.trainer.memory_plan
        fuses = (  # nothing has to happen between an update and the next jump
            config.fuse
            and config.follows_slow
            and config.rollback == "undo"
            and not self._probes(controller)
            and plans.for_phase(Phase.PREDICT) == plans.for_phase(Phase.FULL)
        )
        if not (fuses and controller.jumps_after(number, self.watch.monitor.level)):
            return self.predictor.slow_step(number), False
        steps = self._steps_of_jump(controller, number, controller.state.block_steps + 1)
        return self.predictor.slow_step(number, steps), steps > 0

    def _probes(self, controller: PhaseController) -> bool:
        """Return whether a probe batch's loss judges the next jump."""
        config = self._config
        is_due = controller.state.num_jumps % config.probe_every == 0
        return config.searches or config.monitor == "every_step" or (config.monitor == "probe" and is_due)

    def _steps_of_jump(self, controller: PhaseController, number: int, block_steps: int) -> float:
        """Return the predicted steps until CORRECT comes, and note those that follow after it."""
        steps = controller.state.predict_left
        if not steps:
            steps = self.predictor.steps_of_jump(number, block_steps, controller.scale_at(number))
            steps = min(steps, _or_inf(self._config.max_predict_steps))
        until_correct = min(steps, _or_inf(self._config.correction_interval))
        self._steps_after = steps - until_correct
        return until_correct

    def _guarded_step(
        self, controller: PhaseController, batches: Batches, slow: SlowStep | None
    ) -> tuple[StepResult, bool]:
        """Run a true step; if it diverges right after a jump, take the jump back and run it again."""
        guards = self._pending is not None and self._config.guard and refuses_before_update(self.trainer)
        limits = self.watch.monitor.limits() if guards else None
        bounds = None
        if limits is not None:
            ratio = self._config.divergence_threshold / 10.0
            bounds = StepLimits(limits[0], limits[1] * ratio)
        try:
            done = self.trainer.step(batches, hook=slow, limits=bounds, lr_factor=controller.state.lr_factor)
        except DivergenceError:
            if not guards:
                raise
            self.undo()
            self.statistics.divergences += 1
            controller.note_rollback(self.trainer.steps_done)
            self._steps_after = 0.0
            return self.trainer.step(batches, hook=slow, lr_factor=controller.state.lr_factor), True
        self._pending = None
        return done, False

    def _predict(self, controller: PhaseController) -> HybridResult:
        """Make a separate jump: state may be offloaded, probes may be needed."""
        trainer, number = self.trainer, self.trainer.steps_done
        steps = self._steps_of_jump(controller, number, controller.state.block_steps)
        trainer.enter_phase(Phase.PREDICT)
        probes = self._probes(controller) and steps > 0
        probe = self._next_probe() if probes else ()
        before = trainer.loss(probe) if probes else math.nan
        jump, after = self._jump(steps, probe, before)
        self._jumped(controller, jump)
        moved = self._pending is not None
        is_harmful = probes and moved and self._config.guard and self._is_harmful(controller, before, after)
        if is_harmful:
            self.undo()
            controller.state.predict_left = 0.0
        controller.update(number, self.watch.monitor.level)
        forecast = self.watch.forecast
        return HybridResult(
            step=number, phase=Phase.PREDICT, loss=None if forecast is None else forecast.mean,
            lr=jump.lr, grad_norm=None, num_tokens=0,
            predicted_steps=0.0 if is_harmful else jump.predicted_steps, move_rms=jump.rms,
            confidence=controller.state.confidence, scale=controller.scale_at(number), is_rolled_back=is_harmful,
            cost=_FORWARD * (jump.num_forwards + probes),
        )  # fmt: skip

    def _is_harmful(self, controller: PhaseController, before: float, after: float) -> bool:
        """Return whether a jump must be undone, by the probe batch's loss before and after it."""
        if self._config.searches:
            return not after < before
        if controller.judge_probe(before, after):
            controller.note_rollback(self.trainer.steps_done)
            return True
        return False

    def _jump(self, steps: float, probe: Batches, before: float) -> tuple[Jump, float]:
        """Make a jump of P ``steps``, in one piece or one predicted step at a time; return it and the probe's loss."""
        if steps <= 0:
            return Jump(self.trainer.steps_done, 0.0, self._last_lr, 0.0), math.nan
        if self._config.rollback == "copy" and self._rollback is None:
            self._rollback = RollbackCopy(self.trainer)
        pieces = math.ceil(steps) if self._config.monitor == "every_step" else 1
        lookahead = min(pieces, self.trainer.memory_plan.for_phase(Phase.PREDICT).restore_lookahead)
        jumps: list[Jump] = []
        loss = math.nan
        for piece in range(pieces):
            rollback = None if piece else self._rollback
            jumps.append(self.predictor.jump(steps / pieces, self._last_lr, rollback))
            if lookahead and piece == pieces - lookahead:
                self.trainer.restore_ahead()
            if probe:
                loss = self.trainer.loss(probe)
                if math.isfinite(before) and not math.isfinite(loss):  # a dry run makes every piece
                    break
        made, rms = sum(jump.predicted_steps for jump in jumps), sum(jump.rms for jump in jumps)
        return Jump(self.trainer.steps_done, made, self._last_lr, rms, len(jumps) if probe else 0), loss

    def undo(self) -> None:
        """Roll back the last jump, by recomputing it or from the copy; only before the next true step."""
        assert self._pending is not None, "no jump to roll back"
        if self._rollback is not None:
            self._rollback.fetch_back()
        else:
            self.predictor.undo(self._pending)
        self._pending = None

    def _jumped(self, controller: PhaseController, jump: Jump) -> None:
        """Start a new round after a jump, with a forecast of its mean loss."""
        controller.count_jump(self._steps_after)
        self._pending = jump if jump.predicted_steps else None
        number = self.trainer.steps_done
        self.watch.open_round(number, predicted_steps=jump.predicted_steps, scale=controller.scale_at(number))

    def _next_probe(self) -> Batches:
        assert self._load_probe is not None, "checked at construction"
        self.num_probes += 1
        return self._load_probe(self.num_probes - 1)

    @property
    def _config(self) -> HybridConfig:
        assert self.config is not None, "a hybrid run without a controller"
        return self.config

    def load_state_dict(self, state: State) -> None:
        """Restore the state of a saved run; raises ``ConfigError`` if it is damaged, or of another version.

        A rollback copy is not saved: its jump can no longer be rolled back.
        """
        try:
            super().load_state_dict(state)
        except ValueError as error:
            raise ConfigError("checkpoint of the cycle", [str(error)]) from error
        if self.config is not None and self.config.rollback == "copy":
            self._pending = None

    def _state_names(self) -> Iterable[str]:
        names = ("controller", "watch", "predictor", "num_probes", "_last_lr", "_pending")
        return ("statistics", *(() if self.controller is None else names))


def _or_inf(limit: float | None) -> float:
    return math.inf if limit is None else limit


def _result(done: StepResult, phase: Phase) -> HybridResult:
    return HybridResult(
        step=done.step, phase=phase, loss=done.loss, lr=done.lr, grad_norm=done.grad_norm, num_tokens=done.num_tokens
    )
