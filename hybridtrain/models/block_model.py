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
class Unit:
    """A part of the model whose parameters are handled together."""

    name: str
    """``embedding``, ``block.0`` ... or ``head``."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Qualified name and parameter; a tied weight belongs to the embedding."""

    @property
    def tensors(self) -> tuple[nn.Parameter, ...]:
        """The parameters without their names."""
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

    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return the final hidden_BTD, in one plain autograd graph."""
        hidden_BTD = self.embedding(token_ids_BT)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
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
            parameters = tuple(
                (f"{name}.{parameter_name}", parameter)
                for parameter_name, parameter in module.named_parameters()
                if id(parameter) not in seen
            )
            seen.update(id(parameter) for _, parameter in parameters)
            units.append(Unit(name, parameters))
        return tuple(units)

    def named_unit_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, in unit order."""
        for unit in self.units():
            yield from unit.parameters
