"""Layout of blocks' weights in shared memory, and placement of blocks."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.memory.formats import CodeFormat, StoredWeight
from hybridtrain.memory.tier_tensor import ByteLayout, TierTensor, lay_out
from hybridtrain.models.widening import Widen, set_widening
from hybridtrain.plan.memory_plan import CODED, PhasePlan, suited
from hybridtrain.plan.placement import Placement

_T = TypeVar("_T", Tensor, TierTensor)


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """The byte layout of a block's stored parameters."""

    layout: ByteLayout
    counts: tuple[int, ...]
    """Stored tensors of each parameter: one of values, or those of a code format."""

    @classmethod
    def of(cls, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, codes: CodeFormat | None) -> "StoredLayout":
        """Return the layout: codes for matrices if ``codes`` is given, values for the rest."""
        found = [
            [(spec.shape, spec.dtype) for spec in codes.specs(shape)]
            if codes is not None and len(shape) > 1
            else [(shape, dtype)]
            for shape in shapes
        ]
        return cls(lay_out(tensor for tensors in found for tensor in tensors), tuple(map(len, found)))

    @property
    def num_bytes(self) -> int:
        """Padding included."""
        return self.layout.num_bytes

    def grouped(self, tensors: Iterable[_T]) -> list[tuple[_T, ...]]:
        """Return the stored tensors by parameter."""
        rest = iter(tensors)
        return [tuple(next(rest) for _ in range(count)) for count in self.counts]

    def views(self, flat: Tensor) -> list[StoredWeight]:
        """Return the stored tensors of each parameter in ``flat``."""
        return self.grouped(self.layout.views(flat))


Values = tuple[Tensor, Widen | None]
"""Memory of a parameter, and the rule that computes its values from codes; None: it is stored as values."""


class MatrixSlot:
    """Device memory that coded matrices use in turn: ``flat``, uint8, of the largest's size."""

    def __init__(self, codes: CodeFormat, flat: Tensor) -> None:
        self.codes = codes
        self._flat = flat
        self.holder: Widen | None = None
        """Rule of the matrix whose values are present; None after its codes changed."""

    def values(self, stored: StoredWeight, shape: tuple[int, ...], dtype: torch.dtype) -> Values:
        """Return the memory of a matrix's values and the rule that fills it; vectors are used as stored."""
        if len(stored) == 1:
            return stored[0], None
        view = self._flat[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
        return view, _MatrixWidening(self, stored, view)


@dataclass(eq=False, slots=True)
class _MatrixWidening:
    """Widens one coded matrix into the shared memory."""

    _slot: MatrixSlot
    _stored: StoredWeight
    _view: Tensor

    @torch.no_grad()
    def __call__(self) -> None:
        if not self.is_done:
            self._slot.holder = self
            self._slot.codes.widen(self._stored, self._view.view(-1))

    @property
    def is_done(self) -> bool:
        return self._slot.holder is self

    @property
    def row_codes(self) -> tuple[Tensor, Tensor] | None:
        codes, *scales = self._stored
        return (codes.view(self._view.shape), scales[0].view(-1)) if scales[0].dim() > 1 else None

    @property
    def layout(self) -> Hashable:
        return self._slot.codes, tuple((part.shape, part.stride(), part.dtype) for part in self._stored)

    def pretend(self, *, is_done: bool) -> None:
        if is_done:
            self._slot.holder = self
        elif self.is_done:
            self._slot.holder = None


@torch.no_grad()
def widen(codes: CodeFormat, stored: Iterable[StoredWeight], parameters: Iterable[nn.Parameter]) -> None:
    """Dequantize codes to the parameters' dtype, and copy vectors."""
    for parameter, parts in zip(parameters, stored, strict=True):
        if len(parts) > 1:
            codes.widen(parts, parameter.data.view(-1))
        else:
            parameter.data.copy_(parts[0])


def streamed_blocks(plan: PhasePlan, blocks: range) -> tuple[int, ...]:
    """Return the held blocks whose weights are offloaded; resident ones are spread evenly among them.

    Spread resident blocks give the bus time to fetch the next streamed block.
    """
    if plan.weight.placement is Placement.DEVICE:
        return ()
    count = len(blocks)
    resident = suited(plan, count).resident_layers
    return tuple(block for i, block in enumerate(blocks) if (i + 1) * resident // count == i * resident // count)


def packed_blocks(plan: PhasePlan, blocks: range) -> tuple[int, ...]:
    """Return the held blocks whose parameters are views of slots instead of own memory."""
    if plan.weight.codec in CODED:
        return tuple(blocks)
    return streamed_blocks(plan, blocks)


@contextmanager
def placeholder_scope() -> Iterator[None]:
    """Build modules without memory, unseen by ledgers."""
    with _disable_current_modes(), torch.device("meta"):
        yield


def bind(block: nn.Module, names: Sequence[str], values: Sequence[Values]) -> None:
    """Set the parameters of ``block`` to ``values``, by qualified name."""
    for name, (view, widen) in zip(names, values, strict=True):
        owner, _, attribute = name.rpartition(".")
        module = block.get_submodule(owner)
        learns = getattr(module, attribute).requires_grad
        parameter = nn.Parameter(view.data, requires_grad=learns)  # a version counter of its own
        set_widening(parameter, widen)
        setattr(module, attribute, parameter)


def rebind(parameters: Iterable[nn.Parameter], values: Sequence[Values]) -> None:
    """Replace the parameters' data by ``values``; the Parameter objects stay."""
    for parameter, (view, widen) in zip(parameters, values, strict=True):
        parameter.data = view.data
        set_widening(parameter, widen)


def block_number(unit: str) -> int:
    """Return the number in ``block.3``, -1 for any other unit."""
    kind, _, number = unit.partition(".")
    return int(number) if kind == "block" else -1
