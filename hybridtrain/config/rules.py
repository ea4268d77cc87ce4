"""Value rules that many configuration classes share."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AtMost:
    """Largest value of a field, beside its type: ``num_blocks: Annotated[int, AtMost(4096)]``.

    It is above any realistic training, and low enough to avoid hangs and overflows.
    """

    value: int


def added_field(default: T) -> T:
    """Declare a field that older files and records lack; it is written only where it differs from ``default``."""
    return field(default=default, metadata={"is_left_out_at_default": True})


def omit_if_default(declared: Field[Any]) -> bool:
    """Return whether a field was declared by ``added_field``."""
    return bool(declared.metadata.get("is_left_out_at_default"))


def broken(rules: Mapping[str, object]) -> list[str]:
    """Return the requirement of each broken rule."""
    return [fault for fault, holds in rules.items() if not holds]


def refuse(faults: Iterable[str]) -> None:
    """Raise ``ValueError`` with all faults, one per line, if there are any."""
    if text := "\n".join(faults):
        raise ValueError(text)


def repeated(names: Sequence[str]) -> list[str]:
    """Return the names that appear more than once, sorted."""
    return sorted({name for name in names if names.count(name) > 1})


def below_least(owner: object, names: Iterable[str], least: int = 1) -> list[str]:
    """Return a fault for each named field of ``owner`` that is below ``least``."""
    return [f"{name}: {value} must be at least {least}" for name in names if (value := getattr(owner, name)) < least]


def faults_above_most(owner: object) -> list[str]:
    """Return a fault for each field of ``owner`` that is above the ``AtMost`` of its declaration."""
    return [
        f"{name}: {value} must be at most {most}"
        for name, most in _declared_most(cast("Hashable", type(owner))).items()
        if (value := getattr(owner, name)) is not None and value > most
    ]


@cache
def _declared_most(cls: type) -> Mapping[str, int]:
    hints = get_type_hints(cls, include_extras=True).items()
    return {
        name: bound.value
        for name, hint in hints
        for bound in getattr(hint, "__metadata__", ())
        if isinstance(bound, AtMost)
    }
