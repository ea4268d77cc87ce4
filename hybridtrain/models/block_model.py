"""The engine's interface to a model: embedding, blocks, head. B batch, T sequence, D width, V vocabulary."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from hybridtrain.errors import ConfigError
from hybridtrain.models.experts import BalanceLoss
from hybridtrain.models.layers import AttentionFunction, Head
from hybridtrain.models.model_config import ModelConfig

BlockScope = Callable[[int], AbstractContextManager[None]]
"""Context around the construction of each block, by number, which decides its parameters' memory. -1 is the embedding,
the number of blocks the head."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A process's part of a model: consecutive blocks, the embedding with the first, the head with the last."""

    blocks: range
    num_blocks: int
    """Blocks of the whole model."""

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding is held."""
        return self.blocks.start == 0

    @property
    def has_head(self) -> bool:
        """Whether the head is held."""
        return self.blocks.stop == self.num_blocks

    @property
    def is_whole(self) -> bool:
        """Whether everything is held."""
        return self.has_embedding and self.has_head

    def holds(self, number: int) -> bool:
        """Return whether a block is held, by number; -1 is the embedding, the number of blocks the head."""
        if number == -1:
            return self.has_embedding
        return self.has_head if number == self.num_blocks else number in self.blocks


def model_parts(num_blocks: int, stages: int) -> list[ModelPart]:
    """Return the parts of the stages: equally many blocks each, or one more in the first ones."""
    starts = [-(-stage * num_blocks // stages) for stage in range(stages + 1)]
    return [ModelPart(range(*ends), num_blocks) for ends in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents of packed rows: attention stays inside each, and positions restart."""

    ids_BT: Tensor
    """int32, document number, rising along a row."""
    positions_BT: Tensor
    """int64, position within the document, from 0."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the model whose parameters are handled together."""

    name: str
    """``embedding``, ``block.0`` ... or ``head``."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Qualified name and parameter of all trained parameters; a tied weight belongs to the embedding."""
    frozen: tuple[tuple[str, nn.Parameter], ...] = ()
    """Qualified name and parameter of all frozen parameters."""

    @property
    def tensors(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters without names."""
        return tuple(parameter for _, parameter in self.parameters)


class BlockModel(nn.Module):
    """A decoder-only transformer as embedding -> blocks -> head.

    ``part`` is this process's part, None: everything; other blocks have no memory.
    """

    def __init__(
        self, config: ModelConfig, embedding: nn.Module, blocks: list[nn.Module], head: Head,
        part: ModelPart | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.part = part or model_parts(len(blocks), 1)[0]
        self.config = config
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def compute_attention(self, attention: AttentionFunction) -> None:
        """Set the attention function of every block."""
        for block in self.blocks:
            setattr(block, "attention", attention)  # noqa: B010  nn.Module is typed for tensors and modules alone

    def compute_in_tiles(self, tokens: int) -> None:
        """Set the tokens of a slice of every block's feed-forward part; 0: all.

        Raises:
            ConfigError: A token's result depends on the others, or on random numbers.
        """
        if tokens and (self.config.experts is not None or self.config.dropout):
            what = "experts" if self.config.experts is not None else f"dropout = {self.config.dropout}"
            raise ConfigError("tiled_mlp", [f"the model has {what}, which tiles do not support; drop tiled_mlp"])
        for block in self.blocks:
            setattr(block, "tile_tokens", tokens)  # noqa: B010  nn.Module is typed for tensors and modules alone

    def forward(
        self, token_ids_BT: Tensor, documents: Documents | None = None, balance: BalanceLoss | None = None
    ) -> Tensor:
        """Return the final hidden_BTD, in one plain autograd graph."""
        hidden_BTD = self.embedding(token_ids_BT, documents)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, documents, balance)
        return hidden_BTD  # type: ignore[no-any-return]

    def units(self, *, everywhere: bool = False) -> tuple[Unit, ...]:
        """Return embedding, blocks and head in forward order; each parameter belongs to exactly one.

        ``everywhere``: of the whole model, other processes' parts included, which have no memory.
        """
        blocks = ((f"block.{i}", block) for i, block in enumerate(self.blocks))
        named = [("embedding", self.embedding), *blocks, ("head", self.head)]
        seen: set[int] = set()
        units = []
        for number, (name, module) in enumerate(named, start=-1):
            parameters = [
                (f"{name}.{parameter_name}", parameter)
                for parameter_name, parameter in module.named_parameters()
                if id(parameter) not in seen
            ]
            seen.update(id(parameter) for _, parameter in parameters)
            if not (everywhere or self.part.holds(number)):
                continue
            trained = tuple(item for item in parameters if item[1].requires_grad)
            units.append(Unit(name, trained, tuple(item for item in parameters if not item[1].requires_grad)))
        return tuple(units)

    def named_unit_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, in unit order; trained ones of a unit first."""
        for unit in self.units():
            yield from (*unit.parameters, *unit.frozen)
