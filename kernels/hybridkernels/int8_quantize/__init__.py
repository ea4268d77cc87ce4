"""Values as signed 8-bit codes with one float32 scale per 256 of them, and back."""

from hybridkernels.int8_quantize.op import (
    dequantize_workspace_bytes,
    int8_dequantize,
    int8_quantize,
    quantize_workspace_bytes,
)
from hybridkernels.int8_quantize.reference import GROUP_SIZE, num_groups

__all__ = [
    "GROUP_SIZE",
    "dequantize_workspace_bytes",
    "int8_dequantize",
    "int8_quantize",
    "num_groups",
    "quantize_workspace_bytes",
]
