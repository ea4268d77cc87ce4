"""Causal attention as one torch.library op: torch's flash kernels on CPU and CUDA, shapes only on meta.

B batch, T sequence, N query heads, K key/value heads, H head dim. fp32 on CUDA takes the memory-efficient
kernel, because the flash kernel is for 16-bit types; its log-sum-exp is padded to a multiple of 32 rows, and the
CPU returns the same shape so that a run on either device holds the same bytes.
"""

import math
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_LSE_ROW_PAD = 32
"""Row padding of the memory-efficient kernel's log-sum-exp (aten/native/transformers/cuda/attention.cu)."""
_FLASH_ROW_PAD = 128
"""Row padding of the flash kernel's backward scratch (flash_api.cpp, mha_bwd)."""


def _lse_rows(q_BTNH: Tensor) -> int:
    seq_len = q_BTNH.shape[1]
    return math.ceil(seq_len / _LSE_ROW_PAD) * _LSE_ROW_PAD if q_BTNH.dtype == torch.float32 else seq_len


@torch.library.custom_op("hybridkernels::causal_attention", mutates_args=(), device_types="cpu")
def _attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
    out_BNTH, lse_BNT = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q_BTNH.transpose(1, 2), k_BTKH.transpose(1, 2), v_BTKH.transpose(1, 2), 0.0, is_causal=True
    )
    lse_BNR = lse_BNT.new_zeros(*lse_BNT.shape[:2], _lse_rows(q_BTNH))
    lse_BNR[..., : lse_BNT.shape[2]] = lse_BNT
    return out_BNTH.transpose(1, 2).contiguous(), lse_BNR


@_attention.register_kernel("cuda")
def _attention_cuda(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
    q_BNTH, k_BKTH, v_BKTH = (tensor.transpose(1, 2) for tensor in (q_BTNH, k_BTKH, v_BTKH))
    if q_BTNH.dtype == torch.float32:
        k_BNTH, v_BNTH = _repeat_heads(k_BKTH, q_BNTH), _repeat_heads(v_BKTH, q_BNTH)
        out_BNTH, lse_BNR, _, _ = _ATEN._scaled_dot_product_efficient_attention(
            q_BNTH, k_BNTH, v_BNTH, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=True
        )
    else:
        out_BNTH, lse_BNR, *_ = _ATEN._scaled_dot_product_flash_attention(q_BNTH, k_BKTH, v_BKTH, 0.0, is_causal=True)
    return out_BNTH.transpose(1, 2).contiguous(), lse_BNR


@_attention.register_fake
def _attention_fake(
    q_BTNH: Tensor,
    k_BTKH: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    v_BTKH: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    batch, _, num_heads, _ = q_BTNH.shape
    lse_BNR = q_BTNH.new_empty(batch, num_heads, _lse_rows(q_BTNH), dtype=torch.float32)
    return q_BTNH.new_empty(q_BTNH.shape), lse_BNR


@torch.library.custom_op("hybridkernels::causal_attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, out_BTNH: Tensor, lse_BNR: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    lse_BNT = lse_BNR[..., : q_BTNH.shape[1]]
    grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        *(tensor.transpose(1, 2) for tensor in (grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH)),
        lse_BNT,
        0.0,
        is_causal=True,
    )
    dq_BTNH, dk_BTKH, dv_BTKH = (grad.transpose(1, 2).contiguous() for grad in grads)
    return dq_BTNH, dk_BTKH, dv_BTKH


@_attention_backward.register_kernel("cuda")
def _attention_backward_cuda(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, out_BTNH: Tensor, lse_BNR: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_BNTH, q_BNTH, k_BKTH, v_BKTH, out_BNTH = (
        tensor.transpose(1, 2) for tensor in (grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH)
    )
    no_rng = torch.empty((), dtype=torch.int64, device=q_BTNH.device)  # read by the kernels only under dropout
    if q_BTNH.dtype == torch.float32:
        k_BNTH, v_BNTH = _repeat_heads(k_BKTH, q_BNTH), _repeat_heads(v_BKTH, q_BNTH)
        needs_grad = [True, True, True, False]
        dq_BNTH, dk_BNTH, dv_BNTH, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
            grad_BNTH,
            q_BNTH,
            k_BNTH,
            v_BNTH,
            None,
            out_BNTH,
            lse_BNR,
            no_rng,
            no_rng,
            0.0,
            needs_grad,
            is_causal=True,
        )
        dk_BKTH, dv_BKTH = _sum_heads(dk_BNTH, k_BKTH), _sum_heads(dv_BNTH, v_BKTH)
    else:
        seq_len = q_BTNH.shape[1]
        dq_BNTH, dk_BKTH, dv_BKTH = _ATEN._scaled_dot_product_flash_attention_backward(
            grad_BNTH, q_BNTH, k_BKTH, v_BKTH, out_BNTH, lse_BNR, None, None, seq_len, seq_len, 0.0,
            is_causal=True, philox_seed=no_rng, philox_offset=no_rng,
        )  # fmt: skip
    dq_BTNH, dk_BTKH, dv_BTKH = (grad.transpose(1, 2).contiguous() for grad in (dq_BNTH, dk_BKTH, dv_BKTH))
    return dq_BTNH, dk_BTKH, dv_BTKH


@_attention_backward.register_fake
def _attention_backward_fake(
    grad_BTNH: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    out_BTNH: Tensor,  # noqa: ARG001
    lse_BNR: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BTNH.new_empty(q_BTNH.shape), k_BTKH.new_empty(k_BTKH.shape), v_BTKH.new_empty(v_BTKH.shape)


def _repeat_heads(kv_BKTH: Tensor, q_BNTH: Tensor) -> Tensor:
    return kv_BKTH.repeat_interleave(q_BNTH.shape[1] // kv_BKTH.shape[1], dim=1)


def _sum_heads(grad_BNTH: Tensor, kv_BKTH: Tensor) -> Tensor:
    batch, num_kv_heads, seq_len, head_dim = kv_BKTH.shape
    return grad_BNTH.view(batch, num_kv_heads, -1, seq_len, head_dim).sum(2)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, grad_BTNH: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = _attention_backward(grad_BTNH, *ctx.saved_tensors)
    return grads


_attention.register_autograd(_differentiate, setup_context=_save)


def causal_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """Return causal attention scaled by 1/sqrt(H).

    Args:
        q_BTNH: (B, T, N, H) float32, float16 or bfloat16; any strides with a dense last dimension.
        k_BTKH: (B, T, K, H), N a multiple of K.
        v_BTKH: (B, T, K, H).

    Returns:
        out_BTNH: (B, T, N, H), contiguous, dtype and device of the inputs.

    Memory: saves q, k, v, out and 4*B*N*T bytes of log-sum-exp for the backward pass, never the T x T scores.
    """
    out_BTNH: Tensor = _attention(q_BTNH, k_BTKH, v_BTKH)[0]
    return out_BTNH


def backward_workspace_bytes(q_BTNH: Tensor, k_BTKH: Tensor) -> int:
    """Return the scratch bytes of the CUDA backward kernel, which no dispatcher sees.

    16-bit types (flash, mha_bwd): an fp32 accumulator of dq and one fp32 row sum, rows padded to 128 and the head
    dim to 32; with grouped heads also dk and dv per query head. fp32 (memory-efficient): the product of out and its
    gradient, its row sums and their contiguous copy (delta, attention_backward.cu); with grouped heads also k, v, dk
    and dv per query head.
    """
    batch, seq_len, num_heads, head_dim = q_BTNH.shape
    if q_BTNH.dtype == torch.float32:
        expanded = 4 * 4 * batch * seq_len * num_heads * head_dim if num_heads != k_BTKH.shape[2] else 0
        return 4 * batch * num_heads * seq_len * (head_dim + 2) + expanded
    rows = math.ceil(seq_len / _FLASH_ROW_PAD) * _FLASH_ROW_PAD
    dq_accumulator = 4 * batch * num_heads * rows * (math.ceil(head_dim / 32) * 32)
    row_sums = 4 * batch * num_heads * rows
    grouped = num_heads != k_BTKH.shape[2]
    expanded = 2 * 2 * batch * seq_len * num_heads * head_dim if grouped else 0
    return dq_accumulator + row_sums + expanded


def _attention_flops(q_shape: tuple[int, ...], *_args: Any, **_kwargs: Any) -> int:
    """Two matmuls over the lower triangle: 2 * 2 * B*N*T*T*H / 2."""
    batch, seq_len, num_heads, head_dim = q_shape
    return 2 * batch * num_heads * seq_len * seq_len * head_dim


def _attention_backward_flops(_grad: tuple[int, ...], q_shape: tuple[int, ...], *_args: Any, **_kwargs: Any) -> int:
    """Five matmuls over the lower triangle: scores again, dv, dp, dq, dk."""
    return 5 * _attention_flops(q_shape) // 2


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula  # noqa: PLC0415  its import takes 0.1 s

    register_flop_formula(torch.ops.hybridkernels.causal_attention)(_attention_flops)
    register_flop_formula(torch.ops.hybridkernels.causal_attention_backward)(_attention_backward_flops)


_register_flops()
