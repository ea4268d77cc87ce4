"""What is compiled of linear_cross_entropy ahead of time."""

from hybridkernels.compile_case import CompileCase
from hybridkernels.linear_cross_entropy.triton_kernel import BLOCK, NUM_WARPS, cross_entropy_grad_kernel

_UNALIGNED = {"vocab32000": frozenset[str](), "vocab50257": frozenset({"vocab"})}


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return each dtype with LLaMA's and with GPT-2's vocabulary, rows padded."""
    return [
        CompileCase(
            name=f"linear_cross_entropy/{dtype}/{vocab}",
            kernel=cross_entropy_grad_kernel,
            arguments={
                "logits_ptr": f"*{dtype}",
                "targets_ptr": "*i64",
                "losses_ptr": "*fp32",
                "vocab": "i32",
                "row_stride": "i32",
                "scale": "fp32",
            },
            constants={"BLOCK": BLOCK},
            unaligned=unaligned,
            num_warps=NUM_WARPS,
        )
        for dtype in ("fp32", "bf16", "fp16")
        for vocab, unaligned in _UNALIGNED.items()
    ]
