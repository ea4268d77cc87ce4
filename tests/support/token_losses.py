"""What torch makes of logits: the loss of each token and the gradient of their sum. C tokens, V vocabulary."""

import torch
from torch import Tensor
from torch.nn import functional


def torchs_results(logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return losses_C and the gradient of ``scale`` times their sum; 16-bit logits are widened to float32."""
    leaf_CV = logits_CV.detach().requires_grad_()
    wide_CV = leaf_CV if leaf_CV.dtype == torch.float64 else leaf_CV.float()
    if softcap:
        wide_CV = softcap * torch.tanh(wide_CV / softcap)
    losses_C = functional.cross_entropy(wide_CV, targets_C, reduction="none")
    (grad_CV,) = torch.autograd.grad(losses_C.sum() * scale, leaf_CV)
    return losses_C.detach(), grad_CV
