"""Causal attention in plain torch, the definition the op is tested against.

B batch, T sequence, N query heads, K key/value heads, H head dim.
"""

import torch
from torch import Tensor


def causal_attention_reference(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(H), causal) v as out_BTNH; materialises the (B, N, T, T) scores."""
    group = q_BTNH.shape[2] // k_BTKH.shape[2]
    k_BTNH = k_BTKH.repeat_interleave(group, dim=2)
    v_BTNH = v_BTKH.repeat_interleave(group, dim=2)
    scores_BNTT = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) * q_BTNH.shape[-1] ** -0.5
    seq_len = q_BTNH.shape[1]
    future_TT = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q_BTNH.device).triu(1)
    weights_BNTT = scores_BNTT.masked_fill(future_TT, float("-inf")).softmax(-1)
    return torch.einsum("bnts,bsnh->btnh", weights_BNTT, v_BTNH)
