"""What is compiled of swiglu ahead of time."""

from typing import Any

from hybridkernels.compile_case import CompileCase
from hybridkernels.swiglu.triton_kernel import BLOCK, NUM_WARPS, swiglu_backward_kernel, swiglu_kernel

_POINTERS = (3, 5)
_DTYPES = ("fp32", "bf16", "fp16")


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return forward and backward in every dtype."""
    return elementwise_cases("swiglu", swiglu_kernel, swiglu_backward_kernel)


def elementwise_cases(folder: str, forward: Any, backward: Any) -> list[CompileCase]:
    """Return both kernels of an activation times a tensor in every dtype."""
    return [
        CompileCase(
            name=f"{folder}/{kernel.__name__}/{dtype}",
            kernel=kernel,
            arguments={**dict.fromkeys(kernel.arg_names[:pointers], f"*{dtype}"), "numel": "i32"},
            constants={"BLOCK": BLOCK},
            num_warps=NUM_WARPS,
        )
        for kernel, pointers in zip((forward, backward), _POINTERS, strict=True)
        for dtype in _DTYPES
    ]
