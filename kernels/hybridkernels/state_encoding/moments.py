"""Optimizer moments of one tensor as they are stored: in floating point, or in 8-bit codes with scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE

FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Coded:
    """Codes of the dynamic 8-bit map (adamw_int8/dynamic_map.py), which is unsigned for second moments."""

    codes: Tensor
    """uint8, contiguous; may go on to the end of the last group, where nothing is read."""
    scale: Tensor
    """float32, contiguous, one per group of 256."""


Stored = Tensor | Coded


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of one tensor of weights, on one device; floating-point ones are float32 or bfloat16 and contiguous."""

    m: Stored
    """First moment, any shape."""
    v: Stored
    """Second moment, as many elements."""
    slow: Stored | None = None
    """Slow gradient average, as many elements, in codes of the signed map if in codes."""

    @property
    def num_elements(self) -> int:
        """The number of weights; whole groups where all moments are codes."""
        parts = [part for part in (self.m, self.v, self.slow) if part is not None]
        counts = [part.numel() if isinstance(part, Tensor) else part.codes.numel() for part in parts]
        return min(counts)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._values.device

    def sums_like(self) -> Tensor:
        """Return what ``moment_statistics`` returns of them, not filled."""
        return self._values.new_empty(8, dtype=torch.float64)

    @property
    def _values(self) -> Tensor:
        return self.m if isinstance(self.m, Tensor) else self.m.codes


def require_moments(moments: list[Moments]) -> None:
    """Refuse moments that do not fit together.

    Raises:
        ValueError: there are none, or sizes, dtypes, devices or memory layouts do not fit.
    """
    if not moments:
        raise ValueError("moment_statistics: no moments are given; give those of at least one tensor")
    device = moments[0].device
    for index, piece in enumerate(moments):
        count = piece.num_elements
        for name in ("m", "v", "slow"):
            stored = getattr(piece, name)
            if stored is not None:
                _require_stored(f"moment_statistics: {name} of tensor {index}", stored, count, device)


def _require_stored(name: str, stored: Stored, count: int, device: torch.device) -> None:
    groups = -(-count // QUANT_GROUP_SIZE)
    wanted: list[tuple[Tensor, tuple[torch.dtype, ...], tuple[int, int]]] = []
    if isinstance(stored, Tensor):
        allowed = "float32 or bfloat16"
        wanted += [(stored, FLOATS, (count, count))]
    else:
        wanted += [
            (stored.codes, (torch.uint8,), (count, groups * QUANT_GROUP_SIZE)),
            (stored.scale, (torch.float32,), (groups, groups)),
        ]
        allowed = f"uint8 codes with {groups} float32 scales"
    for tensor, dtypes, (fewest, most) in wanted:
        fits = fewest <= tensor.numel() <= most and tensor.dtype in dtypes
        if not fits or tensor.device != device or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, {layout}; beside its others it "
                f"must be {allowed}, of {count} elements on {device}, contiguous"
            )
