"""Cross entropy and its gradient, in place, as one Triton kernel: a program takes a token's row of logits.

The row is read twice: once for its largest value and the sum of exponentials (the online rule of Milakov and
Gimelshein, 1805.02867), once to be overwritten; the second time it comes from the second-level cache. C tokens,
V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkernels.ahead_of_time import CompileCase

BLOCK = 4096
NUM_WARPS = 8
"""16 elements per thread and block: two 16-byte accesses for 16-bit logits."""


@triton.jit
def _capped(logits, SOFTCAP: tl.constexpr):
    """Return c * tanh(logits / c), by (1 - e) / (1 + e) of e = exp(-2 |.|), which overflows nowhere."""
    shrunk = tl.exp(tl.abs(logits) * (-2 / SOFTCAP))
    size = SOFTCAP * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(logits < 0, -size, size)


@triton.jit
def _load(pointers, SOFTCAP: tl.constexpr):
    """Return logits in fp32, capped where there is a cap."""
    logits = tl.load(pointers).to(tl.float32)
    if SOFTCAP > 0:
        logits = _capped(logits, SOFTCAP)
    return logits


@triton.jit
def _with_block(largest, total, logits):
    """Return the largest value and the sum of exponentials, relative to it, with one more block of logits."""
    above = tl.maximum(largest, tl.max(logits, 0))
    base = tl.where(above == -float("inf"), 0.0, above)  # nothing but -inf so far: exp(-inf - 0), not exp(nan)
    return above, total * tl.exp(largest - base) + tl.sum(tl.exp(logits - base), 0)


@triton.jit
def cross_entropy_grad_kernel(  # noqa: C901  branches of the compiler's
    logits_ptr, targets_ptr, losses_ptr, vocab, row_stride, scale,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, IGNORES: tl.constexpr,
):  # fmt: skip
    """Write loss = ln(sum(exp(x - a))) + (a - x[target]), a = max(x), and x = scale * (softmax(x) - onehot(target))."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row)
    if IGNORES:
        counts = target != -100
        scale = tl.where(counts, scale, 0.0)
        target = tl.where(counts, target, 0)
    picked = _load(row_ptr + target, SOFTCAP)
    lanes = tl.arange(0, BLOCK)
    whole = vocab // BLOCK * BLOCK  # blocks before it need no mask, hence 16-byte accesses for any vocabulary
    largest = -float("inf")
    total = 0.0
    for start in range(0, whole, BLOCK):
        logits = _load(row_ptr + start + lanes, SOFTCAP)
        largest, total = _with_block(largest, total, logits)
    inside = whole + lanes < vocab
    if whole < vocab:
        logits = tl.load(row_ptr + whole + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        if SOFTCAP > 0:  # which would make of -inf what is not
            logits = tl.where(inside, _capped(logits, SOFTCAP), -float("inf"))
        largest, total = _with_block(largest, total, logits)
    loss = tl.log(total) + (largest - picked)
    if IGNORES:
        loss = tl.where(counts, loss, 0.0)
    tl.store(losses_ptr + row, loss)
    share = scale / total
    for start in range(0, whole, BLOCK):
        logits = _load(row_ptr + start + lanes, SOFTCAP)
        grad = share * tl.exp(logits - largest) - tl.where(start + lanes == target, scale, 0.0)
        if SOFTCAP > 0:
            grad = grad * (1.0 - (logits / SOFTCAP) * (logits / SOFTCAP))
        tl.store(row_ptr + start + lanes, grad.to(logits_ptr.dtype.element_ty))
    if whole < vocab:
        logits = tl.load(row_ptr + whole + lanes, mask=inside, other=0.0).to(tl.float32)
        if SOFTCAP > 0:
            logits = _capped(logits, SOFTCAP)
        grad = share * tl.exp(logits - largest) - tl.where(whole + lanes == target, scale, 0.0)
        if SOFTCAP > 0:
            grad = grad * (1.0 - (logits / SOFTCAP) * (logits / SOFTCAP))
        tl.store(row_ptr + whole + lanes, grad.to(logits_ptr.dtype.element_ty), mask=inside)


def cross_entropy_grad_triton(
    logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float = 0.0, ignores: bool = False
) -> Tensor:
    """Return losses_C (float32) and overwrite ``logits_CV`` (float32, bfloat16 or float16, dense rows)."""
    num_tokens, vocab = logits_CV.shape
    losses_C = logits_CV.new_empty(num_tokens, dtype=torch.float32)
    if num_tokens:  # CUDA refuses an empty grid
        with torch.cuda.device_of(logits_CV):
            cross_entropy_grad_kernel[(num_tokens,)](
                logits_CV, targets_C.contiguous(), losses_C, vocab, logits_CV.stride(0), scale,
                BLOCK=BLOCK, SOFTCAP=softcap, IGNORES=ignores, num_warps=NUM_WARPS,
            )  # fmt: skip
    return losses_C


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return each dtype with LLaMA's and GPT-2's vocabulary, rows padded, and variants in bfloat16.

    Variants ignore targets, with Gemma 2's soft cap and without.
    """
    types = {"targets_ptr": "*i64", "vocab": "i32", "row_stride": "i32", "scale": "fp32"}
    cases = [(dtype, vocab, "", 0.0) for dtype in ("fp32", "bf16", "fp16") for vocab in (32000, 50257)]
    cases += [("bf16", 32000, "/ignores", 0.0), ("bf16", 32000, "/ignores-capped", 30.0)]
    return [
        CompileCase.of(
            f"linear_cross_entropy/{dtype}/vocab{vocab}{variant}",
            cross_entropy_grad_kernel,
            {**types, "logits_ptr": f"*{dtype}"},
            {"BLOCK": BLOCK, "SOFTCAP": softcap, "IGNORES": bool(variant)},
            unaligned=frozenset({"vocab"} if vocab % 16 else ()),
            num_warps=NUM_WARPS,
        )
        for dtype, vocab, variant, softcap in cases
    ]
