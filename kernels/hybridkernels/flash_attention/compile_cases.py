"""What is compiled of causal attention ahead of time."""

from typing import Any

from hybridkernels.compile_case import CompileCase
from hybridkernels.flash_attention.tiles import UNSPECIALIZED, constants, launch_config
from hybridkernels.flash_attention.triton_backward import attention_dkdv_kernel, attention_dq_kernel
from hybridkernels.flash_attention.triton_forward import attention_kernel

_KERNELS = {"forward": attention_kernel, "dq": attention_dq_kernel, "dkdv": attention_dkdv_kernel}
_FP32 = frozenset({"lse_ptr", "delta_ptr"})
_BOUNDS = frozenset({"first_ptr", "last_ptr"})
_HEAD_DIMS = (64, 80, 96, 128)
_DTYPES = ("bf16", "fp16")
_VARIANTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "bounded": ((64, 80, 96, 128, 256), {"bounded": True}),
    "bounded-capped": ((128, 256), {"bounded": True, "softcap": 50.0}),
}
"""Head dims and options: packed documents and windows, and these with Gemma 2's soft cap."""


def compile_cases(capability: int) -> list[CompileCase]:
    """Return forward and both halves of backward for each head dim and 16-bit dtype, and bfloat16 variants."""
    plain = [
        _case(capability, kernel, head_dim, dtype)
        for kernel in _KERNELS
        for head_dim in _HEAD_DIMS
        for dtype in _DTYPES
    ]
    return plain + [
        _case(capability, kernel, head_dim, "bf16", variant, **options)
        for variant, (head_dims, options) in _VARIANTS.items()
        for kernel in _KERNELS
        for head_dim in head_dims
    ]


def _case(
    capability: int, kernel: str, head_dim: int, dtype: str, variant: str = "", *, bounded: bool = False, **options: Any
) -> CompileCase:
    function = _KERNELS[kernel]
    config = launch_config(capability, kernel, head_dim)
    values: dict[str, Any] = constants(config, head_dim, bounded=bounded, **options)
    if not bounded:
        values |= {name: None for name in _BOUNDS if name in function.arg_names}
    return CompileCase(
        name="/".join(filter(None, ("flash_attention", kernel, dtype, f"head{head_dim}", variant))),
        kernel=function,
        arguments={name: _type(name, dtype) for name in function.arg_names if name not in values},
        constants=values,
        unaligned=frozenset(UNSPECIALIZED),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _type(argument: str, dtype: str) -> str:
    """Return the type of an argument: strides of these head dims are multiples of 16, and fit 32 bits."""
    if not argument.endswith("_ptr"):
        return "i32"
    if argument in _BOUNDS:
        return "*i32"
    return "*fp32" if argument in _FP32 else f"*{dtype}"
