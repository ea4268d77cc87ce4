"""Causal attention on CUDA by torch's own kernels: flash for 16-bit types, memory-efficient for fp32.

B batch, T sequence, N query heads, K key/value heads, H head dim. The flash kernel is for 16-bit types. The
memory-efficient kernel pads its log-sum-exp to a multiple of 32 rows R, and every device returns that shape, so that a
run on any of them holds the same bytes.
"""

import math

import torch
from torch import Tensor

from hybridkernels.triton_launch import compute_capability

_ATEN = torch.ops.aten
_LSE_ROW_PAD = 32
"""Row padding of the memory-efficient kernel's log-sum-exp (aten/native/transformers/cuda/attention.cu)."""
_FLASH_ROW_PAD = 128
"""Row padding of the flash kernel's backward scratch (flash_api.cpp, mha_bwd)."""
_FLASH_DTYPES = frozenset({torch.bfloat16, torch.float16})
_FLASH_HEAD_DIM_STEP = 8
_FLASH_HEAD_DIM = 256
_FLASH_CAPABILITY = 80


def lse_rows(q_BTNH: Tensor) -> int:
    """Return R, the rows of the log-sum-exp."""
    seq_len = q_BTNH.shape[1]
    return math.ceil(seq_len / _LSE_ROW_PAD) * _LSE_ROW_PAD if q_BTNH.dtype == torch.float32 else seq_len


def flash_takes(q_BTNH: Tensor) -> bool:
    """Return whether torch's flash kernel takes this dtype and head dim on the card of ``q_BTNH`` (flash_api.cpp)."""
    head_dim = q_BTNH.shape[3]
    return (
        q_BTNH.dtype in _FLASH_DTYPES
        and head_dim % _FLASH_HEAD_DIM_STEP == 0
        and head_dim <= _FLASH_HEAD_DIM
        and compute_capability(q_BTNH.device) >= _FLASH_CAPABILITY
        and torch.backends.cuda.is_flash_attention_available()
    )


def heads_first(*tensors_BTNH: Tensor) -> tuple[Tensor, ...]:
    """Return views with the heads in front of the sequence, as torch's kernels take and return them."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors_BTNH)


def padded(lse_BNT: Tensor, q_BTNH: Tensor) -> Tensor:
    """Return lse_BNR, zeros behind the T rows."""
    lse_BNR = lse_BNT.new_zeros(*lse_BNT.shape[:2], lse_rows(q_BTNH))
    lse_BNR[..., : lse_BNT.shape[2]] = lse_BNT
    return lse_BNR


def dense(dq_BNTH: Tensor, dk_BKTH: Tensor, dv_BKTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous gradients with the sequence in front of the heads."""
    dq_BTNH, dk_BTKH, dv_BTKH = (grad.transpose(1, 2).contiguous() for grad in (dq_BNTH, dk_BKTH, dv_BKTH))
    return dq_BTNH, dk_BTKH, dv_BTKH


def flash(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return out_BTNH, contiguous, and lse_BNR; without a scale it is 1/sqrt(H)."""
    out_BNTH, lse_BNR, *_ = _ATEN._scaled_dot_product_flash_attention(
        *heads_first(q_BTNH, k_BTKH, v_BTKH), 0.0, is_causal=True, scale=scale
    )
    return out_BNTH.transpose(1, 2).contiguous(), lse_BNR


def efficient(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
    """Return out_BTNH, contiguous, and lse_BNR."""
    q_BNTH, k_BKTH, v_BKTH = heads_first(q_BTNH, k_BTKH, v_BTKH)
    k_BNTH, v_BNTH = _repeat_heads(k_BKTH, q_BNTH), _repeat_heads(v_BKTH, q_BNTH)
    out_BNTH, lse_BNR, _, _ = _ATEN._scaled_dot_product_efficient_attention(
        q_BNTH, k_BNTH, v_BNTH, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=True
    )
    return out_BNTH.transpose(1, 2).contiguous(), lse_BNR


def flash_backward(*tensors: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq_BTNH, dk_BTKH and dv_BTKH, contiguous, of grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH and lse_BNR."""
    *inputs, lse_BNR = tensors
    seq_len, no_rng = inputs[1].shape[1], _no_rng(lse_BNR)
    grads = _ATEN._scaled_dot_product_flash_attention_backward(
        *heads_first(*inputs), lse_BNR, None, None, seq_len, seq_len, 0.0,
        is_causal=True, philox_seed=no_rng, philox_offset=no_rng, scale=scale,
    )  # fmt: skip
    return dense(*grads)


def efficient_backward(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same, by the memory-efficient kernel."""
    *inputs, lse_BNR = tensors
    grad_BNTH, q_BNTH, k_BKTH, v_BKTH, out_BNTH = heads_first(*inputs)
    k_BNTH, v_BNTH = _repeat_heads(k_BKTH, q_BNTH), _repeat_heads(v_BKTH, q_BNTH)
    no_rng, needs_grad = _no_rng(lse_BNR), [True, True, True, False]
    dq_BNTH, dk_BNTH, dv_BNTH, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        grad_BNTH, q_BNTH, k_BNTH, v_BNTH, None, out_BNTH, lse_BNR, no_rng, no_rng, 0.0, needs_grad, is_causal=True
    )
    return dense(dq_BNTH, _sum_heads(dk_BNTH, k_BKTH), _sum_heads(dv_BNTH, v_BKTH))


def _no_rng(like: Tensor) -> Tensor:
    """Return a placeholder for the state of the generator, read by the kernels only under dropout."""
    return torch.empty((), dtype=torch.int64, device=like.device)


def _repeat_heads(kv_BKTH: Tensor, q_BNTH: Tensor) -> Tensor:
    group = q_BNTH.shape[1] // kv_BKTH.shape[1]
    return kv_BKTH if group == 1 else kv_BKTH.repeat_interleave(group, dim=1)  # which copies for a group of one too


def _sum_heads(grad_BNTH: Tensor, kv_BKTH: Tensor) -> Tensor:
    batch, num_kv_heads, seq_len, head_dim = kv_BKTH.shape
    return grad_BNTH.view(batch, num_kv_heads, -1, seq_len, head_dim).sum(2)


def backward_workspace_bytes(q_BTNH: Tensor, k_BTKH: Tensor) -> int:
    """Return the scratch bytes of torch's CUDA backward kernel, which no dispatcher sees.

    16-bit types (flash, mha_bwd): an fp32 accumulator of dq and one fp32 row sum, rows padded to 128 and the head
    dim to 32; with grouped heads also dk and dv per query head. fp32 (memory-efficient): the product of out and its
    gradient, its row sums and their contiguous copy (delta, attention_backward.cu); with grouped heads also k, v, dk
    and dv per query head.
    """
    batch, seq_len, num_heads, head_dim = q_BTNH.shape
    is_grouped = num_heads != k_BTKH.shape[2]
    if q_BTNH.dtype == torch.float32:
        expanded = 4 * 4 * batch * seq_len * num_heads * head_dim if is_grouped else 0
        return 4 * batch * num_heads * seq_len * (head_dim + 2) + expanded
    rows = math.ceil(seq_len / _FLASH_ROW_PAD) * _FLASH_ROW_PAD
    dq_accumulator = 4 * batch * num_heads * rows * (math.ceil(head_dim / 32) * 32)
    row_sums = 4 * batch * num_heads * rows
    expanded = 2 * 2 * batch * seq_len * num_heads * head_dim if is_grouped else 0
    return dq_accumulator + row_sums + expanded
