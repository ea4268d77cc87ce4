"""Turn a parsed TOML or JSON mapping into frozen dataclasses, strictly, and report every fault at once.

The annotations of the dataclass are the schema. A fault is a sentence that starts with the JSON path of the
value (``$.workload.seq_len``), then says what was found and what is allowed. The only conversions are integer to float,
and text to path or enum; unknown keys are errors.
"""

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Final, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from hybridtrain.config.aliases import KINDS, OPTIONS, RENAMED, log_alias
from hybridtrain.config.encode import hints_of, tag_of
from hybridtrain.errors import ConfigError, near_name
from hybridtrain.plain_file import read_plain

T = TypeVar("T")

Unions: TypeAlias = Mapping[type, Mapping[str, type]]
"""For each protocol or base class used as an annotation: the dataclass of each ``kind``; ``""`` is the default kind."""

_NO_UNIONS: Final[Unions] = {}
_FAILED: Final = object()  # stands for a value whose fault is already noted; None is a legal value
_SHOWN_CHARACTERS: Final = 60  # of a value found in the file, enough to recognise it
_DEEP_KEY: Final = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")
"""A dotted key with too many parts, for which tomllib needs quadratic time."""
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_FOUND: Final[Mapping[type, str]] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    tuple: "an array",
    dict: "a table",
    NoneType: "null",
}


def _is_text(value: object) -> bool:
    # JSON lets halves of a surrogate pair through, which cannot be written.
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_finite_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond 1.8e308
        return False


_SCALARS: Final[Mapping[Callable[..., object], tuple[str, Callable[[object], bool]]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a finite number", _is_finite_number),
    str: ("a string", _is_text),
    Path: ("a path", lambda value: _is_text(value) and value != ""),
}
"""Name of each plain type, and a test of a value; a boolean is not an integer here."""


def decode(cls: type[T], mapping: object, *, source: str, unions: Unions = _NO_UNIONS) -> T:
    """Build ``cls`` from a parsed TOML or JSON mapping; errors start with ``source``.

    Fields may be bool, int, float, str, Path, StrEnum, Literal, another dataclass, ``tuple[X, ...]``,
    ``dict[str, X]`` or ``Mapping[str, X]``, ``X | None``, or a class in ``unions``, whose tables name their
    dataclass by ``kind = "..."``. A ``ValueError`` from ``__post_init__`` becomes one fault per line of its
    message; ``__post_init__`` runs once all fields of its object are sound.

    Raises:
        ConfigError: at least one fault; it holds all of them.
        TypeError: an annotation that the decoder does not know, which is a fault of the program.
    """
    decoder = _Decoder(unions)
    decoded = decoder.value(cls, mapping, "$")
    if decoder.faults:
        raise ConfigError(source, decoder.faults)
    for alias, name in decoder.aliases.items():
        log_alias(source, alias, name)
    assert isinstance(decoded, cls), f"decoding {cls.__name__} gave neither a fault nor an object"
    return decoded


def load_toml(cls: type[T], path: Path, *, unions: Unions = _NO_UNIONS) -> T:
    """Return ``cls`` read from a TOML file; the arguments are those of ``decode``.

    Raises:
        ConfigError: the file is missing, a folder, unreadable, not UTF-8, not TOML, or has faults.
    """
    try:
        text = read_plain(path).decode("utf-8")
        if deep := _DEEP_KEY.search(text):
            line = text.count("\n", 0, deep.start()) + 1
            raise ConfigError(str(path), [f"line {line}: a key of more than 64 parts; use less nesting"])
        mapping = tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(str(path), [missing_path(path)]) from None
    except IsADirectoryError:
        raise ConfigError(str(path), ["is a folder; a TOML file is required"]) from None
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read ({error.strerror}); check its permissions"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"byte {error.start} is not UTF-8; save the file as UTF-8"]) from error
    except tomllib.TOMLDecodeError as error:
        last_line = f"at line {len(text.splitlines())}, the end of the file"
        fault = str(error).replace("at end of document", last_line)
        raise ConfigError(str(path), [f"is not TOML: {fault}"]) from error
    except RecursionError:
        raise ConfigError(str(path), ["nests arrays or tables too deeply; use less nesting"]) from None
    except ValueError as error:
        raise ConfigError(str(path), [f"contains a number that cannot be read ({error}); shorten it"]) from error
    return decode(cls, mapping, source=str(path), unions=unions)


def missing_path(path: Path) -> str:
    """Return the message for a missing file or folder, with the nearest existing name."""
    folder = path.parent
    if not folder.is_dir():
        return f"does not exist: there is no folder {folder}"
    return f"does not exist{near_name(path.name, (entry.name for entry in folder.iterdir()))}"


class _Decoder:
    """One run over one mapping. Each method notes faults and returns ``_FAILED`` in place of a value."""

    def __init__(self, unions: Unions) -> None:
        self.faults: list[str] = []
        self.aliases: dict[str, str] = {}
        """Aliases that were used."""
        self._unions = unions

    def value(self, hint: object, value: object, path: str) -> object:
        """Return ``value`` converted to the annotation ``hint``."""
        if isinstance(hint, type) and hint in self._unions:
            return self._tagged(self._unions[hint], value, path)
        if isinstance(hint, type) and hint in _SCALARS:
            return hint(value) if _SCALARS[hint][1](value) else self._wrong(hint, value, path)
        if isinstance(hint, type) and is_dataclass(hint):
            return self._object(hint, value, path)
        if choices := _choices(hint):
            return self._choice(choices, value, path)
        return self._generic(hint, value, path)

    def _generic(self, hint: object, value: object, path: str) -> object:
        """Return ``value`` for ``X | None``, ``tuple[X, ...]`` or ``dict[str, X]``."""
        match get_origin(hint), get_args(hint):
            case origin, (inner, none) if origin in {Union, UnionType} and none is NoneType:
                return None if value is None else self.value(inner, value, path)
            case origin, (inner, dots) if origin is tuple and dots is Ellipsis:
                return self._array(hint, inner, value, path)
            case origin, (key, inner) if origin in {dict, Mapping} and key is str:
                return self._mapping(hint, inner, value, path)
        raise TypeError(f"{path}: the decoder does not know the annotation {hint!r}")

    def _array(self, hint: object, inner: object, value: object, path: str) -> object:
        if not isinstance(value, list | tuple):
            return self._wrong(hint, value, path)
        if _are_plain(inner, value):
            return tuple(value)
        items = tuple(self.value(inner, item, f"{path}[{index}]") for index, item in enumerate(value))
        return _FAILED if _FAILED in items else items

    def _mapping(self, hint: object, inner: object, value: object, path: str) -> object:
        if not isinstance(value, Mapping):
            return self._wrong(hint, value, path)
        items = {key: self.value(inner, item, _child(path, key)) for key, item in value.items()}
        return _FAILED if _FAILED in items.values() else items

    def _choice(self, choices: tuple[object, ...], value: object, path: str) -> object:
        for choice in choices:
            if choice == value and (str if isinstance(choice, StrEnum) else type(choice)) is type(value):
                return choice
        near = near_name(value, map(str, choices)) if isinstance(value, str) else ""
        return self._fault(path, f"{_show(value)} is not one of {_list(choices)}{near}")

    def _tagged(self, kinds: Mapping[str, type], value: object, path: str) -> object:
        if not isinstance(value, Mapping):
            return self._fault(path, f'found {_found(value)}; a table with kind = "..." is required')
        names = tuple(sorted(name for name in kinds if name))
        if "kind" not in value and "" in kinds:
            return self._object(kinds[""], value, path)
        if "kind" not in value:
            return self._fault(f"{path}.kind", f"is missing; one of {_list(names)} is required")
        if isinstance(found := value["kind"], str) and KINDS.get(found) in kinds:
            self.aliases[found] = KINDS[found]
            value = {**value, "kind": KINDS[found]}
        kind = self._choice(names, value["kind"], f"{path}.kind")
        return self._object(kinds[kind], value, path) if isinstance(kind, str) else _FAILED

    def _object(self, cls: type, value: object, path: str) -> object:
        if not isinstance(value, Mapping):
            return self._wrong(cls, value, path)
        assert is_dataclass(cls), f"{path}: {cls.__name__} is registered as a kind but is not a dataclass"
        hints = hints_of(cls)
        known = {field.name: field for field in fields(cls) if field.init}
        value = self._with_preset(cls, self._renamed(cls, value, path), path)
        self._check_keys(cls, known, value, path)
        arguments: dict[str, object] = {}
        for name, field in known.items():
            if name in value:
                arguments[name] = self.value(hints[name], value[name], _child(path, name))
            elif field.default is MISSING and field.default_factory is MISSING:
                needed = describe_hint(hints[name])
                arguments[name] = self._fault(_child(path, name), f"is missing; {needed} is required")
        return _FAILED if _FAILED in arguments.values() else self._build(cls, arguments, path)

    def _renamed(self, cls: type, value: Mapping[str, object], path: str) -> Mapping[str, object]:
        """Return a table with the keys of the class in place of other names for them."""
        aliases = _aliases(cls)
        if not aliases:
            return value
        renamed: dict[str, object] = {}
        for key, item in value.items():
            name = aliases.get(key, key)
            given = [other for other in value if aliases.get(other, other) == name]
            if len(given) > 1 and key == given[-1]:
                self._fault(_child(path, name), f"is given {len(given)} times, as {_list(given)}; keep one of them")
            if key != name:
                self.aliases[key] = name
            renamed[name] = item
        return renamed

    def _with_preset(self, cls: type, value: Mapping[str, object], path: str) -> Mapping[str, object]:
        """Return a table with the settings of its ``preset``; keys of the table itself win."""
        presets: Mapping[str, Mapping[str, object]] = getattr(cls, "PRESETS", {})
        if not presets or "preset" not in value:
            return value
        name = self._choice(tuple(presets), value["preset"], f"{path}.preset")
        chosen = presets[name] if isinstance(name, str) else {}
        return {**chosen, **{key: item for key, item in value.items() if key != "preset"}}

    def _check_keys(self, cls: type, known: Mapping[str, object], value: Mapping[str, object], path: str) -> None:
        """Note unknown keys, and a ``kind`` that is not the one of this class."""
        tag = tag_of(cls)
        if tag is not None and "kind" in value:
            self._choice((tag,), value["kind"], f"{path}.kind")
        for key in sorted(value.keys() - known.keys() - ({"kind"} if tag is not None else set())):
            keys = [*known, *(["preset"] if getattr(cls, "PRESETS", None) else [])]
            allowed = f"allowed: {_list(keys)}" if known else "no keys are allowed in this table"
            near = near_name(key, known)
            self._fault(_child(path, key), f"is an unknown key (found {_show(value[key])}); {allowed}{near}")

    def _build(self, cls: Callable[..., object], arguments: Mapping[str, object], path: str) -> object:
        """Call the dataclass, whose ``__post_init__`` holds the rules for values."""
        try:
            return cls(**arguments)
        except ValueError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            for line in lines or ["invalid values"]:
                self._fault(path, line)
            return _FAILED

    def _wrong(self, hint: object, value: object, path: str) -> object:
        return self._fault(path, f"found {_found(value)}; {describe_hint(hint)} is required")

    def _fault(self, path: str, sentence: str) -> object:
        self.faults.append(f"{path}: {sentence}")
        return _FAILED


def _are_plain(hint: object, items: Sequence[object]) -> bool:
    """Return whether all items are of the annotation as they stand: records have long arrays of numbers."""
    if hint not in {int, float} or not set(map(type, items)) <= {hint}:
        return False
    return hint is int or all(map(math.isfinite, cast("Sequence[float]", items)))


def _choices(hint: object) -> tuple[object, ...]:
    """Return the values of an enum or a Literal; empty for any other annotation."""
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return tuple(hint)
    return get_args(hint) if get_origin(hint) is Literal else ()


def describe_hint(hint: object) -> str:
    """Describe the values that an annotation allows."""
    if isinstance(hint, type) and hint in _SCALARS:
        return _SCALARS[hint][0]
    if choices := _choices(hint):
        return f"one of {_list(choices)}"
    if get_origin(hint) in {Union, UnionType}:
        return describe_hint(get_args(hint)[0])
    return "an array" if get_origin(hint) is tuple else "a table"


def _found(value: object) -> str:
    """Return a value and its type in words."""
    kind = _FOUND.get(type(value), type(value).__name__)
    if isinstance(value, str) and not _is_text(value):
        kind = "an unpaired surrogate, which is not text"
    return f"{_show(value)} ({kind})"


def _show(value: object) -> str:
    """Return a value as text, cut when long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested beyond the stack; an integer of more digits than Python writes
        return "a value too large to show"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _list(choices: tuple[object, ...] | list[str]) -> str:
    return ", ".join(map(str, choices))


def _child(path: str, key: str) -> str:
    return f"{path}.{key}" if _PLAIN_KEY.fullmatch(key) else f"{path}[{key!r}]"


@cache
def _aliases(cls: type) -> Mapping[str, str]:
    """Return the other names of a class's keys."""
    return OPTIONS.get(cls.__name__, {}) | (RENAMED if "description" in hints_of(cls) else {})
