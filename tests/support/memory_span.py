"""Ranges of memory by address, who used them last, and a dispatch mode that sees every use by compute."""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes from ``start`` to ``start + size``, inside the storage that begins at ``storage``."""

    storage: int
    start: int
    size: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Span":
        """Return the smallest range that holds a tensor."""
        if not tensor.numel():
            return cls(tensor.untyped_storage().data_ptr(), tensor.data_ptr(), 0)
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        size = (sum((count - 1) * stride for count, stride in pairs) + 1) * tensor.element_size()
        return cls(tensor.untyped_storage().data_ptr(), tensor.data_ptr(), size)

    @classmethod
    def of_storage(cls, tensor: Tensor) -> "Span":
        """Return all memory behind a tensor."""
        storage = tensor.untyped_storage()
        return cls(storage.data_ptr(), storage.data_ptr(), storage.nbytes())

    def overlaps(self, other: "Span") -> bool:
        """Return whether both have a byte in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


class Accesses:
    """When compute last used each range."""

    def __init__(self) -> None:
        self._ticks: defaultdict[int, dict[Span, int]] = defaultdict(dict)

    def note(self, span: Span, tick: int) -> None:
        """Remember a use."""
        self._ticks[span.storage][span] = tick

    def renew(self, storage: Span, tick: int) -> None:
        """Forget the uses of a storage that had the address before; the memory was in use until now."""
        self._ticks[storage.storage] = {storage: tick}

    def last(self, span: Span) -> int:
        """Return the latest use of any byte of a range."""
        used = self._ticks.get(span.storage, {})
        return max((tick for other, tick in used.items() if other.overlaps(span)), default=0)


class Watcher(Protocol):
    """Told what memory compute uses."""

    def compute(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Take notice of one op, before it runs."""
        ...

    def allocated(self, tensor: Tensor) -> None:
        """Take notice of new memory."""
        ...


class ComputeWatch(TorchDispatchMode):
    """Shows every op of the dispatcher to a watcher; views use no memory."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op between two looks at its memory."""
        if func.is_view:
            return func(*args, **(kwargs or {}))
        inputs, writes = _split(func, args, kwargs or {})
        self._watcher.compute(inputs, writes)
        out = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *writes)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self._watcher.allocated(tensor)
        return out


def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an op reads and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    names = [argument.name for argument in func._schema.arguments]
    for argument, value in [*zip(func._schema.arguments, args, strict=False)] + [
        (func._schema.arguments[names.index(name)], value) for name, value in kwargs.items()
    ]:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(tensors)
    return reads, writes


def bytes_at(span: Span) -> np.ndarray:
    """Return memory by address, which keeps nothing alive."""
    if not span.size:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * span.size).from_address(span.start))
