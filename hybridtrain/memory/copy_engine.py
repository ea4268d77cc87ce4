"""Copies between tiers: counted by the ledger, ordered by tickets, executed by the transfer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrain.memory.group import DirectGroup, Group
from hybridtrain.memory.tier import Ticket, TierBuffer, page_rounded
from hybridtrain.memory.transfer import Transfer
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.observer import MemoryObserver
from hybridtrain.virtual_gpu.account.op_record import Lane
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


@dataclass(frozen=True, slots=True)
class Gather:
    """An all-gather in progress, op number ``op``; ``rows`` (world, n) are held until compute waits for it."""

    op: int
    rows: Tensor
    end: Callable[[], None]


class CopyEngine:
    """Allocates host and disk buffers, and copies between them and device tensors.

    Copies are asynchronous: users of a result wait for its ticket. The observer records each copy's lane.
    """

    def __init__(self, transfer: Transfer, observer: MemoryObserver, group: Group | None = None) -> None:
        self.transfer = transfer
        self.device = transfer.device
        self.group: Group = group or DirectGroup()
        self.observer = observer
        self._sent: dict[int, tuple[int, Callable[[], None], Tensor]] = {}
        """Sends in progress: number of the op, its wait, tensor."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, tensor_class: TensorClass, unit: str) -> Tensor:
        """Return an uninitialized device tensor, labelled in the ledger."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.observer.label(tensor, tensor_class, unit)
        return tensor

    def allocate(self, num_bytes: int, placement: Placement, tensor_class: TensorClass, name: str) -> TierBuffer:
        """Return a zeroed host or disk buffer of whole pages.

        Raises:
            HostMemoryError, DiskSpaceError: not enough space; nothing was allocated.
        """
        size = page_rounded(num_bytes)
        self.transfer.tiers.enter(placement, size, tensor_class)
        try:
            content = self.transfer.open_bytes(placement, size, f"{tensor_class} of {name}")
        except BaseException:
            self.transfer.tiers.leave(placement, size, tensor_class)
            raise
        return TierBuffer(placement, size, tensor_class, content)

    def release(self, buffer: TierBuffer) -> None:
        """Release a buffer."""
        if buffer.placement is Placement.DISK:
            self.transfer.finish()  # a file goes at once
        self.transfer.tiers.leave(buffer.placement, buffer.num_bytes, buffer.tensor_class)
        if buffer.content is not None:
            buffer.content.close()

    def fetch(self, target: Tensor, source: TierBuffer, offset: int = 0, after: Sequence[Ticket] = ()) -> Ticket:
        """Start copying ``source`` to ``target``, once the tickets in ``after`` are done."""
        before = [*after, *filter(None, [source.last_store])]
        waits = [ticket.op for ticket in before]
        if source.placement is Placement.DISK:
            waits = [self.observer.work(Lane.DISK, target.nbytes, waits)]
        op = self.observer.work(Lane.COPY_IN, target.nbytes, waits)
        return Ticket(op, self.transfer.fetch(target, source.content, offset, [ticket.event for ticket in before]))

    def store(self, source: Tensor, target: TierBuffer, offset: int = 0) -> Ticket:
        """Start copying ``source`` to a buffer after queued compute; it must not change until the ticket is done."""
        op = self.observer.work(Lane.COPY_OUT, source.nbytes, [self.observer.mark()])
        if target.placement is Placement.DISK:
            op = self.observer.work(Lane.DISK, source.nbytes, [op])
        ticket = Ticket(op, self.transfer.store(source, target.content, offset))
        target.last_store = ticket
        return ticket

    def exchange(self, collective: Callable[[Tensor, Tensor], None], target: Tensor, source: Tensor) -> None:
        """Fill ``target`` by a collective of the group; later work of the compute queue waits for it."""
        op = self.observer.work(Lane.LINK, max(target.nbytes, source.nbytes), [self.observer.mark()])
        collective(target, source)
        self.observer.join(op)

    def gather_ahead(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Gather:
        """Start an all-gather of ``source`` in parallel to compute, after the copies in ``after``."""
        waits = [self.observer.mark(), *(ticket.op for ticket in after)]
        op = self.observer.work(Lane.LINK, max(target.nbytes, source.nbytes), waits)
        with self.transfer.beside([ticket.event for ticket in after]):
            return Gather(op, target, self.group.begin_all_gather(target, source))

    def end(self, gather: Gather) -> None:
        """Make later work of the compute queue wait for a gather."""
        self.observer.join(gather.op)
        gather.end()

    def send(self, source: Tensor, rank: int) -> None:
        """Start sending a tensor to another rank after the previous send; the tensor is held until it is sent."""
        self.wait_sent(rank)
        op = self.observer.work(Lane.LINK, source.nbytes, [self.observer.mark()])
        self._sent[rank] = (op, self.group.send(source, rank), source)

    def wait_sent(self, rank: int) -> None:
        """Wait for sends to a rank before their memory is reused."""
        if rank in self._sent:
            op, wait, _ = self._sent.pop(rank)
            self.observer.join(op)
            wait()

    def finish_sends(self) -> None:
        """Wait for all sends to other ranks."""
        for rank in tuple(self._sent):
            self.wait_sent(rank)

    def receive(self, target: Tensor, rank: int) -> None:
        """Receive a tensor from another rank; later work of the compute queue waits for it."""
        op = self.observer.work(Lane.LINK, target.nbytes, [self.observer.mark()])
        self.group.receive(target, rank)
        self.observer.join(op)

    def mark(self) -> Ticket:
        """Return a ticket for all work queued for compute so far."""
        return Ticket(self.observer.mark(), self.transfer.mark())

    def wait(self, ticket: Ticket) -> None:
        """Make later work of the compute queue wait for ``ticket``."""
        self.observer.join(ticket.op)
        self.transfer.wait(ticket.event)

    def host_work(self, num_bytes: int, after: Sequence[Ticket | None]) -> Ticket:
        """Wait for the tickets, then record CPU work on ``num_bytes`` of host memory."""
        tickets = [ticket for ticket in after if ticket is not None]
        for ticket in tickets:
            self.transfer.synchronize(ticket.event)
        return Ticket(self.observer.work(Lane.HOST, num_bytes, [ticket.op for ticket in tickets]))
