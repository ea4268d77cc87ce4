"""SwiGLU's elementwise half, silu(gate) * up, as one op that saves its two inputs and nothing else."""

from hybridkernels.swiglu.op import cuda_backend, swiglu

__all__ = ["cuda_backend", "swiglu"]
