"""A copy of all weights in host memory, to take back what a predicted step did, bit by bit."""

from collections.abc import Sequence

from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.memory.byte_layout import ByteLayout, lay_out
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.state_store import StateStore
from hybridtrain.memory.tier import HostBytes, TierBuffer
from hybridtrain.memory.tier_tensor import Stored
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.tensor_class import TensorClass


class RollbackCopy:
    """What is stored of every weight and the master codec's companion of it, once more, on the host.

    Args:
        units: All of the model.
        weights: Theirs.
        states: Theirs.
        copies: The way to the host.

    Raises:
        HostMemoryError: there is not enough host memory.
    """

    def __init__(self, units: Sequence[Unit], weights: WeightStore, states: StateStore, copies: CopyEngine) -> None:
        self._copies = copies
        self._layouts: dict[str, tuple[ByteLayout, list[int], TierBuffer]] = {}
        for unit in units:
            tensors: list[Stored] = []
            firsts: list[int] = []
            stored = weights.stored_tensors(unit.name, unit.tensors)
            for state, weight in zip(states.of(unit.name), stored, strict=True):
                firsts.append(len(tensors))
                tensors += [*weight, *([] if state.companion is None else [state.companion])]
            layout = lay_out((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
            buffer = copies.allocate(layout.num_bytes, Placement.HOST, TensorClass.MASTER, f"rollback of {unit.name}")
            self._layouts[unit.name] = (layout, firsts, buffer)

    def take(self, unit: str, index: int, part: slice, tensors: Sequence[Tensor]) -> None:
        """Copy a slice of a parameter: its stored parts and its companion, flat, on the device."""
        buffer, offsets = self._places(unit, index, part, len(tensors))
        tickets = [self._copies.store(tensor, buffer, offset) for tensor, offset in zip(tensors, offsets, strict=True)]
        for ticket in tickets:  # the slice changes next
            self._copies.wait(ticket)

    def give(self, unit: str, index: int, part: slice, tensors: Sequence[Tensor]) -> None:
        """Write a slice of a parameter back to where ``take`` had it from."""
        buffer, offsets = self._places(unit, index, part, len(tensors))
        after = [self._copies.mark()]
        pairs = zip(tensors, offsets, strict=True)
        for ticket in [self._copies.fetch(tensor, buffer, offset, after) for tensor, offset in pairs]:
            self._copies.wait(ticket)

    def take_on_host(self, unit: str, index: int, tensors: Sequence[Tensor]) -> None:
        """Copy a whole parameter that is in host memory."""
        for tensor, kept in zip(tensors, self._kept(unit, index, tensors), strict=True):
            kept.copy_(tensor)

    def give_on_host(self, unit: str, index: int, tensors: Sequence[Tensor]) -> None:
        """Write a whole parameter back."""
        for tensor, kept in zip(tensors, self._kept(unit, index, tensors), strict=True):
            tensor.copy_(kept)

    def num_bytes(self, unit: str) -> int:
        """Return the bytes kept of a unit."""
        return self._layouts[unit][0].num_bytes

    def _places(self, unit: str, index: int, part: slice, count: int) -> tuple[TierBuffer, list[int]]:
        layout, firsts, buffer = self._layouts[unit]
        fields = layout.fields[firsts[index] : firsts[index] + count]
        whole = max(field.num_elements for field in fields)
        starts = [
            part.start if field.num_elements == whole else part.start // GROUP_SIZE for field in fields
        ]  # scales: one per group
        return buffer, [f.offset + start * f.dtype.itemsize for f, start in zip(fields, starts, strict=True)]

    def _kept(self, unit: str, index: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        layout, firsts, buffer = self._layouts[unit]
        assert isinstance(buffer.content, HostBytes), "the processor works on host memory"
        fields = layout.fields[firsts[index] : firsts[index] + len(tensors)]
        return [field.view(buffer.content.tensor).view(-1) for field in fields]
