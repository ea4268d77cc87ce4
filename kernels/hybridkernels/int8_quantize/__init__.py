"""Values as signed 8-bit codes with one float32 scale per 256 of them, and back; random bits for rounding."""

from hybridkernels.int8_quantize.op import int8_dequantize, int8_quantize
from hybridkernels.int8_quantize.random_bits import random_bits
from hybridkernels.int8_quantize.reference import GROUP_SIZE, num_groups

__all__ = ["GROUP_SIZE", "int8_dequantize", "int8_quantize", "num_groups", "random_bits"]
