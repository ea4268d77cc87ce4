"""AdamW whose moments are 8-bit codes."""

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE, dequantize, quantize
from hybridkernels.adamw_int8.op import adamw_int8_, cpu_backend

__all__ = ["QUANT_GROUP_SIZE", "adamw_int8_", "cpu_backend", "dequantize", "quantize"]
