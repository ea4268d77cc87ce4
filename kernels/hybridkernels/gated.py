"""An activation of one tensor times another as an op that saves these two, but not the activation's output.

On the CPU and on CUDA without Triton in torch's own ops: fp32 and fp64 take them as they are, in the order of torch's
autograd, hence bit-equal to it. 16-bit inputs are widened to fp32 a chunk at a time: the scratch stays in the
processor's cache and does not grow with the input.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, describe, empty_like
from hybridkernels.provider import takes_triton

_ATEN = torch.ops.aten
_WIDE = frozenset({torch.float32, torch.float64})
_TRITON_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 21}
"""fp32 scratch is 4 bytes times 2 forward, 4 backward: 4 MiB on the CPU, 32 MiB on CUDA, where launches cost more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """An elementwise function by torch's ops for it."""

    of: Any
    """The packet, as ``torch.ops.aten.silu``."""
    in_place: Any
    backward: Any
    options: dict[str, str] = field(default_factory=dict)


SILU = Activation(of=_ATEN.silu, in_place=_ATEN.silu_, backward=_ATEN.silu_backward)
GELU = Activation(of=_ATEN.gelu, in_place=_ATEN.gelu_, backward=_ATEN.gelu_backward, options={"approximate": "tanh"})


def define_gated_op(name: str, activation: Activation) -> Callable[[Tensor, Tensor], Tensor]:
    """Register ``hybridkernels::{name}`` and its gradient, differentiable once; return it with its checks.

    The name is also that of the folder whose ``triton_kernel`` has ``{name}_kernel`` and ``{name}_backward_kernel``.
    """

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return gated_plain(activation, gate, up)

    def backward_plain(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gated_backward_plain(activation, gate, up, grad)

    def kernel_on_cuda(gate: Tensor, direction: str = "") -> Any:
        """Return the Triton kernel, None where torch's own ops run."""
        if not takes_triton(name, gate.device, fits=gate.dtype in _TRITON_DTYPES):
            return None
        return getattr(import_module(f"hybridkernels.{name}.triton_kernel"), f"{name}{direction}_kernel")

    def cuda(gate: Tensor, up: Tensor) -> Tensor:
        kernel = kernel_on_cuda(gate)
        return plain(gate, up) if kernel is None else _run_triton(kernel, gate, up)[0]

    def backward_cuda(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        kernel = kernel_on_cuda(gate, "_backward")
        return backward_plain(gate, up, grad) if kernel is None else _run_triton(kernel, gate, up, grad)

    op = define_op(name, plain, cuda=cuda, fake=lambda gate, _: empty_like(gate)[0])
    backward_op = define_op(
        f"{name}_backward", backward_plain, cuda=backward_cuda, fake=lambda gate, up, _: empty_like(gate, up)
    )
    op.register_autograd(
        lambda ctx, grad: backward_op(*ctx.saved_tensors, grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005  torch's names
    )

    def checked(gate: Tensor, up: Tensor) -> Tensor:
        if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device) or not gate.is_floating_point():
            raise ValueError(
                f"{name}: gate is {describe(gate)}, up is {describe(up)}; both need one shape, one floating "
                "point dtype and one device; broadcast or convert one of them first"
            )
        product: Tensor = op(gate, up)
        return product

    return checked


def gated_plain(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Return activation(gate) * up, contiguous."""
    gate, up = gate.contiguous(), up.contiguous()
    if gate.dtype in _WIDE:
        product: Tensor = activation.of(gate, **activation.options).mul_(up)
        return product
    out = torch.empty_like(gate)
    for (gate_C, up_C, out_C), (act_C, wide_up_C) in _chunks(2, gate, up, out):
        act_C.copy_(gate_C)
        wide_up_C.copy_(up_C)
        out_C.copy_(activation.in_place(act_C, **activation.options).mul_(wide_up_C))
    return out


def gated_backward_plain(activation: Activation, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, both contiguous."""
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    differentiate, options = activation.backward.grad_input, activation.options
    if gate.dtype in _WIDE:
        grad_up = activation.of(gate, **options).mul_(grad)
        grad_act = grad * up
        return differentiate(grad_act, gate, grad_input=grad_act, **options), grad_up
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    for (gate_C, up_C, grad_C, grad_gate_C, grad_up_C), buffers in _chunks(4, gate, up, grad, grad_gate, grad_up):
        wide_gate_C, wide_up_C, wide_grad_C, act_C = buffers
        wide_gate_C.copy_(gate_C)
        wide_grad_C.copy_(grad_C)
        grad_up_C.copy_(activation.of.out(wide_gate_C, out=act_C, **options).mul_(wide_grad_C))
        wide_up_C.copy_(up_C)
        wide_grad_C.mul_(wide_up_C)
        grad_gate_C.copy_(differentiate(wide_grad_C, wide_gate_C, grad_input=wide_grad_C, **options))
    return grad_gate, grad_up


def _chunks(num_buffers: int, *tensors: Tensor) -> Iterator[tuple[tuple[Tensor, ...], list[Tensor]]]:
    """Yield pieces of C elements of contiguous tensors, and fp32 buffers of that length."""
    chunk = max(1, min(_CHUNK_ELEMENTS[tensors[0].device.type], tensors[0].numel()))
    scratch = torch.empty(num_buffers, chunk, dtype=torch.float32, device=tensors[0].device)
    for pieces in zip(*(torch.split(tensor.view(-1), chunk) for tensor in tensors), strict=True):
        yield pieces, [buffer[: len(pieces[0])] for buffer in scratch.unbind(0)]


def _run_triton(kernel: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of an elementwise kernel: contiguous, of the shape of its inputs, one less than these."""
    from hybridkernels.swiglu.triton_kernel import launch  # noqa: PLC0415  Triton is optional

    dense = [tensor.contiguous() for tensor in inputs]
    outputs = tuple(torch.empty_like(tensor) for tensor in dense[1:])
    launch(kernel, *dense, *outputs)
    return outputs
