"""The references: every verb from the help of the command, every key of every file from the dataclass that reads it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from inspect import getdoc, signature
from types import NoneType, UnionType
from typing import Final, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

import hybridtrain
from hybridtrain import errors
from hybridtrain.cli.main import APP, EXIT_CODES
from hybridtrain.config.decode import describe_hint
from hybridtrain.config.encode import tag_of
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.optim.optimizer import Optimizer
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.memory_plan import SETTINGS
from hybridtrain.reports.tables import MARKDOWN, table
from hybridtrain.stacks import Stack
from hybridtrain.training_file import TrainFile
from hybridtrain.virtual_gpu.cards.card import Card
from hybridvalidation.scenario import Scenario

_SHOWN: Final = 5
"""Parameters of a call in a table."""
_OF_KINDS: Final = (Optimizer, Optimization)
_SHARED: Final = {"active_phases": "Phases of a hybrid run in which it acts."}
"""Meanings of fields that many classes have."""
FILES: Final[Mapping[str, type]] = {
    "training": TrainFile, "stack": Stack, "model": ModelConfig, "card": Card, "scenario": Scenario,
}  # fmt: skip
"""Accepted values in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a table in a file."""

    name: str
    allowed: str
    default: str
    """As TOML; empty: it must be given."""
    description: str


def keys_of(cls: type) -> Iterator[Key]:
    """Yield every key that a table of ``cls`` may have."""
    assert is_dataclass(cls), f"{cls.__name__} is no table"
    hints, description = get_type_hints(cls), _meanings(cls)
    for field in fields(cls):
        if field.init:
            declared = SETTINGS.get(field.name) if tag_of(cls) in OPTIMIZATIONS else None
            inner = _inner(hints[field.name])[0]
            table = _first_line(inner) if isinstance(inner, type) and is_dataclass(inner) else ""
            meaning = description.get(field.name) or (
                declared.description if declared else _SHARED.get(field.name, table)
            )
            is_number = declared is not None and declared.least is not None
            allowed = declared.words if declared and is_number else describe_hint(hints[field.name])
            yield Key(name=field.name, allowed=allowed, default=_default(field), description=meaning)
    if presets := getattr(cls, "PRESETS", None):
        told = "; ".join(
            f"{name}: {', '.join(f'{key} = {_toml(value)}' for key, value in values.items())}"
            for name, values in presets.items()
        )
        yield Key(name="preset", allowed=f"one of {', '.join(presets)}", default="unset", description=f"{told}.")


def settings_table(cls: type) -> str:
    """Return the keys of a table as Markdown; a sentence where there are none."""
    rows = [
        [f"`{key.name}`", _cell(key.allowed), f"`{key.default}`" if key.default else "required", _cell(key.description)]
        for key in keys_of(cls)
    ]
    if not rows:
        return "It has no settings."
    return table(["key", "allowed", "default", "meaning"], rows, MARKDOWN)


def file_settings(name: str) -> str:
    """Return every table of a kind of file as Markdown, the file's own keys first; one told before is named alone."""
    told: dict[type, str] = {}
    for kind, file in FILES.items():
        parts, inside = [], "none"
        for path, cls in tables_of(file):
            if path.startswith(inside):
                continue  # told with the table around it
            text = settings_table(cls)
            if cls in told:
                text, inside = f"Its keys: {told[cls]}.", path.replace("]`", ".") or "`["
            told.setdefault(cls, f"{path or 'those'} of a {kind} file")
            parts += [*([f"### {path}"] if path else []), _first_line(cls), text]
        if kind == name:
            return "\n\n".join(parts)
    raise KeyError(name)


def optimizers() -> str:
    """Return every optimizer with its settings."""
    return "\n\n".join(
        f'### kind = "{kind}"\n\n{_first_line(cls)}\n\n{settings_table(cls)}'
        for kind, cls in sorted(OPTIMIZERS.items())
    )


def tables_of(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Yield the tables of a file, outer ones first; a table of several kinds comes with all of them."""
    yield path, cls
    for name, hint in get_type_hints(cls).items():
        inner, is_array = _inner(hint)
        if isinstance(inner, type) and is_dataclass(inner) and inner not in _OF_KINDS:
            dotted = f"{path.strip('[]`')}.{name}".strip(".")
            yield from tables_of(inner, f"`[[{dotted}]]`" if is_array else f"`[{dotted}]`")


def _inner(hint: object) -> tuple[object, bool]:
    """Return the inner type of an annotation, and whether it is a sequence."""
    arguments = [argument for argument in get_args(hint) if argument not in {NoneType, ...}]
    if get_origin(hint) in {Union, UnionType, tuple} and len(arguments) == 1:
        return arguments[0], get_origin(hint) is tuple
    return hint, False


def _meanings(cls: type) -> dict[str, str]:
    """Return the documentation of each field, including those of base classes."""
    told: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        for meta in parse_from_object(owner).meta:
            if meta.args[0] == "attribute" and meta.description:
                told[meta.args[1]] = " ".join(meta.description.split())
    return told


def _default(field: "Field[object]") -> str:
    if field.default_factory is not MISSING:
        value = field.default_factory()
        if not value:
            return "[]" if isinstance(value, tuple) else "{}"
        cls: type = type(value)
        return f'kind = "{tag}"' if (tag := tag_of(cls)) else "the table's defaults"
    return "" if field.default is MISSING else _toml(field.default)


def _toml(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return "a table" if is_dataclass(value) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0]


def commands() -> str:
    """Return the text of ``hybridtrain VERB --help`` for every verb, as Markdown."""
    text = APP.generate_docs(output_format="markdown", heading_level=1, max_heading_level=2, usage_name="hybridtrain")
    text = re.sub(r"^(hybridtrain \S+) -m hybridtrain\b", r"\1", text, flags=re.MULTILINE)  # of python -m hybridtrain
    return f"{EXIT_CODES}\n\n{text[text.index('## hybridtrain ') :].rstrip()}"


def api_names() -> str:
    """Return every name of the package with its parameters and what it does, as Markdown."""
    return _calls({name: getattr(hybridtrain, name) for name in dir(hybridtrain)})


def api_errors() -> str:
    """Return every exception for users, as Markdown."""
    found = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and name.endswith("Error")}
    rows = [[f"`{name}`", _first_line(kind)] for name, kind in found.items()]
    return table(["exception", "meaning"], rows, MARKDOWN)


def _calls(named: Mapping[str, Callable[..., object]]) -> str:
    rows = []
    for name, call in sorted(named.items(), key=lambda item: item[0].lower()):
        names = [found.name for found in signature(call).parameters.values() if not found.name.startswith("_")]
        shown = ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])
        rows.append([f"`{name}({shown})`", (getdoc(call) or "").partition("\n")[0]])
    return table(["call", "what it does"], rows, MARKDOWN)
