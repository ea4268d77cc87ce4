"""Causal attention as it is written without a fused kernel, to show what flash attention saves.

B batch, T sequence, N query heads, K key/value heads, H head dim. The order of operations and of roundings is that of
Hugging Face's ``eager_attention_forward``.
"""

import torch
from torch import Tensor

from hybridkernels.flash_attention.options import check_inputs


def unfused_attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    document_ids_BT: Tensor | None = None,
    kept: object = None,
) -> Tensor:
    """Return causal attention in torch's own ops, each visible to the dispatcher; arguments as ``causal_attention``'s.

    It has no log-sum-exp to keep: ``kept`` must be None.

    Any floating point dtype, strides and device, meta too.

    Raises:
        ValueError: shapes, dtypes or devices do not go together, or an option is out of its range.

    Memory: keeps B*N*T*T weights for the backward pass, in float32 (what softmax saves) and, for 16-bit inputs, once
    more rounded (what the product with v saves); besides q, and k and v with N heads. A soft cap keeps B*N*T*T more in
    the inputs' dtype.
    """
    assert kept is None, "attention without a fused kernel is not kept"
    check_inputs("unfused_attention", q_BTNH, k_BTKH, v_BTKH, softcap, window, document_ids_BT)
    scale = q_BTNH.shape[3] ** -0.5 if scale is None else scale
    q_BNTH = q_BTNH.transpose(1, 2)
    k_BNTH, v_BNTH = (_repeat_heads(tensor, q_BTNH.shape[2]) for tensor in (k_BTKH, v_BTKH))
    weights_BNTT = torch.matmul(q_BNTH, k_BNTH.transpose(2, 3)) * scale
    if softcap:
        weights_BNTT = torch.tanh(weights_BNTT / softcap) * softcap
    weights_BNTT = weights_BNTT + _mask(weights_BNTT, window, document_ids_BT)
    wide = torch.promote_types(weights_BNTT.dtype, torch.float32)
    weights_BNTT = weights_BNTT.to(wide).softmax(-1).to(v_BNTH.dtype)
    out_BNTH = torch.matmul(weights_BNTT, v_BNTH)
    return out_BNTH.transpose(1, 2).contiguous()


def _mask(scores_BNTT: Tensor, window: int, document_ids_BT: Tensor | None) -> Tensor:
    """Return a summand: the type's lowest number where a key is hidden, whose softmax is exactly 0.

    (T, T), or (B, 1, T, T) with documents.
    """
    seq_len = scores_BNTT.shape[-1]
    lowest = torch.finfo(scores_BNTT.dtype).min
    mask = scores_BNTT.new_full((seq_len, seq_len), lowest).triu(1)
    if 0 < window < seq_len:
        mask = mask + scores_BNTT.new_full((seq_len, seq_len), lowest).tril(-window)
    if document_ids_BT is not None:
        differs_B1TT = document_ids_BT[:, None, :, None] != document_ids_BT[:, None, None, :]
        mask = torch.where(differs_B1TT, lowest, mask)
    return mask


def _repeat_heads(kv_BTKH: Tensor, num_heads: int) -> Tensor:
    """Return (B, N, T, H): each key/value head once for every query head of its group."""
    batch, seq_len, num_kv_heads, head_dim = kv_BTKH.shape
    kv_BKTH = kv_BTKH.transpose(1, 2)
    if num_heads == num_kv_heads:
        return kv_BKTH
    shape = (batch, num_kv_heads, num_heads // num_kv_heads, seq_len, head_dim)
    return kv_BKTH[:, :, None].expand(shape).reshape(batch, num_heads, seq_len, head_dim)
