"""The memory optimizations, one file each; files are discovered, and classes are imported from here by name."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import cast

from hybridtrain.plan.compose import Optimization


def _found() -> Iterator[type[Optimization]]:
    for module in sorted(f"{__name__}.{entry.name}" for entry in iter_modules(__path__)):
        for value in vars(import_module(module)).values():
            if isinstance(value, type) and is_dataclass(value) and value.__module__ == module:
                yield cast("type[Optimization]", value)


OPTIMIZATIONS: dict[str, type[Optimization]] = {found.kind: found for found in _found()}
globals().update({found.__name__: found for found in OPTIMIZATIONS.values()})
