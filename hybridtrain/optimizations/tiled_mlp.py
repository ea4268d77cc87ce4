"""Tiled MLP: the feed-forward part of a block in slices of the tokens, for long sequences."""

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.compose import Optimization


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledMlp(Optimization):
    """Compute each block's norm and feed-forward part ``mlp_tile_tokens`` tokens at a time, forward and backward."""

    kind: ClassVar[str] = "tiled_mlp"
    SWITCH: ClassVar[str] = "mlp_tile_tokens"

    mlp_tile_tokens: int = 4096
    """Tokens of a tile, of all sequences of a micro-batch."""
