"""Host copies of weights that live on the device, for an update that runs on the host."""

from collections.abc import Sequence

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtrain.memory.byte_layout import ByteLayout, lay_out
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import StoredWeight
from hybridtrain.memory.tier import HostBytes, Ticket, TierBuffer
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.tensor_class import TensorClass


class WeightMirror:
    """The stored weights of one unit, once more in host memory.

    Args:
        unit: Its name.
        weights: What is stored of each parameter, on the device.
        copies: The way to the host.
    """

    def __init__(self, unit: str, weights: Sequence[StoredWeight], copies: CopyEngine) -> None:
        self._weights = [list(weight) for weight in weights]
        self._copies = copies
        tensors = self._tensors()
        self._layout = lay_out((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        self._buffer = copies.allocate(self._layout.num_bytes, Placement.HOST, TensorClass.WEIGHT, unit)
        self.write()

    def write(self) -> None:
        """Take over what the device holds."""
        for tensor, field in zip(self._tensors(), self._layout.fields, strict=True):
            self._copies.wait(self._copies.store(tensor, self._buffer, field.offset))

    def parts(self) -> list[StoredWeight] | None:
        """Return what is stored of each parameter, in host memory; None in a dry run."""
        views = host_views(self._layout, self._buffer)
        if views is None:
            return None
        rest = iter(views)
        return [tuple(next(rest) for _ in weight) for weight in self._weights]

    def refresh(self, changed: Ticket) -> None:
        """Bring the device up to date once ``changed`` is done."""
        self._buffer.last_store = changed
        after = [self._copies.mark()]
        tickets = [
            self._copies.fetch(tensor, self._buffer, field.offset, after)
            for tensor, field in zip(self._tensors(), self._layout.fields, strict=True)
        ]
        for ticket in tickets:
            self._copies.wait(ticket)

    def close(self) -> None:
        """Give the host memory back."""
        self._copies.release(self._buffer)

    def _tensors(self) -> list[Tensor]:
        return [tensor for weight in self._weights for tensor in weight]


def host_views(layout: ByteLayout, buffer: TierBuffer) -> list[Tensor] | None:
    """Return the tensors of a buffer in host memory; None in a dry run."""
    if buffer.content is None:
        return None
    assert isinstance(buffer.content, HostBytes), "the processor works on host memory"
    with _disable_current_modes():  # host memory is not the ledger's
        return layout.views(buffer.content.tensor)
