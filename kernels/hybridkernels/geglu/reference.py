"""gelu(gate) * up in plain torch (Shazeer, 2002.05202; Hendrycks and Gimpel, 1606.08415, section 2)."""

import math

import torch
from torch import Tensor


def geglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate / 2 * (1 + tanh(sqrt(2/pi) * (gate + 0.044715 gate^3))) * up; 16-bit inputs in fp32, rounded once."""
    work = torch.promote_types(gate.dtype, torch.float32)
    gate_work = gate.to(work)
    half = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate_work + 0.044715 * gate_work**3)))
    return (gate_work * half * up.to(work)).to(gate.dtype)
