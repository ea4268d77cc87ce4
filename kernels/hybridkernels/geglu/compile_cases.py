"""What is compiled of geglu ahead of time."""

from hybridkernels.compile_case import CompileCase
from hybridkernels.geglu.triton_kernel import geglu_backward_kernel, geglu_kernel
from hybridkernels.swiglu.compile_cases import elementwise_cases


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return forward and backward in every dtype."""
    return elementwise_cases("geglu", geglu_kernel, geglu_backward_kernel)
