"""The base of all loss forecasters: signals, forecasts, intervals that learn from past errors.

A forecast is of a mean over steps, never of the next raw loss: the mean training loss over the last ``window`` steps of
the horizon. The learning rates of those steps are known in advance and given.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.hybrid.stateful import State, Stateful
from hybridtrain.phase import Phase

COVERAGE = 0.9
_NUM_SCORES = 64
_FEWEST_SCORES = 8
"""Fewest scores of a bucket; with fewer the scores of all buckets are used, with fewer still the prior factor."""
_PRIOR_FACTOR = 2.0
"""Initial factor on the model's standard deviation: a normal distribution has 1.645, untrained models are
overconfident."""
_LR_TOLERANCE = 0.01
"""Relative difference of summed learning rates up to which a schedule counts as followed."""
_SMALLEST_SCALE = 1e-4
"""Smallest standard deviation in nats per token; a smaller one is overconfident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSignal:
    """The scalars of one true optimizer step."""

    step: int
    """Counted from 1."""
    loss: float
    """Nats per token."""
    grad_norm: float | None
    """Global L2 norm before clipping; None if unknown."""
    lr: float
    phase: Phase
    predicted_steps: float = 0.0
    """Steps predicted right after this one."""
    moments: Sequence[float] | None = None
    """The six statistics of ``hybridkernels.state_encoding.moments_of_sums``: means over all elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawForecast:
    """Forecast of the mean loss over a window some steps ahead, before calibration; nats per token."""

    mean: float
    aleatoric: float
    """Standard deviation that the model attributes to noise in the data."""
    epistemic: float
    """Standard deviation between models or fits of an ensemble."""
    entropy: float | None = None
    """Entropy of the categorical state, nats per categorical, from 0 to ln(classes); None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForecast(RawForecast):
    """A forecast with its calibrated 90 % interval."""

    low: float
    high: float


@dataclass(slots=True)
class _Pending:
    """A forecast whose steps are not over."""

    first_step: int
    """First step of the window."""
    last_step: int
    mean: float
    scale: float
    horizon: int
    lr_sum: float
    """Sum of the given learning rates."""
    seen_lr_sum: float = 0.0
    loss_sum: float = 0.0


class IntervalCalibrator(Stateful):
    """Scales a model's standard deviation to intervals that covered 90 % of past forecasts.

    Split conformal prediction, online, one bucket per octave of the horizon. A forecast of scale s (nats per token)
    waits until its steps are done; its score is |error| / s. The interval of a new forecast is mean +- q s, where q is
    the (1 - alpha)(n + 1)/n empirical quantile of the latest scores of its bucket (Vovk et al.; Angelopoulos and Bates
    2107.07511, section 1). Only the latest ``_NUM_SCORES`` scores count, so that the interval adapts to a changing run.
    Overlapping forecasts are dependent, so coverage is approximate. A forecast is dropped if its steps had other
    learning rates than given.
    """

    _state = ("_pending", "_scores")
    _pending: list[_Pending]
    _scores: dict[int, list[float]]

    def __init__(self) -> None:
        self._pending = []
        self._scores = {}

    def observe(self, step: int, loss: float, lr: float) -> None:
        """Add one true step to pending forecasts; score those that end with it."""
        still = []
        for pending in self._pending:
            pending.seen_lr_sum += lr
            if step >= pending.first_step:
                pending.loss_sum += loss
            if step < pending.last_step:
                still.append(pending)
            elif abs(pending.seen_lr_sum - pending.lr_sum) <= _LR_TOLERANCE * abs(pending.lr_sum):
                actual = pending.loss_sum / (pending.last_step - pending.first_step + 1)
                scores = self._scores.setdefault(_bucket(pending.horizon), [])
                scores.append(abs(actual - pending.mean) / pending.scale)
                del scores[:-_NUM_SCORES]
        self._pending = still

    def factor(self, horizon: int) -> float:
        """Return the number of standard deviations that cover 90 % at this horizon."""
        scores = self._scores.get(_bucket(horizon), [])
        if len(scores) < _FEWEST_SCORES:
            scores = [score for bucket in sorted(self._scores) for score in self._scores[bucket]]
        if len(scores) < _FEWEST_SCORES:
            return _PRIOR_FACTOR
        rank = min(len(scores), math.ceil(COVERAGE * (len(scores) + 1)))
        return sorted(scores)[rank - 1]

    def remember(self, step: int, mean: float, scale: float, future_lrs: Sequence[float], window: int) -> None:
        """Store a forecast made after ``step`` until it can be scored."""
        last = step + len(future_lrs)
        self._pending.append(_Pending(last - window + 1, last, mean, scale, len(future_lrs), sum(future_lrs)))

    def drop_pending(self) -> None:
        """Drop forecasts whose steps are not done, after an event that they could not foresee."""
        self._pending = []


def _bucket(horizon: int) -> int:
    return round(math.log2(horizon))


class Forecaster(Stateful, ABC):
    """Forecasts losses online from one signal per true step: a model plus an ``IntervalCalibrator``.

    ``seed`` seeds its own random stream; global ones are not used. With few ``total_steps`` training starts earlier.
    Raises ``ValueError`` if it needs more than ``budget_mib``.
    """

    kind: ClassVar[str]
    _state: ClassVar[tuple[str, ...]] = ("_step", "_calibrator")
    steps_before_training: int = 0
    """Steps before the model is trained; until then it forecasts like its baseline."""

    def __init__(self, *, seed: int = 0, budget_mib: float = math.inf, total_steps: int | None = None) -> None:
        del seed, budget_mib, total_steps  # of models that draw, of large ones, of trained ones
        self._calibrator = IntervalCalibrator()
        self._step = 0

    def observe(self, signal: TrainingSignal) -> None:
        """Add one true step, in order of step numbers; a non-finite loss is ignored."""
        self._step = signal.step
        if not math.isfinite(signal.loss):
            self._calibrator.drop_pending()
            return
        self._calibrator.observe(signal.step, signal.loss, signal.lr)
        self._learn(signal)

    def forecast(self, future_lrs: Sequence[float], window: int) -> LossForecast | None:
        """Forecast the mean loss of the last ``window`` of the next ``len(future_lrs)`` steps; None at first.

        Its error calibrates later intervals once the steps are done. Raises ``ValueError`` if the window is empty or
        longer than the horizon.
        """
        horizon = len(future_lrs)
        if not 1 <= window <= horizon:
            raise ValueError(
                f"window: {window} must be 1 to {horizon}, the horizon; extend the horizon or shorten the window"
            )
        raw = self._predict(future_lrs, window)
        if raw is None or not math.isfinite(raw.mean):
            return None
        scale = max(_SMALLEST_SCALE, math.hypot(raw.aleatoric, raw.epistemic))
        half_width = scale * self._calibrator.factor(horizon)
        self._calibrator.remember(self._step, raw.mean, scale, future_lrs, window)
        return LossForecast(
            mean=raw.mean, low=raw.mean - half_width, high=raw.mean + half_width, aleatoric=raw.aleatoric,
            epistemic=raw.epistemic, entropy=raw.entropy,
        )  # fmt: skip

    def state_dict(self) -> State:
        """Return the state from which a resumed forecaster continues bit-equal."""
        return {"kind": self.kind} | super().state_dict()

    def load_state_dict(self, state: State) -> None:
        """Restore the state of a forecaster made with the same arguments; raises ``ValueError`` for another kind's."""
        if state.get("kind") != self.kind:
            raise ValueError(
                f"kind: the state is of forecaster '{state.get('kind')}'; '{self.kind}' is configured: resume with "
                f"the saved kind, or start a new forecaster"
            )
        super().load_state_dict(state)

    @abstractmethod
    def _learn(self, signal: TrainingSignal) -> None:
        """Take in one step whose loss is finite."""

    @abstractmethod
    def _predict(self, future_lrs: Sequence[float], window: int) -> RawForecast | None:
        """Forecast without calibration; must not change what the model learned."""
