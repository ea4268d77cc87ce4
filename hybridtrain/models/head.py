"""The output head: final norm, projection to the vocabulary, cross entropy, whole or in slices of tokens.

B batch, T sequence, D width, V vocabulary.
"""

from torch import Tensor, nn
from torch.nn import functional

from hybridkernels.linear_cross_entropy import linear_cross_entropy


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
            return linear_cross_entropy(normed_BTD.flatten(0, 1), weight_VD, targets, chunk_tokens=chunk_tokens)
        logits_BTV = functional.linear(normed_BTD, weight_VD)
        return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets)
