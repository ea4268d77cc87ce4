"""Scratch that CUDA kernels take from the allocator inside one op, where no dispatcher sees it.

The rules are the kernels' own (torch's flash-attention backward, bitsandbytes' gradient cast); they are counted on
every device, so that a CPU run, a dry run and a plan speak of the same bytes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import adamw_int8_  # noqa: F401  registers the op
from hybridkernels.flash_attention import backward_workspace_bytes


def _attention_backward(args: Sequence[Tensor]) -> int:
    return backward_workspace_bytes(args[1], args[2])


def _adamw_int8(args: Sequence[Tensor]) -> int:
    param, grad = args[0], args[1]
    return 0 if grad.dtype == param.dtype else param.numel() * param.element_size()


OP_SCRATCH: dict[torch._ops.OpOverload, Callable[[Sequence[Tensor]], int]] = {
    torch.ops.hybridkernels.causal_attention_backward.default: _attention_backward,
    torch.ops.hybridkernels.adamw_int8_.default: _adamw_int8,
}

MATMUL_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.mm.out,
        torch.ops.aten.addmm.default,
        torch.ops.aten.addmm_.default,
        torch.ops.aten.bmm.default,
    }
)
"""Ops that make cuBLAS take its workspace."""
