"""Gradients of parameters, from the backward pass until the update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtrain.models.block_model import Unit
from hybridtrain.plan.tensor_class import TensorClass
from hybridtrain.profiler.observer import MemoryObserver


class GradStore:
    """Owns every parameter gradient, unit by unit.

    Args:
        units: The model's units; gradients of a unit come in the order of its parameters.
        sum_dtype: Element type while micro-batches are being added.
        kept_dtype: Element type from ``seal`` until ``take``.
        observer: Told that the tensors are gradients.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        sum_dtype: torch.dtype,
        kept_dtype: torch.dtype,
        observer: MemoryObserver,
    ) -> None:
        self._units = {unit.name: unit for unit in units}
        self._sum_dtype = sum_dtype
        self._kept_dtype = kept_dtype
        self._observer = observer
        self._grads: dict[str, list[Tensor]] = {}

    def accumulate(self, unit: str, grads: Sequence[Tensor]) -> None:
        """Add one micro-batch's gradients; the first ones are kept as they are, not copied."""
        held = self._grads.get(unit)
        if held is None:
            self._grads[unit] = [self._label(grad.to(self._sum_dtype), unit) for grad in grads]
            return
        for total, grad in zip(held, grads, strict=True):
            total.add_(grad)

    def seal(self, unit: str) -> None:
        """Say that ``unit`` got its last micro-batch; converts to the kept dtype, tensor by tensor."""
        grads = self._grads[unit]
        for index, grad in enumerate(grads):
            grads[index] = self._label(grad.to(self._kept_dtype), unit)

    def norm(self) -> Tensor:
        """Return the global L2 norm, a scalar float32; every unit must be sealed."""
        every = [grad for name in self._units for grad in self._grads[name]]
        norms = torch._foreach_norm(every, 2, dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2)
        return norm

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar of the device, in place."""
        for grads in self._grads.values():
            torch._foreach_mul_(grads, factor)

    def take(self, unit: str) -> list[Tensor]:
        """Return the gradients of ``unit`` and forget them; raises ``KeyError`` when there are none."""
        return self._grads.pop(unit)

    def drop(self) -> None:
        """Forget everything, as after a step that must not be applied."""
        self._grads.clear()

    def _label(self, grad: Tensor, unit: str) -> Tensor:
        self._observer.label(grad, TensorClass.GRAD, unit)
        return grad
