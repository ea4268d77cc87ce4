"""All exceptions for users.

Each message has three clauses: what is wrong (path and value), what is allowed, what to do.
"""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches


class HybridTrainError(Exception):
    """Base of all errors that a user can fix; the command prints them without a traceback."""


class ConfigError(HybridTrainError):
    """A file or an argument is wrong. Holds every fault found, not only the first."""

    def __init__(self, source: str, faults: Iterable[str]) -> None:
        self.source = source
        self.faults = tuple(faults)
        count = len(self.faults)
        head = f"{source}: {count} fault{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  {fault}" for fault in self.faults)]))


class PlanConflictError(HybridTrainError, ValueError):
    """Two optimizations claim different values for one cell of the memory plan."""


class DataError(HybridTrainError):
    """A corpus or token file cannot be used."""


class DivergenceError(HybridTrainError):
    """The loss or the gradient norm is not finite.

    Args:
        message: The error's message. layers: Parameters with non-finite gradients, as far as known.
        is_applied: Whether parts of the model were already updated, so that only a checkpoint restores them.
        step: Step of the checkpoint in which it was found; None: found in the current step.
    """

    def __init__(
        self, message: str, *, layers: Iterable[str] = (), is_applied: bool = False, step: int | None = None
    ) -> None:
        super().__init__(message)
        self.layers = tuple(layers)
        self.is_applied = is_applied
        self.step = step


class SpikeError(DivergenceError):
    """Loss or gradient norm exceeds a guarded step's limits; the step was not applied."""


class OutOfMemoryError(HybridTrainError):
    """The card has too little memory; an outcome of a run, not a crash."""


class HostMemoryError(HybridTrainError):
    """Host memory, or its limit, is too small."""


class RankError(HybridTrainError):
    """Another rank ended, did not start, or timed out."""


class DiskSpaceError(HybridTrainError):
    """A disk has too little free space."""


class DiskTierError(HybridTrainError):
    """A file of the disk tier cannot be created, read or written."""


class StateError(HybridTrainError):
    """A checkpoint cannot be written: no permission, a failing disk."""


class RecordError(HybridTrainError):
    """A record file is damaged or of another schema."""


_MOST_LISTED = 24
_LISTS = {"model": "models", "card": "cards", "stack": "stacks"}
"""Kinds of ``hybridtrain list`` by what a message calls a name."""


def near_name(name: str, allowed: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest allowed name, or an empty string."""
    found = get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{found[0]}'?" if found else ""


def known_names(what: str, allowed: Iterable[str]) -> str:
    """Return the sentence that tells the names of a registry, or of many the command that does."""
    names = sorted(allowed)
    if len(names) > _MOST_LISTED and what in _LISTS:
        return f"`hybridtrain list {_LISTS[what]}` names the {len(names)} known ones."
    return f"Known: {', '.join(names)}."


def unknown_name(what: str, name: str, allowed: Iterable[str]) -> str:
    """Return the sentences for a name that is not in a registry."""
    names = sorted(allowed)
    return f"{what} '{name}' is unknown{near_name(name, names) or '.'} {known_names(what, names)}"


def reasons(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def short_text(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
