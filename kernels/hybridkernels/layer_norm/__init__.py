"""Layer normalisation with fp32 statistics on every device."""

from hybridkernels.layer_norm.op import layer_norm

__all__ = ["layer_norm"]
