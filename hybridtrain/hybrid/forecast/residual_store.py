"""Past forecast errors with their states: a forecast is corrected by the errors of similar states.

correction(x) = sum_n softmax(-d_n / temperature)_n r_n, where d_n is the mean over features of the squared difference
of x and x_n in standard deviations of what is stored. N entries, F features.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridtrain.hybrid.stateful import State, Stateful

TEMPERATURE = 0.5
"""Kernel width in squared standard deviations: a distance of 1 in every feature weighs exp(-2). Random states differ by
2 on average, so near entries decide."""
_SMALLEST_SPREAD = 1e-9
"""Smallest standard deviation relative to the feature; below it is rounding."""
_FARTHEST = 1e6
"""Largest standardised value; squares of larger ones could overflow."""

Array = npt.NDArray[np.float64]


class ResidualStore(Stateful):
    """The latest ``max_entries`` pairs of state and residual; a new one replaces the oldest."""

    _state = ("_features_NF", "_residuals_N", "_next")

    def __init__(self, max_entries: int, num_features: int) -> None:
        self.num_bytes = 8 * max_entries * (num_features + 1)
        """Bytes of a full store."""
        self._max_entries = max_entries
        self._num_features = num_features
        self._features_NF: Array = np.zeros((0, num_features))
        self._residuals_N: Array = np.zeros(0)
        self._next = 0
        """Row of the next entry."""

    def __len__(self) -> int:
        """Return the number of stored entries."""
        return len(self._residuals_N)

    def add(self, features: Sequence[float], residual: float) -> None:
        """Store the residual (actual minus forecast) of a state; ignored if a value is not finite."""
        row_F = np.array(features, dtype=np.float64)
        if not (math.isfinite(residual) and np.isfinite(row_F).all()):
            return
        if len(self) < self._max_entries:
            self._features_NF = np.vstack([self._features_NF, row_F])
            self._residuals_N = np.append(self._residuals_N, residual)
        else:
            self._features_NF[self._next], self._residuals_N[self._next] = row_F, residual
        self._next = (self._next + 1) % self._max_entries

    def correction(self, features: Sequence[float]) -> float:
        """Return the mean residual, weighted by similarity to this state; 0 if the store is empty.

        Non-finite features are ignored.
        """
        if not len(self):
            return 0.0
        row_F = np.array(features, dtype=np.float64)
        spread_F = self._features_NF.std(0)
        least_F = _SMALLEST_SPREAD * np.abs(self._features_NF).max(0)
        compared_F = (spread_F > least_F) & np.isfinite(row_F)  # constant features distinguish no states
        scaled_NF = (self._features_NF[:, compared_F] - row_F[compared_F]) / spread_F[compared_F]
        scaled_NF = scaled_NF.clip(-_FARTHEST, _FARTHEST)
        distance_N = (scaled_NF**2).sum(1) / max(1, int(compared_F.sum()))
        weight_N = np.exp((distance_N.min() - distance_N) / TEMPERATURE)
        return float(weight_N @ self._residuals_N / weight_N.sum())

    def load_state_dict(self, state: State) -> None:
        """Restore a store of the same size; raises ``ValueError`` where it holds more, or other features."""
        super().load_state_dict(state)
        if len(self) > self._max_entries or self._features_NF.size != len(self) * self._num_features:
            raise ValueError(
                f"residuals: {len(self)} entries, {self._features_NF.size} features; at most {self._max_entries} of "
                f"{self._num_features} features are allowed: resume with the saved budget"
            )
        self._features_NF = self._features_NF.reshape(-1, self._num_features)
