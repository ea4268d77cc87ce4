"""RSSM-lite: a recurrent state-space model of the run that corrects the exponential baseline.

One tick of the model is a tick of ticks.py (25 steps). Training equals use: a few ticks with observed features
(posterior), then as many as the horizon needs with actions only, the learning rates (prior); the head answers the
correction y of every unseen tick against the baseline of the last seen one. Members draw their own windows from a small
replay. Random numbers come from its own generators: training uses a saved one, a forecast one seeded by seed and step,
so that forecasts change no state.

Aleatoric is the head's deviation and the spread over sampled states; epistemic the spread of the members' means;
entropy that of the last prior. Their sum's scale is calibrated as all are (base.py).

On two held-out runs of 3000 steps of a small byte model it was no better than its baseline: mean error 400
steps ahead 0.069 nats against 0.067, the power law 0.039. It is here to be compared; it is not the default.

E members, B windows or samples, T ticks of a window.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from hybridkernels.rssm_gru import rssm_rollout
from hybridtrain.hybrid.forecast import rssm_cell as cell
from hybridtrain.hybrid.forecast.base import RawForecast, TrainingSignal
from hybridtrain.hybrid.forecast.ensemble import EnsembleForecaster, bounded, gaussian_loss
from hybridtrain.hybrid.forecast.ticks import TICK_STEPS

NUM_MEMBERS = 3
_SEEN_TICKS = 3
_UNSEEN_TICKS = 16
_BATCH = 6
_SAMPLES = 8
_KL_WEIGHT = 0.1
_TRAIN_EVERY = 10
"""Steps between updates; an update takes about 90 ms of one shared core."""
_FEATURE_NOISE = 0.3
"""Noise added to the unit-size features in training: a run has too few ticks to avoid overfitting."""


class RssmForecaster(EnsembleForecaster):
    """An ensemble of 3 recurrent state-space models: GRU state 256, categorical state 32 x 32."""

    kind: ClassVar[str] = "rssm"
    _state = ("_steps_until_training",)
    layers = cell.LAYERS
    num_members = NUM_MEMBERS
    lr = 1e-4
    scratch_bytes = 4 * NUM_MEMBERS * _BATCH * (_SEEN_TICKS + _UNSEEN_TICKS) * 12 * cell.STOCHASTIC
    """Scratch: about 12 tensors of the stochastic state's size per tick."""

    def __init__(self, *, seed: int = 0, budget_mib: float = math.inf, total_steps: int | None = None) -> None:
        super().__init__(seed=seed, budget_mib=budget_mib, total_steps=total_steps)
        self._seed = seed
        self._steps_until_training = _TRAIN_EVERY
        self.steps_before_training = _TRAIN_EVERY * math.ceil(self._fewest_ticks * TICK_STEPS / _TRAIN_EVERY)

    def _learn(self, signal: TrainingSignal) -> None:
        self._replay.observe(signal)
        self._steps_until_training -= 1
        if self._steps_until_training <= 0:
            self._steps_until_training = _TRAIN_EVERY
            if len(self._replay) >= self._fewest_ticks:
                self._train()

    def _train(self) -> None:
        """Take one update on windows drawn from the replay."""
        generator, shape = self._ensemble.generator, (NUM_MEMBERS, _BATCH)
        origins = self._replay.draw_origins(shape, generator)
        features = self._replay.features_TF[origins[..., None] + torch.arange(1 - _SEEN_TICKS, 1)]
        features = features + _FEATURE_NOISE * torch.randn(features.shape, generator=generator)
        first = origins[..., None] - _SEEN_TICKS
        elapsed = torch.cat([torch.zeros(_SEEN_TICKS), torch.arange(1.0, _UNSEEN_TICKS + 1)]).expand(*shape, -1)
        actions = self._replay.past_actions(first + torch.arange(_SEEN_TICKS + _UNSEEN_TICKS + 1), elapsed)
        targets, over = self._replay.targets(origins, _UNSEEN_TICKS)

        def loss_of(weights: dict[str, Tensor]) -> Tensor:
            latent, surprise = _see(features, actions, weights, generator)
            losses = []
            for tick in range(_UNSEEN_TICKS):
                hidden = cell.advance(latent, actions[:, :, _SEEN_TICKS + tick], None, weights)
                latent = cell.Latent(hidden, cell.sample(cell.prior(hidden, weights), generator))
                mean, log_variance = cell.head(latent, weights)
                losses.append(gaussian_loss(mean, bounded(log_variance), targets[..., tick]))
            known = over.float()
            fit = (torch.stack(losses, -1) * known).sum() / known.sum().clamp_min(1.0)
            return NUM_MEMBERS * (fit + _KL_WEIGHT * surprise)

        self._ensemble.update(loss_of)

    def _correct(self, planned_SA: Tensor) -> RawForecast:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._step)
        weights = self._ensemble.mean_weights()
        rows, last = (NUM_MEMBERS, _SAMPLES), len(self._replay) - 1
        features = self._replay.features_TF[torch.arange(last + 1 - _SEEN_TICKS, last + 1)].expand(*rows, -1, -1)
        ticks = torch.arange(last - _SEEN_TICKS, last + 1)
        actions = self._replay.past_actions(ticks, torch.zeros(_SEEN_TICKS)).expand(*rows, -1, -1)
        latent, _ = _see(features, actions, weights, generator)
        rollout = rssm_rollout(
            weights,
            latent.hidden_EBH,
            cell.classes_of(latent.sample_EBZ),
            planned_SA[:, None, None].expand(-1, *rows, -1),
            torch.rand(len(planned_SA), *rows, cell.NUM_CATEGORICALS, generator=generator),
        )
        mean_EB, log_variance_EB = rollout.means_SEB[-1], rollout.log_variances_SEB[-1]
        return RawForecast(
            mean=float(mean_EB.mean()),
            aleatoric=math.sqrt(float(bounded(log_variance_EB).exp().mean() + mean_EB.var(1).mean())),
            epistemic=float(mean_EB.mean(1).std()),
            entropy=float(cell.entropy(cell.probabilities_of(rollout.logits_EBZ))),
        )


def _see(
    features_EBTF: Tensor, actions_EBTA: Tensor, weights: dict[str, Tensor], generator: torch.Generator
) -> tuple[cell.Latent, Tensor]:
    """Follow seen ticks; return the state and the mean divergence in nats."""
    latent, surprise = cell.initial(*features_EBTF.shape[:2]), torch.zeros(())
    for tick in range(features_EBTF.shape[2]):
        hidden = cell.advance(latent, actions_EBTA[:, :, tick], features_EBTF[:, :, tick], weights)
        probabilities = cell.posterior(hidden, features_EBTF[:, :, tick], weights)
        surprise = surprise + cell.divergence(probabilities, cell.prior(hidden, weights)).mean()
        latent = cell.Latent(hidden, cell.sample(probabilities, generator))
    return latent, surprise / features_EBTF.shape[2]
