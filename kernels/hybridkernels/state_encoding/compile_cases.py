"""What is compiled of state_encoding ahead of time: the kinds of moments that optimizers and predictors store."""

from hybridkernels.compile_case import CompileCase
from hybridkernels.state_encoding.triton_kernel import (
    NUM_WARPS,
    RUN_TIME,
    encode_state_kernel,
    kernel_constants,
    training_state_kernel,
)

_KINDS = {"fp32": 1, "bf16": 2, "fp32_and_bf16": 3, "fp32_and_codes": 5, "all": 7}
"""Of all moments of a model: with an 8-bit optimizer small tensors stay float32, and histories have a codec of their
own."""
_POINTERS = {"table": "*i64", "counter": "*i32", "sums_out": "*fp64"}


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return features alone, and sums with and without them by kinds of moments."""
    cases = [
        CompileCase(
            name="state_encoding/encode_state",
            kernel=encode_state_kernel,
            arguments=dict.fromkeys(encode_state_kernel.arg_names, "*fp32"),
            num_warps=NUM_WARPS,
        )
    ]
    for name, kinds in _KINDS.items():
        for has_states in (False, True):
            constants = kernel_constants(kinds, has_states=has_states)
            integers = dict.fromkeys(RUN_TIME, "i32")
            pointers = [key for key in training_state_kernel.arg_names if key not in {*integers, *constants}]
            cases.append(
                CompileCase(
                    name=f"state_encoding/{'training_state' if has_states else 'moment_statistics'}/{name}",
                    kernel=training_state_kernel,
                    arguments={key: _POINTERS.get(key, "*fp32") for key in pointers} | integers,
                    constants=constants,
                    unaligned=frozenset(RUN_TIME),
                    num_warps=NUM_WARPS,
                )
            )
    return cases
