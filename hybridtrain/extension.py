"""Extensions of the command by other installed packages: verbs, names, scenarios, notes on quality.

A package registers an ``Extension`` as an entry point of the group ``hybridtrain.extensions``, as the harness does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtrain.errors import ConfigError

if TYPE_CHECKING:
    from hybridtrain.planning.candidates import Candidate, FitRequest

_GROUP = "hybridtrain.extensions"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRequest:
    """The request of a scenario file."""

    name: str
    request: "FitRequest"
    budget_bytes: int | None
    """Limit of the card's memory that the scenario states, in bytes; None: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityNote:
    """The loss of a precision beside full training in fp32, on the largest small model that was trained."""

    params: int
    """Of that model."""
    verdict: str
    """In a few words: ``equal within 0.005 nats per token``."""
    text: str
    """Configuration, interval, seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """An extension of the command. Its functions take the folder of scenario files (None: the default one)."""

    verbs: Mapping[str, Callable[..., Any]]
    """Verbs by name: functions that return an ``Answer``."""
    names: Mapping[str, Callable[[Path | None], list[str]]]
    """Names by kind, for ``hybridtrain list`` and shell completion."""
    listings: Mapping[str, Callable[..., Any]]
    """Kinds whose ``hybridtrain list`` shows more than names: functions of ``Recorded``."""
    scenario_request: Callable[[str, Path | None], ScenarioRequest]
    """Raises ``ConfigError`` for a scenario that is unknown or faulty."""
    quality_notes: Callable[[Iterable["Candidate"], Path | None, Path], Mapping[str, QualityNote]]
    """By the name of a candidate's level, from records below a folder of results."""


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions that are installed, by the name of their entry points."""
    return tuple(point.load() for point in sorted(entry_points(group=_GROUP), key=lambda point: point.name))


def harness() -> Extension:
    """Return the extension with scenarios and records.

    Raises:
        ConfigError: none is installed.
    """
    for extension in extensions():
        return extension
    raise ConfigError(
        "scenario", ["no package with scenarios is installed; install hybridtrain with its validation package"]
    )
