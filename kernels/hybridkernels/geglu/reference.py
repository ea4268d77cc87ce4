"""gelu(gate) * up in plain torch (Shazeer, 2002.05202; Hendrycks and Gimpel, 1606.08415, section 2)."""

import math

import torch
from torch import Tensor

_SLOPE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def geglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate / 2 * (1 + tanh(sqrt(2/pi) * (gate + 0.044715 gate^3))) * up; 16-bit inputs in fp32, rounded once."""
    work = torch.promote_types(gate.dtype, torch.float32)
    gate_work = gate.to(work)
    return (gate_work * _half(gate_work) * up.to(work)).to(gate.dtype)


def geglu_backward_reference(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, with h = gelu(x) / x: grad * up * (h + x * h'), and grad * x * h."""
    work = torch.promote_types(gate.dtype, torch.float32)
    gate_work, up_work, grad_work = (tensor.to(work) for tensor in (gate, up, grad))
    half = _half(gate_work)
    slope = 2 * half * (1 - half) * _SLOPE * (1 + 3 * _CUBIC * gate_work**2)
    grad_gate = grad_work * up_work * (half + gate_work * slope)
    return grad_gate.to(gate.dtype), (grad_work * (gate_work * half)).to(up.dtype)


def _half(gate: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(_SLOPE * (gate + _CUBIC * gate**3)))
