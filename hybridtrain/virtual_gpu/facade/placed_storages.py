"""Storages on host and card: each byte is counted on its device."""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StepMark, StorageLedger, holders
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.op_rules import Op, is_truly_meta
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator import AllocatorOutOfMemory, CachingAllocator
from hybridtrain.virtual_gpu.allocator.replay import OutOfMemory
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridtrain.virtual_gpu.facade.basis import LedgerNotes
from hybridtrain.virtual_gpu.facade.known_values import Place, VirtualStorage
from hybridtrain.virtual_gpu.facade.op_sets import allows_mixed_devices
from hybridtrain.virtual_gpu.facade.placeholders import where_called
from hybridtrain.virtual_gpu.facade.worst_case import WorstCase

_FIRST_STEP_WITH_PLACES = 2
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})


class PlacedStorages(StorageLedger):  # type: ignore[no-untyped-call]
    """Counts virtual storages by device, with out-of-memory errors of card and host."""

    def __init__(self, card: Card, host: Host | None, allocator: CachingAllocator) -> None:
        super().__init__(device="meta")
        self.card = card
        self.host = host or Host()
        self.allocator = allocator
        self.modules = ModuleUnits()
        self.refusal: OutOfMemory | None = None
        """The last out-of-memory error of the card."""
        self.seen = LedgerNotes()
        self.on_refusal: Callable[[], None] = lambda: None
        self.notes_lines = False
        """Whether to note the line of every allocation."""
        self.can_see_growth = True
        """Whether the run may be long enough to see growth, which needs the script's lines."""
        self.worst: WorstCase | None = None
        """Notes of the worst case; None: not asked for."""
        self.updates = False
        """Whether an optimizer step is running."""
        self.host_bytes = 0
        self.peak_host_bytes = 0
        self.stream = 0
        """The card's current stream; the allocator's cache is per stream."""
        self.first_matmuls: set[bool] = set()
        self._held: dict[int, VirtualStorage] = {}
        self._addresses: dict[int, int] = {}
        self._streams: list[int] = []
        self._target: Place | None = None

    # What the facade asks for.

    def begin_phase(self, phase: str) -> None:
        """Note a phase of the script, if its worst case is asked for."""
        if self.worst is not None:
            self.worst.begin(phase, len(self._events))

    def place_of(self, tensor: Tensor) -> Place | None:
        """Return the device of a virtual tensor; None for a real one, on the CPU or the script's own meta device."""
        if not is_truly_meta(tensor):
            return None
        if is_functorch_wrapped_tensor(tensor):  # of vmap and grad: it has no storage of its own
            return self.place_of(get_unwrapped(tensor))
        holding = self._held.get(tensor.untyped_storage()._cdata)
        if holding is None and type(tensor) not in _PLAIN_TYPES:
            local = getattr(tensor, "_local_tensor", None)  # a DTensor lies where this rank's share of it does
            return None if local is None else self.place_of(local)
        return None if holding is None else holding.place

    @contextmanager
    def moving_to(self, place: Place) -> Iterator[None]:
        """Set the device of the next op's results."""
        outer, self._target = self._target, place
        try:
            yield
        finally:
            self._target = outer

    def enter_module(self, name: str) -> None:
        """Assign later ops to a module."""
        self._unit = self.modules.enter(name)

    def current_module(self) -> str:
        """Return the module of the current op, in a backward pass that of its forward pass."""
        return self.modules.of_node() if self._stage_now() is Stage.BACKWARD else self._unit

    def leave_module(self) -> None:
        """End the assignment of ops to a module."""
        self._unit = self.modules.leave()

    def label(self, tensor: Tensor, tensor_class: TensorClass, unit: str) -> None:
        """Set the class of a tensor; for a DTensor of its local part."""
        super().label(getattr(tensor, "_local_tensor", tensor), tensor_class, unit)

    def storage_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage in the trace; None for one that is not on the card."""
        local = getattr(tensor, "_local_tensor", tensor)
        found = self._alive.get(local.untyped_storage()._cdata)
        return None if found is None else found[0]

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count a resized storage: FSDP frees gathered weights by resizing to 0."""
        address = storage._cdata
        holding = self._held.get(address)
        if holding is None or size == holding.size:
            return
        holding.forget()
        if holding.place is Place.HOST:
            self.host_bytes += size - holding.size
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        else:
            index = -1
            if size:  # the new bytes are there before the old ones go (resize_bytes_cuda)
                self._stage = self._stage_now()
                index = self._allocate(size, self._stage)
            alive = self._alive.pop(address, None)
            if alive is not None:
                holding.label = self._classes[alive[0]], self._units[alive[0]]
                self._release(alive[0], alive[1])
            if size:
                if holding.label is not None:
                    self._classes[index], self._units[index] = holding.label
                self._alive[address] = index, size, holding.watch
        holding.size = size

    def release_cache(self) -> None:
        """Release the allocator's cached segments, as ``torch.cuda.empty_cache`` does."""
        self.allocator.empty_cache()
        self._cache_releases.append(len(self._events))

    def step_mark(self) -> StepMark:
        """Return the mark of a step that begins now."""
        return StepMark(len(self._events), len(self._ops))

    def add_steps(self, marks: Sequence[StepMark]) -> None:
        """Add steps that began at earlier marks."""
        self._steps = sorted([*self._steps, *marks], key=lambda mark: (mark.event, mark.op))

    def trace(self) -> LedgerTrace:
        """Return the record so far."""
        return replace(super().trace(), streams=tuple(self._streams) if any(self._streams) else ())

    # Places and bytes.

    def _place(self, func: Op, operands: list[Tensor]) -> Place | None:
        """Return the place where an op runs; None where no virtual tensor takes part.

        Raises:
            RuntimeError: Its operands are in two places; torch refuses this too.
        """
        place: Place | None = None
        other: Tensor | None = None
        for tensor in operands:
            is_meta = is_truly_meta(tensor)
            holding = self._held.get(tensor.untyped_storage()._cdata) if is_meta else None
            here = None if holding is None else holding.place
            if here is Place.DEVICE:
                place = here
                continue
            if (here is not None or not is_meta) and tensor.dim():
                other = tensor
            place = place or here
        if place is Place.DEVICE and other is not None and not allows_mixed_devices(func):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(virtual GPU, in {func}; an operand of shape {tuple(other.shape)} is on the CPU)"
            )
        return place

    def _enter_at(self, tensor: Tensor, place: Place) -> None:
        if not is_truly_meta(tensor):
            return
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        holding = self._held.get(address)
        if holding is not None:
            if size > holding.size:  # resize_, or an out= that was too small
                self.resize(storage, size)
            return
        watch = weakref.ref(storage, self._on_release(address))
        if place is Place.DEVICE and size:
            self._alive[address] = self._allocate(size, self._stage), size, watch
        self._held[address] = VirtualStorage(place, size, watch)
        if place is Place.HOST:
            self._add_host_bytes(size)

    def _add_host_bytes(self, size: int) -> None:
        self.host_bytes += size
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        if self.host_bytes > self.host.tensor_bytes:
            raise RuntimeError(
                f"[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                f"{size} bytes. (virtual GPU: {self.host_bytes} bytes of tensors on the host, of "
                f"{int(self.host.tensor_bytes)}; set --host-memory for another machine)"
            )

    def _on_release(self, address: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        def release(_reference: weakref.ref[torch.UntypedStorage]) -> None:
            holding, alive = self._held.pop(address, None), self._alive.pop(address, None)
            if alive is not None:
                self._release(alive[0], alive[1])
            elif holding is not None and holding.place is Place.HOST:
                self.host_bytes -= holding.size

        return release

    def _allocate(self, size: int, stage: Stage) -> int:
        try:
            address = self.allocator.malloc(size, self.stream)
        except AllocatorOutOfMemory as refusal:
            self.on_refusal()
            trace = self.trace()
            held = holders(trace, len(trace.events) - 1)
            self.refusal = OutOfMemory.of(refusal, len(trace.steps), (self._stage, self._unit), held)
            text = _cuda_message(self.card, self.refusal)
            self.seen.refusals.append(f"{where_called()}: {text}")
            raise torch.OutOfMemoryError(text) from None
        index = super()._allocate(size, stage)
        if self.can_see_growth and len(self._steps) >= _FIRST_STEP_WITH_PLACES:
            self.seen.made_at[index] = where_called(in_script=True)
        if self.notes_lines:
            self.seen.allocated_at[index] = where_called()
        if stage is Stage.BUILD:  # the first module that runs, or an optimizer, defines the weights
            self._classes[index] = TensorClass.ACTIVATION
        self._addresses[index] = address
        self._streams.append(self.stream)
        return index

    def _release(self, index: int, size: int) -> None:
        super()._release(index, size)
        self.allocator.free(self._addresses.pop(index))

    def _take_workspace(self) -> None:
        """Take cuBLAS's workspace: one for the thread of the forward pass, one for that of the backward pass."""
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward not in self.first_matmuls:
            self.first_matmuls.add(is_backward)
            index = self._allocate(self.card.cublas_workspace_bytes, Stage.UPDATE)
            self._classes[index], self._units[index] = TensorClass.WORKSPACE, "cublas"

    def _stage_now(self) -> Stage:
        if torch._C._current_graph_task_id() != -1:
            return Stage.BACKWARD
        if self.updates:
            return Stage.UPDATE
        return Stage.FORWARD if self._steps else Stage.BUILD


def _cuda_message(card: Card, refusal: OutOfMemory) -> str:
    """Return torch's message for a refused request, with stage and unit."""
    free = max(card.allocator_capacity_bytes - refusal.reserved_bytes, 0)
    is_pass = refusal.stage in {Stage.FORWARD, Stage.BACKWARD}
    place = f"in the {refusal.stage} pass" if is_pass else f"in {refusal.stage}"
    return (
        f"CUDA out of memory. Tried to allocate {format_bytes(refusal.requested_bytes)}. GPU 0 has a total "
        f"capacity of {format_bytes(card.memory_bytes)} of which {format_bytes(free)} is free. Of the allocated "
        f"memory {format_bytes(refusal.allocated_bytes)} is allocated by PyTorch, and "
        f"{format_bytes(refusal.reserved_bytes - refusal.allocated_bytes)} is reserved by PyTorch but unallocated. "
        f"(virtual {card.name}, {place}{f' of {refusal.unit}' if refusal.unit else ''})"
    )


class ModuleUnits:
    """Tracks the module of each op, in forward and backward pass."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._numbers: list[int] = []
        """Autograd node numbers from which on ops belong to the module at the same position in ``_units``."""
        self._units: list[str] = []

    def enter(self, name: str) -> str:
        """Enter a module; return the module of later ops."""
        self._open.append(name)
        return self._mark()

    def leave(self) -> str:
        """Leave the innermost module; return the module of later ops."""
        if self._open:
            self._open.pop()
        return self._mark()

    def of_node(self) -> str:
        """Return the module whose forward pass created the current autograd node."""
        if self._open:  # recomputation
            return self._open[-1]
        node = torch._C._current_autograd_node()
        if node is None or not self._numbers:
            return ""
        position = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._units[position] if position >= 0 else ""

    def _mark(self) -> str:
        unit = self._open[-1] if self._open else ""
        number = torch._C._autograd._get_sequence_nr()
        if self._numbers and self._numbers[-1] == number:
            self._units[-1] = unit
        else:
            self._numbers.append(number)
            self._units.append(unit)
        return unit
