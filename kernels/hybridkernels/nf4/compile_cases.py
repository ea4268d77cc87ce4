"""What is compiled of NF4 ahead of time."""

from hybridkernels.compile_case import CompileCase
from hybridkernels.nf4.triton_kernel import BYTES, NUM_WARPS, nf4_dequantize_kernel


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return every dtype of the values."""
    return [
        CompileCase(
            name=f"nf4/dequantize/{dtype}",
            kernel=nf4_dequantize_kernel,
            arguments={
                "codes_ptr": "*u8", "scale_codes_ptr": "*u8", "scales_ptr": "*fp32", "mean_ptr": "*fp32",
                "quantiles_ptr": "*fp32", "scale_map_ptr": "*fp32", "out_ptr": f"*{dtype}", "numel": "i32",
            },
            constants={"BYTES": BYTES},
            num_warps=NUM_WARPS,
        )
        for dtype in ("fp32", "bf16", "fp16")
    ]  # fmt: skip
