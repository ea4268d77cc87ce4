"""Projection, cross entropy and both gradients, a slice of the tokens at a time: no slice's logits outlive it.

The gradients are made in the forward pass, where the logits are, as in Liger's fused linear cross entropy (2410.10989).
The matrix products stay with cuBLAS; the softmax between them turns the logits into their own gradient in place, so a
slice costs its logits once, in the compute dtype. M tokens, C tokens of a slice, D width, V vocabulary, P padded V.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from hybridkernels.linear_cross_entropy.op import cross_entropy_grad_
from hybridkernels.linear_cross_entropy.plain import IGNORED

_ROW_MULTIPLE = 64
"""Rows of logits start at multiples of 128 bytes or more: GPT-2's 50257 columns would make every access unaligned."""


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
            raise RuntimeError("linear_cross_entropy: its gradients were taken already; run the forward pass again")
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
        num_targets: How many targets count. None has them counted, for which the host waits for the card.

    Returns:
        A scalar, nats per token, float32 (float64 for float64 inputs).

    Raises:
        ValueError: a shape or dtype is another than these, ``chunk_tokens`` is below 1, ``softcap`` below 0, or
            ``num_targets`` not in [0, M].
        RuntimeError: differentiated twice; the gradients are scaled in place and handed out.

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
    if not torch.is_grad_enabled():  # an autograd function is not told so
        hidden_MD, weight_VD = hidden_MD.detach(), weight_VD.detach()
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_MD, weight_VD, targets_M, chunk_tokens, softcap, num_targets
    )
    return loss


def _count_targets(targets_M: Tensor) -> int:
    """Return how many targets count; all of them by shape alone. Nothing of this is on the card, nor in its ledger."""
    if targets_M.is_meta:
        return len(targets_M)
    with _disable_current_modes():
        return int((targets_M != IGNORED).sum())
