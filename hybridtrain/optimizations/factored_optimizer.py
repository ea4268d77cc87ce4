"""Factored optimizer state: row and column means in place of both moments."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.plan.claim import Claim
from hybridtrain.plan.placement import Codec


@dataclass(frozen=True, slots=True)
class FactoredOptimizer:
    """Update by Adafactor: a few kilobytes of state a matrix, for models whose moments fit nowhere."""

    kind: ClassVar[str] = "factored_optimizer"

    def claims(self) -> Iterable[Claim]:
        """Return the claim on the moments' storage."""
        yield Claim("optim_state.codec", Codec.FACTORED)
