"""The loss as a function of past learning rates: a power law of their sum, minus the gain of annealing.

L = L0 + A S1^-alpha - C S2,  S1 = sum of lr,  S2 = sum of D_i with D_i = lambda D_(i-1) + (lr_(i-1) - lr_i)

after the annealing law (2408.11029, equation 2; lr is taken relative to its peak and S2 times 1 - lambda, so that C is
the nats earned by annealing from peak to zero). L0, A and C solve weighted least squares for each alpha and lambda of a
small grid, none of them negative; fits are averaged with their likelihoods. The multi-power law (2503.12811) makes S2
a power of the later sum of lr; one run holds too little annealing to fit its two more exponents.

Early in a run C is undetermined, as cosine hardly falls at first. Its prior is a normal law around ``_ANNEAL_MEAN`` of
the present loss. B blocks of the history, G fits on the grid, J = 3 coefficients, H steps asked.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import add
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hybridtrain.hybrid.forecast.base import Forecaster, RawForecast, TrainingSignal

Array = NDArray[np.float64]

_ALPHAS = (0.1, 0.2, 0.3, 0.45, 0.65, 1.0)
_LAMBDAS = (0.9, 0.99, 0.997)
_MAX_BLOCKS = 256
"""Most blocks of a fit, which limits memory and time: beyond it neighbours are merged and later blocks twice as
long."""
_FIRST_BLOCK_STEPS = 10
_FEWEST_BLOCKS = 12
_RECENCY = 2.0
"""Weight of a block at step s of t: (s / t)^_RECENCY; the first steps do not follow a power law."""
_ANNEAL_MEAN, _ANNEAL_SPREAD = 0.1, 0.1
"""Prior values of C as fractions of the present loss."""
_PREDICTED_WORTH = 0.1
"""True steps that a predicted step counts as; 0.09 measured at tuned learning rates."""
_LEVEL_PULL = 0.5
"""Share of the latest blocks' mean residual that is added to the forecast."""
_LEVEL_STEPS = 150
_NOISE_RATE = 0.02
_SUBSETS = ((0, 1, 2), (0, 1), (1, 2), (1,))
"""Sets of coefficients that may be positive together; A always is."""


@dataclass(slots=True)
class _LrSums:
    """Running sums of the law; learning rates relative to nothing yet."""

    s1: float
    last_lr: float
    has_fallen: bool
    """Whether the learning rate has fallen once; its warm-up is not annealing."""
    momentum: list[float]
    s2: list[float]

    def step(self, lr: float, worth: float) -> None:
        """Add one step at ``lr`` that counts as ``worth`` steps."""
        fall = self.last_lr - lr
        self.has_fallen = self.has_fallen or fall > 0
        fall = fall if self.has_fallen else 0.0
        for index, decay in enumerate(_LAMBDAS):
            self.momentum[index] = decay * self.momentum[index] + fall
            self.s2[index] += (1 - decay) * self.momentum[index]
        self.s1 += lr * worth
        self.last_lr = lr


class PowerLawForecaster(Forecaster):
    """Refits at every forecast. Its scale is noise plus spread of the fits; base.py calibrates it."""

    kind: ClassVar[str] = "power_law"
    _state = ("_sums", "_peak_lr", "_block_steps", "_blocks", "_last_loss", "_noise", "_count")
    _blocks: list[list[float]]
    """Sums over the steps of a block: count, step, loss, s1, s2 per lambda. The last block may be incomplete."""

    def __init__(self, *, seed: int = 0, budget_mib: float = math.inf, total_steps: int | None = None) -> None:
        super().__init__(seed=seed, budget_mib=budget_mib, total_steps=total_steps)
        zeros = [0.0] * len(_LAMBDAS)
        self._sums = _LrSums(0.0, 0.0, has_fallen=False, momentum=list(zeros), s2=list(zeros))
        self._peak_lr = 0.0
        self._block_steps = _FIRST_BLOCK_STEPS
        self._blocks = []
        self._last_loss = math.nan
        self._noise = 0.0
        """Variance of one step's loss, from differences of neighbours."""
        self._count = 0

    def _learn(self, signal: TrainingSignal) -> None:
        if self._count == 0:
            self._sums.last_lr = signal.lr
        else:
            rate = max(_NOISE_RATE, 1 / self._count)
            self._noise += rate * (0.5 * (signal.loss - self._last_loss) ** 2 - self._noise)
        self._last_loss = signal.loss
        self._count += 1
        self._peak_lr = max(self._peak_lr, signal.lr)
        self._sums.step(signal.lr, 1.0)
        row = [1.0, float(self._count), signal.loss, self._sums.s1, *self._sums.s2]
        if self._blocks and self._blocks[-1][0] < self._block_steps:
            self._blocks[-1] = list(map(add, self._blocks[-1], row))
        else:
            if len(self._blocks) == _MAX_BLOCKS:
                pairs = zip(self._blocks[::2], self._blocks[1::2], strict=True)
                self._blocks = [list(map(add, first, second)) for first, second in pairs]
                self._block_steps *= 2
            self._blocks.append(row)
        self._sums.s1 += signal.lr * signal.predicted_steps * _PREDICTED_WORTH

    def _design(self, s1: Array, s2_L: Array) -> Array:
        """Return the columns 1, S1^-alpha, -S2 for all fits: (G, rows, J)."""
        ones = np.ones_like(s1)
        return np.stack([
            np.stack([ones, (s1 / self._sums.s1) ** -alpha, -s2 / self._peak_lr], axis=1)
            for alpha in _ALPHAS
            for s2 in s2_L
        ])  # fmt: skip

    def _fit(self, design_GBJ: Array, loss_B: Array, weights_B: Array) -> tuple[Array, Array, Array]:
        """Solve every subset of coefficients for every grid point; keep the best that is nowhere negative.

        Returns coefficients (G, J), weights of the fits (G,), variances of the coefficients (G, J, J).
        """
        level = float(loss_B[-1])
        noise = max(self._noise, 1e-10)
        weights_B = weights_B / noise
        prior = np.array([1e-6, 1e-6, (_ANNEAL_SPREAD * level) ** -2])
        mean = np.array([0.0, 0.0, _ANNEAL_MEAN * level])
        gram_GJJ = np.einsum("gbj,b,gbk->gjk", design_GBJ, weights_B, design_GBJ) + np.diag(prior)
        right_GJ = np.einsum("gbj,b,b->gj", design_GBJ, weights_B, loss_B) + prior * mean
        num_fits = len(gram_GJJ)
        best_G = np.full(num_fits, np.inf)
        coefficients_GJ, variance_GJJ = np.zeros((num_fits, 3)), np.zeros((num_fits, 3, 3))
        for subset in _SUBSETS:
            rows = np.ix_(range(num_fits), subset, subset)
            inverse = np.linalg.inv(gram_GJJ[rows])
            trial_GJ = np.zeros((num_fits, 3))
            trial_GJ[:, subset] = np.einsum("gjk,gk->gj", inverse, right_GJ[:, subset])
            errors_GB = np.einsum("gbj,gj->gb", design_GBJ, trial_GJ) - loss_B
            cost_G = (weights_B * errors_GB**2).sum(1) + (prior * (trial_GJ - mean) ** 2).sum(1)
            taken = (trial_GJ >= 0).all(1) & (cost_G < best_G)
            best_G = np.where(taken, cost_G, best_G)
            coefficients_GJ[taken] = trial_GJ[taken]
            cleared = np.zeros((num_fits, 3, 3))
            cleared[rows] = inverse
            variance_GJJ[taken] = cleared[taken]
        weights_G = np.exp(-0.5 * (best_G - best_G.min()))
        return coefficients_GJ, weights_G / weights_G.sum(), variance_GJJ

    def _asked(self, future_lrs: Sequence[float], window: int) -> Array:
        """Return the mean design over the window: (G, J)."""
        sums = deepcopy(self._sums)
        s1, s2 = [], []
        for lr in future_lrs:
            sums.step(lr, 1.0)
            s1.append(sums.s1)
            s2.append(list(sums.s2))
        return np.asarray(self._design(np.array(s1[-window:]), np.array(s2[-window:]).T).mean(1))

    def _predict(self, future_lrs: Sequence[float], window: int) -> RawForecast | None:
        if len(self._blocks) < _FEWEST_BLOCKS or self._peak_lr <= 0:
            return None
        sums = np.array(self._blocks)
        count_B, means = sums[:, 0], sums[:, 1:] / sums[:, :1]
        loss_B = means[:, 1]
        design_GBJ = self._design(means[:, 2], means[:, 3:].T)
        coefficients_GJ, weights_G, variance_GJJ = self._fit(
            design_GBJ, loss_B, count_B * (means[:, 0] / self._count) ** _RECENCY
        )
        asked_GJ = self._asked(future_lrs, window)
        residual_GB = loss_B - np.einsum("gbj,gj->gb", design_GBJ, coefficients_GJ)
        recent_B = count_B * (means[:, 0] > self._count - _LEVEL_STEPS)
        pull_G = _LEVEL_PULL * (residual_GB * recent_B).sum(1) / recent_B.sum()
        forecast_G = (asked_GJ * coefficients_GJ).sum(1) + pull_G
        mean = float(weights_G @ forecast_G)
        own_G = np.einsum("gj,gjk,gk->g", asked_GJ, variance_GJJ, asked_GJ)
        spread = float(weights_G @ ((forecast_G - mean) ** 2 + own_G))
        return RawForecast(mean=mean, aleatoric=math.sqrt(self._noise / window), epistemic=math.sqrt(max(spread, 0.0)))
