"""Optimizers: one file each, found by itself. They are a setting of training; their state's format is one of memory."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import cast

from hybridtrain.optim.adamw import AdamWConfig
from hybridtrain.optim.optimizer import Optimizer


def _found() -> Iterator[type[Optimizer]]:
    for module in sorted(f"{__name__}.{entry.name}" for entry in iter_modules(__path__)):
        for value in vars(import_module(module)).values():
            if isinstance(value, type) and value.__module__ == module and isinstance(vars(value).get("kind"), str):
                yield cast("type[Optimizer]", value)


OPTIMIZERS: dict[str, type[Optimizer]] = {found.kind: found for found in _found()}
"""By ``kind``; a table of a file that names none is AdamW's."""
globals().update({found.__name__: found for found in OPTIMIZERS.values()})

__all__ = ["OPTIMIZERS", "AdamWConfig", "Optimizer"]
