"""Causal attention as two torch.library ops: the usual one, and one with a scale, a soft cap, a window or documents.

torch's flash kernels or ours on CUDA, torch's own or tiles of its ops on the CPU, shapes on meta. The flash kernels
need compute capability 8.0: on older cards 16-bit types take the tiles.
B batch, T sequence, N query heads, K key/value heads, H head dim, R rows of the log-sum-exp.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, empty_like
from hybridkernels.flash_attention import sdpa
from hybridkernels.flash_attention.options import Options, check_inputs
from hybridkernels.flash_attention.tiled import tiled_attention, tiled_attention_backward
from hybridkernels.provider import chosen_provider
from hybridkernels.triton_launch import compute_capability, cuda_backend

_ATEN = torch.ops.aten
_TRITON_DTYPES = frozenset({torch.bfloat16, torch.float16})
_TRITON_CAPABILITY = 80
_TRITON_HEAD_DIM = 128
"""Up to here any: of wider heads no tile of useful size fits the registers. With options also twice as many columns, in
small tiles: torch's own kernels know no soft cap."""

_QKV = "Tensor q_BTNH, Tensor k_BTKH, Tensor v_BTKH"
_SAVED = f"Tensor grad_BTNH, {_QKV}, Tensor out_BTNH, Tensor lse_BNR"
_OPTIONS = "Tensor? ids_BT, float scale, float softcap, SymInt window"
_Pair: TypeAlias = tuple[Tensor, Tensor]
_Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _provider(q_BTNH: Tensor, options: Options | None = None) -> str:
    """Return the implementation for the card of ``q_BTNH``; forward and backward may differ, the lse fits both."""
    dtype, head_dim = q_BTNH.dtype, q_BTNH.shape[3]
    takes_triton = (
        dtype in _TRITON_DTYPES
        and (head_dim <= _TRITON_HEAD_DIM or (options is not None and head_dim == 2 * _TRITON_HEAD_DIM))
        and compute_capability(q_BTNH.device) >= _TRITON_CAPABILITY
        and cuda_backend() == "triton"
    )
    runs = {
        "sdpa_efficient": options is None and dtype == torch.float32,
        "sdpa_flash": (options is None or options.is_scale_alone) and sdpa.flash_takes(q_BTNH),
        "triton": takes_triton,
        "torch": options is not None or compute_capability(q_BTNH.device) < _TRITON_CAPABILITY,
    }
    available = [name for name, can_run in runs.items() if can_run]
    if not available:
        raise ValueError(
            f"causal_attention: no kernel for {dtype} with head dim {head_dim} on this card; 16-bit types need a head "
            f"dim that is a multiple of 8 up to 256, or, where Triton runs, any up to {_TRITON_HEAD_DIM}; use float32, "
            "or pad the heads"
        )
    op = "causal_attention" if options is None else "masked_attention"
    return chosen_provider(f"{op}/head{head_dim}", available, q_BTNH.device)


def _cpu(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, *given: Any) -> _Pair:
    options = Options(*given)
    if not options.is_scale_alone:
        return tiled_attention(q_BTNH, k_BTKH, v_BTKH, options)
    out_BNTH, lse_BNT = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        *sdpa.heads_first(q_BTNH, k_BTKH, v_BTKH), 0.0, is_causal=True, scale=options.scale
    )
    return out_BNTH.transpose(1, 2).contiguous(), sdpa.padded(lse_BNT, q_BTNH)


def _cpu_backward(*given: Any) -> _Triple:
    grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNR, *others = given
    tensors, options = (grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH), Options(*others)
    if not options.is_scale_alone:
        return tiled_attention_backward(*tensors, lse_BNR, options)
    lse_BNT = lse_BNR[..., : q_BTNH.shape[1]]
    grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        *sdpa.heads_first(*tensors), lse_BNT, 0.0, is_causal=True, scale=options.scale
    )
    return sdpa.dense(*grads)


def _cuda(*given: Any) -> _Pair:
    q_BTNH, k_BTKH, v_BTKH, *others = given
    tensors, options = (q_BTNH, k_BTKH, v_BTKH), Options(*others)
    provider = _provider(q_BTNH, options if others else None)
    if provider == "sdpa_efficient":
        return sdpa.efficient(*tensors)
    if provider == "sdpa_flash":
        return sdpa.flash(*tensors, options.scale)
    if provider == "torch":
        return tiled_attention(*tensors, options)
    from hybridkernels.flash_attention.triton_kernel import causal_attention_triton  # noqa: PLC0415  optional

    return causal_attention_triton(*tensors, options)


def _cuda_backward(*given: Any) -> _Triple:
    grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNR, *others = given
    tensors, options = (grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNR), Options(*others)
    provider = _provider(q_BTNH, options if others else None)
    if provider == "sdpa_efficient":
        return sdpa.efficient_backward(*tensors)
    if provider == "sdpa_flash":
        return sdpa.flash_backward(*tensors, scale=options.scale)
    if provider == "torch":
        return tiled_attention_backward(*tensors, options)
    from hybridkernels.flash_attention.triton_kernel import causal_attention_backward_triton  # noqa: PLC0415  optional

    return causal_attention_backward_triton(*tensors, options)


def _fake(q_BTNH: Tensor, *_others: Any) -> _Pair:
    batch, _, num_heads, _ = q_BTNH.shape
    wide = torch.promote_types(q_BTNH.dtype, torch.float32)
    return q_BTNH.new_empty(q_BTNH.shape), q_BTNH.new_empty(batch, num_heads, sdpa.lse_rows(q_BTNH), dtype=wide)


def _flops(q_shape: tuple[int, ...], _k: Any, _v: Any, *options: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of two matmuls over the pairs within the window; documents are values, unknown here."""
    batch, seq_len, num_heads, head_dim = q_shape
    window = Options(*options).window
    beyond = seq_len - window if 0 < window < seq_len else 0  # half of the square, less what no window reaches
    return 2 * batch * num_heads * head_dim * (seq_len**2 - beyond**2)


def _backward_flops(_grad: Any, q: Any, k: Any, v: Any, _out: Any, _lse: Any, *options: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of five matmuls over these pairs: scores again, dv, dp, dq, dk."""
    return 5 * _flops(q, k, v, *options) // 2


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    q_BTNH, k_BTKH, v_BTKH, *options = inputs
    ctx.save_for_backward(q_BTNH, k_BTKH, v_BTKH, *output, *options[:1])
    ctx.numbers, ctx.not_differentiable = options[1:], [None] * len(options)
    ctx.set_materialize_grads(value=False)  # the log-sum-exp is never differentiated: no zeros for it


def _differentiate(backward: Any, ctx: Any, grad_BTNH: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return *backward(grad_BTNH, *ctx.saved_tensors, *ctx.numbers), *ctx.not_differentiable


class _Kept(torch.autograd.Function):
    """An attention whose output and log-sum-exp are known: nothing forward, the op's own gradient backward."""

    @staticmethod
    def forward(ctx: Any, backward: Any, *tensors: Any) -> Tensor:
        q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNR, *options = tensors
        _save(ctx, (q_BTNH, k_BTKH, v_BTKH, *options), (out_BTNH, lse_BNR))
        ctx.op = backward
        result: Tensor = out_BTNH.detach()
        return result

    @staticmethod
    def backward(ctx: Any, grad_BTNH: Tensor) -> tuple[Tensor | None, ...]:
        grads = _differentiate(ctx.op, ctx, grad_BTNH, None)
        return None, *grads[:3], None, None, *grads[3:]


@dataclass(slots=True)
class KeptAttention:
    """What one attention leaves for its gradient, so that a recomputed block need not compute it again."""

    tensors: tuple[Tensor, ...] = ()
    """Output (B, T, N, H) and log-sum-exp (B, N, R) float32, of ``causal_attention``; empty: it is to be filled."""


def _define(name: str, options: str) -> Any:
    schema = f"({_QKV}{options}) -> (Tensor, Tensor)"
    forward = define_op(name, _cpu, cuda=_cuda, fake=_fake, flops=_flops, schema=schema)
    backward = define_op(
        f"{name}_backward", _cpu_backward, cuda=_cuda_backward, fake=lambda *tensors: empty_like(*tensors[1:4]),
        flops=_backward_flops, schema=f"({_SAVED}{options}) -> (Tensor, Tensor, Tensor)",
    )  # fmt: skip
    forward.register_autograd(partial(_differentiate, backward), setup_context=_save)
    return forward, backward


_attention = _define("causal_attention", "")
_masked = _define("masked_attention", f", {_OPTIONS}")


def causal_attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    document_ids_BT: Tensor | None = None,
    kept: KeptAttention | None = None,
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
        kept: Where empty, it is filled, outside of autograd. Where filled, by the same inputs, the output is taken
            from it and can be differentiated.

    Returns:
        out_BTNH: (B, T, N, H), contiguous, dtype and device of the inputs.

    Raises:
        ValueError: shapes, dtypes or devices do not go together, an option is out of its range, or no kernel of the
            card takes them.

    Memory: saves q, k, v, out and 4*B*N*T bytes of log-sum-exp for the backward pass, and the ids; never the T x T
    scores.
    """
    check_inputs("causal_attention", q_BTNH, k_BTKH, v_BTKH, softcap, window, document_ids_BT)
    usual_scale = q_BTNH.shape[3] ** -0.5
    scale = usual_scale if scale is None else scale
    window = 0 if window >= q_BTNH.shape[1] else window
    is_usual = scale == usual_scale and not softcap and not window and document_ids_BT is None
    options = () if is_usual else (document_ids_BT, scale, softcap, window)
    forward, backward = _attention if is_usual else _masked
    if kept is not None and kept.tensors:
        given = (q_BTNH, k_BTKH, v_BTKH, *kept.tensors, *options)
        return _Kept.apply(backward, *given)  # type: ignore[no-any-return, no-untyped-call]
    out_BTNH, lse_BNR = forward(q_BTNH, k_BTKH, v_BTKH, *options)
    if kept is not None:
        kept.tensors = out_BTNH, lse_BNR
    return out_BTNH  # type: ignore[no-any-return]


def masked_workspace_bytes(q_BTNH: Tensor, ids_BT: Tensor | None, window: int) -> int:
    """Return the scratch bytes of our CUDA kernel: the first key of each query, where there is one."""
    return 0 if ids_BT is None and not window else 4 * q_BTNH.shape[0] * q_BTNH.shape[1]


def masked_backward_workspace_bytes(
    q_BTNH: Tensor, k_BTKH: Tensor, ids_BT: Tensor | None, softcap: float, window: int
) -> int:
    """Return the scratch bytes of the CUDA backward kernels: torch's, or a row sum and the bounds for ours."""
    if Options(ids_BT, None, softcap, window).is_scale_alone:
        return sdpa.backward_workspace_bytes(q_BTNH, k_BTKH)
    batch, seq_len, num_heads, _ = q_BTNH.shape
    return 4 * batch * num_heads * seq_len + 2 * masked_workspace_bytes(q_BTNH, ids_BT, window)
