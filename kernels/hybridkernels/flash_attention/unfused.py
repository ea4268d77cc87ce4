"""Causal attention as it is written without a fused kernel, to show what flash attention saves.

B batch, T sequence, N query heads, K key/value heads, H head dim. The order of operations and of roundings is that of
Hugging Face's ``eager_attention_forward``.
"""

import torch
from torch import Tensor

from hybridkernels.flash_attention.checks import check_inputs


def unfused_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """Return causal attention scaled by 1/sqrt(H), in torch's own ops, each visible to the dispatcher.

    Args:
        q_BTNH: (B, T, N, H), any floating point dtype, strides and device, meta too.
        k_BTKH: (B, T, K, H), N a multiple of K.
        v_BTKH: (B, T, K, H).

    Returns:
        out_BTNH: (B, T, N, H), contiguous, dtype and device of the inputs.

    Raises:
        ValueError: shapes, dtypes or devices do not go together.

    Memory: keeps B*N*T*T weights for the backward pass, in float32 (what softmax saves) and, for 16-bit inputs, once
    more rounded (what the product with v saves); besides q, and k and v with N heads.
    """
    check_inputs("unfused_attention", q_BTNH, k_BTKH, v_BTKH)
    q_BNTH = q_BTNH.transpose(1, 2)
    k_BNTH, v_BNTH = (_repeat_heads(tensor, q_BTNH.shape[2]) for tensor in (k_BTKH, v_BTKH))
    weights_BNTT = torch.matmul(q_BNTH, k_BNTH.transpose(2, 3)) * q_BNTH.shape[3] ** -0.5
    weights_BNTT = weights_BNTT + _causal_mask(weights_BNTT)
    wide = torch.promote_types(weights_BNTT.dtype, torch.float32)
    weights_BNTT = weights_BNTT.to(wide).softmax(-1).to(v_BNTH.dtype)
    out_BNTH = torch.matmul(weights_BNTT, v_BNTH)
    return out_BNTH.transpose(1, 2).contiguous()


def _causal_mask(scores_BNTT: Tensor) -> Tensor:
    """Return a (T, T) summand: the type's lowest number above the diagonal, whose softmax is exactly 0."""
    seq_len = scores_BNTT.shape[-1]
    lowest = torch.finfo(scores_BNTT.dtype).min
    return scores_BNTT.new_full((seq_len, seq_len), lowest).triu(1)


def _repeat_heads(kv_BTKH: Tensor, num_heads: int) -> Tensor:
    """Return (B, N, T, H): each key/value head once for every query head of its group."""
    batch, seq_len, num_kv_heads, head_dim = kv_BTKH.shape
    kv_BKTH = kv_BTKH.transpose(1, 2)
    if num_heads == num_kv_heads:
        return kv_BKTH
    shape = (batch, num_kv_heads, num_heads // num_kv_heads, seq_len, head_dim)
    return kv_BKTH[:, :, None].expand(shape).reshape(batch, num_heads, seq_len, head_dim)
