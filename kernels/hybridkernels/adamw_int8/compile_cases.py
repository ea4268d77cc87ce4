"""What is compiled of the 8-bit AdamW ahead of time."""

from itertools import product
from typing import Any

from hybridkernels.adamw_int8.triton_kernel import NUM_WARPS, ROWS, adamw_int8_kernel
from hybridkernels.compile_case import CompileCase

_CODES = ("m_codes_ptr", "v_codes_ptr")
_FLOATS = ("m_scale_ptr", "v_scale_ptr", "signed_map_ptr", "unsigned_map_ptr")
_SCALARS = ("decay", "step_size", "inverse_root", "beta1", "beta2", "eps")
_WEIGHTS = {
    "fp32": {"weight_ptr": "*fp32"},
    "bf16": {"weight_ptr": "*bf16", "seed_ptr": "*i64"},
    "int8": {"weight_ptr": "*i8", "weight_scale_ptr": "*fp32", "seed_ptr": "*i64"},
}


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return every kind of weights and gradients; lengths are multiples of 16."""
    return [_case(weight, grad) for weight, grad in product(_WEIGHTS, ("fp32", "bf16", "fp16"))]


def _case(weight: str, grad: str) -> CompileCase:
    arguments = {
        **_WEIGHTS[weight],
        "grad_ptr": f"*{grad}",
        **dict.fromkeys(_CODES, "*u8"),
        **dict.fromkeys(_FLOATS, "*fp32"),
        **dict.fromkeys(_SCALARS, "fp32"),
        "numel": "i32",
    }
    absent: dict[str, Any] = {name: None for name in ("weight_scale_ptr", "seed_ptr") if name not in arguments}
    return CompileCase(
        name=f"adamw_int8/{weight}/grad_{grad}",
        kernel=adamw_int8_kernel,
        arguments=arguments,
        constants={**absent, "ROWS": ROWS},
        num_warps=NUM_WARPS,
    )
