"""What the ledger must know of an op: its arithmetic, traffic and scratch, and what it returns on meta tensors.

Figures are per call; bytes of traffic are read plus written.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hybridkernels.adamw_int8 import adamw_int8_  # noqa: F401  registers the op
from hybridkernels.flash_attention import backward_workspace_bytes

_ATEN = torch.ops.aten
_NO_TRAFFIC = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.empty_like.default,
        _ATEN.new_empty.default,
        _ATEN.empty_strided.default,
        _ATEN._unsafe_view.default,
    }
)
_SAME_FLOPS = {_ATEN.addmm_: _ATEN.addmm}
"""Ops that torch's flop counter does not know, by one that it does."""
_ROW_OPS = frozenset({_ATEN.embedding.default, _ATEN.gather.default, _ATEN.nll_loss_forward.default})
"""Ops that read single rows or elements of their first operand."""


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return floating point operations by torch's flop counter; 0 for everything that is no matmul or attention."""
    packet = func._overloadpacket
    formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def count_bytes(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return bytes read and written: every operand once, a changed operand twice, every new output once."""
    if func in _NO_TRAFFIC:
        return 0
    outputs = sum(tensor.nbytes for tensor in tensors_in([out]))
    if func in _ROW_OPS:
        return 2 * outputs
    if func is _ATEN.scatter_add_.default:
        return 3 * int(args[3].nbytes)
    read = sum(tensor.nbytes for tensor in tensors_in([*args, *kwargs.values()]))
    written = _written_operands(func)
    if not written:
        return read + outputs
    return read + sum(tensor.nbytes for name in written for tensor in tensors_in([_operand(func, name, args, kwargs)]))


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values and inside their lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))


@cache
def _written_operands(func: torch._ops.OpOverload) -> tuple[str, ...]:
    written = tuple(
        item.name for item in func._schema.arguments if item.alias_info is not None and item.alias_info.is_write
    )
    # The fused update changes its gradients only under a gradient scaler, which we do not use.
    return tuple(name for name in written if (func, name) != (_ATEN._fused_adamw_.default, "grads"))


def _operand(func: torch._ops.OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    position = next(i for i, item in enumerate(func._schema.arguments) if item.name == name)
    return args[position] if position < len(args) else None


def _attention_backward(args: Sequence[Tensor]) -> int:
    return backward_workspace_bytes(args[1], args[2])


def _adamw_int8(args: Sequence[Tensor]) -> int:
    param, grad = args[0], args[1]
    return 0 if grad.dtype == param.dtype else param.numel() * param.element_size()


OP_SCRATCH: dict[torch._ops.OpOverload, Callable[[Sequence[Tensor]], int]] = {
    torch.ops.hybridkernels.causal_attention_backward.default: _attention_backward,
    torch.ops.hybridkernels.adamw_int8_.default: _adamw_int8,
}

MATMUL_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.mm.out,
        torch.ops.aten.addmm.default,
        torch.ops.aten.addmm_.default,
        torch.ops.aten.bmm.default,
    }
)
"""Ops that make cuBLAS take its workspace."""


_Key = tuple[Hashable, ...]
_UNSEEN = object()


@dataclass(frozen=True, slots=True)
class _Meta:
    """One output."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class MetaCache:
    """Calls ops, or answers for them."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Meta | tuple[_Meta, ...] | None] = {}

    def call(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)``."""
        if func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        key = _key(func, args, kwargs)
        known = _UNSEEN if key is None else self._known.get(key, _UNSEEN)
        if isinstance(known, _Meta):
            return known.make()
        if isinstance(known, tuple):
            return tuple(meta.make() for meta in known)
        out = func(*args, **kwargs)
        if key is not None and known is _UNSEEN:
            self._known[key] = _describe(out, args)
        return out


def _key(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Key | None:
    """Return what the result depends on; None for operands that are not on the meta device."""
    parts: list[Hashable] = [func]
    for value in (*args, *kwargs.items()):
        part = _part(value)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts)


def _part(value: Any) -> Hashable | None:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype) if value.is_meta else None
    if isinstance(value, tuple | list):
        parts = tuple(_part(item) for item in value)
        return None if None in parts else (type(value), parts)
    return (type(value), value)


def _describe(out: Any, args: tuple[Any, ...]) -> _Meta | tuple[_Meta, ...] | None:
    """Return what to make next time; None when the op must be called every time."""
    tensors = out if isinstance(out, tuple) else (out,)
    if not all(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
        return None
    storages = [tensor.untyped_storage()._cdata for tensor in (*tensors, *(a for a in args if isinstance(a, Tensor)))]
    if len(set(storages[: len(tensors)])) < len(tensors) or set(storages[: len(tensors)]) & set(
        storages[len(tensors) :]
    ):
        return None
    metas = tuple(_Meta(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
    full = all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    if not full:
        return None
    return metas if isinstance(out, tuple) else metas[0]
