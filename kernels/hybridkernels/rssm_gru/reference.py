"""Rollout of a recurrent state-space model in plain torch: a GRU and its categorical prior.

    h_t = GRU(h_(t-1), silu(mix(z_(t-1)) + action(a_t)))   and + seen(x) in the first tick, where features x are given
    z_t ~ prior(h_t): categoricals, each (1 - u) softmax(logits) + u / classes with u = 1 %
    y_t = head(silu(head_hidden(h_t, z_t))): mean and unbounded log-variance

After DreamerV3 (Hafner et al., 2301.04104, section "World model learning"); the GRU is that of Cho et al. (1406.1078)
with the reset gate after the matrix product, as torch and cuDNN have it. A class is drawn by a given uniform number: it
is the number of classes whose cumulative probability lies below it. So everything is a function of the inputs.

The sample is one class of each categorical; its product with a matrix is a sum of rows of that matrix, one per
categorical, which is what is computed.

E members, S ticks, B rows, H hidden units, K categoricals of C classes, Z = K * C, A actions, F features, D widths of
hidden layers, G = 3 * H: reset, update and new gate.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

UNIFORM_SHARE = 0.01
"""Share of the uniform distribution in every categorical, so that no class is impossible."""


class RssmRollout(NamedTuple):
    """Outputs of some ticks."""

    means_SEB: Tensor
    log_variances_SEB: Tensor
    hidden_EBH: Tensor
    """Deterministic state after the last tick; the next two likewise."""
    classes_EBK: Tensor
    """int64."""
    logits_EBZ: Tensor
    """Logits of the prior that the last classes were sampled from."""


def linear(inputs_EBI: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the affine map ``name`` of every member: (E, B, O); its weight is (E, I, O), its bias (E, 1, O)."""
    return torch.baddbmm(weights[f"{name}.bias"], inputs_EBI, weights[f"{name}.weight"])


def gru_cell(mixed_EBD: Tensor, hidden_EBH: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the next hidden state: (E, B, H)."""
    reset_i, update_i, new_i = linear(mixed_EBD, weights, "gru_input").chunk(3, -1)
    reset_h, update_h, new_h = linear(hidden_EBH, weights, "gru_hidden").chunk(3, -1)
    update = torch.sigmoid(update_i + update_h)
    new = torch.tanh(new_i + torch.sigmoid(reset_i + reset_h) * new_h)
    return torch.lerp(new, hidden_EBH, update)


def unimix(logits_EBKC: Tensor) -> Tensor:
    """Return probabilities of which a share is uniform."""
    return (1 - UNIFORM_SHARE) * logits_EBKC.softmax(-1) + UNIFORM_SHARE / logits_EBKC.shape[-1]


def draw_classes(probabilities_EBKC: Tensor, uniforms_EBK: Tensor) -> Tensor:
    """Return the class that each uniform number in [0, 1) falls to: (E, B, K), int64."""
    below = probabilities_EBKC.cumsum(-1) < uniforms_EBK[..., None]
    return below.sum(-1).clamp_max(probabilities_EBKC.shape[-1] - 1)  # rounding may leave the last sum below 1


def _sum_of_rows(classes_EBK: Tensor, weight_EID: Tensor, num_classes: int) -> Tensor:
    """Return the one-hot sample times the last Z rows of the matrix: (E, B, D)."""
    num_members, num_rows, num_categoricals = classes_EBK.shape
    num_inputs, width = weight_EID.shape[1:]
    first_row = num_inputs - num_categoricals * num_classes
    first_K = torch.arange(first_row, num_inputs, num_classes, device=classes_EBK.device)
    member_E = torch.arange(0, num_members * num_inputs, num_inputs, device=classes_EBK.device)
    rows = (classes_EBK + (first_K + member_E[:, None, None])).flatten(0, 1)
    summed = torch.nn.functional.embedding_bag(rows, weight_EID.flatten(0, 1), mode="sum")
    return summed.view(num_members, num_rows, width)


def _heads(
    hidden_SEBH: Tensor, classes_SEBK: Tensor, weights: Mapping[str, Tensor], num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return means and log-variances of all ticks at once, both (S, E, B)."""
    num_ticks, num_members, num_rows, num_hidden = hidden_SEBH.shape
    hidden_ENH = hidden_SEBH.transpose(0, 1).flatten(1, 2)
    classes_ENK = classes_SEBK.transpose(0, 1).flatten(1, 2)
    weight_EID = weights["head_hidden.weight"]
    before_END = torch.baddbmm(weights["head_hidden.bias"], hidden_ENH, weight_EID[:, :num_hidden])
    before_END = before_END + _sum_of_rows(classes_ENK, weight_EID, num_classes)
    answers = linear(silu(before_END), weights, "head").view(num_members, num_ticks, num_rows, 2)
    means, log_variances = (answer.transpose(0, 1) for answer in answers.unbind(-1))
    layout = torch.contiguous_format
    return means.clone(memory_format=layout), log_variances.clone(memory_format=layout)


def rssm_rollout_reference(
    weights: Mapping[str, Tensor],
    hidden_EBH: Tensor,
    classes_EBK: Tensor,
    actions_SEBA: Tensor,
    uniforms_SEBK: Tensor,
    features_EBF: Tensor | None = None,
) -> RssmRollout:
    """Return the path of S ticks; arguments as those of ``rssm_rollout``, in one floating-point dtype."""
    hidden, classes, logits = hidden_EBH, classes_EBK, hidden_EBH
    num_classes = weights["mix.weight"].shape[1] // classes.shape[2]
    all_hidden, all_classes = [], []
    for tick, (action_EBA, uniforms_EBK) in enumerate(zip(actions_SEBA, uniforms_SEBK, strict=True)):
        mixed = linear(action_EBA, weights, "action") + _sum_of_rows(classes, weights["mix.weight"], num_classes)
        mixed = mixed + weights["mix.bias"]
        if features_EBF is not None and tick == 0:
            mixed = mixed + linear(features_EBF, weights, "seen")
        hidden = gru_cell(silu(mixed), hidden, weights)
        logits = linear(hidden, weights, "prior")
        classes = draw_classes(unimix(logits.view(*classes.shape, num_classes)), uniforms_EBK)
        all_hidden.append(hidden)
        all_classes.append(classes)
    means, log_variances = _heads(torch.stack(all_hidden), torch.stack(all_classes), weights, num_classes)
    return RssmRollout(means, log_variances, hidden, classes, logits)
