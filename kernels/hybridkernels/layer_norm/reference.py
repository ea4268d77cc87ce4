"""Layer normalisation in plain torch."""

import torch
from torch import Tensor


def layer_norm_reference(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias over the last dimension, arithmetic in fp32."""
    x_fp32 = x.float()
    centred = x_fp32 - x_fp32.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * rstd * weight_D.float() + bias_D.float()).to(x.dtype)
