"""Launches of the Triton kernels for causal attention.

B batch, T sequence, N query heads, K key/value heads, H head dim, R rows of the log-sum-exp. Triton comes with torch's
CUDA wheels for Linux and is imported only when a CUDA tensor asks for it.
"""

import torch
import triton
from torch import Tensor

from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.flash_attention.options import Options
from hybridkernels.flash_attention.sdpa import lse_rows
from hybridkernels.flash_attention.tiles import UNSPECIALIZED, constants, launch_config
from hybridkernels.flash_attention.triton_backward import attention_dkdv_kernel, attention_dq_kernel
from hybridkernels.flash_attention.triton_forward import attention_kernel
from hybridkernels.triton_launch import compute_capability

_INTERPRETED_CAPABILITY = 80
_CACHED_BYTES = 8 << 20
"""Keys and values of the heads worked on at once; every card here but RTX 30xx caches more (theirs, up to 6 MiB)."""
_LARGEST_STRIDE = 1 << 24
"""Elements between tokens, up to which the 128 rows of a tile have 32-bit offsets."""

_USUAL = Options()


def causal_attention_triton(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, options: Options = _USUAL
) -> tuple[Tensor, Tensor]:
    """Return out_BTNH, contiguous, and lse_BNR (float32, natural logarithm); bfloat16, float16 or float32."""
    q_BTNH, k_BTKH, v_BTKH = (_with_dense_rows(tensor) for tensor in (q_BTNH, k_BTKH, v_BTKH))
    batch, seq_len, num_heads, head_dim = q_BTNH.shape
    rows = lse_rows(q_BTNH)
    out_BTNH = q_BTNH.new_empty(q_BTNH.shape)
    new_lse = q_BTNH.new_empty if rows == seq_len else q_BTNH.new_zeros
    lse_BNR = new_lse(batch, num_heads, rows, dtype=torch.float32)
    if q_BTNH.numel():  # CUDA refuses an empty grid
        group, all_heads = num_heads // k_BTKH.shape[2], batch * num_heads
        config = launch_config(_capability(q_BTNH), "forward", head_dim)
        with torch.cuda.device_of(q_BTNH):
            attention_kernel[(all_heads * triton.cdiv(seq_len, config.block_m),)](
                q_BTNH, k_BTKH, v_BTKH, _first_keys(q_BTNH, options), out_BTNH, lse_BNR,
                *_strides(q_BTNH, k_BTKH, v_BTKH),
                num_heads, group, all_heads, seq_len, rows, _heads_at_once(k_BTKH, 1) * group,
                **constants(config, head_dim, options), num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip
    return out_BTNH, lse_BNR


def causal_attention_backward_triton(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, out_BTNH: Tensor, lse_BNR: Tensor,
    options: Options = _USUAL,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq_BTNH, dk_BTKH and dv_BTKH, contiguous; ``lse_BNR`` may be any provider's."""
    grad_BTNH, q_BTNH, k_BTKH, v_BTKH = (_with_dense_rows(tensor) for tensor in (grad_BTNH, q_BTNH, k_BTKH, v_BTKH))
    out_BTNH, lse_BNR = out_BTNH.contiguous(), lse_BNR.contiguous()
    dq_BTNH, dk_BTKH, dv_BTKH = (tensor.new_empty(tensor.shape) for tensor in (q_BTNH, k_BTKH, v_BTKH))
    if not q_BTNH.numel():
        return dq_BTNH, dk_BTKH, dv_BTKH
    batch, seq_len, num_heads, head_dim = q_BTNH.shape
    num_kv_heads, rows, capability = k_BTKH.shape[2], lse_BNR.shape[2], _capability(q_BTNH)
    group, strides = num_heads // num_kv_heads, _strides(grad_BTNH, q_BTNH, k_BTKH, v_BTKH)
    delta_BNT = q_BTNH.new_empty(batch, num_heads, seq_len, dtype=torch.float32)
    first_BT = _first_keys(q_BTNH, options)
    with torch.cuda.device_of(q_BTNH):
        config, all_heads = launch_config(capability, "dq", head_dim), batch * num_heads
        attention_dq_kernel[(all_heads * triton.cdiv(seq_len, config.block_m),)](
            grad_BTNH, q_BTNH, k_BTKH, v_BTKH, first_BT, out_BTNH, lse_BNR, delta_BNT, dq_BTNH, *strides,
            num_heads, group, all_heads, seq_len, rows, _heads_at_once(k_BTKH, 1) * group,
            **constants(config, head_dim, options), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        config, all_heads = launch_config(capability, "dkdv", head_dim), batch * num_kv_heads
        attention_dkdv_kernel[(all_heads * triton.cdiv(seq_len, config.block_n),)](
            grad_BTNH, q_BTNH, k_BTKH, v_BTKH, first_BT, options.last_queries(q_BTNH) if options.is_bounded else None,
            lse_BNR, delta_BNT, dk_BTKH, dv_BTKH, *strides,
            num_kv_heads, group, all_heads, seq_len, rows, _heads_at_once(k_BTKH, group),
            **constants(config, head_dim, options), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return dq_BTNH, dk_BTKH, dv_BTKH


def _first_keys(q_BTNH: Tensor, options: Options) -> Tensor | None:
    return options.first_keys(q_BTNH) if options.is_bounded else None


def _with_dense_rows(tensor: Tensor) -> Tensor:
    """Copy a tensor whose last dimension is not dense, as the gradient of a sum, or whose rows lie very far apart."""
    return tensor if tensor.stride(3) == 1 and tensor.stride(1) < _LARGEST_STRIDE else tensor.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, sequence and heads of each tensor."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _heads_at_once(k_BTKH: Tensor, read_heads: int) -> int:
    """Return the number of key/value heads to process at once, if each reads ``read_heads`` pairs of (T, H)."""
    _, seq_len, _, head_dim = k_BTKH.shape
    return max(1, _CACHED_BYTES // (2 * read_heads * seq_len * head_dim * k_BTKH.element_size()))


def _capability(tensor: Tensor) -> int:
    return compute_capability(tensor.device) if tensor.is_cuda else _INTERPRETED_CAPABILITY


def compile_cases(capability: int) -> list[CompileCase]:
    """Return forward and both halves of backward for each head dim and 16-bit dtype, and bfloat16 variants.

    Variants are packed documents and windows, and these with Gemma 2's soft cap. Strides of these head dims are
    multiples of 16, and fit 32 bits.
    """
    variants = [("", dtype, head, Options()) for head in (64, 80, 96, 128) for dtype in ("bf16", "fp16")]
    variants += [("/bounded", "bf16", head, Options(window=1)) for head in (64, 80, 96, 128, 256)]
    variants += [("/bounded-capped", "bf16", head, Options(window=1, softcap=50.0)) for head in (128, 256)]
    cases = []
    for name, kernel in (("forward", attention_kernel), ("dq", attention_dq_kernel), ("dkdv", attention_dkdv_kernel)):
        bounds = {"first_ptr", "last_ptr"}.intersection(kernel.arg_names)
        for suffix, dtype, head_dim, options in variants:
            types = {key: f"*{dtype}" if key.endswith("_ptr") else "i32" for key in kernel.arg_names}
            types |= {"lse_ptr": "*fp32", "delta_ptr": "*fp32", **dict.fromkeys(bounds, "*i32")}
            config = launch_config(capability, name, head_dim)
            case = CompileCase.of(
                f"flash_attention/{name}/{dtype}/head{head_dim}{suffix}",
                kernel,
                types,
                {**constants(config, head_dim, options), **({} if options.is_bounded else dict.fromkeys(bounds))},
                unaligned=frozenset(UNSPECIALIZED),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
            cases.append(case)
    return cases
