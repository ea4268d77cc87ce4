"""Where a model's first values come from, if not from its rule for random ones. P elements of a flat slice."""

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Values by the model's own names for its parameters."""

    def read(self, name: str, part: slice) -> Tensor:
        """Return elements ``part`` of a parameter, flat.

        Args:
            name: Qualified, as ``BlockModel.named_unit_parameters`` yields it.
            part: Range of its elements.

        Returns:
            (P,) on the CPU, in the floating point type that they are kept in.

        Raises:
            ConfigError: they cannot be read.
        """
        ...
