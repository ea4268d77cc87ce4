"""Rotary position embedding in plain torch (Su et al., 2104.09864), halves rotated against each other."""

import torch
from torch import Tensor


def rotary_reference(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Return x with each pair (i, i + H/2) turned by its position's angle; R = H/2, arithmetic in fp32."""
    first, second = x_BTNH.float().chunk(2, dim=-1)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTNH.dtype)
