"""Causal attention as one torch.library op: torch's flash kernels or ours on CUDA, torch's on the CPU, shapes on meta.

B batch, T sequence, N query heads, K key/value heads, H head dim, R rows of the log-sum-exp.
"""

from typing import Any

import torch
from torch import Tensor

from hybridkernels.flash_attention import sdpa
from hybridkernels.flash_attention.checks import check_inputs, check_options
from hybridkernels.flash_attention.masked import masked_attention
from hybridkernels.provider import chosen_provider
from hybridkernels.triton_launch import compute_capability, cuda_backend

_ATEN = torch.ops.aten
_TRITON_DTYPES = frozenset({torch.bfloat16, torch.float16})
_TRITON_HEAD_DIM = 128
"""Of wider heads no tile of useful size fits the registers."""
_TRITON_CAPABILITY = 80


def _provider(q_BTNH: Tensor) -> str:
    """Return what runs on the card of ``q_BTNH``; forward and backward ask alike, and either reads the other's lse."""
    head_dim = q_BTNH.shape[3]
    available = []
    if q_BTNH.dtype == torch.float32:
        available.append("sdpa_efficient")
    if sdpa.flash_takes(q_BTNH):
        available.append("sdpa_flash")
    if _triton_takes(q_BTNH):
        available.append("triton")
    if not available:
        raise ValueError(
            f"causal_attention: no kernel for {q_BTNH.dtype} with head dim {head_dim} on this card; 16-bit types need "
            f"compute capability 8.0 and a head dim that is a multiple of 8 up to 256, or, where Triton runs, any up "
            f"to {_TRITON_HEAD_DIM}; use float32, or pad the heads"
        )
    return chosen_provider(f"causal_attention/head{head_dim}", available, q_BTNH.device)


def _triton_takes(q_BTNH: Tensor) -> bool:
    return (
        q_BTNH.dtype in _TRITON_DTYPES
        and q_BTNH.shape[3] <= _TRITON_HEAD_DIM
        and compute_capability(q_BTNH.device) >= _TRITON_CAPABILITY
        and cuda_backend() == "triton"
    )


@torch.library.custom_op("hybridkernels::causal_attention", mutates_args=(), device_types="cpu")
def _attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
    out_BNTH, lse_BNT = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q_BTNH.transpose(1, 2), k_BTKH.transpose(1, 2), v_BTKH.transpose(1, 2), 0.0, is_causal=True
    )
    lse_BNR = lse_BNT.new_zeros(*lse_BNT.shape[:2], sdpa.lse_rows(q_BTNH))
    lse_BNR[..., : lse_BNT.shape[2]] = lse_BNT
    return out_BNTH.transpose(1, 2).contiguous(), lse_BNR


@_attention.register_kernel("cuda")
def _attention_cuda(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
    provider = _provider(q_BTNH)
    if provider == "sdpa_efficient":
        return sdpa.efficient(q_BTNH, k_BTKH, v_BTKH)
    if provider == "sdpa_flash":
        return sdpa.flash(q_BTNH, k_BTKH, v_BTKH)
    from hybridkernels.flash_attention.triton_kernel import causal_attention_triton  # noqa: PLC0415  optional

    return causal_attention_triton(q_BTNH, k_BTKH, v_BTKH)


@_attention.register_fake
def _attention_fake(
    q_BTNH: Tensor,
    k_BTKH: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    v_BTKH: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    batch, _, num_heads, _ = q_BTNH.shape
    lse_BNR = q_BTNH.new_empty(batch, num_heads, sdpa.lse_rows(q_BTNH), dtype=torch.float32)
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
    provider = _provider(q_BTNH)
    if provider == "sdpa_efficient":
        return sdpa.efficient_backward(grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNR)
    if provider == "sdpa_flash":
        return sdpa.flash_backward(grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNR)
    from hybridkernels.flash_attention.triton_kernel import causal_attention_backward_triton  # noqa: PLC0415

    return causal_attention_backward_triton(grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNR)


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


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(value=False)  # nobody differentiates the log-sum-exp: no zeros for it


def _differentiate(ctx: Any, grad_BTNH: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = _attention_backward(grad_BTNH, *ctx.saved_tensors)
    return grads


_attention.register_autograd(_differentiate, setup_context=_save)


def causal_attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    document_ids_BT: Tensor | None = None,
) -> Tensor:
    """Return causal attention.

    Args:
        q_BTNH: (B, T, N, H) float32, float16 or bfloat16; any strides with a dense last dimension.
        k_BTKH: (B, T, K, H), N a multiple of K.
        v_BTKH: (B, T, K, H).
        scale: Of the scores; None: 1/sqrt(H).
        softcap: c of c * tanh(score / c), taken before the mask (Gemma 2, 2408.00118, section 2); 0: none.
        window: Keys that a token sees at most, itself among them (Mistral, 2310.06825, section 2; transformers'
            ``sliding_window``); 0: all.
        document_ids_BT: (B, T) int32 or int64, rising along a row: a token sees its own document only. None: one
            document a row.

    Returns:
        out_BTNH: (B, T, N, H), contiguous, dtype and device of the inputs.

    Raises:
        ValueError: shapes, dtypes or devices do not go together, an option is out of its range, or no kernel of the
            card takes them.

    Memory: saves q, k, v, out and 4*B*N*T bytes of log-sum-exp for the backward pass, and the ids; never the T x T
    scores.
    """
    check_inputs("causal_attention", q_BTNH, k_BTKH, v_BTKH)
    check_options("causal_attention", q_BTNH, softcap, window, document_ids_BT)
    usual_scale = q_BTNH.shape[3] ** -0.5
    scale = usual_scale if scale is None else scale
    window = 0 if window >= q_BTNH.shape[1] else window
    if scale != usual_scale or softcap or window or document_ids_BT is not None:
        return masked_attention(q_BTNH, k_BTKH, v_BTKH, document_ids_BT, scale, softcap, window)
    out_BTNH: Tensor = _attention(q_BTNH, k_BTKH, v_BTKH)[0]
    return out_BTNH


def triton_workspace_bytes(q_BTNH: Tensor, k_BTKH: Tensor) -> int:  # noqa: ARG001  as backward_workspace_bytes
    """Return the scratch bytes of our CUDA backward kernels: one fp32 number for each row and query head."""
    batch, seq_len, num_heads, _ = q_BTNH.shape
    return 4 * batch * num_heads * seq_len


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
