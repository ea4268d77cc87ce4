"""Root-mean-square normalisation in plain torch (Zhang and Sennrich, 1910.07467)."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, arithmetic in fp32."""
    x_fp32 = x.float()
    rstd = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return (x_fp32 * rstd * weight_D.float()).to(x.dtype)
