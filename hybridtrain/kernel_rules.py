"""What the virtual GPU must know of the kernels' ops: scratch that their CUDA versions take inside one op.

Importing this registers the rules; ``hybridtrain.models`` does, so whatever trains is counted by them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkernels.adamw_int8 import adamw_int8_  # noqa: F401  defines the op
from hybridkernels.flash_attention import backward_workspace_bytes
from hybridtrain.virtual_gpu.op_rules import register_scratch


def _attention_backward(args: Sequence[Tensor]) -> int:
    """Return what torch's flash-attention backward takes."""
    return backward_workspace_bytes(args[1], args[2])


def _adamw_int8(args: Sequence[Tensor]) -> int:
    """Return what bitsandbytes takes to cast a gradient of another type than its parameter."""
    param, grad = args[0], args[1]
    return 0 if grad.dtype == param.dtype else param.numel() * param.element_size()


register_scratch(torch.ops.hybridkernels.causal_attention_backward.default, _attention_backward)
register_scratch(torch.ops.hybridkernels.adamw_int8_.default, _adamw_int8)
