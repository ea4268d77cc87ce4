"""The base of all loss forecasters: signals, forecasts, intervals that learn from past errors.

A forecast is never of the next raw loss but of a block mean: the mean training loss over the last ``window`` steps of
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
"""Below this a bucket takes the scores of all buckets; below this in all, the prior factor."""
_PRIOR_FACTOR = 2.0
"""Of the model's own standard deviation: a normal law has 1.645; models that just started are too sure."""
_LR_TOLERANCE = 0.01
"""Relative difference of summed learning rates up to which a schedule was kept."""
_SMALLEST_SCALE = 1e-4
"""Nats per token: a model surer than this is not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSignal:
    """The scalars of one true optimizer step."""

    step: int
    """Counted from 1."""
    loss: float
    """Nats per token."""
    grad_norm: float | None
    """Global L2 norm before clipping; None when it is not known."""
    lr: float
    phase: Phase
    predicted_steps: float = 0.0
    """Steps jumped right after this one."""
    moments: Sequence[float] | None = None
    """The six statistics of ``hybridkernels.state_encoding.moments_of_sums``: means over all elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawForecast:
    """Of the mean loss over a window ending some steps ahead, before calibration; nats per token."""

    mean: float
    aleatoric: float
    """Standard deviation that the model ascribes to noise in the data."""
    epistemic: float
    """Standard deviation over models: spread of an ensemble or of fits."""
    entropy: float | None = None
    """Of the categorical state, nats per categorical, 0 (sure) to ln of its classes; None where there is none."""


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
    """Of the learning rates that were given."""
    seen_lr_sum: float = 0.0
    loss_sum: float = 0.0


class IntervalCalibrator(Stateful):
    """Turns a model's own standard deviation into a half-width that held for 90 % of past forecasts.

    Split conformal prediction, online, one bucket per octave of the horizon. A forecast made with scale s (nats per
    token) is kept until its steps were seen; its score is |error| / s. The interval of a new forecast is mean +- q s,
    where q is the (1 - alpha)(n + 1)/n empirical quantile of the latest scores of its bucket (Vovk et al.; Angelopoulos
    and Bates 2107.07511, section 1). Scores are of the latest ``_NUM_SCORES`` forecasts, so that the interval follows a
    changing run; overlapping forecasts are dependent, so coverage is approximate. A forecast whose steps were trained
    with other learning rates than were given is dropped.
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
        """Return the number of the model's standard deviations that cover 90 % at this horizon."""
        scores = self._scores.get(_bucket(horizon), [])
        if len(scores) < _FEWEST_SCORES:
            scores = [score for bucket in sorted(self._scores) for score in self._scores[bucket]]
        if len(scores) < _FEWEST_SCORES:
            return _PRIOR_FACTOR
        rank = min(len(scores), math.ceil(COVERAGE * (len(scores) + 1)))
        return sorted(scores)[rank - 1]

    def remember(self, step: int, mean: float, scale: float, future_lrs: Sequence[float], window: int) -> None:
        """Keep a forecast made after ``step`` until it can be scored."""
        last = step + len(future_lrs)
        self._pending.append(_Pending(last - window + 1, last, mean, scale, len(future_lrs), sum(future_lrs)))

    def drop_pending(self) -> None:
        """Drop forecasts whose steps are not over, as after an event that they do not cover."""
        self._pending = []


def _bucket(horizon: int) -> int:
    return round(math.log2(horizon))


class Forecaster(Stateful, ABC):
    """Learns online from one signal per true step: a model plus an ``IntervalCalibrator``.

    ``seed`` is of the model's own random numbers; the global random streams are never touched. A short run, of
    ``total_steps``, begins to train a model earlier. One that needs more than ``budget_mib`` raises ``ValueError``.
    """

    kind: ClassVar[str]
    _state: ClassVar[tuple[str, ...]] = ("_step", "_calibrator")
    steps_before_training: int = 0
    """After which a model begins to be trained; until then it forecasts as its baseline."""

    def __init__(self, *, seed: int = 0, budget_mib: float = math.inf, total_steps: int | None = None) -> None:
        del seed, budget_mib, total_steps  # of models that draw, of large ones, of trained ones
        self._calibrator = IntervalCalibrator()
        self._step = 0

    def observe(self, signal: TrainingSignal) -> None:
        """Take in one true step, in order of their numbers; a loss that is not finite is left out."""
        self._step = signal.step
        if not math.isfinite(signal.loss):
            self._calibrator.drop_pending()
            return
        self._calibrator.observe(signal.step, signal.loss, signal.lr)
        self._learn(signal)

    def forecast(self, future_lrs: Sequence[float], window: int) -> LossForecast | None:
        """Forecast the mean loss of the last ``window`` of the next ``len(future_lrs)`` steps; None at first.

        The forecast is remembered until its steps are seen: its error calibrates later intervals. Raises ``ValueError``
        if the window is empty or longer than the horizon.
        """
        horizon = len(future_lrs)
        if not 1 <= window <= horizon:
            raise ValueError(f"window: {window} must be 1 to {horizon}, the horizon; forecast further or average less")
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
                f"kind: the state is of forecaster '{state.get('kind')}'; '{self.kind}' is wanted: resume with "
                "the kind that was saved, or start a new forecaster"
            )
        super().load_state_dict(state)

    @abstractmethod
    def _learn(self, signal: TrainingSignal) -> None:
        """Take in one step whose loss is finite."""

    @abstractmethod
    def _predict(self, future_lrs: Sequence[float], window: int) -> RawForecast | None:
        """Forecast without calibration; must not change what the model learned."""
