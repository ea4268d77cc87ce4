"""silu(gate) * up in plain torch (Shazeer, 2002.05202)."""

import torch
from torch import Tensor


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate / (1 + exp(-gate)) * up; 16-bit inputs are computed in fp32 and rounded once."""
    work = torch.promote_types(gate.dtype, torch.float32)
    gate_work = gate.to(work)
    return (gate_work * torch.sigmoid(gate_work) * up.to(work)).to(gate.dtype)


def swiglu_backward_reference(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up: grad * up * s * (1 + gate * (1 - s)) and grad * gate * s, s the sigmoid."""
    work = torch.promote_types(gate.dtype, torch.float32)
    gate_work, up_work, grad_work = (tensor.to(work) for tensor in (gate, up, grad))
    sigmoid = torch.sigmoid(gate_work)
    grad_gate = grad_work * up_work * (sigmoid * (1 + gate_work * (1 - sigmoid)))
    return grad_gate.to(gate.dtype), (grad_work * (gate_work * sigmoid)).to(up.dtype)
