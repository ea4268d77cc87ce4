"""Block inputs (boundaries) kept between forward and backward, on any tier. B batch, T sequence, D width.

With the input of a block, what its attention left is kept where the plan says so.
"""

from torch import Tensor

from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.tier import Ticket, TierBuffer
from hybridtrain.memory.tier_tensor import Field, lay_out
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

HEAD_INPUT = -1
"""Block number of the head's input, which is fetched first."""
_Key = tuple[int, int]


class BoundaryStore:
    """Owns one hidden_BTD, and what is kept beside it, per micro-batch and kept block.

    Inputs are fetched from the last block back, micro-batches in order; offloaded ones are prefetched.
    ``by_micro_batch``: all of one micro-batch before the next.
    """

    def __init__(self, placement: Placement, copies: CopyEngine, *, by_micro_batch: bool = False) -> None:
        self._by_micro_batch = by_micro_batch
        self._placement = placement
        self._copies = copies
        self._kept: dict[_Key, tuple[Tensor, ...]] = {}
        self._away: dict[_Key, tuple[Field, ...]] = {}
        self._leaving: list[tuple[Ticket, Tensor]] = []
        self._arriving: dict[_Key, list[tuple[Ticket, Tensor]]] = {}
        self._buffers: dict[_Key, TierBuffer] = {}

    def store(self, micro_batch: int, block: int, hidden_BTD: Tensor, *more: Tensor) -> None:
        """Keep the input of ``block``, or ``HEAD_INPUT``, and ``more`` of the block."""
        key, tensors = (micro_batch, block), (hidden_BTD, *more)
        for tensor in tensors:
            self.note(block, tensor)
        if self._placement is Placement.DEVICE:
            self._kept[key] = tensors
            return
        layout = lay_out((tensor.shape, tensor.dtype) for tensor in tensors)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.num_bytes < layout.num_bytes:
            if buffer is not None:
                self._copies.release(buffer)
            buffer = self._copies.allocate(layout.num_bytes, self._placement, TensorClass.BOUNDARY, _unit(block))
            self._buffers[key] = buffer
        self._finish_leaving()
        for tensor, field in zip(tensors, layout.fields, strict=True):
            dense = tensor.contiguous()
            self._leaving.append((self._copies.store(dense, buffer, field.offset), dense))
        self._away[key] = layout.fields

    def note(self, block: int, hidden_BTD: Tensor) -> None:
        """Record in the ledger that the input of ``block`` is kept on the device."""
        self._copies.observer.label(hidden_BTD, TensorClass.BOUNDARY, _unit(block))

    def fetch(self, micro_batch: int, block: int) -> tuple[Tensor, ...]:
        """Return and remove the input of ``block`` and what was stored with it; ``KeyError`` if it is not stored."""
        key = (micro_batch, block)
        if self._placement is Placement.DEVICE:
            return self._kept.pop(key)
        self._finish_leaving()
        if key not in self._arriving:
            self._start_fetch(key)
        del self._away[key]
        arrived = self._arriving.pop(key)
        following = min(self._away, key=self._turn, default=None)
        if following is not None and following not in self._arriving:
            self._start_fetch(following)
        for ticket, _ in arrived:
            self._copies.wait(ticket)
        return tuple(tensor for _, tensor in arrived)

    def drop(self) -> None:
        """Remove all inputs."""
        self._kept.clear()
        self._away.clear()
        for ticket, _ in (entry for arriving in self._arriving.values() for entry in arriving):
            self._copies.wait(ticket)
        self._arriving.clear()
        self._finish_leaving()

    def release(self) -> None:
        """Remove all inputs and free offload memory."""
        self.drop()
        while self._buffers:
            self._copies.release(self._buffers.popitem()[1])

    def _turn(self, key: _Key) -> tuple[int, int]:
        micro_batch, block = key
        return (micro_batch, -block) if self._by_micro_batch else (-block, micro_batch)

    def _start_fetch(self, key: _Key) -> None:
        fields, unit = self._away[key], _unit(key[1])
        tensors = [self._copies.empty(field.shape, field.dtype, TensorClass.BOUNDARY, unit) for field in fields]
        after = [self._copies.mark()]
        self._arriving[key] = [
            (self._copies.fetch(tensor, self._buffers[key], field.offset, after), tensor)
            for tensor, field in zip(tensors, fields, strict=True)
        ]

    def _finish_leaving(self) -> None:
        """Wait for the copies under way before their tensors' memory can be used again."""
        for ticket, _ in self._leaving:
            self._copies.wait(ticket)
        self._leaving.clear()


def _unit(block: int) -> str:
    return "head" if block == HEAD_INPUT else f"block.{block}"
