"""The tables of this folder, by name or from a file of the same entries, and the faults of their figures."""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from hybridtrain.config.decode import decode, load_toml
from hybridtrain.errors import ConfigError, unknown_name

T = TypeVar("T")


@cache
def tables(file: str) -> dict[str, dict[str, Any]]:
    """Return the tables of a file of this package."""
    return tomllib.loads(resources.files(__package__).joinpath(file).read_text(encoding="utf-8"))


def read_catalogue(cls: type[T], file: str) -> dict[str, T]:
    """Return the tables of a file as objects."""
    return {name: decode(cls, table, source=f"{file} [{name}]") for name, table in tables(file).items()}


def find_entry(cls: type[T], kind: str, name: str, catalogue: Mapping[str, T]) -> T:
    """Return an entry by its name, or read it from a TOML file when ``name`` ends in ``.toml``.

    Raises:
        ConfigError: Unknown name (the nearest one is suggested), or a faulty file.
    """
    if name.endswith(".toml"):
        return load_toml(cls, Path(name))
    if name not in catalogue:
        known = unknown_name(kind, name, catalogue)
        raise ConfigError(kind, [f"{known} Your own {kind}: a .toml file with its figures."])
    return catalogue[name]


def figure_faults(owner: object, *, above_0: Iterable[str] = (), at_least_0: Iterable[str] = ()) -> list[str]:
    """Return a sentence for each figure that is too small; one that is None has no limit."""
    asked = [(name, "above") for name in above_0] + [(name, "at least") for name in at_least_0]
    found = [(name, getattr(owner, name), limit) for name, limit in asked if getattr(owner, name) is not None]
    return [f"{n}: {v} must be {limit} 0" for n, v, limit in found if v < 0 or (v == 0 and limit == "above")]


def raise_faults(faults: Iterable[str]) -> None:
    """Raise a ``ValueError`` of all faults, if there are any."""
    if text := "\n".join(faults):
        raise ValueError(text)
