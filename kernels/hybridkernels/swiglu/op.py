"""silu(gate) * up as an op that saves gate and up, where autograd would also keep silu(gate)."""

from torch import Tensor

from hybridkernels.gated_op import define_gated_op
from hybridkernels.swiglu.plain import swiglu_backward_plain, swiglu_plain

_OP = define_gated_op("swiglu", swiglu_plain, swiglu_backward_plain)


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
    return _OP(gate, up)
