"""Optimizers, one file each, discovered by ``kind``.

A file's name is its optimizer's ``kind``, so that a lookup imports only that file.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, cast

from hybridtrain.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from hybridtrain.optim.adamw import AdamWConfig as AdamWConfig


class Optimizers(Mapping[str, type[Optimizer]]):
    """Optimizer classes by ``kind``; a lookup imports only that file."""

    def __getitem__(self, kind: str) -> type[Optimizer]:
        """Return a class; raises ``KeyError`` for an unknown kind."""
        found = _optimizer_of(kind) if kind in _files() else None
        if found is None:
            raise KeyError(kind)
        return found

    def __iter__(self) -> Iterator[str]:
        """Yield every kind, which imports every file."""
        return (name for name in _files() if _optimizer_of(name) is not None)

    def __len__(self) -> int:
        """Return the number of optimizers."""
        return sum(1 for _ in self)


OPTIMIZERS = Optimizers()
"""Optimizers by ``kind``; a table without a kind is AdamW's."""


def __getattr__(name: str) -> type[Optimizer]:
    """Return an optimizer's class by its name: ``from hybridtrain.optim import Lion``."""
    if name == "AdamWConfig":  # of every run that names no optimizer: the others stay where they are
        return OPTIMIZERS["adamw"]
    classes = {} if name.startswith("_") else {found.__name__: found for found in OPTIMIZERS.values()}
    if name not in classes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return classes[name]


@cache
def _files() -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in iter_modules(__path__)))


@cache
def _optimizer_of(name: str) -> type[Optimizer] | None:
    """Return the optimizer of a file, None of one that has none; raises ``TypeError`` where its kind is another."""
    module = import_module(f"{__name__}.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__ and isinstance(vars(value).get("kind"), str):
            found = cast("type[Optimizer]", value)
            if found.kind != name:
                raise TypeError(f"{module.__name__}: kind '{found.kind}' must be the file's name; rename one of them")
            return found
    return None


__all__ = ["OPTIMIZERS", "AdamWConfig", "Optimizer"]
