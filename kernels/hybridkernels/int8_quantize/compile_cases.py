"""What is compiled of the 8-bit codes ahead of time."""

from itertools import product

import torch

from hybridkernels.compile_case import CompileCase
from hybridkernels.int8_quantize.triton_kernel import (
    NUM_WARPS,
    dequantize_rows,
    int8_dequantize_kernel,
    int8_quantize_kernel,
    quantize_rows,
)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return every rounding, kind of scales and dtype; lengths are multiples of 16, and one is not."""
    quantize = [
        CompileCase(
            name="/".join(
                ["int8_quantize", dtype, "stochastic" if stochastic else "nearest", "static" if static else "dynamic"]
            ),
            kernel=int8_quantize_kernel,
            arguments={
                "values_ptr": f"*{dtype}",
                "codes_ptr": "*i8",
                "scales_ptr": "*fp32",
                **({"seed_ptr": "*i64"} if stochastic else {}),
                "numel": "i32",
            },
            constants={
                **({} if stochastic else {"seed_ptr": None}),
                "STOCHASTIC": stochastic,
                "STATIC": static,
                "ROWS": quantize_rows(_DTYPES[dtype]),
            },
            num_warps=NUM_WARPS,
        )
        for dtype, stochastic, static in product(_DTYPES, (False, True), (False, True))
    ]
    return quantize + [_dequantize(dtype) for dtype in _DTYPES] + [_dequantize("bf16", unaligned=True)]


def _dequantize(dtype: str, *, unaligned: bool = False) -> CompileCase:
    return CompileCase(
        name=f"int8_dequantize/{dtype}" + ("/any_length" if unaligned else ""),
        kernel=int8_dequantize_kernel,
        arguments={"codes_ptr": "*i8", "scales_ptr": "*fp32", "out_ptr": f"*{dtype}", "numel": "i32"},
        constants={"ROWS": dequantize_rows(_DTYPES[dtype])},
        unaligned=frozenset({"numel"} if unaligned else ()),
        num_warps=NUM_WARPS,
    )
