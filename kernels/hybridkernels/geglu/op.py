"""gelu(gate) * up as an op that saves gate and up, where autograd would also keep gelu(gate)."""

from torch import Tensor

from hybridkernels.gated_op import define_gated_op
from hybridkernels.geglu.plain import geglu_backward_plain, geglu_plain

_OP = define_gated_op("geglu", geglu_plain, geglu_backward_plain)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, gelu by its tanh approximation (Gemma, 2403.08295); else as ``swiglu``, memory too."""
    return _OP(gate, up)
