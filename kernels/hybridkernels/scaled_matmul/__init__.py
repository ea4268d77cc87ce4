"""Products of 8-bit matrices with a scale for each row: int8, or float8 (e4m3)."""

from hybridkernels.scaled_matmul.op import quantize_rows, scaled_matmul
from hybridkernels.scaled_matmul.reference import CODES

__all__ = ["CODES", "quantize_rows", "scaled_matmul"]
