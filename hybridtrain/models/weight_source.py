"""Sources of a model's first values, other than its rule for random ones. P elements of a flat slice."""

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Values by the model's own names for its parameters."""

    def read(self, name: str, part: slice) -> Tensor:
        """Return elements ``part`` of a parameter, (P,) on the CPU, in the floating point type that they are kept in.

        ``name`` is as ``BlockModel.named_unit_parameters`` yields it. Raises ``ConfigError`` where they cannot be read.
        """
