"""An activation of the gate times up, and its gradients, in torch's own ops, for the CPU and for CUDA without Triton.

fp32 and fp64 take torch's ops as they are, in the order of torch's autograd, hence bit-equal to it. 16-bit inputs are
widened to fp32 a chunk at a time: the scratch stays in the processor's cache and does not grow with the input.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_WIDE = frozenset({torch.float32, torch.float64})
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


def gated_plain(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Return activation(gate) * up, contiguous."""
    gate, up = gate.contiguous(), up.contiguous()
    if gate.dtype in _WIDE:
        product: Tensor = activation.of(gate, **activation.options).mul_(up)
        return product
    out = torch.empty_like(gate)
    chunk, scratch = _scratch(gate, 2)
    for gate_C, up_C, out_C in zip(*_chunks(chunk, gate, up, out), strict=True):
        act_C, wide_up_C = (buffer[: len(gate_C)] for buffer in scratch)
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
    chunk, scratch = _scratch(gate, 4)
    chunks = _chunks(chunk, gate, up, grad, grad_gate, grad_up)
    for gate_C, up_C, grad_C, grad_gate_C, grad_up_C in zip(*chunks, strict=True):
        wide_gate_C, wide_up_C, wide_grad_C, act_C = (buffer[: len(gate_C)] for buffer in scratch)
        wide_gate_C.copy_(gate_C)
        wide_grad_C.copy_(grad_C)
        grad_up_C.copy_(activation.of.out(wide_gate_C, out=act_C, **options).mul_(wide_grad_C))
        wide_up_C.copy_(up_C)
        wide_grad_C.mul_(wide_up_C)
        grad_gate_C.copy_(differentiate(wide_grad_C, wide_gate_C, grad_input=wide_grad_C, **options))
    return grad_gate, grad_up


def _chunks(chunk: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the pieces of ``chunk`` elements of each contiguous tensor."""
    return [torch.split(tensor.view(-1), chunk) for tensor in tensors]


def _scratch(like: Tensor, buffers: int) -> tuple[int, tuple[Tensor, ...]]:
    """Return the chunk length C and fp32 buffers of that length."""
    chunk = max(1, min(_CHUNK_ELEMENTS[like.device.type], like.numel()))
    return chunk, torch.empty(buffers, chunk, dtype=torch.float32, device=like.device).unbind(0)
