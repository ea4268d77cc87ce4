"""Cross entropy and its gradient in torch's own ops, in place, some rows at a time. R rows, C tokens, V vocabulary."""

import torch
from torch import Tensor

IGNORED = -100
"""The target of a token that does not count, as in torch's ``cross_entropy``."""
_WIDE = frozenset({torch.float32, torch.float64})
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""On the CPU the rows at work stay in the second-level cache; on CUDA fp32 scratch is 64 MiB: launches cost more."""


def cross_entropy_grad_plain(
    logits_CV: Tensor, targets_C: Tensor, scale: float, softcap: float = 0.0, *, ignores: bool = False
) -> Tensor:
    """Return losses_C; ``logits_CV`` becomes the gradient of ``scale`` times their sum."""
    num_tokens, vocab = logits_CV.shape
    losses_C = logits_CV.new_empty(num_tokens, dtype=torch.promote_types(logits_CV.dtype, torch.float32))
    rows = max(1, min(num_tokens, _BLOCK_ELEMENTS[logits_CV.device.type] // vocab))
    scratch_RV = None if logits_CV.dtype in _WIDE else logits_CV.new_empty(rows, vocab, dtype=torch.float32)
    pieces = (torch.split(tensor, rows) for tensor in (logits_CV, targets_C[:, None], losses_C))
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
