"""Saving and resuming: an object declares the attributes of its state; each is restored by its type.

The type is the annotation in the class body, else that of a new object's value. A state is numbers, strings,
None, tensors, and lists and dicts of them: what ``torch.load(weights_only=True)`` reads.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import ClassVar, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from hybridtrain.config.rules import omit_if_default

State = dict[str, object]
T = TypeVar("T")


class Stateful:
    """Saves and restores the attributes in ``_state`` of its classes; without ``_state`` a dataclass's fields."""

    _state: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> State:
        """Return copies of all state that affects the next call."""
        return {name.lstrip("_"): _saved(getattr(self, name)) for name in self._state_names()}

    def load_state_dict(self, state: State) -> None:
        """Restore the state of an object with equal arguments; raises ``ValueError`` naming the path of a bad value."""
        hints = get_type_hints(type(self))
        for name in self._state_names():
            own = getattr(self, name)
            setattr(self, name, _entry(state, name.lstrip("_"), hints.get(name, type(own)), own))

    def _state_names(self) -> Iterable[str]:
        if is_dataclass(self):
            return [field.name for field in fields(self)]
        return [name for base in reversed(type(self).__mro__) for name in base.__dict__.get("_state", ())]


def _saved(value: object) -> object:  # noqa: PLR0911  one a type
    """Return plain values and tensors that later steps do not change."""
    match value:
        case Tensor():
            return value.clone()
        case torch.Generator():
            return value.get_state()
        case np.ndarray():
            return value.tolist()
        case Enum():
            return value.value
        case Stateful():
            return value.state_dict()
        case dict():
            return {key: _saved(item) for key, item in value.items()}
        case list() | deque():
            return [_saved(item) for item in value]
    if is_dataclass(value):
        items = ((field, getattr(value, field.name)) for field in fields(value))
        return {
            field.name: _saved(item) for field, item in items if not (omit_if_default(field) and item == field.default)
        }
    return value


def _entry(state: object, name: str, hint: object, own: object) -> object:
    """Return the attribute ``name`` from a state; a fault's message begins with its path."""
    if name not in _checked(state, dict):
        raise ValueError(f"{name}: missing in the checkpoint; use an older one, or start a new run")
    try:
        return _restored(hint, own, _checked(state, dict)[name])
    except ValueError as error:
        raise ValueError(f"{name}.{error}".replace(".:", ":", 1)) from None


def _restored(hint: object, own: object, value: object) -> object:  # noqa: PLR0911  one a type
    """Return ``value`` as ``hint`` wants it; ``own`` is what a fresh object holds there, where there is one."""
    if get_origin(hint) is UnionType:  # X | None
        return None if value is None else _restored(get_args(hint)[0], own, value)
    match own:
        case Stateful():
            own.load_state_dict(_checked(value, dict))
            return own
        case torch.Generator():
            return own.set_state(_checked(value, Tensor))
        case Tensor():
            return _tensor(own, _checked(value, Tensor))
        case np.ndarray():
            return np.array(_checked(value, list), dtype=own.dtype)
    kind = get_origin(hint) or hint
    assert isinstance(kind, type), f"annotation {hint!r} of a state"
    if issubclass(kind, Enum):
        if value not in [member.value for member in kind]:
            raise _wrong(value, kind)
        return kind(value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{
            field.name: _entry(value, field.name, hints[field.name], getattr(own, field.name, None))
            for field in fields(kind)
            if not omit_if_default(field) or field.name in _checked(value, dict)
        })  # fmt: skip
    return _collected(hint, kind, own, value)


def _collected(hint: object, kind: type, own: object, value: object) -> object:
    """Return a number, a string, or a list, deque or dict of what the annotation says: of numbers without one."""
    if issubclass(kind, list | deque):
        (inner,) = get_args(hint) or (float,)
        items = [_restored(inner, None, item) for item in _checked(value, list)]
        return deque(items, maxlen=own.maxlen) if isinstance(own, deque) else items
    if issubclass(kind, dict):
        key_kind, inner = get_args(hint)
        return {key_kind(key): _restored(inner, None, item) for key, item in _checked(value, dict).items()}
    if not isinstance(value, (int | float) if kind is float else kind) or (
        isinstance(value, bool) and kind is not bool
    ):
        raise _wrong(value, kind)
    return value


def _checked(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise _wrong(value, kind)
    return value


def _tensor(own: Tensor, value: Tensor) -> Tensor:
    """Return a copy; rows of a matrix come and go, all else must fit."""
    first = 1 if own.ndim > 1 else 0
    if (value.dtype, value.shape[first:]) != (own.dtype, own.shape[first:]):
        raise ValueError(
            f": found {value.dtype} {tuple(value.shape)}; {own.dtype} {tuple(own.shape)} is required: resume with the "
            f"saved configuration"
        )
    return value.clone()


def _wrong(value: object, kind: type) -> ValueError:
    found = f"{str(value)[:60]} ({type(value).__name__})"
    return ValueError(f": found {found}; {kind.__name__} is required: use an older checkpoint, or start a new run")
