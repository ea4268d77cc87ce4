"""What cuDNN's convolutions take as workspace: copies of their operands in channels-last order.

Torch asks cuDNN's heuristics for engines, best first, and gives the first that runs the workspace that it asks for
(aten/src/ATen/native/cudnn/Conv_v8.cpp: ``run_single_conv``, ``try_configs``). Tensor cores read channels last, so a
contiguous operand is copied. Asked without a card (cuDNN 9.28, heuristic mode A, device properties of an H100, an A100
and an RTX 4090; 45 convolutions of ResNet, U-Net, a diffusion model, YOLO and clips, in fp16 and fp32, forward and
both gradients), cuDNN wants for contiguous operands as much as such copies of input, weight and output: the quartiles
of its workspace over their sum are 1.00, 1.00 and 1.02. In 74 of 810, most of them fp32, it copies nothing, and small
operands take up to four times as much. Channels-last halves need no copies, nor does channels-last fp32 on a Hopper.
Without tensor cores (an RTX 2080 Ti in fp32) a product of 3 x 3 in steps of one is Winograd's: it takes the weight with
25 values for 9, and nothing for the gradient of the weight.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.op_rules import Op, ScratchRule
from hybridtrain.virtual_gpu.account.reductions import Multiprocessors

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
CONVOLUTIONS = frozenset({_FORWARD, _BACKWARD})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_LAST = frozenset({torch.channels_last, torch.channels_last_3d})
_ALIGNED_BYTES = 16
"""Channels of an operand of tensor cores come in so many bytes; others are padded, which takes a copy."""


def workspace_rules(capability: int, multiprocessors: Multiprocessors) -> dict[Op, ScratchRule]:
    """Return the bytes of workspace by op and arguments, for a card of compute capability ``capability / 10``.

    The gradient of a bias is a sum, after the convolution (Convolution.cpp, ``convolution_backward``).
    """

    def forward(args: Sequence[Any]) -> int:
        x, weight, _, stride, padding, dilation, is_transposed, extra, groups = args
        spatial = _spatial(x, weight, stride, padding, dilation, extra if is_transposed else None)
        channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
        if _has_tensor_cores(x.dtype, capability):
            return _copies(x, weight, [x.shape[0], channels, *spatial], groups, capability)
        return _winograd(weight, stride, dilation, groups)

    def backward(args: Sequence[Any]) -> int:
        gradient, x, weight, _, stride, _, dilation, _, _, groups, asked = args
        others = [dim for dim in range(gradient.ndim) if dim != 1]
        bias = multiprocessors.scratch_of(gradient, others, torch.float32.itemsize) if asked[2] else 0
        if _has_tensor_cores(x.dtype, capability):
            return max(bias, _copies(x, weight, gradient.shape, groups, capability))
        return max(bias, _winograd(weight, stride, dilation, groups) if asked[0] else 0)

    return {_FORWARD: forward, _BACKWARD: backward}


def _has_tensor_cores(dtype: torch.dtype, capability: int) -> bool:
    if dtype is torch.float32:
        cudnn: Any = torch.backends.cudnn
        return capability >= 80 and bool(cudnn.conv.fp32_precision == "tf32")
    return dtype in _HALVES and capability >= (80 if dtype is torch.bfloat16 else 70)


def _copies(x: Tensor, weight: Tensor, out: Sequence[int], groups: int, capability: int) -> int:
    is_depthwise = groups > 1 and weight.shape[1] == 1  # a kernel of torch's own
    if is_depthwise or not torch.backends.cudnn.enabled:
        return 0
    is_last = any(torch._prims_common.suggest_memory_format(one) in _LAST for one in (x, weight) if one.dim() > 3)
    as_they_are = is_last and (x.dtype in _HALVES or capability >= 90)
    aligned = _ALIGNED_BYTES // x.element_size()
    needed = 0
    for shape, dims in ((x.shape, (1,)), (weight.shape, (0, 1)), (out, (1,))):
        padded = [-(-size // aligned) * aligned if dim in dims else size for dim, size in enumerate(shape)]
        is_read = as_they_are or prod(shape[2:]) == 1  # of one position both orders are the same
        if not is_read or padded != [*shape]:
            needed += prod(padded) * x.element_size()
    return needed


def _winograd(weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int) -> int:
    is_plain = [*weight.shape[2:]] == [3, 3] and groups == 1 and {*stride, *dilation} == {1}
    is_wide = weight.dtype is torch.float32 and torch.backends.cudnn.enabled
    return 25 * weight.nbytes // 9 if is_plain and is_wide else 0


def _spatial(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    extra: Sequence[int] | None,
) -> list[int]:  # fmt: skip
    """Return the output's height and width, or what there is of dimensions; ``extra``: of a transposed convolution."""
    found = []
    for n, (size, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        step, pad, spread = (each[n % len(each)] for each in (stride, padding, dilation))
        reach = spread * (kernel - 1)
        if extra is None:
            found.append((size + 2 * pad - reach - 1) // step + 1)
        else:
            found.append((size - 1) * step - 2 * pad + reach + extra[n % len(extra)] + 1)
    return found
