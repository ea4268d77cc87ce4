"""Projection, cross entropy and both gradients, a slice of the tokens at a time: no slice's logits outlive it.

The gradients are made in the forward pass, where the logits are, as in Liger's fused linear cross entropy (2410.10989).
The matrix products stay with cuBLAS; the softmax between them turns the logits into their own gradient in place, by a
Triton kernel on CUDA, torch's ops elsewhere. So a slice costs its logits once, in the compute dtype.

M tokens, C tokens of a slice, D width, V vocabulary, P padded V; R rows at a time in torch's ops.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from hybridkernels.define_op import define_op, triton_or_fallback
from hybridkernels.linear_cross_entropy.reference import IGNORED

_ROW_MULTIPLE = 64
"""Rows of logits start at multiples of 128 bytes or more: GPT-2's 50257 columns would make every access unaligned."""
_WIDE = frozenset({torch.float32, torch.float64})
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""On the CPU the rows at work stay in the second-level cache; on CUDA fp32 scratch is 64 MiB: launches cost more."""


def cross_entropy_grad_plain(
    logits: Tensor, targets: Tensor, scale: float, softcap: float = 0.0, ignores: bool = False
) -> Tensor:
    """Return losses_C; ``logits`` (C, V) become the gradient of ``scale`` times their sum."""
    num_tokens, vocab = logits.shape
    losses_C = logits.new_empty(num_tokens, dtype=torch.promote_types(logits.dtype, torch.float32))
    rows = max(1, min(num_tokens, _BLOCK_ELEMENTS[logits.device.type] // vocab))
    scratch_RV = None if logits.dtype in _WIDE else logits.new_empty(rows, vocab, dtype=torch.float32)
    pieces = (torch.split(tensor, rows) for tensor in (logits, targets[:, None], losses_C))
    for logits_RV, given_R1, losses_R in zip(*pieces, strict=True):
        work_RV = logits_RV if scratch_RV is None else scratch_RV[: len(logits_RV)].copy_(logits_RV)
        slope_RV = _cap(work_RV, softcap) if softcap else None
        is_ignored_R1 = given_R1 == IGNORED if ignores else None
        targets_R1 = given_R1 if is_ignored_R1 is None else given_R1.masked_fill(is_ignored_R1, 0)
        picked_R1 = work_RV.sub_(work_RV.amax(1, keepdim=True)).gather(1, targets_R1)
        total_R1 = work_RV.exp_().sum(1, keepdim=True)
        torch.sub(total_R1.log(), picked_R1, out=losses_R[:, None])
        work_RV.mul_(total_R1.reciprocal_().mul_(scale))
        work_RV.scatter_add_(1, targets_R1, torch.full_like(picked_R1, -scale))
        if slope_RV is not None:
            work_RV.mul_(slope_RV)
        if is_ignored_R1 is not None:
            work_RV.masked_fill_(is_ignored_R1, 0)
            losses_R.masked_fill_(is_ignored_R1[:, 0], 0)
        if scratch_RV is not None:
            logits_RV.copy_(work_RV)
    return losses_C


def _cap(logits_RV: Tensor, softcap: float) -> Tensor:
    """Replace logits x by c * tanh(x / c); return the derivative, 1 - tanh(x / c)^2."""
    logits_RV.div_(softcap).tanh_()
    slope_RV = 1 - logits_RV.square()
    logits_RV.mul_(softcap)
    return slope_RV


_cross_entropy_grad = define_op(
    "cross_entropy_grad_", cross_entropy_grad_plain, mutates=("logits",),
    cuda=triton_or_fallback(
        cross_entropy_grad_plain, "linear_cross_entropy.cross_entropy_grad_triton", key="linear_cross_entropy",
        fits=lambda logits, *_: logits.dtype != torch.float64,
    ),
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32)),
)  # fmt: skip


def cross_entropy_grad_(
    logits_CV: Tensor, targets_C: Tensor, scale: float, *, softcap: float = 0.0, ignores: bool = False
) -> Tensor:
    """Return the cross entropy of each token and overwrite the logits with the gradient of ``scale`` times its sum.

    Args:
        logits_CV: (C, V), float32, bfloat16, float16 or float64, rows dense; overwritten with
            ``scale * (softmax(logits) - onehot(target))``. Rows that start at multiples of 16 elements are read faster.
        targets_C: (C,) int64, each in [0, V); other values are undefined behaviour on CUDA and an error on the CPU.
        scale: Factor of the gradient, for example 1 / tokens for a mean. The losses are not scaled.
        softcap: c of the soft cap c * tanh(logits / c); the gradient is with respect to ``logits``. 0: none.
        ignores: A target may be -100 too: its token has loss 0 and gradient 0.

    Returns:
        losses_C: (C,) float32 (float64 for float64 logits), nats.

    Raises:
        ValueError: a shape, dtype or stride is not supported.

    Memory: none besides the losses; on the CPU and without Triton float32 scratch of some rows, unseen by the ledger.
    """
    fits = logits_CV.ndim == 2 and logits_CV.is_floating_point() and targets_C.dtype == torch.int64
    fits = fits and targets_C.shape == logits_CV.shape[:1] and logits_CV.shape[1] > 0
    if not fits or (logits_CV.numel() and logits_CV.stride(1) != 1):
        raise ValueError(
            f"cross_entropy_grad_: logits are {logits_CV.dtype} {tuple(logits_CV.shape)} with strides "
            f"{logits_CV.stride()}, targets {targets_C.dtype} {tuple(targets_C.shape)}; allowed: floating point (C, V) "
            "with dense rows and int64 (C,); flatten or convert first"
        )
    losses_C: Tensor = _cross_entropy_grad(logits_CV, targets_C, scale, softcap, ignores)
    return losses_C


def padded_vocab(vocab: int) -> int:
    """Return the columns that a row of logits takes."""
    return -(-vocab // _ROW_MULTIPLE) * _ROW_MULTIPLE


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean loss; the gradients of hidden states and weight are made in the forward pass, those that are asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        chunk_tokens: int,
        softcap: float,
        num_targets: int,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        num_tokens, vocab = len(targets_M), len(weight_VD)
        ignores, divisor = num_targets < num_tokens, max(num_targets, min(1, num_tokens))
        grad_MD = torch.empty_like(hidden_MD) if needs_hidden else None
        grad_VD = torch.zeros_like(weight_VD) if needs_weight and not num_tokens else None
        loss = hidden_MD.new_zeros((), dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
        buffer_CP = hidden_MD.new_empty(min(chunk_tokens, num_tokens), padded_vocab(vocab))
        if buffer_CP.is_cpu:  # oneDNN's bfloat16 products with AMX read beyond a row's end, and 0 * NaN is NaN
            with _disable_current_modes():  # nothing of this is on the card, nor in its ledger
                buffer_CP[:, vocab:].zero_()
        for start in range(0, num_tokens, chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, num_tokens))
            hidden_CD, logits_CV = hidden_MD[rows], buffer_CP[: rows.stop - start, :vocab]
            torch.mm(hidden_CD, weight_VD.t(), out=logits_CV)
            loss += cross_entropy_grad_(logits_CV, targets_M[rows], 1 / divisor, softcap=softcap, ignores=ignores).sum()
            if grad_MD is not None:
                torch.mm(logits_CV, weight_VD, out=grad_MD[rows])
            if needs_weight:
                transposed_VC = logits_CV.t()
                grad_VD = transposed_VC @ hidden_CD if grad_VD is None else grad_VD.addmm_(transposed_VC, hidden_CD)
        ctx.grads = (grad_MD, grad_VD)
        return loss / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.grads
        if grads is None:
            raise RuntimeError("linear_cross_entropy: backward was run already; run the forward pass again")
        ctx.grads = None
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_loss)
        return *grads, None, None, None, None


def linear_cross_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    chunk_tokens: int,
    softcap: float = 0.0,
    num_targets: int | None = None,
) -> Tensor:
    """Return the mean over targets of the cross entropy of ``hidden_MD @ weight_VD.T``, differentiable once.

    Args:
        hidden_MD: (M, D), floating point; with no token the mean is NaN, as in torch.
        weight_VD: (V, D), dtype and device of ``hidden_MD``.
        targets_M: (M,) int64, each in [0, V), or -100 for a token that does not count; none that does: the mean is 0.
        chunk_tokens: Tokens whose logits exist at a time, at least 1.
        softcap: c, where the logits are c * tanh(x / c) (Gemma 2, 2408.00118, section 2); 0: none.
        num_targets: Number of targets that count; None: count them, which synchronizes with the card.

    Returns:
        A scalar, nats per token, float32 (float64 for float64 inputs).

    Raises:
        ValueError: a shape or dtype is not supported, ``chunk_tokens`` is below 1, ``softcap`` below 0, or
            ``num_targets`` not in [0, M].
        RuntimeError: differentiated twice; gradients are scaled in place and can be used once.

    Memory: one slice of logits in the dtype of the inputs, rows padded to a multiple of 64 columns, during the forward
    pass; the gradients that are asked for until the backward pass.
    """
    same = hidden_MD.ndim == 2 and weight_VD.ndim == 2 and hidden_MD.shape[1] == weight_VD.shape[1]
    same = same and hidden_MD.dtype == weight_VD.dtype and targets_M.shape == hidden_MD.shape[:1]
    if not same or chunk_tokens < 1:
        raise ValueError(
            f"linear_cross_entropy: hidden is {hidden_MD.dtype} {tuple(hidden_MD.shape)}, weight {weight_VD.dtype} "
            f"{tuple(weight_VD.shape)}, targets {tuple(targets_M.shape)}, chunk_tokens {chunk_tokens}; allowed: "
            "(M, D), (V, D) of one dtype, (M,), at least 1"
        )
    num_targets = _count_targets(targets_M) if num_targets is None else num_targets
    if softcap < 0 or not 0 <= num_targets <= len(targets_M):
        raise ValueError(
            f"linear_cross_entropy: softcap is {softcap}, num_targets {num_targets} of {len(targets_M)}; allowed: 0 or "
            "above, and from 0 to all; count the targets that are not -100"
        )
    if not torch.is_grad_enabled():  # an autograd function does not see this
        hidden_MD, weight_VD = hidden_MD.detach(), weight_VD.detach()
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_MD, weight_VD, targets_M, chunk_tokens, softcap, num_targets
    )
    return loss


def _count_targets(targets_M: Tensor) -> int:
    """Return the number of targets that count, or of all if values are unknown; unseen by card and ledger."""
    if targets_M.is_meta:
        return len(targets_M)
    with _disable_current_modes():
        return int((targets_M != IGNORED).sum())
