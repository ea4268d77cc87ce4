"""Loss and its gradients, with a tied weight summed as plain autograd sums it.

B batch, T sequence, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrain.models.block_model import Unit
from hybridtrain.models.layers import Head


@dataclass(frozen=True, slots=True)
class HeadStep:
    """What one micro-batch leaves behind at the head."""

    loss: Tensor
    """Scalar float32, mean over the micro-batch, on the device."""
    grad_BTD: Tensor
    unit_grads: tuple[Tensor, ...]
    """By the head's own parameters."""
    tied_grad_VD: Tensor | None
    """By the token embedding, to be added to the embedding's own gradient of the same micro-batch."""


def differentiate_head(
    head: Head,
    unit: Unit,
    hidden_BTD: Tensor,
    target_ids_BT: Tensor,
    *,
    scale: float,
    chunk_tokens: int,
    wants_tied: bool,
) -> HeadStep:
    """Run the head and differentiate ``scale`` times its loss."""
    hidden_BTD = hidden_BTD.detach().requires_grad_()
    own = unit.tensors
    is_tied = all(parameter is not head.weight for parameter in own)
    weight_VD = head.weight.detach() if is_tied and not wants_tied else head.weight
    inputs = [hidden_BTD, *own, *([head.weight] if is_tied and wants_tied else [])]
    with torch.enable_grad():
        loss = head(hidden_BTD, target_ids_BT, chunk_tokens=chunk_tokens, weight_VD=weight_VD)
    grad_BTD, *grads = torch.autograd.grad(loss, inputs, torch.full_like(loss, scale))
    tied_grad_VD = grads.pop() if is_tied and wants_tied else None
    return HeadStep(loss.detach(), grad_BTD, tuple(grads), tied_grad_VD)


def differentiate_tied_weight(
    head: Head, hidden_BTD: Tensor, target_ids_BT: Tensor, *, scale: float, chunk_tokens: int
) -> Tensor:
    """Return the gradient by the tied weight alone, from the head's input.

    A vertical schedule reaches the embedding only after every micro-batch has passed the head. Adding all of the head's
    contributions first would change the order of the sum; keeping one (V, D) gradient per micro-batch would cost more
    than anything the schedule saves. So the projection is run once more, when the embedding's own gradient is at hand.
    """
    with torch.no_grad():
        normed_BTD = head.norm(hidden_BTD)
    with torch.enable_grad():
        loss = head.projection_loss(normed_BTD, target_ids_BT, chunk_tokens=chunk_tokens, weight_VD=head.weight)
    (grad_VD,) = torch.autograd.grad(loss, (head.weight,), torch.full_like(loss, scale))
    return grad_VD
