"""Intervals that learn from past errors: split conformal prediction, online, one bucket per octave of the horizon.

A forecast made with scale s (nats per token) is kept until its steps were seen; its score is |error| / s. The interval
of a new forecast is mean +- q s, where q is the (1 - alpha)(n + 1)/n empirical quantile of the latest scores of its
bucket (Vovk et al.; Angelopoulos and Bates 2107.07511, section 1). Scores are of the latest ``_NUM_SCORES`` forecasts,
so that the interval follows a changing run; overlapping forecasts are dependent, so coverage is approximate.
A forecast whose steps were trained with other learning rates than it was told says nothing and is dropped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.predictor.forecast import State

COVERAGE = 0.9
_NUM_SCORES = 64
_FEWEST_SCORES = 8
"""Below this a bucket takes the scores of all buckets; below this in all, the prior factor."""
_PRIOR_FACTOR = 2.0
"""Of the model's own standard deviation: a normal law has 1.645; models that just started are too sure."""
_LR_TOLERANCE = 0.01
"""Relative difference of summed learning rates up to which a schedule was kept."""


def _bucket(horizon: int) -> int:
    return round(math.log2(horizon))


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
    """Of the learning rates it was told."""
    seen_lr_sum: float = 0.0
    loss_sum: float = 0.0

    def to_list(self) -> list[float]:
        """Return the fields in order."""
        return [
            self.first_step, self.last_step, self.mean, self.scale, self.horizon, self.lr_sum, self.seen_lr_sum,
            self.loss_sum,
        ]  # fmt: skip


class IntervalCalibrator:
    """Turns a model's own standard deviation into a half-width that held for 90 % of past forecasts."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._scores: dict[int, list[float]] = {}

    def observe(self, step: int, loss: float, lr: float) -> None:
        """Let pending forecasts see one true step; score those that end with it."""
        still = []
        for pending in self._pending:
            pending.seen_lr_sum += lr
            if step >= pending.first_step:
                pending.loss_sum += loss
            if step < pending.last_step:
                still.append(pending)
            else:
                self._score(pending)
        self._pending = still

    def _score(self, pending: _Pending) -> None:
        if abs(pending.seen_lr_sum - pending.lr_sum) > _LR_TOLERANCE * abs(pending.lr_sum):
            return
        actual = pending.loss_sum / (pending.last_step - pending.first_step + 1)
        scores = self._scores.setdefault(_bucket(pending.horizon), [])
        scores.append(abs(actual - pending.mean) / pending.scale)
        del scores[:-_NUM_SCORES]

    def factor(self, horizon: int) -> float:
        """Return how many of the model's standard deviations cover 90 % at this horizon."""
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
        self._pending.append(
            _Pending(last - window + 1, last, mean, scale, len(future_lrs), sum(future_lrs)),
        )

    def drop_pending(self) -> None:
        """Forget forecasts whose steps are not over: something happened that no forecast is about."""
        self._pending = []

    def state_dict(self) -> State:
        """Return pending forecasts and scores."""
        return {"pending": [pending.to_list() for pending in self._pending], "scores": dict(self._scores)}

    def load_state_dict(self, state: State) -> None:
        """Take up a saved state."""
        pending, scores = state["pending"], state["scores"]
        assert isinstance(pending, list)
        assert isinstance(scores, dict)
        self._pending = [_Pending(*values) for values in pending]
        self._scores = {int(bucket): list(values) for bucket, values in scores.items()}
