"""Fast bfloat16 matmuls and attention gradients on the CPU.

Without bfloat16 instructions, matmuls run in float32 and are rounded once, to nearest. Products of bfloat16 numbers are
exact in float32, and sums are in float32, as in tensor cores and torch's own loops: only the order of summation
differs. Torch's attention works tile by tile; here gradients are computed for all heads and rows at once, with the
roundings of the cards' kernels.

B matrices of a batch or rows, M rows, K summed over, N columns or heads, T sequence, H head dim.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


@contextmanager
def fast_bfloat16() -> Iterator[None]:
    """Replace torch's products of bfloat16 matrices on the CPU within a context; other types are unchanged."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        torchs = torch.library.get_kernel(f"aten::{_ATTENTION_BACKWARD}", "CPU")

        def attention_backward(
            keys: Any, grad_BNTH: Tensor, q_BNTH: Tensor, k_BKTH: Tensor, *rest: Any, **options: Any
        ) -> tuple[Tensor, Tensor, Tensor]:
            if q_BNTH.dtype is torch.bfloat16 and q_BNTH.shape == k_BKTH.shape and _is_plain(*rest, **options):
                return _attention_backward(grad_BNTH, q_BNTH, k_BKTH, *rest[:3])
            grads: tuple[Tensor, Tensor, Tensor] = torchs.call_boxed(keys, grad_BNTH, q_BNTH, k_BKTH, *rest, **options)
            return grads

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch says that something is replaced
            library.impl(_ATTENTION_BACKWARD, attention_backward, "CPU", with_keyset=True)
            if product_unit() == "float32":
                for name, product in (("mm", _mm), ("addmm", _addmm), ("bmm", _bmm)):
                    library.impl(name, product, "CPU")
        yield


def product_unit() -> str:
    """Return the unit that multiplies bfloat16 matrices: ``processor``, for its own instructions, or ``float32``."""
    return "processor" if torch.cpu._is_avx512_bf16_supported() else "float32"


def _is_plain(
    v_BNTH: Tensor,  # noqa: ARG001  the op's arguments behind the keys
    out_BNTH: Tensor,  # noqa: ARG001
    lse_BNT: Tensor,  # noqa: ARG001
    dropout: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> bool:
    """Return whether attention is causal, unmasked and scaled as usual."""
    return is_causal and not dropout and attn_mask is None and scale is None


def _attention_backward(
    grad_BNTH: Tensor, q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, out_BNTH: Tensor, lse_BNT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values (FlashAttention, 2205.14135, algorithm 4).

    Scores and their gradients are float32; they are rounded to bfloat16 as factors, and so is each result, once.
    """
    shape, flat = q_BNTH.shape, (-1, *q_BNTH.shape[2:])
    grad_BTH, q_BTH, k_BTH, v_BTH, out_BTH = (
        value.reshape(flat) for value in (grad_BNTH, q_BNTH, k_BNTH, v_BNTH, out_BNTH)
    )
    wide_grad_BTH, scale = grad_BTH.float(), shape[-1] ** -0.5
    weights_BTT = torch.bmm(q_BTH.float() * scale, k_BTH.float().mT)
    weights_BTT = weights_BTT.sub_(lse_BNT.reshape(-1, shape[2], 1)).exp_().tril_()
    dv_BTH = torch.bmm(weights_BTT.bfloat16().mT, grad_BTH)
    scores_grad_BTT = torch.bmm(wide_grad_BTH, v_BTH.float().mT)
    scores_grad_BTT.sub_((wide_grad_BTH * out_BTH.float()).sum(-1, keepdim=True)).mul_(weights_BTT).mul_(scale)
    factor_BTT = scores_grad_BTT.bfloat16()
    dq_BTH, dk_BTH = torch.bmm(factor_BTT, k_BTH), torch.bmm(factor_BTT.mT, q_BTH)
    return dq_BTH.view(shape), dk_BTH.view(shape), dv_BTH.view(shape)


def _mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    return _once_rounded(torch.ops.aten.mm.out, left_MK, right_KN)


def _addmm(bias_N: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _once_rounded(torch.ops.aten.addmm.out, bias_N, left_MK, right_KN, beta=beta, alpha=alpha)


def _bmm(left_BMK: Tensor, right_BKN: Tensor) -> Tensor:
    return _once_rounded(torch.ops.aten.bmm.out, left_BMK, right_BKN)


def _once_rounded(product: Callable[..., Tensor], *factors: Tensor, **scales: float) -> Tensor:
    """Return a product, by the overload that writes to a given tensor: it is not replaced."""
    left, right = factors[-2:]
    shape = (*left.shape[:-1], right.shape[-1])
    if left.dtype is not torch.bfloat16:
        return product(*factors, **scales, out=left.new_empty(shape))
    wide = [factor.float() for factor in factors]
    return product(*wide, **scales, out=left.new_empty(shape, dtype=torch.float32)).bfloat16()
