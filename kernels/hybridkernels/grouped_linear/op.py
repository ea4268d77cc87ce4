"""One linear layer an expert over rows sorted by expert, as an op whose sizes do not depend on the routing.

P rows, D width, E experts, F outputs. The rows of expert e are those from ``group_ends_E[e - 1]`` to
``group_ends_E[e]``; the last end is P.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, describe

_GROUPED_MM_CAPABILITY = (8, 0)
"""torch/nn/functional.py, grouped_mm: bfloat16 on CUDA from SM 80 on; public since 2.10, so in each torch we take."""
_ALIGNED_BYTES = 16
"""Required alignment of rows (aten/native/cuda/GroupedBlas.cpp, check_valid_strides_and_return_transposed)."""


def _forward(x_PD: Tensor, weight_EFD: Tensor, group_ends_E: Tensor) -> Tensor:
    return _times_experts(x_PD, weight_EFD.transpose(1, 2), weight_EFD, group_ends_E)


def _backward_of_input(grad_PF: Tensor, weight_EFD: Tensor, group_ends_E: Tensor) -> Tensor:
    return _times_experts(grad_PF, weight_EFD, weight_EFD, group_ends_E)


def _times_experts(x_PI: Tensor, weight_EIO: Tensor, weight_EFD: Tensor, group_ends_E: Tensor) -> Tensor:
    """Return each row times the matrix of its expert; ``weight_EIO`` is ``weight_EFD`` or its transpose."""
    x_PI = x_PI.contiguous()
    if _takes_grouped_mm(x_PI, weight_EFD):
        return torch._grouped_mm(x_PI, weight_EIO, offs=group_ends_E)
    out_PO = x_PI.new_empty(len(x_PI), weight_EIO.shape[2])
    for expert, rows in _groups(group_ends_E):
        torch.mm(x_PI[rows], weight_EIO[expert], out=out_PO[rows])
    return out_PO


def _backward_of_weight(grad_PF: Tensor, x_PD: Tensor, group_ends_E: Tensor) -> Tensor:
    grad_PF, x_PD = grad_PF.contiguous(), x_PD.contiguous()
    if _takes_grouped_mm(grad_PF, x_PD):
        dweight_EFD = torch._grouped_mm(grad_PF.t(), x_PD, offs=group_ends_E)
        # On Blackwell the kernel leaves an expert without rows what its memory held (pytorch issue 172439).
        is_empty_E = group_ends_E.diff(prepend=group_ends_E.new_zeros(1)) == 0
        return dweight_EFD.masked_fill_(is_empty_E[:, None, None], 0)
    dweight_EFD = grad_PF.new_empty(len(group_ends_E), grad_PF.shape[1], x_PD.shape[1])
    for expert, rows in _groups(group_ends_E):  # of no rows, the product is zeros
        torch.mm(grad_PF[rows].t(), x_PD[rows], out=dweight_EFD[expert])
    return dweight_EFD


def _takes_grouped_mm(*operands: Tensor) -> bool:
    """Return whether torch's grouped kernel takes these: 16-byte rows of bfloat16 on CUDA."""
    first = operands[0]
    return (
        first.is_cuda
        and len(first) > 0  # of no rows at all, it takes no strides (pytorch pull request 192497)
        and first.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(first.device) >= _GROUPED_MM_CAPABILITY
        and all(size * first.element_size() % _ALIGNED_BYTES == 0 for tensor in operands for size in tensor.shape[1:])
    )


def _groups(group_ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert's number and rows; on CUDA the host waits for the ends."""
    ends = group_ends_E.tolist()
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        yield expert, slice(start, end)


def _flops(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **_kwargs: Any) -> int:
    """Return the FLOPs: each row meets one expert, 2 * P * F * D each way."""
    return 2 * x[0] * weight[-2] * weight[-1]


_grouped_linear = define_op(
    "grouped_linear", _forward, flops=_flops, fake=lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[1])
)
_input_grad = define_op(
    "grouped_linear_input_grad", _backward_of_input, flops=_flops,
    fake=lambda grad, weight, _: grad.new_empty(grad.shape[0], weight.shape[2]),
)  # fmt: skip
_weight_grad = define_op(
    "grouped_linear_weight_grad", _backward_of_weight,
    flops=lambda grad, x, *_, **__: 2 * grad[0] * grad[1] * x[1],
    fake=lambda grad, x, ends: grad.new_empty(ends.shape[0], grad.shape[1], x.shape[1]),
)  # fmt: skip


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    x_PD, weight_EFD, group_ends_E = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x_PD if needs_weight else None, weight_EFD if needs_x else None, group_ends_E)


def _differentiate(ctx: Any, grad_PF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_PD, weight_EFD, group_ends_E = ctx.saved_tensors
    dx_PD = None if weight_EFD is None else _input_grad(grad_PF, weight_EFD, group_ends_E)
    dweight_EFD = None if x_PD is None else _weight_grad(grad_PF, x_PD, group_ends_E)
    return dx_PD, dweight_EFD, None


_grouped_linear.register_autograd(_differentiate, setup_context=_save)


def grouped_linear(x_PD: Tensor, weight_EFD: Tensor, group_ends_E: Tensor) -> Tensor:
    """Return out_PF, contiguous: each row times the transposed weight of its expert.

    Args:
        x_PD: (P, D), floating point, sorted by expert.
        weight_EFD: (E, F, D), dtype and device of ``x_PD``.
        group_ends_E: (E,) int32: rows of the experts up to this one; rising, the last is P. An expert may have none.

    Raises:
        ValueError: a shape, dtype or device is not supported.

    Memory: saves ``x_PD`` where the weight has a gradient, the weight where ``x_PD`` has one, and the ends. Only
    required gradients are computed; an expert without rows has zeros.
    """
    fits = x_PD.ndim == 2 and weight_EFD.ndim == 3 and x_PD.shape[1] == weight_EFD.shape[2]
    fits = fits and x_PD.dtype == weight_EFD.dtype and x_PD.is_floating_point()
    fits = fits and group_ends_E.shape == weight_EFD.shape[:1] and group_ends_E.dtype == torch.int32
    if not fits or len({x_PD.device, weight_EFD.device, group_ends_E.device}) > 1:
        raise ValueError(
            f"grouped_linear: x, weight and group_ends are {describe(x_PD, weight_EFD, group_ends_E)}; allowed: (P, D) "
            "and (E, F, D) of one floating point dtype and (E,) int32 on one device; convert or move them first"
        )
    out_PF: Tensor = _grouped_linear(x_PD, weight_EFD, group_ends_E)
    return out_PF
