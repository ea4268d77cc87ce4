"""silu(gate) * up as an op that saves gate and up, where autograd would also keep silu(gate)."""

from typing import Any

import torch
from torch import Tensor

from hybridkernels.provider import chosen_provider
from hybridkernels.swiglu.plain import swiglu_backward_plain, swiglu_plain
from hybridkernels.triton_launch import cuda_backend

_TRITON_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def _takes_triton(gate: Tensor) -> bool:
    runs = gate.dtype in _TRITON_DTYPES and cuda_backend() == "triton"
    return chosen_provider("swiglu", ("triton", "torch") if runs else ("torch",), gate.device) == "triton"


@torch.library.custom_op("hybridkernels::swiglu", mutates_args=(), device_types="cpu")
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu_plain(gate, up)


@_swiglu.register_kernel("cuda")
def _swiglu_cuda(gate: Tensor, up: Tensor) -> Tensor:
    if not _takes_triton(gate):
        return swiglu_plain(gate, up)
    from hybridkernels.swiglu.triton_kernel import swiglu_triton  # noqa: PLC0415  Triton is optional

    return swiglu_triton(gate, up)


@_swiglu.register_fake
def _swiglu_fake(gate: Tensor, up: Tensor) -> Tensor:  # noqa: ARG001  an op's fake has the op's signature
    return gate.new_empty(gate.shape)


@torch.library.custom_op("hybridkernels::swiglu_backward", mutates_args=(), device_types="cpu")
def _swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward_plain(gate, up, grad)


@_swiglu_backward.register_kernel("cuda")
def _swiglu_backward_cuda(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    if not _takes_triton(gate):
        return swiglu_backward_plain(gate, up, grad)
    from hybridkernels.swiglu.triton_kernel import swiglu_backward_triton  # noqa: PLC0415  Triton is optional

    return swiglu_backward_triton(gate, up, grad)


@_swiglu_backward.register_fake
def _swiglu_backward_fake(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001  torch's signature
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = _swiglu_backward(*ctx.saved_tensors, grad)
    return grads


_swiglu.register_autograd(_differentiate, setup_context=_save)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; 16-bit inputs are computed in fp32 and rounded once.

    Args:
        gate: Any shape and strides; float32, bfloat16 or float16 (float64 works too, for gradient checks).
        up: Shape, dtype and device of ``gate``.

    Returns:
        Contiguous, shape and dtype of ``gate``.

    Raises:
        ValueError: the inputs differ in shape, dtype or device, or are no floating point numbers.

    Memory: saves ``gate`` and ``up`` for the backward pass. Strided inputs are copied inside the op, unseen by the
    ledger; what a linear layer returns is not.
    """
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device) or not gate.is_floating_point():
        raise ValueError(
            f"swiglu: gate is {_describe(gate)}, up is {_describe(up)}; both need one shape, one floating point "
            "dtype and one device; broadcast or convert one of them first"
        )
    out: Tensor = _swiglu(gate, up)
    return out


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
