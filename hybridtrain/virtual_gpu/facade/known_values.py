"""Known values of virtual tensors, computed from the script's own data: small ones are kept beside their storage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from hybridtrain.virtual_gpu.account.op_rules import Args, Kwargs, Op, is_truly_meta, traits_of
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.facade.op_sets import (
    ANY_ALL,
    DRAWS,
    FILLS,
    FINITE_ANSWERS,
    LIKES,
    LOGIC,
    PUTS,
    QUESTIONS,
    TAKES_HOST_INDICES,
    is_integral,
    is_small,
    like,
    made_on_meta,
    map_tensors,
    without_generator,
)
from hybridtrain.virtual_gpu.facade.placeholders import Placeholders
from hybridtrain.virtual_gpu.facade.sequence_ops import PACK

_ATEN = torch.ops.aten
_CPU = torch.device("cpu")
_KNOWN_FLOATS_OF_HOST = 2**20
"""Most elements of a floating-point tensor of the host with known values, by which scripts draw masks."""
_EQUAL = {_ATEN.eq: False, _ATEN.ne: True}
_DIMS_OF_PLACES = 2
_MASKS = frozenset({torch.bool, torch.uint8})


class Place(Enum):
    """Device that a virtual tensor's bytes belong to."""

    HOST = "cpu"
    DEVICE = "cuda"


@dataclass(slots=True)
class VirtualStorage:
    """A virtual storage."""

    place: Place
    size: int
    """Bytes."""
    watch: ref[torch.UntypedStorage]
    """Weak reference whose callback notes the end of the storage."""
    values: torch.UntypedStorage | None = None
    """Known values, on the CPU."""
    fill: bool | None = None
    """Placeholder value of all elements."""
    rule: str = ""
    """Rule that the fill rests on; empty: that numbers are finite."""
    label: tuple[TensorClass, str] | None = None
    """Class before it was resized to nothing."""
    arriving: int | None = None
    """Number of the collective that writes it, for which readers wait."""

    def forget(self) -> None:
        """Mark its values as unknown."""
        self.values, self.fill, self.rule = None, None, ""


class KnownValues:
    """Keeps known values, and computes ops on the CPU if all inputs are known and small."""

    def __init__(self, held: Mapping[int, VirtualStorage], placeholders: Placeholders) -> None:
        self._held, self._placeholders = held, placeholders

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's known values, on the CPU; None if unknown."""
        if not is_truly_meta(tensor):
            return tensor
        holding = self._held.get(tensor.untyped_storage()._cdata)
        if holding is None or holding.values is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(holding.values, tensor.storage_offset(), tensor.shape, tensor.stride())

    def are_known(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the values of all tensors are known."""
        held = self._held
        for tensor in tensors:
            holding = held.get(tensor.untyped_storage()._cdata)
            if holding is None or holding.values is None:
                return False
        return True

    def forget(self, tensor: Tensor) -> None:
        """Mark a tensor's values as unknown."""
        holding = self._held.get(tensor.untyped_storage()._cdata)
        if holding is not None:
            holding.forget()

    def keep(self, func: Op, args: Args, out: Any, written: Sequence[Tensor], results: Any) -> None:
        """Keep the values of new tensors; forget those overwritten by unknown ones."""
        if results is None:
            found = self._filled(func, args)
            for tensor in written:
                self.forget(tensor)
            holding = None if found is None else self._held.get(out.untyped_storage()._cdata)
            if found is not None and holding is not None and out.nbytes == holding.size:
                holding.fill, holding.rule = found
            return
        if written:
            return
        pairs = zip(out, results, strict=True) if isinstance(out, list | tuple) else [(out, results)]
        for tensor, value in pairs:
            if value is None or not isinstance(tensor, Tensor):
                continue
            holding = self._held.get(tensor.untyped_storage()._cdata)
            if holding is not None and holding.values is None and self._is_kept(tensor):
                self._fresh(tensor, holding).copy_(value)

    def compute(self, func: Op, args: Args, kwargs: Kwargs, operands: list[Tensor]) -> Any:
        """Compute an op's results on the CPU (no results: empty tuple); None if unknown.

        Results of factories are known, random ones included, as scripts make batches of them; random functions of
        operands are on the host alone.
        """
        traits = traits_of(func)
        if func.is_view or (traits.is_random and operands and not all(map(self._is_of_host, operands))):
            return None
        if not operands or func._overloadpacket in LIKES:
            return self._made(func, args, kwargs)
        if func in ANY_ALL and (fill := self._fill_of(func, args[0])) is not None:
            return torch.tensor(fill, device="cpu")
        values: dict[int, Tensor] = {}
        for tensor in operands:
            if not self._is_kept(tensor):
                return None
            known = self.of(tensor)
            if known is None:
                known = self._assume(func, args, tensor)
            if known is None:
                return self._placeholders.rule(func, args, kwargs)
            values[id(tensor)] = known
        return _on_cpu(func, args, kwargs, values)

    def read(self, func: Op, args: Args, _kwargs: Kwargs) -> Any:
        """Return a tensor's single value as a Python number, a placeholder if unknown."""
        known = self.of(args[0])
        if known is not None:
            return known.item()
        fill = self._fill_of(func, args[0])
        return self._placeholders.number(func, args[0].dtype) if fill is None else fill

    def compare(self, func: Op, args: Args, kwargs: Kwargs) -> bool:
        """Return whether two tensors are equal, or close."""
        one, other = self.of(args[0]), self.of(args[1])
        if one is None or other is None:
            return bool(self._placeholders.number(func, torch.bool))
        return bool(func(one, other, *args[2:], **kwargs))

    def is_masked_fill(self, func: Op, args: Args) -> bool:
        """Return whether ``index_put_`` becomes a masked fill: one mask, a host scalar (TensorAdvancedIndexing.cpp)."""
        if func not in PUTS:
            return False
        masks = [(place, index) for place, index in enumerate(args[1]) if index is not None]
        if len(masks) != 1 or args[2].numel() != 1 or (len(args) > 3 and args[3]):
            return False
        place, mask = masks[0]
        holding = self._held.get(args[2].untyped_storage()._cdata)
        is_of_host = not args[2].is_meta or (holding is not None and holding.place is Place.HOST)
        return is_of_host and mask.shape == args[0].shape[place : place + mask.dim()] and mask.dtype in _MASKS

    def selected(self, func: Op, args: Args) -> Tensor | None:
        """Return what an op selects by unknown values, as the user states; None for other ops, or nothing stated."""
        if func is _ATEN.nonzero.default and self._placeholders.assumed.keep is not None:
            shape = (self._placeholders.kept(func, args[0].numel()), args[0].dim())
            return torch.empty(shape, dtype=torch.int64, device="meta")
        if func is _ATEN.masked_select.default:
            shape, mask = torch.broadcast_shapes(args[0].shape, args[1].shape), self.of(args[1])  # type: ignore[no-untyped-call]
            if mask is None and self._placeholders.assumed.keep is None:
                return None
            count = self._placeholders.kept(func, shape.numel()) if mask is None else int(mask.expand(shape).sum())
            return torch.empty(count, dtype=args[0].dtype, device="meta")
        return None

    def resolve_masks(self, func: Op, args: Args) -> tuple[Any, ...]:
        """Replace known boolean indices by their positions.

        Raises:
            DataDependentError: The shape of a result depends on unknown values.
        """
        if func not in TAKES_HOST_INDICES:
            self._placeholders.refuse(func)
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in _MASKS:
                indices.append(index)
                continue
            known = self.of(index)
            if known is not None:
                indices += map(like, known.nonzero(as_tuple=True))
                continue
            kept = self._placeholders.kept(func, index.numel())
            indices += (torch.empty(kept, dtype=torch.int64, device="meta") for _ in range(index.dim()))
        return (args[0], indices, *args[2:])

    def on_host(self, func: Op, tensor: Tensor) -> Tensor:
        """Return a tensor of the host with values: known ones, or ones in place of unknown values.

        Raises:
            DataDependentError: The unknown values are places of a sparse matrix.
        """
        known = self.of(tensor)
        if known is None and tensor.untyped_storage()._cdata in self._held:
            if tensor.dtype is torch.int64 and tensor.dim() == _DIMS_OF_PLACES:
                self._placeholders.refuse(func)
            self._placeholders.note(func, "values of a sparse matrix: ones")
            known = torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        return tensor if known is None else known

    def resolve_lengths(self, func: Op, args: Args) -> tuple[Any, ...]:
        """Replace the lengths of padded sequences by their known values.

        Raises:
            DataDependentError: They depend on unknown values.
        """
        if func is not PACK:
            return args
        lengths = self.of(args[1])
        if lengths is None:
            self._placeholders.refuse(func)
        return (args[0], lengths, *args[2:])

    def _fresh(self, tensor: Tensor, holding: VirtualStorage) -> Tensor:
        """Return unset memory for the values of a tensor."""
        holding.values = torch.UntypedStorage(holding.size)  # type: ignore[no-untyped-call]
        known = self.of(tensor)
        assert known is not None
        return known

    def _is_of_host(self, tensor: Tensor) -> bool:
        if not tensor.is_meta:
            return True
        holding = self._held.get(tensor.untyped_storage()._cdata)
        return holding is not None and holding.place is Place.HOST

    def _is_kept(self, tensor: Tensor) -> bool:
        """Return whether a tensor is small enough to keep its values, which on the host may be data."""
        return is_small(tensor) or (tensor.numel() <= _KNOWN_FLOATS_OF_HOST and self._is_of_host(tensor))

    def _made(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Return what a factory makes, from numbers or in the shape of a tensor; None if it is too much to keep."""
        like = args[0] if args and isinstance(args[0], Tensor) else None
        if like is None and not traits_of(func).is_factory:
            return None
        if any(isinstance(value, Tensor) for value in args[1:]):
            return None
        made = made_on_meta(func, args, kwargs)
        device = kwargs.get("device")
        is_of_host = (like is None or self._is_of_host(like)) if device is None else device.type == "cpu"
        if not is_small(made) and not (is_of_host and made.numel() <= _KNOWN_FLOATS_OF_HOST):
            return None
        if like is not None:  # its shape alone
            args = (torch.empty((), dtype=like.dtype, device="cpu").expand(like.shape), *args[1:])
            kwargs = {**kwargs, "device": _CPU, "memory_format": torch.contiguous_format}
        return _on_cpu(func, args, kwargs, {})

    def _fill_of(self, func: Op, tensor: Tensor) -> bool | None:
        """Return the placeholder value of all elements of an unknown tensor; note the rule that it rests on."""
        holding = self._held.get(tensor.untyped_storage()._cdata)
        if holding is None or holding.fill is None:
            return None
        if holding.rule:
            self._placeholders.note(func, holding.rule)
        return holding.fill

    def _filled(self, func: Op, args: Args) -> tuple[bool, str] | None:
        """Return the placeholder value of all elements that an op makes, and its rule; None without one."""
        packet = func._overloadpacket
        if packet in FINITE_ANSWERS:
            return FINITE_ANSWERS[packet], ""
        if packet in _EQUAL and is_integral(args[0].dtype) and args[0].dtype is not torch.bool:
            is_of_one = not isinstance(args[1], Tensor) or args[1].numel() == 1
            return (_EQUAL[packet], "is a computed token this one: no") if is_of_one else None
        combine = LOGIC.get(packet)
        if combine is None:
            return None
        found = [one for value in args if isinstance(value, Tensor) and (one := self._one_value(value))]
        if len(found) < len(func._schema.arguments):
            return None
        return combine(*(fill for fill, _ in found)), next((rule for _, rule in found if rule), "")

    def _one_value(self, tensor: Tensor) -> tuple[bool, str] | None:
        """Return the boolean that all elements of a tensor have, and its rule; None if they have none, or several."""
        known = self.of(tensor)
        if known is not None and known.numel():
            return (bool(known.flatten()[0]), "") if bool((known == known.flatten()[0]).all()) else None
        holding = self._held.get(tensor.untyped_storage()._cdata)
        return None if holding is None or holding.fill is None else (holding.fill, holding.rule)

    def _assume(self, func: Op, args: Args, tensor: Tensor) -> Tensor | None:
        """Return placeholder values for an unknown tensor that is overwritten, or for a single number that is read."""
        is_drawn = func._overloadpacket in DRAWS and not tensor.requires_grad  # data, and no weights
        if tensor is args[0] and is_small(tensor) and (func in FILLS or is_drawn):
            holding = self._held.get(tensor.untyped_storage()._cdata)
            if holding is not None and tensor.nbytes == holding.size:
                return self._fresh(tensor, holding)
        if tensor.numel() == 1 and func._overloadpacket in QUESTIONS:
            self._placeholders.note(func, "a tested number: 1")
            return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        return None


def _on_cpu(func: Op, args: Args, kwargs: Kwargs, values: dict[int, Tensor]) -> Any:
    """Return an op's results; None where the CPU has no kernel for it.

    In float64 where it has none for whole numbers and CUDA has one.
    """

    def known(value: Any) -> Any:
        return map_tensors(value, lambda tensor: values.get(id(tensor), tensor))

    kwargs = without_generator(kwargs)
    if "device" in kwargs:
        kwargs["device"] = _CPU
    try:
        made = func(*map(known, args), **{name: known(value) for name, value in kwargs.items()})
    except NotImplementedError:
        if all(value.is_floating_point() for value in values.values()):
            return None
        return _on_cpu(func, args, kwargs, {key: value.double() for key, value in values.items()})
    return () if made is None else made  # of lists that are written in place
