"""What is compiled of linear_cross_entropy ahead of time."""

from hybridkernels.compile_case import CompileCase
from hybridkernels.linear_cross_entropy.triton_kernel import BLOCK, NUM_WARPS, cross_entropy_grad_kernel

_UNALIGNED = {"vocab32000": frozenset[str](), "vocab50257": frozenset({"vocab"})}
_VARIANTS = (("ignores", 0.0), ("ignores-capped", 30.0))
"""Ignored targets, and these with Gemma 2's soft cap."""


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return each dtype with LLaMA's and GPT-2's vocabulary, rows padded, and variants in bfloat16."""
    plain = [_case(dtype, vocab) for dtype in ("fp32", "bf16", "fp16") for vocab in _UNALIGNED]
    return plain + [_case("bf16", "vocab32000", *variant) for variant in _VARIANTS]


def _case(dtype: str, vocab: str, variant: str = "", softcap: float = 0.0) -> CompileCase:
    return CompileCase(
        name="/".join(filter(None, ("linear_cross_entropy", dtype, vocab, variant))),
        kernel=cross_entropy_grad_kernel,
        arguments={
            "logits_ptr": f"*{dtype}",
            "targets_ptr": "*i64",
            "losses_ptr": "*fp32",
            "vocab": "i32",
            "row_stride": "i32",
            "scale": "fp32",
        },
        constants={"BLOCK": BLOCK, "SOFTCAP": softcap, "IGNORES": bool(variant)},
        unaligned=_UNALIGNED[vocab],
        num_warps=NUM_WARPS,
    )
