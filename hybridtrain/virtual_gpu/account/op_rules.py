"""Rules of ops for the ledger: arithmetic, traffic, scratch, and results on meta tensors.

Figures are per call; bytes of traffic are read plus written.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Op = torch._ops.OpOverload
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_ATEN = torch.ops.aten
_SAME_FLOPS = {_ATEN.addmm_: _ATEN.addmm}
"""Ops unknown to torch's flop counter -> equivalent known ops."""
_ROW_OPS = frozenset({_ATEN.embedding.default, _ATEN.gather.default, _ATEN.nll_loss_forward.default})
"""Ops that read single rows or elements of their first operand."""
MATMUL_OPS = frozenset({_ATEN.mm.default, _ATEN.mm.out, _ATEN.addmm.default, _ATEN.addmm_.default, _ATEN.bmm.default})
"""Ops that allocate cuBLAS's workspace."""

_true_is_meta: Callable[[Tensor], bool] = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]


def is_truly_meta(tensor: Tensor) -> bool:
    """Return torch's own ``Tensor.is_meta``, which scripts on a virtual card see replaced."""
    if not torch._C._len_torch_function_stack():
        return _true_is_meta(tensor)
    with torch._C.DisableTorchFunction():  # a mode, as of a default device, would ask the replacement
        return _true_is_meta(tensor)


def count_flops(func: Op, args: Args, kwargs: Kwargs, out: Any) -> int:
    """Return floating point operations by torch's flop counter; 0 except for matmuls and attention."""
    packet = func._overloadpacket
    formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def count_bytes(func: Op, args: Args, kwargs: Kwargs, out: Any) -> int:
    """Return bytes read and written: operands once, changed operands twice, new outputs once."""
    if "empty" in func._schema.name or func is _ATEN._unsafe_view.default:
        return 0
    outputs = sum(tensor.nbytes for tensor in tensors_in([out]))
    if func in _ROW_OPS:
        return 2 * outputs
    if func is _ATEN.scatter_add_.default:
        return 3 * int(args[3].nbytes)
    read = sum(tensor.nbytes for tensor in tensors_in([*args, *kwargs.values()]))
    written = written_tensors(func, args, kwargs)
    return read + (sum(tensor.nbytes for tensor in written) if func._schema.is_mutable else outputs)


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values and inside their lists and tuples, and lists of lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


def written_tensors(func: Op, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the tensors that an op changes."""
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in traits_of(func).written]
    return list(tensors_in(values))


ScratchRule = Callable[[Sequence[Any]], int]
"""Positional arguments of an op -> bytes of scratch."""
_SCRATCH_RULES: dict[Op, ScratchRule] = {}


def register_scratch(func: Op, rule: ScratchRule) -> None:
    """Register the scratch that a CUDA kernel allocates inside an op, unseen by the dispatcher.

    It is counted on every device, so that a CPU run, a dry run and a plan have equal bytes. Register it once, beside
    the op or its use:

        register_scratch(torch.ops.mylib.sort.default, lambda args: 2 * args[0].nbytes)

    Raises:
        ValueError: The op has another rule already.
    """
    if _SCRATCH_RULES.setdefault(func, rule) is not rule:
        raise ValueError(f"{func}: the op has a scratch rule already; register it only once.")


def scratch_bytes(func: Op, args: Sequence[Any]) -> int:
    """Return the scratch of one call; 0 for an op without a rule."""
    rule = _SCRATCH_RULES.get(func)
    return 0 if rule is None else rule(args)


OpKey = tuple[Hashable, ...]
OpAnswer = Callable[[Args, Kwargs], Any]
"""An op's arguments -> its results on the meta device."""
_NUMBERS = frozenset({float, int})
_DRAWN = _ATEN.normal_.default
"""Built-in results, as torch's own meta rule imports torch._dynamo, which takes a second."""


class MetaCache:
    """Cache of ops' results on meta tensors, whose few shapes occur thousands of times.

    Shapes, strides and dtypes are cached, for ops without views (in-place ops may return their operand). A cached op
    makes the same storages in the same order. At most ``MOST`` are cached.
    """

    MOST = 1 << 16

    def __init__(self) -> None:
        self._known: dict[OpKey, OpAnswer | None] = {}
        """None: an op that cannot be cached."""

    def known(self, key: OpKey) -> OpAnswer | None:
        """Return what makes the results of an op that was called before; None if it must be called every time."""
        return self._known.get(key)

    def call(self, func: Op, args: Args, kwargs: Kwargs, key: OpKey | None = None) -> Any:
        """Return ``func(*args, **kwargs)``; ``key``: its ``op_key``, if known."""
        if key is None:
            key = op_key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key not in self._known:
            return self._first_call(func, args, kwargs, key)
        known = self._known[key]
        return func(*args, **kwargs) if known is None else known(args, kwargs)

    def _first_call(self, func: Op, args: Args, kwargs: Kwargs, key: OpKey) -> Any:
        if len(self._known) >= self.MOST:
            self._known.clear()
        if func is _DRAWN:
            self._known[key] = _same(0)
            return args[0]
        if not func._schema.is_mutable:
            out = func(*args, **kwargs)
            self._known[key] = _describe(out, args)
            return out
        before = _metadata(args, kwargs)
        out = func(*args, **kwargs)
        if before == _metadata(args, kwargs):
            self._known[key] = _changed(out, args, kwargs)
        return out


def op_key(func: Op, args: Args, kwargs: Kwargs) -> OpKey | None:
    """Return the key of an op's results and traffic: shapes, strides, dtypes and non-tensor arguments.

    None if it cannot be cached: views, non-meta operands, ops that change a shape.
    """
    operands = traits_of(func).operands
    if operands is None:
        return None
    parts: list[Hashable] = [id(func)]
    for position, value in enumerate(args):
        kind = type(value)
        part = (kind,) if kind in _NUMBERS and position in operands else _part(value)
        if part is None:
            return None
        parts.append(part)
    for name, value in kwargs.items():
        kind = type(value)
        part = (kind,) if kind in _NUMBERS and name in operands else _part(value)
        if part is None:
            return None
        parts.append((name, part))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class OpTraits:
    """Traits of an op by torch's schema and tags."""

    func: Op
    """The op itself, kept because its id is the cache key (its hash would be a Python call)."""
    operands: frozenset[int | str] | None
    """Positions and names of tensor arguments, where a number affects values (a step, a rate) but not shapes. None: not
    cached."""
    written: tuple[tuple[int, str], ...]
    """Positions and names of changed arguments."""
    is_random: bool
    """Whether its result is random."""
    is_dynamic: bool
    """Whether its result's shape may depend on values."""
    is_factory: bool
    """Whether it creates values without tensor inputs; uninitialized and sparse tensors do not count."""
    has_one_tensor: bool
    """Whether its first argument is a tensor, and no other one is."""
    is_composite: bool
    """Whether it is made of other ops; autograd takes it apart, but inference mode hands it on whole."""
    is_torchs: bool
    """Whether torch defines it, and no library or script."""


_TRAITS: dict[int, OpTraits] = {}


_TORCHS = frozenset({"aten", "prims", "c10d", "_c10d_functional", "higher_order", "hybridkernels"})
"""Namespaces of ops that have kernels or rules here."""


def traits_of(func: Op) -> OpTraits:
    """Return the traits of an op."""
    return _TRAITS.get(id(func)) or _TRAITS.setdefault(id(func), _read_traits(func))


def _read_traits(func: Op) -> OpTraits:
    items = [(i, item.name, str(item.type), item) for i, item in enumerate(func._schema.arguments)]
    name = func._schema.name.partition("::")[2]
    written = ((i, name) for i, name, _, item in items if item.alias_info is not None and item.alias_info.is_write)
    return OpTraits(
        func=func,
        operands=_operands(func),
        # The fused update changes its gradients only under a gradient scaler, which we do not use.
        written=tuple(pair for pair in written if (func, pair[1]) != (_ATEN._fused_adamw_.default, "grads")),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_dynamic=torch.Tag.dynamic_output_shape in func.tags,
        is_factory=not any("Tensor" in kind for _, _, kind, _ in items)
        and any(name == "device" for _, name, _, _ in items)
        and not name.startswith(("empty", "sparse", "_")),
        has_one_tensor=[i for i, _, kind, _ in items if "Tensor" in kind] == [0] and items[0][2] == "Tensor",
        is_composite=_has_kernel(func, "CompositeImplicitAutograd") and not _has_kernel(func, "CPU"),
        is_torchs=func.namespace in _TORCHS,
    )


def _has_kernel(func: Op, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func._name, key)


def _operands(func: Op) -> frozenset[int | str] | None:
    """Return the operands of an op that is remembered; what changes values alone decides no shape by any number."""
    is_mutable = func._schema.is_mutable
    if func.is_view or (is_mutable and (torch.Tag.inplace_view in func.tags or "resize" in func._schema.name)):
        return None
    if func._overloadpacket in {_ATEN.arange, _ATEN.range}:  # numbers that decide how many elements there are
        return frozenset()
    kinds = {"number", "Optional[number]", "Tensor"} | ({"float", "int"} if is_mutable else set())
    found = [(i, item.name) for i, item in enumerate(func._schema.arguments) if str(item.type) in kinds]
    return frozenset(name for names in found for name in names)


def _metadata(args: Args, kwargs: Kwargs) -> list[tuple[object, ...]]:
    return [
        (t.shape, t.stride(), t.dtype, t.untyped_storage()._cdata, t.untyped_storage().nbytes())
        for t in tensors_in([*args, *kwargs.values()])
    ]


def _same(place: int | str) -> OpAnswer:
    """Answer with an operand, by its place or name."""
    return lambda args, kwargs: args[place] if isinstance(place, int) else kwargs[place]


def _changed(out: Any, args: Args, kwargs: Kwargs) -> OpAnswer | None:
    """Return the operand that an op gave back; None when it must be called every time."""
    if out is None:
        return lambda _args, _kwargs: None
    operands: Iterator[tuple[int | str, Any]] = chain(enumerate(args), kwargs.items())
    return next((_same(place) for place, value in operands if value is out), None)


def _part(value: Any) -> Hashable | None:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype) if is_truly_meta(value) else None
    if isinstance(value, tuple | list):
        parts = tuple(_part(item) for item in value)
        return None if None in parts else (type(value), parts)
    return (type(value), value)


def _describe(out: Any, args: Args) -> OpAnswer | None:
    """Return the maker of such results; None when the op must be called every time."""
    tensors = out if isinstance(out, tuple) else (out,)
    if not all(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
        return None
    storages = [tensor.untyped_storage()._cdata for tensor in (*tensors, *(a for a in args if isinstance(a, Tensor)))]
    new = set(storages[: len(tensors)])
    if len(new) < len(tensors) or new & set(storages[len(tensors) :]):
        return None
    if any(tensor.untyped_storage().nbytes() != tensor.nbytes for tensor in tensors):
        return None
    metas = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
    if isinstance(out, tuple):
        return lambda _args, _kwargs: tuple([_make(meta) for meta in metas])
    only = metas[0]
    return lambda _args, _kwargs: _make(only)


def _make(meta: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> Tensor:
    shape, stride, dtype = meta
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
