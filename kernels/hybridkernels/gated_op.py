"""An activation of one tensor times another as an op that saves these two, and not what the activation makes."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hybridkernels.provider import chosen_provider
from hybridkernels.triton_launch import cuda_backend

_TRITON_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

Forward = Callable[[Tensor, Tensor], Tensor]
"""Of gate and up: activation(gate) * up."""
Backward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of gate, up and the gradient of the product: the gradients of gate and up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedOp:
    """Both directions of one such op, differentiable once."""

    name: str
    """As ``swiglu``: the op is ``hybridkernels::swiglu``, its gradient ``hybridkernels::swiglu_backward``."""
    forward: Forward
    cuda: Forward
    """What runs on CUDA."""
    backward_cuda: Backward

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return activation(gate) * up.

        Raises:
            ValueError: the inputs differ in shape, dtype or device, or are no floating point numbers.
        """
        if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device) or not gate.is_floating_point():
            raise ValueError(
                f"{self.name}: gate is {_describe(gate)}, up is {_describe(up)}; both need one shape, one floating "
                "point dtype and one device; broadcast or convert one of them first"
            )
        return self.forward(gate, up)


def define_gated_op(name: str, plain: Forward, backward_plain: Backward) -> GatedOp:
    """Register an op and its gradient.

    Args:
        name: Also the folder whose ``triton_kernel`` module has ``{name}_triton`` and ``{name}_backward_triton``.
        plain: In torch's own ops, for the CPU and for CUDA without Triton; contiguous result.
        backward_plain: Likewise.
    """

    def kernel(gate: Tensor, direction: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        runs = gate.dtype in _TRITON_DTYPES and cuda_backend() == "triton"
        if chosen_provider(name, ("triton", "torch") if runs else ("torch",), gate.device) == "torch":
            return otherwise
        found: Callable[..., Any] = getattr(import_module(f"hybridkernels.{name}.triton_kernel"), direction)
        return found

    def cuda(gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = kernel(gate, f"{name}_triton", plain)(gate, up)
        return out

    def backward_cuda(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        grads: tuple[Tensor, Tensor] = kernel(gate, f"{name}_backward_triton", backward_plain)(gate, up, grad)
        return grads

    def fake(gate: Tensor, up: Tensor) -> Tensor:  # noqa: ARG001  an op's fake has the op's signature
        return gate.new_empty(gate.shape)

    def backward_fake(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        return gate.new_empty(gate.shape), up.new_empty(up.shape)

    forward_op = torch.library.custom_op(f"hybridkernels::{name}", plain, mutates_args=(), device_types="cpu")
    backward_op = torch.library.custom_op(
        f"hybridkernels::{name}_backward", backward_plain, mutates_args=(), device_types="cpu"
    )
    forward_op.register_kernel("cuda", cuda)
    backward_op.register_kernel("cuda", backward_cuda)
    forward_op.register_fake(fake)
    backward_op.register_fake(backward_fake)

    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001  torch's signature
        ctx.save_for_backward(*inputs)

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grads: tuple[Tensor, Tensor] = backward_op(*ctx.saved_tensors, grad)
        return grads

    forward_op.register_autograd(differentiate, setup_context=save)
    return GatedOp(name=name, forward=forward_op, cuda=cuda, backward_cuda=backward_cuda)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
