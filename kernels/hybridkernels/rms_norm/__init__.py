"""Root-mean-square normalisation with fp32 statistics on every device."""

from hybridkernels.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
