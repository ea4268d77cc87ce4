"""Gradients of parameters, from the backward pass until the update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.tier import Ticket, TierBuffer
from hybridtrain.memory.tier_tensor import Stored, TierTensor, lay_out, padded
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.observer import MemoryObserver
from hybridtrain.virtual_gpu.tensor_class import TensorClass


class GradStore:
    """Owns every parameter gradient, unit by unit.

    Args:
        units: The model's units; gradients of a unit come in the order of its parameters.
        sum_dtype: Element type while micro-batches of one visit are being added.
        kept_dtype: Element type between visits and until ``take``.
        placement: Where they wait for the update; DROPPED: on the device, until someone takes them within the step.
        wants_norm: Whether ``norm`` will be asked for.
        copies: The way there.
        observer: Told that the tensors are gradients.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        sum_dtype: torch.dtype,
        kept_dtype: torch.dtype,
        placement: Placement,
        wants_norm: bool,
        copies: CopyEngine,
        observer: MemoryObserver,
    ) -> None:
        self._units = {unit.name: unit for unit in units}
        self._sum_dtype = sum_dtype
        self._kept_dtype = kept_dtype
        self._offloads = placement in {Placement.HOST, Placement.DISK}
        self._placement = placement
        self._wants_norm = wants_norm
        self._copies = copies
        self._observer = observer
        self._grads: dict[str, list[Tensor]] = {}
        self._norms: dict[str, list[Tensor]] = {}
        self._buffers: dict[str, TierBuffer] = {}
        self._away: dict[str, list[TierTensor]] = {}
        self._leaving: list[tuple[Ticket, list[Tensor]]] = []
        self._arriving: dict[str, list[Ticket]] = {}

    def prefetch(self, unit: str) -> None:
        """Start bringing back the sum of earlier visits, if there is one."""
        if unit in self._away:
            self._grads[unit], self._arriving[unit] = self._fetch(unit)

    def accumulate(self, unit: str, grads: Sequence[Tensor]) -> None:
        """Add one micro-batch's gradients; the first ones are kept as they are, not copied."""
        self.prefetch(unit)
        for ticket in self._arriving.pop(unit, ()):
            self._copies.wait(ticket)
        held = self._grads.get(unit)
        if held is None:
            self._grads[unit] = [self._label(grad.to(self._sum_dtype), unit) for grad in grads]
            return
        for index, (total, grad) in enumerate(zip(held, grads, strict=True)):
            held[index] = self._label(total.to(self._sum_dtype), unit).add_(grad)

    def finish_visit(self, unit: str, *, is_last: bool) -> None:
        """Say that a visit of ``unit`` has ended; after the last one of the step its gradients are complete."""
        grads = self._grads[unit]
        for index, grad in enumerate(grads):
            grads[index] = self._label(grad.to(self._kept_dtype), unit)
        if is_last and self._wants_norm:
            self._norms[unit] = list(torch._foreach_norm(grads, 2, dtype=torch.float32)) if grads else []
        if self._offloads and grads:
            self._store(unit, self._grads.pop(unit))

    def norm(self) -> Tensor:
        """Return the global L2 norm, a scalar float32; every unit must have had its last visit."""
        norms = [norm for name in self._units for norm in self._norms[name]]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2)
        self._norms.clear()
        return norm

    def take(self, unit: str) -> list[Stored]:
        """Return the gradients of ``unit`` and forget them; raises ``KeyError`` when there are none."""
        if unit in self._away:
            return list(self._away.pop(unit))
        return list(self._grads.pop(unit))

    def discard(self, unit: str) -> None:
        """Forget the gradients of ``unit``; their norm stays known."""
        self.take(unit)

    def streamed_bytes(self, unit: str, index: int, num_elements: int) -> int:
        """Return what a range of ``num_elements`` of a gradient takes in a slot; 0 when it waits on the device."""
        if unit not in self._away:
            return 0
        tensor = self._away[unit][index]
        return padded(min(tensor.numel(), num_elements) * tensor.dtype.itemsize)

    def drop(self) -> None:
        """Forget everything, as after a step that must not be applied."""
        self._grads.clear()
        self._norms.clear()
        self._away.clear()
        for tickets in self._arriving.values():
            for ticket in tickets:
                self._copies.wait(ticket)
        self._arriving.clear()
        self._finish_leaving()

    def release(self) -> None:
        """Forget everything and give the memory below the device back."""
        self.drop()
        while self._buffers:
            self._copies.release(self._buffers.popitem()[1])

    def _store(self, unit: str, grads: list[Tensor]) -> None:
        layout = lay_out((tuple(grad.shape), grad.dtype) for grad in grads)
        if unit not in self._buffers:
            self._buffers[unit] = self._copies.allocate(layout.num_bytes, self._placement, TensorClass.GRAD, unit)
        buffer = self._buffers[unit]
        self._finish_leaving()
        away = [TierTensor(buffer, field.offset, field.shape, field.dtype) for field in layout.fields]
        for tensor, grad in zip(away, grads, strict=True):
            source = grad.contiguous()
            self._leaving.append((self._copies.store(source, buffer, tensor.offset), [grad, source]))
        self._away[unit] = away

    def _fetch(self, unit: str) -> tuple[list[Tensor], list[Ticket]]:
        grads: list[Tensor] = []
        tickets: list[Ticket] = []
        for tensor in self._away.pop(unit):
            grad = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._copies.transfer.device)
            grads.append(self._label(grad, unit))
            tickets.append(self._copies.fetch(grad, tensor.buffer, tensor.offset, after=[self._copies.mark()]))
        return grads, tickets

    def _finish_leaving(self) -> None:
        for ticket, _ in self._leaving:
            self._copies.wait(ticket)
        self._leaving.clear()

    def _label(self, grad: Tensor, unit: str) -> Tensor:
        self._observer.label(grad, TensorClass.GRAD, unit)
        return grad
