"""silu(gate) * up in plain torch (Shazeer, 2002.05202)."""

import torch
from torch import Tensor


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate / (1 + exp(-gate)) * up; 16-bit inputs are computed in fp32 and rounded once."""
    work = torch.promote_types(gate.dtype, torch.float32)
    gate_work = gate.to(work)
    return (gate_work * torch.sigmoid(gate_work) * up.to(work)).to(gate.dtype)
