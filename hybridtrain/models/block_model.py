"""What the engine knows of a model: embedding, blocks, head. B batch, T sequence, D width, V vocabulary."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn

from hybridtrain.models.layers import AttentionFunction, Head
from hybridtrain.models.model_config import ModelConfig

BlockScope = Callable[[int], AbstractContextManager[None]]
"""Around the construction of each block, by number: decides where its parameters get memory."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Which tokens of packed rows belong together: attention stays inside a document, positions start with it."""

    ids_BT: Tensor
    """int32, rising along a row."""
    positions_BT: Tensor
    """int64, from 0 in each document."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the model whose parameters are handled together."""

    name: str
    """``embedding``, ``block.0`` ... or ``head``."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Qualified name and parameter of what is trained; a tied weight belongs to the embedding."""
    frozen: tuple[tuple[str, nn.Parameter], ...] = ()
    """What is not."""

    @property
    def tensors(self) -> tuple[nn.Parameter, ...]:
        """What is trained, without the names."""
        return tuple(parameter for _, parameter in self.parameters)


class BlockModel(nn.Module):
    """A decoder-only transformer as embedding -> blocks -> head."""

    def __init__(self, config: ModelConfig, embedding: nn.Module, blocks: list[nn.Module], head: Head) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def compute_attention(self, attention: AttentionFunction) -> None:
        """Let every block compute attention by this function from now on."""
        for block in self.blocks:
            setattr(block, "attention", attention)  # noqa: B010  nn.Module is typed for tensors and modules alone

    def scale_loss(self, share: float) -> None:
        """Say what the loss of the next micro-batch is multiplied with: blocks may add losses of their own."""
        for block in self.blocks:
            setattr(block, "loss_share", share)  # noqa: B010  as above

    def forward(self, token_ids_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the final hidden_BTD, in one plain autograd graph."""
        hidden_BTD = self.embedding(token_ids_BT, documents)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, documents)
        return hidden_BTD  # type: ignore[no-any-return]

    def units(self) -> tuple[Unit, ...]:
        """Return embedding, blocks and head in forward order, every parameter in exactly one of them."""
        named = [
            ("embedding", self.embedding),
            *((f"block.{i}", block) for i, block in enumerate(self.blocks)),
        ]
        seen: set[int] = set()
        units = []
        for name, module in [*named, ("head", self.head)]:
            parameters = [
                (f"{name}.{parameter_name}", parameter)
                for parameter_name, parameter in module.named_parameters()
                if id(parameter) not in seen
            ]
            seen.update(id(parameter) for _, parameter in parameters)
            trained = tuple(item for item in parameters if item[1].requires_grad)
            units.append(Unit(name, trained, tuple(item for item in parameters if not item[1].requires_grad)))
        return tuple(units)

    def named_unit_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, in unit order, a unit's trained ones first."""
        for unit in self.units():
            yield from (*unit.parameters, *unit.frozen)
