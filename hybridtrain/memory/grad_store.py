"""Gradients of parameters, from the backward pass until the update."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.memory.shards import Shards, ranges_of
from hybridtrain.memory.tier import Ticket, TierBuffer
from hybridtrain.memory.tier_tensor import Stored, TierTensor, lay_out, padded
from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.memory_plan import PhasePlan, Schedule
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class GradStore:
    """Owns every parameter gradient, unit by unit, in the order of a unit's parameters.

    With placement DROPPED they stay on the device until taken within the step. Each shard sums its own micro-batches.
    """

    def __init__(self, units: Sequence[Unit], plan: PhasePlan, shards: Shards, *, wants_norm: bool) -> None:
        self._shards = shards
        self._copies = shards.copies
        self._per_sum = plan.grad_accum_steps // shards.shares
        """Micro-batches per partial sum."""
        self._folds = shards.shares > 1 and not shards.sums
        """Whether this process adds partial sums in the order of ranks."""
        self._kept_dtype = to_torch_dtype(plan.grad.codec)
        """Sums between visits, until ``take``."""
        adds_in_visit = plan.schedule is Schedule.VERTICAL and plan.grad_accum_steps > 1
        self._sum_dtype = torch.float32 if adds_in_visit else self._kept_dtype
        """Sums of the current visit."""
        self._placement = plan.grad.placement
        self._offloads = self._placement in {Placement.HOST, Placement.DISK}
        self._wants_norm = wants_norm
        self._units = {unit.name: unit for unit in units}
        self._added: Counter[str] = Counter()
        self._sums: dict[str, list[Tensor]] = {}
        """Sums of complete shares, if one process adds like several ranks."""
        self._grads: dict[str, list[Tensor]] = {}
        self._norms: dict[str, list[list[Tensor]]] = {}
        """Squared norms per range of each parameter of a unit; only the own range if gradients are sharded."""
        self._is_finite: dict[str, Tensor] = {}
        """Per unit, a device bool: whether gradients are finite, if no norm tells."""
        self._buffers: dict[str, TierBuffer] = {}
        self._away: dict[str, list[TierTensor]] = {}
        self._leaving: list[tuple[Ticket, list[Tensor]]] = []
        self._arriving: dict[str, list[Ticket]] = {}

    def prefetch(self, unit: str) -> None:
        """Start fetching the sum of earlier visits, if there is one."""
        if unit in self._away:
            self._grads[unit], self._arriving[unit] = [], []
        for stored in self._away.pop(unit, ()):
            grad = self._copies.empty(stored.shape, stored.dtype, TensorClass.GRAD, unit)
            self._grads[unit].append(grad)
            self._arriving[unit].append(self._copies.fetch(grad, stored.buffer, stored.offset, [self._copies.mark()]))

    def accumulate(self, unit: str, grads: Sequence[Tensor]) -> None:
        """Add one micro-batch's gradients; the first ones are kept without a copy."""
        self.prefetch(unit)
        for ticket in self._arriving.pop(unit, ()):
            self._copies.wait(ticket)
        for grad in grads:
            self._copies.observer.cast(grad.dtype, self._sum_dtype, grad.numel())
        held = self._grads.get(unit)
        if held is None:
            self._grads[unit] = [self._label(grad.to(self._sum_dtype), unit) for grad in grads]
        else:
            for index, (total, grad) in enumerate(zip(held, grads, strict=True)):
                held[index] = self._label(total.to(self._sum_dtype), unit).add_(grad)
        if self._folds:
            self._fold(unit)

    def _fold(self, unit: str) -> None:
        """Add the sum of a whole share to those before it."""
        self._added[unit] += 1
        if self._added[unit] % self._per_sum:
            return
        part = self._grads.pop(unit)
        if unit not in self._sums:
            self._sums[unit] = part
        else:
            for total, grad in zip(self._sums[unit], part, strict=True):
                total.add_(grad)

    def finish_visit(self, unit: str, *, is_last: bool) -> None:
        """End a visit of ``unit``; after the step's last visit its gradients are complete."""
        if is_last and self._folds:
            self._grads[unit] = self._sums.pop(unit)
        elif is_last and self._shards.sums and self._grads[unit]:
            self._grads[unit] = self._summed(self._grads[unit])
        grads = self._grads.get(unit)
        if grads is None:  # its share is complete, and another one begins
            return
        for index, grad in enumerate(grads):
            self._copies.observer.cast(grad.dtype, self._kept_dtype, grad.numel())
            grads[index] = self._label(grad.to(self._kept_dtype), unit)
        if is_last and self._wants_norm:
            self._norms[unit] = [
                list(torch._foreach_norm(part, 2, dtype=torch.float32)) if part else [] for part in self._parts(grads)
            ]
        elif is_last and grads and not isinstance(self._copies.transfer, VirtualTransfer):
            with _disable_current_modes():  # two numbers per tensor, for a moment: no ledger's
                self._is_finite[unit] = torch.stack([_is_finite(grad) for grad in grads]).all()
        if self._offloads and grads:
            self._store(unit, self._grads.pop(unit))

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the global L2 norm, a scalar float32, after the last visit of every unit."""
        with self._copies.observer.region(Stage.UPDATE, ""):
            shares = range(max(map(len, self._norms.values()), default=1))
            norms = [norm for share in shares for name in self._units for norm in self._norms[name][share]]
            norm: Tensor = torch.linalg.vector_norm(self._shards.gather_all(torch.stack(norms)), 2)
            self._norms.clear()
            return norm

    def are_finite(self, units: Sequence[str] | None = None) -> bool:
        """Return whether gradients of units (default: all) are finite after their last visit; waits for the device."""
        with _disable_current_modes():
            for unit in self._units if units is None else units:
                norms = [norm for part in self._norms.get(unit, ()) for norm in part]
                flags = [torch.stack(norms).isfinite().all()] if norms else []
                flags += [self._is_finite[unit]] if unit in self._is_finite else []
                if not all(map(bool, flags)):
                    return self._shards.agree(False)
        return self._shards.agree(True)

    def non_finite(self, units: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the names of parameters whose held gradients are not finite; reads all of them."""
        self._copies.transfer.finish()
        names: list[str] = []
        with _disable_current_modes():
            for unit in map(self._units.__getitem__, self._units if units is None else units):
                held: Sequence[Stored] = self._grads.get(unit.name) or self._away.get(unit.name) or ()
                values = (grad if isinstance(grad, Tensor) else _read(grad) for grad in held)
                found = zip(unit.parameters, values, strict=False)
                names += [name for (name, _), grad in found if not _is_finite(grad)]
        everything = [name for unit in self._units.values() for name, _ in unit.parameters]
        return self._shards.agree_on(names, everything)

    def take(self, unit: str) -> list[Stored]:
        """Return and remove the gradients of ``unit``; their norm stays. Raises ``KeyError`` if there are none."""
        held: list[Stored] = list(self._away.pop(unit)) if unit in self._away else list(self._grads.pop(unit))
        return held if self._shards.cuts_grads else [self._own(grad) for grad in held]

    def streamed_bytes(self, unit: str, index: int, num_elements: int) -> int:
        """Return the bytes of ``num_elements`` of a gradient in a stream's slot; 0 if it is on the device."""
        if unit not in self._away:
            return 0
        tensor = self._away[unit][index]
        return padded(min(tensor.numel(), num_elements) * tensor.dtype.itemsize)

    def drop(self) -> None:
        """Remove all gradients, as after a rejected step."""
        for held in (self._grads, self._added, self._sums, self._norms, self._is_finite, self._away):
            held.clear()
        for tickets in self._arriving.values():
            for ticket in tickets:
                self._copies.wait(ticket)
        self._arriving.clear()
        self._finish_leaving()

    def release(self) -> None:
        """Remove all gradients and free offload memory."""
        self.drop()
        while self._buffers:
            self._copies.release(self._buffers.popitem()[1])

    def _summed(self, grads: list[Tensor]) -> list[Tensor]:
        """Return gradients summed: own ranges where they are cut, else whole ones, of which some are unset."""
        parts = self._shards.sum(grads)
        if self._shards.cuts_grads:
            return parts
        for grad, part in zip(grads, parts, strict=True):
            grad.view(-1)[self._shards.range(grad.numel())].copy_(part)
        if not self._shards.cuts_state:
            self._shards.gather([(grad.view(-1),) for grad in grads])
        return grads

    def _parts(self, grads: list[Tensor]) -> list[list[Tensor]]:
        """Return the locally summed ranges, the inputs of norms, share by share."""
        if self._shards.shares == 1 or self._shards.cuts_grads:
            return [grads]
        if self._shards.cuts_state:
            return [[grad.view(-1)[self._shards.range(grad.numel())] for grad in grads]]
        cuts = [ranges_of(grad.numel(), self._shards.shares) for grad in grads]
        return [
            [grad.view(-1)[cut[share]] for grad, cut in zip(grads, cuts, strict=True)]
            for share in range(self._shards.shares)
        ]

    def _own(self, grad: Stored) -> Stored:
        """Return the range of a whole gradient that is updated here."""
        own = self._shards.own(grad.numel())
        if not self._shards.cuts_state:
            return grad
        if isinstance(grad, Tensor):
            return grad.view(-1)[own]
        return replace(grad, offset=grad.offset_of(own.start), shape=(own.stop - own.start,))

    def _store(self, unit: str, grads: list[Tensor]) -> None:
        layout = lay_out((tuple(grad.shape), grad.dtype) for grad in grads)
        if unit not in self._buffers:
            self._buffers[unit] = self._copies.allocate(layout.num_bytes, self._placement, TensorClass.GRAD, unit)
        buffer = self._buffers[unit]
        self._finish_leaving()
        away = [TierTensor.of(buffer, field) for field in layout.fields]
        for tensor, grad in zip(away, grads, strict=True):
            source = grad.contiguous()
            self._leaving.append((self._copies.store(source, buffer, tensor.offset), [grad, source]))
        self._away[unit] = away

    def _finish_leaving(self) -> None:
        for ticket, _ in self._leaving:
            self._copies.wait(ticket)
        self._leaving.clear()

    def _label(self, grad: Tensor, unit: str) -> Tensor:
        self._copies.observer.label(grad, TensorClass.GRAD, unit)
        return grad


def _is_finite(grad: Tensor) -> Tensor:
    if not grad.numel():
        return torch.ones((), dtype=torch.bool, device=grad.device)
    return torch.stack(torch.aminmax(grad)).isfinite().all()


def _read(stored: TierTensor) -> Tensor:
    assert stored.buffer.content is not None, "gradient values in a dry run"
    values = torch.empty(stored.shape, dtype=stored.dtype)
    stored.buffer.content.read(stored.offset, values)
    return values
