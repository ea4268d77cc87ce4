"""gelu(gate) * up, by gelu's tanh approximation, and its gradients as Triton kernels; else as ``swiglu``'s.

1 + tanh(u) is 2 * sigmoid(2u), so that gelu(x) = x * sigmoid(2 sqrt(2/pi) * (x + 0.044715 x^3)).
"""

import triton
import triton.language as tl

from hybridkernels.ahead_of_time import CompileCase
from hybridkernels.swiglu.triton_kernel import compile_cases as swiglu_cases


@triton.jit
def geglu_kernel(gate_ptr, up_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    """Write gelu(gate) * up for one block; 64-bit offsets, because a tensor may hold more than 2^31 elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate))) * up
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def geglu_backward_kernel(gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, numel, BLOCK: tl.constexpr):
    """Write the gradients of gate and up for one block."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    near = tl.minimum(tl.maximum(gate, -12.0), 12.0)  # beyond, the sigmoid is 0 or 1 in fp32: its slope has no part
    shrunk = tl.exp(tl.minimum(-1.5957691216057308 * near * (1.0 + 0.044715 * near * near), 80.0))
    half = 1.0 / (1.0 + shrunk)
    slope = shrunk * half * half * 1.5957691216057308 * (1.0 + 0.134145 * near * near)  # 1 - half would cancel
    grad_gate = grad * up * (half + near * slope)
    grad_up = grad * (gate * half)
    tl.store(grad_gate_ptr + offsets, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + offsets, grad_up.to(grad_up_ptr.dtype.element_ty), mask=inside)


def compile_cases(capability: int) -> list[CompileCase]:
    """Return both kernels in every dtype."""
    return swiglu_cases(capability, "geglu", (geglu_kernel, geglu_backward_kernel))
