"""A copy of all weights in host memory, to take back what a predicted step did, bit by bit."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.engine.parameter_pass import ParameterSlice, PassSettings
from hybridtrain.memory.tier import HostBytes, TierBuffer
from hybridtrain.memory.tier_tensor import ByteLayout, Stored, lay_out
from hybridtrain.phase import Phase
from hybridtrain.plan.placement import Placement
from hybridtrain.trainer import Trainer
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class RollbackCopy:
    """What is stored of every weight and the companion of it, once more, on the host.

    Args:
        trainer: Whose weights they are.

    Raises:
        HostMemoryError: there is not enough host memory.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._layouts: dict[str, tuple[ByteLayout, list[int], TierBuffer]] = {}
        for unit in trainer.parameters.units:
            tensors: list[Stored] = []
            firsts: list[int] = []
            stored = trainer.weights.stored_tensors(unit.name, unit.tensors)
            for state, weight in zip(trainer.states.of(unit.name), stored, strict=True):
                firsts.append(len(tensors))
                tensors += [*weight, *([] if state.companion is None else [state.companion])]
            layout = lay_out((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
            name = f"rollback of {unit.name}"
            buffer = trainer.copies.allocate(layout.num_bytes, Placement.HOST, TensorClass.MASTER, name)
            self._layouts[unit.name] = (layout, firsts, buffer)

    def store(self, piece: ParameterSlice) -> None:
        """Copy a slice of a parameter: its stored parts and its companion."""
        if piece.on_host:
            for tensor, kept in zip(_stored(piece), self._kept(piece), strict=True):
                kept.copy_(tensor)
            return
        copies, places = self._trainer.copies, self._places(piece)
        tickets = [copies.store(tensor, buffer, offset) for tensor, (buffer, offset) in places]
        for ticket in tickets:  # the slice changes next
            copies.wait(ticket)

    def fetch_back(self) -> None:
        """Let weights be what was taken in PREDICT; the phase stays."""
        settings = PassSettings(uses_extra=False, reads_stored=True, loads_values=False)
        with self._trainer.stored_as(Phase.PREDICT):
            self._trainer.parameters.visit(self._fetch, settings)

    def _fetch(self, piece: ParameterSlice) -> None:
        if piece.on_host:
            for tensor, kept in zip(_stored(piece), self._kept(piece), strict=True):
                tensor.copy_(kept)
            return
        copies = self._trainer.copies
        after, places = [copies.mark()], self._places(piece)
        for ticket in [copies.fetch(tensor, buffer, offset, after) for tensor, (buffer, offset) in places]:
            copies.wait(ticket)

    def _places(self, piece: ParameterSlice) -> list[tuple[Tensor, tuple[TierBuffer, int]]]:
        """Return each tensor of a slice with its buffer and offset."""
        layout, firsts, buffer = self._layouts[piece.unit]
        tensors, places = _stored(piece), []
        for tensor, field in zip(tensors, layout.fields[firsts[piece.index] :], strict=False):
            is_of_group = any(tensor is other for other in piece.weight.stored[1:])  # there are others of codes alone
            start = piece.part.start // GROUP_SIZE if is_of_group else piece.part.start
            places.append((tensor, (buffer, field.offset + start * field.dtype.itemsize)))
        return places

    def _kept(self, piece: ParameterSlice) -> list[Tensor]:
        layout, firsts, buffer = self._layouts[piece.unit]
        assert isinstance(buffer.content, HostBytes), "the processor works on host memory"
        content, first = buffer.content.tensor, firsts[piece.index]
        return [field.view(content).view(-1) for field in layout.fields[first : first + len(_stored(piece))]]


def visit_with(
    rollback: RollbackCopy | None,
    trainer: Trainer,
    work: Callable[[ParameterSlice], None],
    settings: PassSettings,
) -> None:
    """Visit all parameters, each of which ``rollback`` copies before it changes."""

    def on_slice(piece: ParameterSlice) -> None:
        if rollback is not None:
            rollback.store(piece)
        work(piece)

    trainer.parameters.visit(on_slice, replace(settings, reads_stored=rollback is not None))


def _stored(piece: ParameterSlice) -> list[Tensor]:
    companion = piece.weight.companion
    return [*piece.weight.stored, *([] if companion is None else [companion])]
