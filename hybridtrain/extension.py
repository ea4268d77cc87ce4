"""Additions of other installed packages to the command: verbs, kinds of names, scenarios, notes on quality.

A package names an ``Extension`` by an entry point of the group ``hybridtrain.extensions``; the harness is one.
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
    """Of the card's memory, as the scenario's stated figures bound it; None: all of it."""


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
    """Additions of a package. Functions take the folder of scenario files (None: the default one)."""

    verbs: Mapping[str, Callable[..., Any]]
    """Functions that return an ``Answer``, by name."""
    names: Mapping[str, Callable[[Path | None], list[str]]]
    """Names of a kind, for ``hybridtrain list`` and the shell."""
    listings: Mapping[str, Callable[..., Any]]
    """Kinds that ``hybridtrain list`` answers with more than names: functions of ``Recorded``."""
    scenario_request: Callable[[str, Path | None], ScenarioRequest]
    """Raises ``ConfigError`` for a scenario that is unknown or faulty."""
    quality_notes: Callable[[Iterable["Candidate"], Path | None, Path], Mapping[str, QualityNote]]
    """By the name of a candidate's level, from records below a folder of results."""


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions that are installed, by the name of their entry points."""
    return tuple(point.load() for point in sorted(entry_points(group=_GROUP), key=lambda point: point.name))


def harness() -> Extension:
    """Return the extension that knows scenarios and records.

    Raises:
        ConfigError: none is installed.
    """
    for extension in extensions():
        return extension
    raise ConfigError("scenario", ["no package that reads scenarios is installed; install hybridtrain whole"])
