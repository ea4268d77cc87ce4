"""Cross entropy of logits and its gradient by them in plain torch. C tokens, V vocabulary."""

import torch
from torch import Tensor


def cross_entropy_grad_reference(logits_CV: Tensor, targets_C: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return (losses_C, dlogits_CV): logsumexp(x) - x[target] in nats, and scale * (softmax(x) - onehot(target)).

    16-bit logits are computed in float32; the losses stay in it, the gradient is rounded once to the logits' dtype.
    """
    work_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    picked_C = work_CV.gather(1, targets_C[:, None])[:, 0]
    losses_C = work_CV.logsumexp(1) - picked_C
    one_hot_CV = torch.nn.functional.one_hot(targets_C, logits_CV.shape[1])
    return losses_C, (scale * (work_CV.softmax(1) - one_hot_CV)).to(logits_CV.dtype)
