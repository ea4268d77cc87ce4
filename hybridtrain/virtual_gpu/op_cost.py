"""Arithmetic and memory traffic of one op: what a roofline needs. Figures are per call; bytes are read plus written."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

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
