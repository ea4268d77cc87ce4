"""GeGLU's elementwise half, gelu(gate) * up, as one op that saves its two inputs and nothing else."""

from hybridkernels.geglu.op import geglu

__all__ = ["geglu"]
