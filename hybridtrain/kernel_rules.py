"""Rules of the virtual GPU for the kernels' ops: the scratch of their CUDA versions.

Importing this module registers the rules, as ``hybridtrain.models`` does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import adamw_int8_  # noqa: F401  defines the op
from hybridkernels.flash_attention import (
    backward_workspace_bytes,
    masked_backward_workspace_bytes,
    masked_workspace_bytes,
    tiled_workspace_bytes,
)
from hybridkernels.geglu import geglu  # noqa: F401  likewise
from hybridkernels.rms_norm import rms_norm  # noqa: F401  likewise
from hybridkernels.swiglu import swiglu  # noqa: F401  likewise
from hybridtrain.virtual_gpu.account.op_rules import Op, ScratchRule, register_scratch
from hybridtrain.virtual_gpu.account.reductions import Multiprocessors, reduction_rules
from hybridtrain.virtual_gpu.cards.card import Card


def _masked_attention(args: Sequence[Any]) -> int:
    """Return the bytes of window and document bounds in our flash-attention forward."""
    q_BTNH, _k, _v, ids_BT, _scale, _softcap, window = args
    return masked_workspace_bytes(q_BTNH, ids_BT, window)


def _masked_attention_backward(args: Sequence[Any]) -> int:
    """Return the scratch of torch's flash-attention backward, or of ours."""
    _grad, q_BTNH, k_BTKH, _v, _out, _lse, ids_BT, _scale, softcap, window = args
    return masked_backward_workspace_bytes(q_BTNH, k_BTKH, ids_BT, softcap, window)


def _adamw_int8(args: Sequence[Tensor]) -> int:
    """Return the bytes of the gradient that bitsandbytes casts to its parameter's type."""
    param, grad = args[0], args[1]
    return 0 if grad.dtype == param.dtype else param.numel() * param.element_size()


def _rms_norm(args: Sequence[Any]) -> int:
    """Return the bytes of x and the result in the type of the weight, where that is another."""
    x, weight_D, _eps = args
    return 0 if x.dtype == weight_D.dtype else 2 * x.numel() * int(weight_D.element_size())


def _rms_norm_backward(args: Sequence[Any]) -> int:
    """Return the bytes of the gradient, x and its gradient in the type of the weight, where that is another."""
    _grad, x, _rstd, weight_D = args
    return _rms_norm((x, weight_D, None)) // 2 * 3


def _copies(args: Sequence[Tensor]) -> int:
    """Return the bytes of dense copies of inputs: halves of one projection (Phi-3) are not dense."""
    return sum(tensor.nbytes for tensor in args if not tensor.is_contiguous())


for name in ("swiglu", "swiglu_backward", "geglu", "geglu_backward"):
    register_scratch(getattr(torch.ops.hybridkernels, name).default, _copies)
_OPS = torch.ops.hybridkernels
register_scratch(_OPS.rms_norm.default, _rms_norm)
register_scratch(_OPS.rms_norm_backward.default, _rms_norm_backward)
register_scratch(_OPS.causal_attention_backward.default, lambda args: backward_workspace_bytes(args[1], args[2]))
register_scratch(_OPS.masked_attention.default, _masked_attention)
register_scratch(_OPS.masked_attention_backward.default, _masked_attention_backward)
register_scratch(_OPS.adamw_int8_.default, _adamw_int8)


def rules_of(card: Card) -> dict[Op, ScratchRule]:
    """Return the scratch that depends on the card: of reductions, and of attention where there is no flash."""
    rules = reduction_rules(Multiprocessors(card.sms, card.threads_per_multiprocessor))
    if card.has_bfloat16_tensor_cores:
        return rules
    return rules | {
        _OPS.causal_attention.default: lambda args: _tiled(*args[:2], is_backward=False, has_kernel=True),
        _OPS.causal_attention_backward.default: lambda args: _tiled(*args[1:3], is_backward=True, has_kernel=True),
        _OPS.masked_attention.default: lambda args: _tiled(*args[:2], is_backward=False, softcap=args[5]),
        _OPS.masked_attention_backward.default: lambda args: _tiled(*args[1:3], is_backward=True, softcap=args[8]),
    }


def _tiled(q_BTNH: Tensor, k_BTKH: Tensor, *, is_backward: bool, has_kernel: bool = False, softcap: float = 0.0) -> int:
    """``has_kernel``: torch's memory-efficient attention takes fp32."""
    if has_kernel and q_BTNH.dtype == torch.float32:
        return backward_workspace_bytes(q_BTNH, k_BTKH) if is_backward else 0
    return tiled_workspace_bytes(q_BTNH, k_BTKH, is_backward=is_backward, softcap=softcap)
