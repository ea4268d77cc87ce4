"""Values as 4-bit codes of normal quantiles with scales in 8 bits (QLoRA's NF4 with double quantization), and back."""

from hybridkernels.nf4.op import nf4_dequantize, nf4_quantize
from hybridkernels.nf4.reference import GROUP_SIZE, Nf4Sizes

__all__ = ["GROUP_SIZE", "Nf4Sizes", "nf4_dequantize", "nf4_quantize"]
