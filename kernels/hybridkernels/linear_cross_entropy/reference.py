"""Cross entropy of logits and its gradient in plain torch. C tokens, V vocabulary."""

import torch
from torch import Tensor

IGNORED = -100
"""The target of a token that does not count, as in torch's ``cross_entropy``."""


def cross_entropy_grad_reference(
    logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (losses_C, dlogits_CV): logsumexp(y) - y[target] in nats, and scale * (softmax(y) - onehot(target)).

    y is x, or c * tanh(x / c) with a soft cap c, whose gradient takes 1 - (y / c)^2 more. Tokens of target -100 have
    neither loss nor gradient. 16-bit logits are computed in float32; the losses stay in it, the gradient is rounded
    once to the logits' dtype.
    """
    work_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    slope_CV = torch.ones_like(work_CV)
    if softcap:
        work_CV = softcap * torch.tanh(work_CV / softcap)
        slope_CV = 1 - (work_CV / softcap) ** 2
    counts_C = (targets_C != IGNORED).to(work_CV.dtype)
    targets_C = targets_C.clamp(min=0)
    picked_C = work_CV.gather(1, targets_C[:, None])[:, 0]
    losses_C = (work_CV.logsumexp(1) - picked_C) * counts_C
    one_hot_CV = torch.nn.functional.one_hot(targets_C, logits_CV.shape[1])
    grad_CV = scale * (work_CV.softmax(1) - one_hot_CV) * slope_CV * counts_C[:, None]
    return losses_C, grad_CV.to(logits_CV.dtype)
