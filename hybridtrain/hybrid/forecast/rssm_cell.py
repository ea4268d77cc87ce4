"""The recurrent state-space model: one tick of it, batched over an ensemble.

    e_t = encoder(features_t);  h_t = GRU(h_(t-1), mix(z_(t-1), action_t, features_t or 0 where unseen))
    posterior(z_t | h_t, e_t), prior(z_t | h_t): 32 categoricals of 32 classes;  y_t ~ head(h_t, z_t), Gaussian

After DreamerV3 (2301.04104): 1 % of every categorical is uniform, samples pass gradients straight through, the KL
divergence is balanced between prior and posterior with free nats. Unlike there the GRU also gets the features, as a run
is too short to learn them through the categoricals; they are not reconstructed, as only the loss is needed. The rollout
without gradients (many ticks of advance, prior, sample and head) is the op rssm_gru of hybridkernels.

E members, B rows, H = 256, Z = 32 * 32, F features, A actions, D widths of hidden layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from hybridkernels.rssm_gru.reference import draw_classes, gru_cell, linear, unimix
from hybridkernels.state_encoding import NUM_FEATURES
from hybridtrain.hybrid.forecast.ticks import NUM_ACTIONS

HIDDEN = 256
NUM_CATEGORICALS, NUM_CLASSES = 32, 32
STOCHASTIC = NUM_CATEGORICALS * NUM_CLASSES
_WIDTH = 64
FREE_NATS = 1.0
_PRIOR_SHARE, _POSTERIOR_SHARE = 0.5, 0.1
"""Weights of the KL terms: prior towards posterior, and posterior towards prior."""

LAYERS = {
    "encoder": (NUM_FEATURES, _WIDTH),
    "mix": (STOCHASTIC, _WIDTH),
    "action": (NUM_ACTIONS, _WIDTH),
    "seen": (NUM_FEATURES, _WIDTH),
    "gru_input": (_WIDTH, 3 * HIDDEN),
    "gru_hidden": (HIDDEN, 3 * HIDDEN),
    "prior": (HIDDEN, STOCHASTIC),
    "posterior": (HIDDEN + _WIDTH, STOCHASTIC),
    "head_hidden": (HIDDEN + STOCHASTIC, _WIDTH),
    "head": (_WIDTH, 2),
}


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent state of the model."""

    hidden_EBH: Tensor
    sample_EBZ: Tensor


def initial(num_members: int, num_rows: int) -> Latent:
    """Return the state before the first tick."""
    return Latent(torch.zeros(num_members, num_rows, HIDDEN), torch.zeros(num_members, num_rows, STOCHASTIC))


def advance(latent: Latent, action_EBA: Tensor, features_EBF: Tensor | None, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the deterministic state one tick later, (E, B, H); without features for an unobserved tick."""
    # Maps of their own: in one, initial weights by fan-in would leave 4 actions unheard among 1024 classes.
    mixed = linear(latent.sample_EBZ, weights, "mix") + linear(action_EBA, weights, "action")
    if features_EBF is not None:
        mixed = mixed + linear(features_EBF, weights, "seen")
    return gru_cell(silu(mixed), latent.hidden_EBH, weights)


def probabilities_of(logits_EBZ: Tensor) -> Tensor:
    """Return (E, B, categoricals, classes)."""
    return unimix(logits_EBZ.view(*logits_EBZ.shape[:-1], NUM_CATEGORICALS, NUM_CLASSES))


def prior(hidden_EBH: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the probabilities of the next state without its features."""
    return probabilities_of(linear(hidden_EBH, weights, "prior"))


def posterior(hidden_EBH: Tensor, features_EBF: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the probabilities of the state given its features."""
    seen = silu(linear(features_EBF, weights, "encoder"))
    return probabilities_of(linear(torch.cat([hidden_EBH, seen], -1), weights, "posterior"))


def sample(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Sample one class of each categorical, one-hot with straight-through gradients: (E, B, Z)."""
    classes = draw_classes(probabilities.detach(), torch.rand(probabilities.shape[:-1], generator=generator))
    one_hot = torch.nn.functional.one_hot(classes, NUM_CLASSES).float()
    return (one_hot + probabilities - probabilities.detach()).flatten(-2)


def classes_of(sample_EBZ: Tensor) -> Tensor:
    """Return the class of each categorical of a sample: (E, B, categoricals), int64."""
    return sample_EBZ.view(*sample_EBZ.shape[:-1], NUM_CATEGORICALS, NUM_CLASSES).argmax(-1)


def divergence(posterior_probabilities: Tensor, prior_probabilities: Tensor) -> Tensor:
    """Return the balanced KL divergence with free nats: (E, B), nats."""

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return (first * (first.log() - second.log())).sum((-2, -1)).clamp_min(FREE_NATS)

    return _PRIOR_SHARE * kl(posterior_probabilities.detach(), prior_probabilities) + _POSTERIOR_SHARE * kl(
        posterior_probabilities, prior_probabilities.detach()
    )


def entropy(probabilities: Tensor) -> Tensor:
    """Return the mean entropy of a categorical, in nats: a scalar."""
    return -(probabilities * probabilities.log()).sum(-1).mean()


def head(latent: Latent, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and unbounded log-variance of y, both (E, B)."""
    hidden = silu(linear(torch.cat([latent.hidden_EBH, latent.sample_EBZ], -1), weights, "head_hidden"))
    mean, log_variance = linear(hidden, weights, "head").unbind(-1)
    return mean, log_variance
