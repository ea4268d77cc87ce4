"""Matrices stored as codes, dequantized only while they are used.

The parameter uses memory shared with others. Autograd keeps only a reference, so it is dequantized again in the
backward pass.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Widen(Protocol):
    """Writes a matrix's dequantized values into its parameter's memory."""

    def __call__(self) -> None:
        """Write the values, unless they are there."""

    @property
    def is_done(self) -> bool:
        """Whether the values are present."""

    @property
    def row_codes(self) -> tuple[Tensor, Tensor] | None:
        """Codes of the matrix's shape, int8, and the scale of each row, float32; None: rows have no scale each."""

    @property
    def layout(self) -> Hashable:
        """Hashable key of its effect, apart from values."""

    def pretend(self, *, is_done: bool) -> None:
        """Set whether the values count as present, in a dry run."""


_NAME = "widen"


def set_widening(parameter: nn.Parameter, widen: Widen | None) -> None:
    """Set the rule by which a parameter gets its values; None: they are stored."""
    setattr(parameter, _NAME, widen)


def widening_of(tensor: Tensor) -> Widen | None:
    """Return the rule by which a tensor gets its values; None: they are stored."""
    return getattr(tensor, _NAME, None)


@contextmanager
def widened(weight: Tensor, *, is_read: bool = True) -> Iterator[Tensor]:
    """Yield a weight with its values, inside the context and whenever a graph made inside needs them.

    A tensor without a rule is yielded unchanged. Not ``is_read``: only the backward pass needs the values.
    """
    widen = widening_of(weight)
    if widen is None:
        yield weight
        return
    if is_read:
        widen()
    shared = weight.detach()
    memory = shared.untyped_storage()._cdata

    def pack(saved: Tensor) -> Tensor | tuple[tuple[int, ...], tuple[int, ...]]:
        is_weight = saved.untyped_storage()._cdata == memory
        return (tuple(saved.shape), saved.stride()) if is_weight else saved

    def unpack(packed: Tensor | tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        widen()
        return shared.as_strided(*packed)

    with saved_tensors_hooks(pack, unpack):
        yield weight
