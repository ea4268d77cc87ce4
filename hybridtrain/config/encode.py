"""Turn frozen dataclasses into plain JSON values, canonical JSON, a digest, or TOML.

Whatever is written here, ``hybridtrain.config.decode`` reads back to an equal object; equal objects have equal digests.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import sha256
from pathlib import PurePath
from typing import ClassVar, TypeAlias, cast, get_origin, get_type_hints

from hybridtrain.config.rules import omit_if_default

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonMapping: TypeAlias = dict[str, JsonValue]
DIGEST_LENGTH = 16
"""Hex characters of a digest: 64 bits, a collision probability of 3e-14 for a thousand files."""

_EXACT_INTEGER = 2**53  # up to here every whole float is one integer and back


def encode(obj: object) -> JsonMapping:
    """Return a dataclass instance as plain JSON values, keys in field order.

    A tagged dataclass (``kind: ClassVar[str]``) starts with its ``kind``. Enums become their value, paths POSIX text,
    tuples arrays. Omitted are fields with ``init=False`` or ``compare=False``, and an `added_field` at its default, so
    that older files keep their text.

    Raises:
        TypeError: a value of a type that ``decode`` does not support.
        ValueError: a float is NaN or infinite.
    """
    return _encode_fields(obj, "$", nulls=True)


def to_json(obj: object) -> str:
    """Return canonical JSON of a dataclass: sorted keys, no spaces, ASCII.

    Whole floats up to 2**53 are written as integers, so that objects built with ``1`` and with ``1.0``, which
    are equal, have the same text.

    Raises:
        TypeError, ValueError: as ``encode``.
    """
    return json.dumps(_canonical(encode(obj)), sort_keys=True, allow_nan=False, separators=(",", ":"))


def flat_settings(parts: Mapping[str, object]) -> JsonMapping:
    """Return the fields of dataclasses as one mapping by dotted names, prefixed by the part's name.

    Raises:
        TypeError, ValueError: as ``encode``.
    """
    return dict(item for part, obj in parts.items() for item in _flat(part, json.loads(to_json(obj))))


def _flat(name: str, value: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    """Yield values of a nested mapping by dotted names."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, part in value.items():
        yield from _flat(f"{name}.{key}" if name else key, part)


def digest(obj: object) -> str:
    """Return the first 16 hex characters of the SHA-256 of the canonical JSON of a dataclass."""
    return sha256(to_json(obj).encode("ascii")).hexdigest()[:DIGEST_LENGTH]


def to_toml(obj: object) -> str:
    """Return a dataclass as a TOML document that decodes to an equal object.

    TOML has no null: a None field is omitted, which requires None as its default.

    Raises:
        TypeError, ValueError: as ``encode``, or a None field with another default.
    """
    import tomlkit  # noqa: PLC0415  only who writes TOML waits for it

    return tomlkit.dumps(_encode_fields(obj, "$", nulls=False))


@cache
def hints_of(cls: type) -> dict[str, object]:
    """Return the resolved annotations of a class, cached."""
    return get_type_hints(cls)


def tag_of(cls: type) -> str | None:
    """Return the ``kind`` that a dataclass declares as ``ClassVar``, or None for an untagged one."""
    if get_origin(hints_of(cls).get("kind")) is not ClassVar:
        return None
    return cast("str | None", getattr(cls, "kind", None))  # none of a base class of kinds


def _encode_fields(obj: object, path: str, *, nulls: bool) -> JsonMapping:
    """Return one dataclass as a mapping; without ``nulls``, None values are left out or refused."""
    if not is_dataclass(obj) or isinstance(obj, type):
        raise TypeError(f"{path}: {obj!r} is not a dataclass instance; only dataclasses can be encoded")
    tag = tag_of(type(obj))
    encoded: JsonMapping = {} if tag is None else {"kind": tag}
    for field in fields(obj):
        value, inner = getattr(obj, field.name), f"{path}.{field.name}"
        if not (field.init and field.compare) or (omit_if_default(field) and value == field.default):
            continue
        if nulls or value is not None:
            encoded[field.name] = _encode_value(value, inner, nulls=nulls)
        elif field.default is not None:  # it would come back as something else
            raise ValueError(f"{inner}: TOML cannot express None; only a field whose default is None may be left out")
    return encoded


def _encode_value(value: object, path: str, *, nulls: bool) -> JsonValue:
    if is_dataclass(value):
        return _encode_fields(value, path, nulls=nulls)
    if isinstance(value, tuple):
        return [_encode_value(item, f"{path}[{index}]", nulls=nulls) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"{path}: key {wrong[0]!r} is a {type(wrong[0]).__name__}; only strings can be keys")
        return {str(key): _encode_value(item, f"{path}.{key}", nulls=nulls) for key, item in value.items()}
    return _encode_scalar(value, path, nulls=nulls)


def _encode_scalar(value: object, path: str, *, nulls: bool) -> bool | int | float | str | None:
    match value:
        case None if not nulls:
            raise ValueError(f"{path}: TOML cannot express None inside an array or a mapping")
        case None | bool():
            return value
        case float() if not math.isfinite(value):
            raise ValueError(f"{path}: {value} cannot be encoded; only finite numbers can")
        case PurePath():
            return value.as_posix()
        case int():
            return int(value)
        case float():  # numpy's float64 is one, but TOML must not show its repr
            return float(value)
        case str():  # StrEnum members are text too
            return str(value)
    raise TypeError(f"{path}: {value!r} is a {type(value).__name__}, which the decoder cannot read")


def _canonical(value: JsonValue) -> JsonValue:
    """Return the value with whole floats as integers; beyond 2**53 their digits would be spurious."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_INTEGER:
        return int(value)
    return value
