"""The controller of phases: the next phase, its length, and the strength of jumps."""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from hybridtrain.config.rules import added_field
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.divergence import DivergenceLevel
from hybridtrain.hybrid.stateful import Stateful
from hybridtrain.phase import Phase

_LARGEST_STRETCH = 4
"""Largest K, in multiples of the configured one."""
_SMALLEST_SCALE = 1 / 16
_GROWTH = 1.25
"""Growth of the strength per round that ended as forecast; a bad round halves it."""
_CALM_STEPS = 200
"""Steps with halved strength after a rollback."""
_CONFIDENCE_MEMORY = 0.8
_PROBE_MEMORY = 50
_FEWEST_PROBES = 8
_LARGEST_RISE = 0.05
"""Relative rise of the probe loss that always counts as harm."""


@dataclass(slots=True)
class ControllerState:
    """Everything the next decision depends on."""

    phase: Phase = Phase.WARMUP
    """Next phase."""
    block_steps: int = 0
    """True steps in the current round."""
    full_steps: int = 1
    """Present K."""
    scale: float = 1.0
    """Factor of the strength of jumps."""
    lr_factor: float = 1.0
    """Factor of the scheduled learning rate."""
    confidence: float = 1.0
    """Exponential average: share of recent rounds that ended below their forecast's upper bound."""
    bad_blocks: int = 0
    """Consecutive rounds that ended above their forecast."""
    calm_until: int = 0
    """Step until which the strength stays low."""
    correct_left: int = 0
    predict_left: float = added_field(0.0)
    """Predicted steps of the last jump that remain after CORRECT."""
    num_jumps: int = 0
    rises: deque[float] = field(default_factory=lambda: deque(maxlen=_PROBE_MEMORY))
    """Relative rises of the probe loss over the latest jumps."""


class PhaseController(Stateful):
    """Decides the next phase from step counts, forecasts and divergence levels."""

    _state = ("state",)

    def __init__(self, config: HybridConfig, warmup_steps: int) -> None:
        self.config = config
        self.state = ControllerState(full_steps=config.full_steps)
        self._warmup_steps = warmup_steps
        self.update(0, DivergenceLevel.NORMAL)

    @property
    def phase(self) -> Phase:
        """The next phase."""
        return self.state.phase

    def jumps_after(self, step: int, level: DivergenceLevel) -> bool:
        """Return whether a jump follows ``step``, the next step."""
        state = self.state
        is_due = state.correct_left <= 1 if state.predict_left else state.block_steps + 1 >= state.full_steps
        return step > self._warmup_steps and is_due and self._may_jump(level)

    def update(self, steps_done: int, level: DivergenceLevel) -> None:
        """Choose the next phase once ``steps_done`` true steps are done."""
        state, may_jump = self.state, self._may_jump(level)
        if not may_jump:
            state.predict_left = 0.0
        if steps_done < self._warmup_steps:
            state.phase = Phase.WARMUP
        elif state.correct_left:
            state.phase = Phase.CORRECT
        elif may_jump and (state.predict_left or state.block_steps >= state.full_steps):
            state.phase = Phase.PREDICT
        else:
            state.phase = Phase.FULL

    def count_step(self, steps_done: int) -> None:
        """Count a true step."""
        if steps_done > self._warmup_steps:
            self.state.block_steps += 1
        self.state.correct_left = max(0, self.state.correct_left - 1)
        if not self.config.adapt and steps_done >= self.state.calm_until:
            self.state.scale = 1.0  # nothing else would raise it again

    def count_jump(self, predict_left: float = 0.0) -> None:
        """Count a jump or a part of it: a new round begins with CORRECT, after which ``predict_left`` steps follow."""
        self.state.block_steps = 0
        self.state.correct_left = self.config.correct_steps
        self.state.predict_left = predict_left
        self.state.num_jumps += 1

    def judge_round(self, loss: float, high: float) -> None:
        """Compare the mean loss of a round of true steps with its forecast's upper bound.

        One round in twenty ends above a good bound by chance: only the second consecutive one has consequences.
        """
        as_forecast, state = loss <= high, self.state
        state.bad_blocks = 0 if as_forecast else state.bad_blocks + 1
        state.confidence = _CONFIDENCE_MEMORY * state.confidence + (1 - _CONFIDENCE_MEMORY) * as_forecast
        if state.bad_blocks == 1:
            return
        if self.config.adapt_lr:
            state.lr_factor = min(1.0, max(0.5, state.lr_factor * (1.05 if as_forecast else 0.8)))
        if self.config.adapt:
            state.scale = min(1.0, max(_SMALLEST_SCALE, state.scale * (_GROWTH if as_forecast else 0.5)))
            shortest = self.config.full_steps
            stretched = state.full_steps - max(1, shortest // 2) if as_forecast else 2 * state.full_steps
            state.full_steps = min(_LARGEST_STRETCH * shortest, max(shortest, stretched))

    def judge_probe(self, before: float, after: float) -> bool:
        """Return whether a jump raised the probe loss: far beyond earlier jumps, or to NaN."""
        if not math.isfinite(before):  # a dry run, or harm that was there already
            return False
        if not math.isfinite(after):
            return True
        rise, limit = after - before, _LARGEST_RISE * abs(before)
        if len(self.state.rises) >= _FEWEST_PROBES:  # a fall is no harm, however much further others fell
            limit = min(limit, max(0.0, fmean(self.state.rises) + 3 * pstdev(self.state.rises)))
        self.state.rises.append(rise)
        return rise > limit

    def note_rollback(self, steps_done: int) -> None:
        """Lower the strength after a jump was undone."""
        self.state.scale = max(_SMALLEST_SCALE, self.state.scale / 2)
        self.state.calm_until = steps_done + _CALM_STEPS
        self.state.correct_left = 0
        self.state.predict_left = 0.0

    def scale_at(self, step: int) -> float:
        """Return the present strength factor."""
        return min(self.state.scale, 0.5) if step < self.state.calm_until else self.state.scale

    def _may_jump(self, level: DivergenceLevel) -> bool:
        return level < DivergenceLevel.WARNING and self.state.confidence >= self.config.confidence_threshold
