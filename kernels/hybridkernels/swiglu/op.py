"""silu(gate) * up as an op that saves gate and up, where autograd would also keep silu(gate)."""

from torch import Tensor

from hybridkernels.gated import SILU, define_gated_op

_OP = define_gated_op("swiglu", SILU)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous; 16-bit inputs are computed in fp32 and rounded once.

    Args:
        gate: Any shape and strides; float32, bfloat16 or float16 (float64 works too, for gradient checks).
        up: Shape, dtype and device of ``gate``.

    Raises:
        ValueError: the inputs differ in shape, dtype or device, or are not floating point numbers.

    Memory: saves ``gate`` and ``up`` for the backward pass. Strided inputs are copied inside the op, unseen by the
    ledger; what a linear layer returns is not.
    """
    return _OP(gate, up)
