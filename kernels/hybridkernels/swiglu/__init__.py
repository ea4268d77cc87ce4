"""SwiGLU's elementwise half, silu(gate) * up, as one op that saves its two inputs and nothing else."""

from hybridkernels.swiglu.op import swiglu

__all__ = ["swiglu"]
