"""Weights as the forward pass reads them."""

from torch import nn

from hybridtrain.models.block_model import BlockModel
from hybridtrain.models.head import Head


class WeightStore:
    """Hands out the model's parts. All of them live on the device, so acquiring and releasing cost nothing."""

    def __init__(self, model: BlockModel) -> None:
        self._model = model

    def acquire_embedding(self) -> nn.Module:
        """Return the embedding with its weights on the device."""
        return self._model.embedding

    def acquire(self, block: int) -> nn.Module:
        """Return ``block`` with its weights on the device."""
        return self._model.blocks[block]

    def acquire_head(self) -> Head:
        """Return the head with its weights on the device."""
        return self._model.head
