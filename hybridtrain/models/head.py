"""The output head: final norm, projection to the vocabulary, cross entropy, whole or in slices of tokens.

B batch, T sequence, D width, V vocabulary, C tokens of a slice.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Head(nn.Module):
    """Final norm and output projection; ``weight`` may be the token embedding's."""

    def __init__(self, norm: nn.Module, weight_VD: nn.Parameter) -> None:
        super().__init__()
        self.norm = norm
        self.weight = weight_VD

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return logits_BTV in the dtype of the weights."""
        return functional.linear(self.norm(hidden_BTD), self.weight)

    def forward(
        self,
        hidden_BTD: Tensor,
        target_ids_BT: Tensor,
        *,
        chunk_tokens: int = 0,
        weight_VD: Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross entropy in nats per token, a scalar float32.

        Args:
            hidden_BTD: Output of the last block.
            target_ids_BT: int64.
            chunk_tokens: Tokens per slice of the logits; 0 computes them in one piece.
            weight_VD: Stands in for ``self.weight``, detached when its gradient is not wanted here.
        """
        weight_VD = self.weight if weight_VD is None else weight_VD
        return self.projection_loss(
            self.norm(hidden_BTD), target_ids_BT, chunk_tokens=chunk_tokens, weight_VD=weight_VD
        )

    def projection_loss(
        self, normed_BTD: Tensor, target_ids_BT: Tensor, *, chunk_tokens: int, weight_VD: Tensor
    ) -> Tensor:
        """Return the mean cross entropy of already normalised hidden states."""
        targets = target_ids_BT.reshape(-1)
        if chunk_tokens:
            loss: Tensor = _ChunkedCrossEntropy.apply(normed_BTD.flatten(0, 1), weight_VD, targets, chunk_tokens)  # type: ignore[no-untyped-call]
            return loss
        logits_BTV = functional.linear(normed_BTD, weight_VD)
        return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and both gradients slice by slice in the forward pass: no slice's logits outlive it."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, chunk_tokens: int) -> Tensor:
        num_tokens = len(targets_M)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_MD = torch.empty_like(hidden_MD) if needs_hidden else None
        grad_VD: Tensor | None = None
        loss = hidden_MD.new_zeros((), dtype=torch.float32)
        for start in range(0, num_tokens, chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, num_tokens))
            hidden_CD = hidden_MD[rows]
            loss_sum, dlogits_CV = _slice_loss(hidden_CD, weight_VD, targets_M[rows], num_tokens)
            loss += loss_sum
            if grad_MD is not None:
                torch.mm(dlogits_CV, weight_VD, out=grad_MD[rows])
            if needs_weight:
                transposed_VC = dlogits_CV.t()
                grad_VD = transposed_VC @ hidden_CD if grad_VD is None else grad_VD.addmm_(transposed_VC, hidden_CD)
            del dlogits_CV, loss_sum
        ctx.grads = (grad_MD, grad_VD)
        return loss / num_tokens

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_MD, grad_VD = ctx.grads
        ctx.grads = (None, None)
        for grad in (grad_MD, grad_VD):
            if grad is not None:
                grad.mul_(grad_loss)
        return grad_MD, grad_VD, None, None


def _slice_loss(hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the slice's summed loss and the gradient of the mean loss by its logits, dtype of ``hidden_CD``."""
    logits_CV = functional.linear(hidden_CD, weight_VD).float()
    log_norm_C1 = logits_CV.logsumexp(-1, keepdim=True)
    picked_C1 = logits_CV.gather(-1, targets_C[:, None])
    loss_sum = (log_norm_C1 - picked_C1).sum()
    dlogits_CV = logits_CV.sub_(log_norm_C1).exp_()
    dlogits_CV.scatter_add_(-1, targets_C[:, None], torch.full_like(picked_C1, -1.0))
    dlogits_CV.div_(num_tokens)
    return loss_sum, dlogits_CV.to(hidden_CD.dtype)
