"""Causal attention in plain torch, the definition the op is tested against.

B batch, T sequence, N query heads, K key/value heads, H head dim.
"""

import torch
from torch import Tensor


def causal_attention_reference(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    document_ids_BT: Tensor | None = None,
) -> Tensor:
    """Return softmax(mask(c * tanh(s / c))) v with s = scale * q k^T; materialises the (B, N, T, T) scores."""
    group = q_BTNH.shape[2] // k_BTKH.shape[2]
    k_BTNH = k_BTKH.repeat_interleave(group, dim=2)
    v_BTNH = v_BTKH.repeat_interleave(group, dim=2)
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    scores_BNTT = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) * scale
    if softcap:
        scores_BNTT = softcap * torch.tanh(scores_BNTT / softcap)
    positions_T = torch.arange(q_BTNH.shape[1], device=q_BTNH.device)
    distance_TT = positions_T[:, None] - positions_T
    hidden_BNTT = (distance_TT < 0).expand_as(scores_BNTT)
    if window:
        hidden_BNTT = hidden_BNTT | (distance_TT >= window)
    if document_ids_BT is not None:
        hidden_BNTT = hidden_BNTT | (document_ids_BT[:, None, :, None] != document_ids_BT[:, None, None, :])
    weights_BNTT = scores_BNTT.masked_fill(hidden_BNTT, float("-inf")).softmax(-1)
    return torch.einsum("bnts,bsnh->btnh", weights_BNTT, v_BTNH)
