"""A copy of all weights in host memory, to undo a predicted step bit by bit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.engine.parameter_pass import ParameterSlice, PassSettings
from hybridtrain.memory.tier import HostBytes, TierBuffer
from hybridtrain.memory.tier_tensor import ByteLayout, Field, Stored, lay_out
from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Placement
from hybridtrain.trainer import Trainer
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class RollbackCopy:
    """Host copy of all stored weights and their master weights; raises ``HostMemoryError``."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._layouts: dict[str, tuple[ByteLayout, list[int], TierBuffer]] = {}
        """Layout of each unit, with the first field of each parameter."""
        for unit in trainer.parameters.units:
            tensors: list[Stored] = []
            firsts: list[int] = []
            stored = trainer.weights.stored_tensors(unit.name, unit.tensors)
            for state, weight in zip(trainer.states.of(unit.name), stored, strict=True):
                firsts.append(len(tensors))
                tensors += [*weight, *([] if state.master_weight is None else [state.master_weight])]
            layout = lay_out((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
            name = f"rollback of {unit.name}"
            buffer = trainer.copies.allocate(layout.num_bytes, Placement.HOST, TensorClass.MASTER, name)
            self._layouts[unit.name] = (layout, firsts, buffer)

    def store(self, piece: ParameterSlice) -> None:
        """Copy a slice of a parameter: its stored parts and its master."""
        self._copy(piece, back=False)

    def fetch_back(self) -> None:
        """Restore the weights before the jump, without changing the phase."""
        settings = PassSettings(uses_extra=False, reads_stored=True, loads_values=False)
        with self._trainer.stored_as(Phase.PREDICT):
            self._trainer.parameters.visit(partial(self._copy, back=True), settings)

    def _copy(self, piece: ParameterSlice, *, back: bool) -> None:
        copies = self._trainer.copies
        if piece.on_host:
            for tensor, kept in self._kept(piece):
                _ = tensor.copy_(kept) if back else kept.copy_(tensor)
            return
        after = [copies.mark()] if back else []
        tickets = [
            copies.fetch(tensor, buffer, offset, after) if back else copies.store(tensor, buffer, offset)
            for tensor, buffer, offset in self._places(piece)
        ]
        for ticket in tickets:  # the slice changes next
            copies.wait(ticket)

    def _fields(self, piece: ParameterSlice) -> tuple[TierBuffer, list[tuple[Tensor, Field, int]]]:
        """Return the buffer of a slice's unit, and the slice's tensors with their parameters' fields and starts."""
        layout, firsts, buffer = self._layouts[piece.unit]
        master_weight, start = piece.weight.master_weight, piece.part.start
        tensors = [*piece.weight.stored, *([] if master_weight is None else [master_weight])]
        of_groups = [any(tensor is other for other in piece.weight.stored[1:]) for tensor in tensors]  # beside codes
        starts = [start // GROUP_SIZE if is_of_group else start for is_of_group in of_groups]
        return buffer, list(zip(tensors, layout.fields[firsts[piece.index] :], starts, strict=False))

    def _places(self, piece: ParameterSlice) -> Iterator[tuple[Tensor, TierBuffer, int]]:
        """Yield each tensor of a slice with its buffer and offset."""
        buffer, fields = self._fields(piece)
        for tensor, field, start in fields:
            yield tensor, buffer, field.offset + start * field.dtype.itemsize

    def _kept(self, piece: ParameterSlice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of a slice with its copy in host memory."""
        buffer, fields = self._fields(piece)
        assert isinstance(buffer.content, HostBytes), "host tensors without memory"
        for tensor, field, start in fields:
            yield tensor, field.view(buffer.content.tensor).view(-1)[start : start + tensor.numel()]


def visit_with(
    rollback: RollbackCopy | None, trainer: Trainer, work: Callable[[ParameterSlice], None], settings: PassSettings
) -> None:
    """Visit all parameters, copying each to ``rollback`` before it changes."""

    def on_slice(piece: ParameterSlice) -> None:
        if rollback is not None:
            rollback.store(piece)
        work(piece)

    trainer.parameters.visit(on_slice, replace(settings, reads_stored=rollback is not None))
