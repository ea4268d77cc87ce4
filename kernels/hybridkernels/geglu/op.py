"""gelu(gate) * up as an op that saves gate and up, where autograd would also keep gelu(gate)."""

from torch import Tensor

from hybridkernels.gated import GELU, define_gated_op

_OP = define_gated_op("geglu", GELU)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, gelu by its tanh approximation (Gemma, 2403.08295); else as ``swiglu``, memory too."""
    return _OP(gate, up)
