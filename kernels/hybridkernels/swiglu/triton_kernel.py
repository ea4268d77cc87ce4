"""silu(gate) * up and its gradients as Triton kernels: one pass over memory, fp32 arithmetic, one rounding.

Triton comes with torch's CUDA wheels for Linux and is imported here only, when a CUDA tensor asks for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.ahead_of_time import CompileCase

BLOCK = 1024
"""Elements a program: with 4 warps, one 16-byte access a thread for each 16-bit tensor."""
NUM_WARPS = 4


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    """Write silu(gate) * up for one block; 64-bit offsets, because a tensor may hold more than 2^31 elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, numel, BLOCK: tl.constexpr):
    """Write the gradients of gate and up for one block."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    grad_up = grad * (gate * sigmoid)
    tl.store(grad_gate_ptr + offsets, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + offsets, grad_up.to(grad_up_ptr.dtype.element_ty), mask=inside)


def launch(kernel: "triton.JITFunction", *tensors: Tensor) -> None:
    """Run an elementwise kernel over contiguous tensors of one length."""
    numel = tensors[0].numel()
    if numel:  # CUDA refuses an empty grid
        with torch.cuda.device_of(tensors[0]):
            kernel[(triton.cdiv(numel, BLOCK),)](*tensors, numel, BLOCK=BLOCK, num_warps=NUM_WARPS)


def compile_cases(
    capability: int,  # noqa: ARG001  the same on every card
    folder: str = "swiglu",
    kernels: tuple["triton.JITFunction", ...] = (swiglu_kernel, swiglu_backward_kernel),
) -> list[CompileCase]:
    """Return both kernels of an activation times a tensor in every dtype."""
    return [
        CompileCase.of(
            f"{folder}/{kernel.__name__}/{dtype}",
            kernel,
            {**dict.fromkeys(kernel.arg_names, f"*{dtype}"), "numel": "i32"},
            {"BLOCK": BLOCK},
            num_warps=NUM_WARPS,
        )
        for kernel in kernels
        for dtype in ("fp32", "bf16", "fp16")
    ]
