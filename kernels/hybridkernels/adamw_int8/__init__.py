"""AdamW whose moments are 8-bit codes, and whose weights may have few bits too."""

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE, dequantize, quantize
from hybridkernels.adamw_int8.op import adamw_int8_, adamw_int8_rounded_, cpu_backend

__all__ = ["QUANT_GROUP_SIZE", "adamw_int8_", "adamw_int8_rounded_", "cpu_backend", "dequantize", "quantize"]
