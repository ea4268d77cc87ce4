"""Device memory that blocks share, and the small rules of which block is where."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hybridkernels.int8_quantize import int8_dequantize, num_groups
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.tier import Ticket
from hybridtrain.memory.tier_tensor import ByteLayout, TierTensor, lay_out
from hybridtrain.plan.memory_plan import PhasePlan
from hybridtrain.plan.placement import Codec, Placement


@dataclass(slots=True)
class WeightSlot:
    """Device memory that blocks share, one at a time."""

    flat: Tensor
    """uint8."""
    block: int | None = None
    """Whose content is inside or on its way."""
    arriving: Ticket | None = None
    leaving: Ticket | None = None

    def settle(self, copies: CopyEngine) -> None:
        """Wait for the copies under way."""
        for ticket in (self.arriving, self.leaving):
            if ticket is not None:
                copies.wait(ticket)
        self.arriving = self.leaving = None


_T = TypeVar("_T", Tensor, TierTensor)


def grouped(tensors: Iterable[_T]) -> Iterator[tuple[_T, ...]]:
    """Yield the stored parts of each parameter: codes are followed by their scales."""
    rest = iter(tensors)
    for tensor in rest:
        yield (tensor, next(rest)) if tensor.dtype == torch.int8 else (tensor,)


def code_layout(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> ByteLayout:
    """Return codes and scales of each matrix, and values of each vector."""
    tensors: list[tuple[tuple[int, ...], torch.dtype]] = []
    for shape in shapes:
        if len(shape) < 2:
            tensors.append((shape, dtype))
        else:
            size = shape[0] * shape[1]
            tensors += [((size,), torch.int8), ((num_groups(size),), torch.float32)]
    return lay_out(tensors)


@torch.no_grad()
def widen(stored: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> None:
    """Turn codes into values of the parameters' dtype, and copy vectors."""
    for parameter, parts in zip(parameters, grouped(stored), strict=True):
        if len(parts) == 2:
            int8_dequantize(*parts, parameter.data.view(-1))
        else:
            parameter.data.copy_(parts[0])


def streamed_blocks(plan: PhasePlan, num_blocks: int) -> tuple[int, ...]:
    """Return the blocks whose weights wait below the device; the resident ones are spread evenly among them.

    Spread, they give the bus time to fetch the next streamed one; side by side they would leave it idle.
    """
    if plan.weight.placement is Placement.DEVICE:
        return ()
    resident = min(plan.resident_layers, num_blocks)
    return tuple(
        block for block in range(num_blocks) if (block + 1) * resident // num_blocks == block * resident // num_blocks
    )


def packed_blocks(plan: PhasePlan, num_blocks: int) -> tuple[int, ...]:
    """Return the blocks whose parameters are bound to slots instead of having memory of their own."""
    if plan.weight.codec is Codec.INT8_BLOCKS:
        return tuple(range(num_blocks))
    return streamed_blocks(plan, num_blocks)


@contextmanager
def placeholder_scope() -> Iterator[None]:
    """Build modules without memory: nothing is allocated, and no ledger sees it."""
    with _disable_current_modes(), torch.device("meta"):
        yield


def bind(block: nn.Module, names: Sequence[str], views: Sequence[Tensor]) -> None:
    """Make ``views`` the parameters of ``block``, by qualified name."""
    for name, view in zip(names, views, strict=True):
        owner, _, attribute = name.rpartition(".")
        setattr(block.get_submodule(owner), attribute, nn.Parameter(view.data))  # a version counter of its own


def rebind(block: nn.Module, views: Sequence[Tensor]) -> None:
    """Let the parameters of ``block`` be ``views`` from now on; everyone who knows them goes on knowing them."""
    for parameter, view in zip(block.parameters(), views, strict=True):
        parameter.data = view.data


def block_number(unit: str) -> int:
    """Return the number in ``block.3``, -1 for any other unit."""
    kind, _, number = unit.partition(".")
    return int(number) if kind == "block" else -1
