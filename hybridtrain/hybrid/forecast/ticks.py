"""A run in ticks of 25 steps: what the learned forecasters train on.

The replay stores for each tick its final encoded state, mean loss, learning rate, and the final level and trend of the
exponential baseline (ema.py). The learned forecasters correct that baseline, relative to its level:

y_ij = gain (loss_(i+j) - base_ij) / level_i,  base_ij = level_i + trend_i reach((j - 1/2) ticks),  j >= 1;

an untrained model answers 0 and equals the baseline. T ticks, F features.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybridkernels.state_encoding import (
    GRAD_NORM_STEPS,
    LOSS_STEPS,
    NUM_FEATURES,
    NUM_MOMENT_STATISTICS,
    NUM_PHASES,
    NUM_SCALARS,
    encode_state,
)
from hybridtrain.hybrid.forecast.base import TrainingSignal
from hybridtrain.hybrid.forecast.ema import EmaForecaster, damped_reach
from hybridtrain.hybrid.stateful import Stateful
from hybridtrain.phase import Phase

TICK_STEPS = 25
GAIN = 20.0
"""Factor on corrections, which are hundredths of the loss, to unit size."""
NUM_ACTIONS = 4
_CAPACITY = 512
"""Ticks of a full replay."""
_LOSS, _LEVEL, _TREND, _LOG_LR, _PREDICTED, _NUM_SCALARS = 0, 1, 2, 3, 4, 5
REPLAY_BYTES = 2 * 4 * _CAPACITY * (NUM_FEATURES + _NUM_SCALARS)
"""Bytes of a full replay; appending doubles them for a moment."""
_BETAS = (0.9, 0.95)
"""Decay rates of the optimizer's moments, for the bias corrections."""
_PHASE_STEPS = 100
"""Phase length that scales the position within a phase to 1."""
_SMALLEST_LR = 1e-12
_TARGET_LIMIT = 4.0
"""Limit of y, a fifth of the loss: the first fall of a run is larger and would dominate training."""
_FIRST_ORIGIN = 4
"""Ticks of a run's start, which later ticks do not resemble."""
_LR_GAIN = 5.0
"""Factor on changes of ln lr within one tick, which are some hundredths."""


class _Ring(Stateful):
    """The last values in a buffer twice their number, so that they always lie in one piece."""

    _state = ("_values", "count")

    def __init__(self, size: int) -> None:
        self._size = size
        self._values = np.zeros(2 * size, dtype=np.float32)
        self.count = 0
        """Number of values pushed so far."""

    def push(self, value: float) -> None:
        if self.count == 0:
            self._values[:] = value
        slot = self.count % self._size
        self._values[slot] = self._values[slot + self._size] = value
        self.count += 1

    def latest(self) -> Tensor:
        """Return the values, oldest first; missing ones repeat the first."""
        start = self.count % self._size
        return torch.from_numpy(self._values[start : start + self._size])


class StateEncoder(Stateful):
    """Ring buffers of a run's recent scalars, encoded when needed."""

    _state = ("_losses", "_norms", "_step", "_lr", "_phase", "_steps_in_phase", "_moments")

    def __init__(self) -> None:
        self._losses, self._norms = _Ring(LOSS_STEPS), _Ring(GRAD_NORM_STEPS)
        self._step = 0
        self._lr = 0.0
        self._phase = Phase.WARMUP
        self._steps_in_phase = 0
        self._moments = [0.0] * NUM_MOMENT_STATISTICS

    def observe(self, signal: TrainingSignal) -> None:
        """Add one true step; an unknown gradient norm repeats the last one."""
        self._losses.push(signal.loss)
        if signal.grad_norm is not None:
            self._norms.push(signal.grad_norm)
        elif not self._norms.count:
            self._norms.push(1.0)
        self._steps_in_phase = self._steps_in_phase + 1 if signal.phase is self._phase else 0
        self._step, self._lr, self._phase = signal.step, signal.lr, signal.phase
        if signal.moments is not None:
            self._moments = list(signal.moments)

    def encode(self) -> Tensor:
        """Return the features of the present state: (F,), float32."""
        corrections = (beta**self._step for beta in _BETAS)
        scalars = [self._lr, *corrections, min(1.0, self._steps_in_phase / _PHASE_STEPS)]
        one_hot = [float(phase is self._phase) for phase in Phase]
        assert (len(scalars), len(one_hot)) == (NUM_SCALARS, NUM_PHASES)
        rows = (torch.tensor([row]) for row in (self._moments, scalars, one_hot))
        return encode_state(self._losses.latest()[None], self._norms.latest()[None], *rows)[0]


class TickReplay(Stateful):
    """The latest 512 ticks of the run."""

    _state = ("encoder", "base", "features_TF", "_scalars", "_open", "peak_log_lr")

    def __init__(self) -> None:
        self.encoder = StateEncoder()
        self.base = EmaForecaster()
        self.features_TF = torch.zeros(0, NUM_FEATURES)
        self._scalars = torch.zeros(0, _NUM_SCALARS)
        self._open = [0.0] * 4
        """Sums of the current tick: steps, losses, ln lr, predicted steps."""
        self.peak_log_lr = -30.0

    def __len__(self) -> int:
        return len(self._scalars)

    def observe(self, signal: TrainingSignal) -> bool:
        """Add one true step; return whether it ended a tick."""
        self.encoder.observe(signal)
        self.base.observe(signal)
        log_lr = float(torch.tensor(max(signal.lr, _SMALLEST_LR)).log())
        self.peak_log_lr = max(self.peak_log_lr, log_lr)
        step = (1.0, signal.loss, log_lr, signal.predicted_steps)
        self._open = [before + now for before, now in zip(self._open, step, strict=True)]
        count, losses, log_lrs, predicted = self._open
        if count < TICK_STEPS:
            return False
        self._open = [0.0] * 4
        row = torch.tensor([[losses / count, self.base.level, self.base.trend, log_lrs / count, predicted]])
        self._scalars = torch.cat([self._scalars, row])[-_CAPACITY:]
        self.features_TF = torch.cat([self.features_TF, self.encoder.encode()[None]])[-_CAPACITY:]
        return True

    def past_actions(self, ticks: Tensor, elapsed: Tensor) -> Tensor:
        """Return the actions of past ticks; ``ticks`` are indices that include the one before the first."""
        ticks = ticks.clamp(0, len(self) - 1)
        return self._actions(self._scalars[ticks, _LOG_LR], self._scalars[ticks, _PREDICTED], elapsed)

    def future_actions(self, future_lrs: Sequence[float], num_ticks: int) -> Tensor:
        """Return the actions of the next ticks under planned rates: (num_ticks, 4); the last rate continues."""
        rates = torch.tensor(future_lrs).clamp_min(_SMALLEST_LR).log()
        rates = torch.cat([rates, rates[-1:].expand(num_ticks * TICK_STEPS)])[: num_ticks * TICK_STEPS]
        log_lrs = torch.cat([self._scalars[-1:, _LOG_LR], rates.view(num_ticks, TICK_STEPS).mean(1)])
        return self._actions(log_lrs, torch.zeros_like(log_lrs), torch.arange(1.0, num_ticks + 1))

    def _actions(self, log_lrs: Tensor, predicted: Tensor, elapsed: Tensor) -> Tensor:
        """Return the actions of consecutive ticks, (..., ticks - 1, 4), from the mean ln lr and the steps jumped.

        The first of (..., ticks) gives only its rate; ``elapsed`` are ticks since the state was last seen.
        """
        change = (log_lrs[..., 1:] - log_lrs[..., :-1]) * _LR_GAIN
        relative = log_lrs[..., 1:] - self.peak_log_lr
        actions = torch.stack([change, relative, predicted[..., 1:] / TICK_STEPS, elapsed / 8], -1)
        return actions.clamp(-8, 8)

    def draw_origins(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw origins of forecasts, at least one tick before the last, later ones more often."""
        first, last = min(_FIRST_ORIGIN, len(self) - 2), len(self) - 2
        place = torch.rand(shape, generator=generator).sqrt()
        return (first + place * (last - first + 1)).long().clamp_max(last)

    def targets(self, origins: Tensor, num_ticks: int) -> tuple[Tensor, Tensor]:
        """Return y for ticks 1 to ``num_ticks`` after each origin, and whether they are complete: (..., num_ticks)."""
        offsets = torch.arange(1, num_ticks + 1)
        wanted = origins[..., None] + offsets
        over = wanted < len(self)
        reach = torch.tensor([damped_reach((j - 0.5) * TICK_STEPS) for j in range(1, num_ticks + 1)])
        level, trend = self._scalars[origins, _LEVEL, None], self._scalars[origins, _TREND, None]
        losses = self._scalars[wanted.clamp_max(len(self) - 1), _LOSS]
        return ((losses - level - trend * reach) / level * GAIN).clamp(-_TARGET_LIMIT, _TARGET_LIMIT), over
