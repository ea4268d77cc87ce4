"""Sources of a model's initial values, other than random ones. P elements of a flat slice."""

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Source of initial values, by the model's own parameter names."""

    def read(self, name: str, part: slice) -> Tensor:
        """Return elements ``part`` of a parameter, (P,) on the CPU, in their stored floating-point dtype.

        ``name`` is as ``BlockModel.named_unit_parameters`` yields it. Raises ``ConfigError`` if they cannot be read.
        """
