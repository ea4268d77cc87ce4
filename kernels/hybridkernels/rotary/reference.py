"""Rotary position embedding in plain torch (Su et al., 2104.09864), halves rotated against each other."""

import torch
from torch import Tensor


def rotary_reference(x_BTNH: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_BT: Tensor | None = None) -> Tensor:
    """Return x with each pair (i, i + R) turned by its position's angle, arithmetic in fp32; the rest stays as it is.

    Tables are (T, R), or (B, T, R) where rows have positions of their own, or (T, R) and given positions. 2R is H,
    or less where only the first columns turn (GPT-NeoX, 2204.06745, section 2.1).
    """
    num_turned = 2 * cos_TR.shape[-1]
    first, second = x_BTNH[..., :num_turned].float().chunk(2, dim=-1)
    if positions_BT is not None:
        cos_TR, sin_TR = cos_TR[positions_BT], sin_TR[positions_BT]
    cos, sin = cos_TR.unsqueeze(-2), sin_TR.unsqueeze(-2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTNH.dtype)
    return turned if num_turned == x_BTNH.shape[-1] else torch.cat([turned, x_BTNH[..., num_turned:]], dim=-1)
