"""Causal attention with a scale of its own, a soft cap, a window or documents, as one torch.library op.

B batch, T sequence, N query heads, K key/value heads, H head dim, R rows of the log-sum-exp. The op beside it, without
any of these, stays what it is.
"""

from typing import Any

import torch
from torch import Tensor

from hybridkernels.flash_attention import sdpa
from hybridkernels.flash_attention.bounds import first_keys, seen_pairs
from hybridkernels.flash_attention.tiled import tiled_attention, tiled_attention_backward
from hybridkernels.provider import chosen_provider
from hybridkernels.triton_launch import compute_capability, cuda_backend

_ATEN = torch.ops.aten
_TRITON_DTYPES = frozenset({torch.bfloat16, torch.float16})
_TRITON_CAPABILITY = 80
_TRITON_HEAD_DIM = 128
"""Up to here any; beyond only the next power of two, with small tiles: torch's own kernels know no soft cap."""


def _provider(q_BTNH: Tensor, *, is_scaled: bool) -> str:
    """Return what runs on the card of ``q_BTNH``; torch's flash kernel where there is nothing but a scale."""
    head_dim = q_BTNH.shape[3]
    available = ["torch"]
    if _triton_takes(q_BTNH):
        available.insert(0, "triton")
    if is_scaled and sdpa.flash_takes(q_BTNH):
        available.insert(0, "sdpa_flash")
    return chosen_provider(f"masked_attention/head{head_dim}", available, q_BTNH.device)


def _triton_takes(q_BTNH: Tensor) -> bool:
    head_dim = q_BTNH.shape[3]
    return (
        q_BTNH.dtype in _TRITON_DTYPES
        and (head_dim <= _TRITON_HEAD_DIM or head_dim == 2 * _TRITON_HEAD_DIM)
        and compute_capability(q_BTNH.device) >= _TRITON_CAPABILITY
        and cuda_backend() == "triton"
    )


@torch.library.custom_op("hybridkernels::masked_attention", mutates_args=(), device_types="cpu")
def _masked(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, ids_BT: Tensor | None, scale: float, softcap: float, window: int
) -> tuple[Tensor, Tensor]:
    if is_scaled_only(ids_BT, softcap, window):
        out_BNTH, lse_BNT = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q_BTNH.transpose(1, 2), k_BTKH.transpose(1, 2), v_BTKH.transpose(1, 2), 0.0, is_causal=True, scale=scale
        )
        return out_BNTH.transpose(1, 2).contiguous(), _padded(lse_BNT, q_BTNH)
    return _tiled(q_BTNH, k_BTKH, v_BTKH, ids_BT, scale, softcap, window)


@_masked.register_kernel("cuda")
def _masked_cuda(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, ids_BT: Tensor | None, scale: float, softcap: float, window: int
) -> tuple[Tensor, Tensor]:
    provider = _provider(q_BTNH, is_scaled=is_scaled_only(ids_BT, softcap, window))
    if provider == "sdpa_flash":
        return sdpa.flash(q_BTNH, k_BTKH, v_BTKH, scale)
    if provider == "torch":
        return _tiled(q_BTNH, k_BTKH, v_BTKH, ids_BT, scale, softcap, window)
    from hybridkernels.flash_attention.triton_kernel import Options, causal_attention_triton  # noqa: PLC0415  optional

    options = Options(scale=scale, softcap=softcap, window=window, ids_BT=ids_BT)
    return causal_attention_triton(q_BTNH, k_BTKH, v_BTKH, options)


@_masked.register_fake
def _masked_fake(
    q_BTNH: Tensor,
    k_BTKH: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    v_BTKH: Tensor,  # noqa: ARG001
    ids_BT: Tensor | None,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    softcap: float,  # noqa: ARG001
    window: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    batch, _, num_heads, _ = q_BTNH.shape
    lse_BNR = q_BTNH.new_empty(batch, num_heads, sdpa.lse_rows(q_BTNH), dtype=_lse_dtype(q_BTNH))
    return q_BTNH.new_empty(q_BTNH.shape), lse_BNR


@torch.library.custom_op("hybridkernels::masked_attention_backward", mutates_args=(), device_types="cpu")
def _masked_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, out_BTNH: Tensor, lse_BNR: Tensor,
    ids_BT: Tensor | None, scale: float, softcap: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH)
    if is_scaled_only(ids_BT, softcap, window):
        lse_BNT = lse_BNR[..., : q_BTNH.shape[1]]
        grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *(tensor.transpose(1, 2) for tensor in tensors), lse_BNT, 0.0, is_causal=True, scale=scale
        )
        dq_BTNH, dk_BTKH, dv_BTKH = (grad.transpose(1, 2).contiguous() for grad in grads)
        return dq_BTNH, dk_BTKH, dv_BTKH
    return _tiled_backward(*tensors, lse_BNR, ids_BT, scale, softcap, window)


@_masked_backward.register_kernel("cuda")
def _masked_backward_cuda(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, out_BTNH: Tensor, lse_BNR: Tensor,
    ids_BT: Tensor | None, scale: float, softcap: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNR)
    provider = _provider(q_BTNH, is_scaled=is_scaled_only(ids_BT, softcap, window))
    if provider == "sdpa_flash":
        return sdpa.flash_backward(*tensors, scale)
    if provider == "torch":
        return _tiled_backward(*tensors, ids_BT, scale, softcap, window)
    from hybridkernels.flash_attention.triton_kernel import (  # noqa: PLC0415  optional
        Options,
        causal_attention_backward_triton,
    )

    options = Options(scale=scale, softcap=softcap, window=window, ids_BT=ids_BT)
    return causal_attention_backward_triton(*tensors, options)


@_masked_backward.register_fake
def _masked_backward_fake(
    grad_BTNH: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    out_BTNH: Tensor,  # noqa: ARG001
    lse_BNR: Tensor,  # noqa: ARG001
    ids_BT: Tensor | None,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    softcap: float,  # noqa: ARG001
    window: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BTNH.new_empty(q_BTNH.shape), k_BTKH.new_empty(k_BTKH.shape), v_BTKH.new_empty(v_BTKH.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BTNH, k_BTKH, v_BTKH, ids_BT, *ctx.numbers = inputs
    ctx.save_for_backward(q_BTNH, k_BTKH, v_BTKH, *output, ids_BT)
    ctx.set_materialize_grads(value=False)  # nobody differentiates the log-sum-exp: no zeros for it


def _differentiate(ctx: Any, grad_BTNH: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _masked_backward(grad_BTNH, *ctx.saved_tensors, *ctx.numbers)
    return *grads, None, None, None, None


_masked.register_autograd(_differentiate, setup_context=_save)


def masked_attention(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, ids_BT: Tensor | None, scale: float, softcap: float, window: int
) -> Tensor:
    """Return what ``causal_attention`` promises, its arguments checked and complete."""
    out_BTNH: Tensor = _masked(q_BTNH, k_BTKH, v_BTKH, ids_BT, scale, softcap, window)[0]
    return out_BTNH


def workspace_bytes(q_BTNH: Tensor, ids_BT: Tensor | None, window: int) -> int:
    """Return the scratch bytes of our CUDA kernel: the first key of each query, where there is one."""
    return 0 if ids_BT is None and not window else 4 * q_BTNH.shape[0] * q_BTNH.shape[1]


def backward_workspace_bytes(q_BTNH: Tensor, k_BTKH: Tensor, ids_BT: Tensor | None, softcap: float, window: int) -> int:
    """Return the scratch bytes of the CUDA backward kernels: torch's, or a row sum and the bounds for ours."""
    if is_scaled_only(ids_BT, softcap, window):
        return sdpa.backward_workspace_bytes(q_BTNH, k_BTKH)
    batch, seq_len, num_heads, _ = q_BTNH.shape
    return 4 * batch * num_heads * seq_len + 2 * workspace_bytes(q_BTNH, ids_BT, window)


def is_scaled_only(ids_BT: Tensor | None, softcap: float, window: int) -> bool:
    """Say whether nothing but the scale is out of the ordinary: torch's own kernels take that."""
    return ids_BT is None and not softcap and not window


def _tiled(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, ids_BT: Tensor | None, scale: float, softcap: float, window: int
) -> tuple[Tensor, Tensor]:
    first_BT = first_keys(q_BTNH, window, ids_BT)
    out_BTNH, lse_BNT = tiled_attention(q_BTNH, k_BTKH, v_BTKH, first_BT, scale, softcap)
    return out_BTNH, _padded(lse_BNT, q_BTNH)


def _tiled_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, out_BTNH: Tensor, lse_BNR: Tensor,
    ids_BT: Tensor | None, scale: float, softcap: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    first_BT = first_keys(q_BTNH, window, ids_BT)
    lse_BNT = lse_BNR[..., : q_BTNH.shape[1]]
    return tiled_attention_backward(grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, first_BT, scale, softcap)


def _lse_dtype(q_BTNH: Tensor) -> torch.dtype:
    return torch.promote_types(q_BTNH.dtype, torch.float32)


def _padded(lse_BNT: Tensor, q_BTNH: Tensor) -> Tensor:
    """Return lse_BNR, zeros behind the T rows."""
    lse_BNR = lse_BNT.new_zeros(*lse_BNT.shape[:2], sdpa.lse_rows(q_BTNH))
    lse_BNR[..., : lse_BNT.shape[2]] = lse_BNT
    return lse_BNR


def _flops(
    q_shape: tuple[int, ...], _k: Any, _v: Any, _ids: Any, _scale: float, _softcap: float, window: int, **_kwargs: Any
) -> int:
    """Two matmuls over the pairs within the window; documents are not looked at: values, not shapes, say where."""
    batch, seq_len, num_heads, head_dim = q_shape
    return int(2 * 2 * batch * num_heads * head_dim * seen_pairs(seq_len, window))


def _backward_flops(_grad: Any, q_shape: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """Five matmuls over them: scores again, dv, dp, dq, dk."""
    k_shape, v_shape, _out, _lse, ids, *numbers = args
    return 5 * _flops(q_shape, k_shape, v_shape, ids, *numbers, **kwargs) // 2


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula  # noqa: PLC0415  its import takes 0.1 s

    register_flop_formula(torch.ops.hybridkernels.masked_attention)(_flops)
    register_flop_formula(torch.ops.hybridkernels.masked_attention_backward)(_backward_flops)


_register_flops()
