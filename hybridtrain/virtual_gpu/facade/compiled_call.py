# mypy: disable-error-code="no-untyped-call"
"""A call of code that is compiled: every tensor that it can reach, and what else decides its graph."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
"""Types whose values a graph may depend on."""
_OF_MODULES = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
Maker = Callable[[Iterator[Tensor]], Tensor]


class NotCapturedError(Exception):
    """A function cannot be one graph, for the reason of the message."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place that holds a tensor: of a module, a closure or a module of Python."""

    holder: Any
    name: str

    def put(self, value: Any) -> None:
        """Hold another tensor."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.name] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor as its plain parts, and the way to rebuild it from such."""

    tensors: list[Tensor]
    make: Maker

    @staticmethod
    def of(tensor: Tensor) -> "_Part":
        if not is_traceable_wrapper_subclass(tensor):
            return _Part(tensors=[tensor], make=next)
        kind, size, stride = type(tensor), tensor.shape, tensor.stride()
        names, context = tensor.__tensor_flatten__()

        def make(left: Iterator[Tensor]) -> Tensor:
            inner = {name: next(left) for name in names}
            made: Tensor = kind.__tensor_unflatten__(inner, context, size, stride)
            return made

        return _Part(tensors=[getattr(tensor, name) for name in names], make=make)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a function: every tensor that it can reach, and what else decides its graph."""

    modules: list[nn.Module]
    slots: list[tuple[Slot, int]]
    """Places of tensors, each with its tensor's number."""
    parts: list[_Part]
    arguments: list[Any]
    """Leaves of the arguments; tensors by their numbers, in ``places``."""
    places: dict[int, int]
    spec: pytree.TreeSpec
    key: Hashable
    shape_key: Hashable
    """The part of the key that does not come from attributes of modules."""

    @staticmethod
    def of(function: Any, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """Return the call of ``function``, a module, its method or another function, with such arguments."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        modules = [] if module is None else [module]
        modules += [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
        free = [] if module is function else _held_by(function)
        modules += [value for _, value in free if isinstance(value, nn.Module)]
        modules = list({id(one): one for one in modules}.values())
        found = [(slot, value) for slot, value in free if isinstance(value, Tensor)]
        each = list({id(one): one for root in modules for one in root.modules()}.values())
        for one in each:
            found += [
                (Slot(holder, name), value)
                for holder in (one._parameters, one._buffers, vars(one))
                for name, value in holder.items()
                if isinstance(value, Tensor)
            ]
        numbers: dict[int, int] = {}
        tensors: list[Tensor] = []
        for _, value in found:
            if numbers.setdefault(id(value), len(tensors)) == len(tensors):
                tensors.append(value)
        places = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                places[position] = len(tensors)
                tensors.append(leaf)
        parts = [_Part.of(tensor) for tensor in tensors]
        rest = tuple(constant_of(leaf) for n, leaf in enumerate(leaves) if n not in places)
        kinds = tuple(kind_of(tensor) for part in parts for tensor in part.tensors)
        shape_key = (
            kinds, tuple(numbers[id(value)] for _, value in found), str(spec), rest, tuple(type(one) for one in each),
            torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"),
        )  # fmt: skip
        key = shape_key, tuple(_facts(one) for one in each)
        return Call(
            modules=modules, slots=[(slot, numbers[id(value)]) for slot, value in found], parts=parts,
            arguments=leaves, places=places, spec=spec, key=key, shape_key=shape_key,
        )  # fmt: skip

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of theirs."""
        leaves = list(self.arguments)
        for position, number in self.places.items():
            leaves[position] = tensors[number]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    @property
    def tensors(self) -> list[Tensor]:
        """The plain parts of all tensors."""
        return [tensor for part in self.parts for tensor in part.tensors]


def _held_by(function: Any) -> list[tuple[Slot, Any]]:
    """Return what a function's closure and the names that it uses hold, two functions deep."""
    found: list[tuple[Slot, Any]] = []
    left = [(function, 0)]
    while left:
        one, depth = left.pop()
        if isinstance(one, partial):
            left += [(value, depth) for value in (one.func, *one.args, *one.keywords.values())]
            continue
        if isinstance(one, nn.Module):
            found.append((Slot({}, ""), one))
            continue
        owner = getattr(one, "__self__", None)
        if isinstance(owner, nn.Module):
            found.append((Slot({}, ""), owner))
        elif owner is not None:
            found += (
                [(Slot({}, ""), value) for value in vars(owner).values() if isinstance(value, nn.Module)]
                if (hasattr(owner, "__dict__"))
                else []
            )
        plain = getattr(one, "__wrapped__", None) or getattr(one, "__func__", one)
        if not isinstance(plain, FunctionType):
            continue
        held = [(Slot(cell, "cell_contents"), _contents(cell)) for cell in plain.__closure__ or ()]
        space = plain.__globals__
        held += [(Slot(space, name), space[name]) for name in plain.__code__.co_names if name in space]
        found += [(slot, value) for slot, value in held if isinstance(value, nn.Module | Tensor)]
        if depth < 2:
            left += [(value, depth + 1) for _, value in held if isinstance(value, FunctionType | partial)]
    return found


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def constant_of(value: Any) -> Hashable:
    """Return what identifies a value that is no tensor: itself if it is plain, else the object."""
    return (type(value), value) if isinstance(value, PLAIN) else (type(value), id(value))


def _facts(module: nn.Module) -> Hashable:
    """Return what decides a module's graph beside its tensors: its type, mode and own attributes."""
    own = vars(module)
    names = [name for name in own if name not in _OF_MODULES and not isinstance(own[name], Tensor)]
    return type(module), module.training, tuple((name, constant_of(own[name])) for name in names)


def kind_of(tensor: Tensor) -> Hashable:
    """Return what of a tensor decides a graph."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def twin(tensor: Tensor) -> Tensor:
    """Return a leaf of the same kind on the CPU, without values where fake tensors are made."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def holding(call: Call, tensors: Sequence[Tensor]) -> Iterator[list[tuple[int, str, Any]]]:
    """Let the function find traced tensors in every place; collect the attributes that it sets, and undo them.

    Raises:
        NotCapturedError: It changes a list or a mapping of a module.
    """
    each = [one for root in call.modules for one in root.modules()]
    before = [dict(vars(one)) for one in each]
    sizes = [_sizes(attributes) for attributes in before]
    previous = [(slot, _read(slot)) for slot, _ in call.slots]
    assigned: list[tuple[int, str, Any]] = []
    for slot, number in call.slots:
        slot.put(tensors[number])
    put = [dict(vars(one)) for one in each]
    try:
        yield assigned
    finally:
        after = [dict(vars(one)) for one in each]
        for number, one in enumerate(each):
            own = vars(one)
            own.clear()
            own.update(before[number])
            assigned += [
                (number, name, value)
                for name, value in after[number].items()
                if name not in put[number] or put[number][name] is not value
            ]
        for slot, value in previous:
            slot.put(value)
    if sizes != [_sizes(attributes) for attributes in before]:
        raise NotCapturedError("it changes a list of a module")
    if any(not isinstance(value, (Tensor, *PLAIN)) for *_, value in assigned):
        raise NotCapturedError("it sets an attribute of a module that is no tensor or number")


def _read(slot: Slot) -> Any:
    return slot.holder.cell_contents if isinstance(slot.holder, CellType) else slot.holder[slot.name]


def _sizes(attributes: dict[str, Any]) -> list[int]:
    return [len(value) for value in attributes.values() if isinstance(value, list | dict | set)]
