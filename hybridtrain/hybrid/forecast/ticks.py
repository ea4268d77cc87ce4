"""A run in ticks of 25 steps: what the learned forecasters train on.

Of each tick the replay keeps the encoded state at its end, its mean loss, its learning rate, and the level and trend of
the exponential baseline (ema.py) at its end. The learned forecasters correct that baseline, relative to its level:

y_ij = gain (loss_(i+j) - base_ij) / level_i,  base_ij = level_i + trend_i reach((j - 1/2) ticks),  j >= 1;

a model that knows nothing answers 0 and is the baseline. T ticks, F features.
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
    moments_of_sums,
)
from hybridtrain.hybrid.forecast.base import MomentStatistics, TrainingSignal
from hybridtrain.hybrid.forecast.ema import EmaForecaster, damped_reach
from hybridtrain.hybrid.stateful import Stateful
from hybridtrain.phase import Phase

TICK_STEPS = 25
GAIN = 20.0
"""Corrections are some hundredths of the loss; this brings them to unit size."""
NUM_ACTIONS = 4
_LOSS, _LEVEL, _TREND, _LOG_LR, _PREDICTED, _NUM_SCALARS = 0, 1, 2, 3, 4, 5
_SMALLEST_LR = 1e-12
_TARGET_LIMIT = 4.0
"""Of y, a fifth of the loss: beyond lies the first fall of a run, which would drown what is to be learned."""
_FIRST_ORIGIN = 4
"""Ticks before it are the start of the run, of which nothing later is like."""
_LR_GAIN = 5.0
"""Of changes of ln lr within one tick, which are some hundredths."""
_PHASES = tuple(Phase)
_TICKS_BEFORE_TRAINING, _FEWEST_TICKS, _SHARE_OF_RUN = 8, 4, 4


def ticks_before_training(total_steps: int | None) -> int:
    """Return how many ticks a model of the run sees before it is trained: 8, a quarter of a short run's, at least 4.

    Args:
        total_steps: Of the run; None: a long one's.
    """
    if total_steps is None:
        return _TICKS_BEFORE_TRAINING
    return min(_TICKS_BEFORE_TRAINING, max(_FEWEST_TICKS, total_steps // TICK_STEPS // _SHARE_OF_RUN))


def moments_from_sums(sums: Tensor) -> MomentStatistics:
    """Return the means that the sums of ``moment_statistics`` stand for; (8,), float64, on any device."""
    m_mean, m_rms, v_mean, v_rms, slow_rms, slow_cosine = moments_of_sums(sums).tolist()
    return MomentStatistics(
        m_mean=m_mean, m_rms=m_rms, v_mean=v_mean, v_rms=v_rms, slow_rms=slow_rms, slow_cosine=slow_cosine
    )


class _Ring(Stateful):
    """The last values in a buffer twice their number, so that they always lie in one piece."""

    _state = ("_values", "count")

    def __init__(self, size: int) -> None:
        self._size = size
        self._values = np.zeros(2 * size, dtype=np.float32)
        self.count = 0
        """How many values were ever pushed."""

    def push(self, value: float) -> None:
        if self.count == 0:
            self._values[:] = value
        slot = self.count % self._size
        self._values[slot] = self._values[slot + self._size] = value
        self.count += 1

    def latest(self) -> np.ndarray:
        """Return the values, oldest first; those not yet known repeat the first one."""
        start = self.count % self._size
        return self._values[start : start + self._size]


class StateEncoder(Stateful):
    """Ring buffers of a run's recent scalars, encoded on demand.

    Args:
        betas: Decay rates of the optimizer's moments, for the bias corrections.
        phase_steps: Length that makes the position within a phase 1.
    """

    _state = ("_losses", "_norms", "_step", "_lr", "_phase", "_steps_in_phase", "_moments")

    def __init__(self, betas: tuple[float, float] = (0.9, 0.95), phase_steps: int = 100) -> None:
        self._betas = betas
        self._phase_steps = phase_steps
        self._losses, self._norms = _Ring(LOSS_STEPS), _Ring(GRAD_NORM_STEPS)
        self._step = 0
        self._lr = 0.0
        self._phase = Phase.WARMUP
        self._steps_in_phase = 0
        self._moments = [0.0] * NUM_MOMENT_STATISTICS

    def observe(self, signal: TrainingSignal) -> None:
        """Take in one true step; a gradient norm that is not known repeats the last one."""
        self._losses.push(signal.loss)
        if signal.grad_norm is not None:
            self._norms.push(signal.grad_norm)
        elif not self._norms.count:
            self._norms.push(1.0)
        self._steps_in_phase = self._steps_in_phase + 1 if signal.phase is self._phase else 0
        self._step, self._lr, self._phase = signal.step, signal.lr, signal.phase
        if signal.moments is not None:
            of = signal.moments
            self._moments = [of.m_mean, of.m_rms, of.v_mean, of.v_rms, of.slow_rms, of.slow_cosine]

    def encode(self) -> Tensor:
        """Return the features of the present state: (F,), float32."""
        scalars = [
            self._lr, self._betas[0] ** self._step, self._betas[1] ** self._step,
            min(1.0, self._steps_in_phase / self._phase_steps),
        ]  # fmt: skip
        assert len(scalars) == NUM_SCALARS
        one_hot = [float(phase is self._phase) for phase in _PHASES]
        assert len(one_hot) == NUM_PHASES
        return encode_state(
            torch.from_numpy(self._losses.latest())[None],
            torch.from_numpy(self._norms.latest())[None],
            torch.tensor([self._moments]),
            torch.tensor([scalars]),
            torch.tensor([one_hot]),
        )[0]


class TickReplay(Stateful):
    """The latest ticks of the run, at most ``capacity``; bounded memory."""

    _state = ("encoder", "base", "features_TF", "_scalars", "_open", "peak_log_lr")

    def __init__(self, capacity: int = 512) -> None:
        self.encoder = StateEncoder()
        self.base = EmaForecaster()
        self._capacity = capacity
        self.features_TF = torch.zeros(0, NUM_FEATURES)
        self._scalars = torch.zeros(0, _NUM_SCALARS)
        self._open = [0.0] * 4
        """Of the tick that is not over: steps, sum of losses, sum of ln lr, predicted steps."""
        self.peak_log_lr = -30.0

    @staticmethod
    def capacity_bytes(capacity: int = 512) -> int:
        """Return the bytes of a full replay; appending makes a second copy for a moment."""
        return 2 * 4 * capacity * (NUM_FEATURES + _NUM_SCALARS)

    def __len__(self) -> int:
        return len(self._scalars)

    def observe(self, signal: TrainingSignal) -> bool:
        """Take in one true step; say whether it ended a tick."""
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
        level, trend = self.base.level_and_trend()
        row = torch.tensor([[losses / count, level, trend, log_lrs / count, predicted]])
        self._scalars = torch.cat([self._scalars, row])[-self._capacity :]
        self.features_TF = torch.cat([self.features_TF, self.encoder.encode()[None]])[-self._capacity :]
        return True

    def actions(self, log_lrs: Tensor, predicted: Tensor, elapsed: Tensor) -> Tensor:
        """Return what was or will be done in consecutive ticks: (..., ticks - 1, 4); the first only gives its rate.

        Args:
            log_lrs: (..., ticks), mean ln lr.
            predicted: (..., ticks), steps jumped.
            elapsed: (..., ticks - 1), ticks since the state was last seen.
        """
        change = (log_lrs[..., 1:] - log_lrs[..., :-1]) * _LR_GAIN
        relative = log_lrs[..., 1:] - self.peak_log_lr
        actions = torch.stack([change, relative, predicted[..., 1:] / TICK_STEPS, elapsed / 8], -1)
        return actions.clamp(-8, 8)

    def past_actions(self, ticks: Tensor, elapsed: Tensor) -> Tensor:
        """Return the actions of ticks that are over; ``ticks`` holds indices, the one before the first included."""
        ticks = ticks.clamp(0, len(self) - 1)
        return self.actions(self._scalars[ticks, _LOG_LR], self._scalars[ticks, _PREDICTED], elapsed)

    def future_actions(self, future_lrs: Sequence[float], num_ticks: int) -> Tensor:
        """Return the actions of the next ticks under planned rates: (num_ticks, 4); the last rate goes on."""
        rates = torch.tensor(future_lrs).clamp_min(_SMALLEST_LR).log()
        rates = torch.cat([rates, rates[-1:].expand(num_ticks * TICK_STEPS)])[: num_ticks * TICK_STEPS]
        log_lrs = torch.cat([self._scalars[-1:, _LOG_LR], rates.view(num_ticks, TICK_STEPS).mean(1)])
        return self.actions(log_lrs, torch.zeros_like(log_lrs), torch.arange(1.0, num_ticks + 1))

    def draw_origins(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw ticks to forecast from, at least one tick before the last; later ones more often."""
        first, last = min(_FIRST_ORIGIN, len(self) - 2), len(self) - 2
        place = torch.rand(shape, generator=generator).sqrt()
        return (first + place * (last - first + 1)).long().clamp_max(last)

    def targets(self, origins: Tensor, num_ticks: int) -> tuple[Tensor, Tensor]:
        """Return y for ticks 1 to ``num_ticks`` after each origin, and which of them are over.

        Args:
            origins: Indices of ticks, any shape.
            num_ticks: Ticks ahead.

        Returns:
            Two of shape (..., num_ticks): float32, bool.
        """
        offsets = torch.arange(1, num_ticks + 1)
        wanted = origins[..., None] + offsets
        over = wanted < len(self)
        reach = torch.tensor([damped_reach((j - 0.5) * TICK_STEPS) for j in range(1, num_ticks + 1)])
        level, trend = self._scalars[origins, _LEVEL, None], self._scalars[origins, _TREND, None]
        losses = self._scalars[wanted.clamp_max(len(self) - 1), _LOSS]
        return ((losses - level - trend * reach) / level * GAIN).clamp(-_TARGET_LIMIT, _TARGET_LIMIT), over
