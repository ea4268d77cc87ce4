"""Cross entropy that turns logits into their own gradient, as an op: a Triton kernel on CUDA, torch's ops elsewhere.

C tokens, V vocabulary; R rows at a time in torch's ops.
"""

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, triton_or
from hybridkernels.linear_cross_entropy.reference import IGNORED

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
    cuda=triton_or(
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
        scale: Of the gradient, as 1 / tokens for that of a mean. The losses are not scaled.
        softcap: c, where the loss is of c * tanh(logits / c) and the gradient that of ``logits``; 0: none.
        ignores: A target may be -100 too: its token has loss 0 and gradient 0.

    Returns:
        losses_C: (C,) float32 (float64 for float64 logits), nats.

    Raises:
        ValueError: a shape, dtype or stride is another than these.

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
