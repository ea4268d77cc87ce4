"""Base of a campaign: one fault is injected many times, and each attempt has one outcome."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Final

_KEPT_FAULTS: Final = 20


@dataclass(slots=True)
class Tally:
    """Outcomes of the attempts so far."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Attempts by subject and outcome."""
    faults: list[str] = field(default_factory=list)
    """The first that failed, a line each."""
    num_faults: int = 0

    def add(self, subject: str, outcome: str, fault: str = "") -> None:
        """Count an attempt; with ``fault`` it failed."""
        outcomes = self.counts.setdefault(subject, {})
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if fault:
            self.num_faults += 1
            if len(self.faults) < _KEPT_FAULTS:
                self.faults.append(f"{subject}: {fault}")

    @property
    def num_attempts(self) -> int:
        """Number of all attempts."""
        return sum(sum(outcomes.values()) for outcomes in self.counts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Arguments of a campaign."""

    seed: int
    count: int
    """Attempts, all subjects together."""
    folder: Path
    """To work in; empty."""
    say: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A fault campaign; one file of ``campaigns/`` holds one."""

    name: str
    description: str
    """The injected fault, and what counts as passed."""
    count: int
    """Attempts of the long form."""
    run: Callable[[Order], Tally]


def campaigns() -> Mapping[str, Campaign]:
    """Return every campaign by its name."""
    folder = import_module("faults.campaigns")
    modules = [import_module(f"{folder.__name__}.{info.name}") for info in pkgutil.iter_modules(folder.__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Campaign)]
    return {campaign.name: campaign for campaign in sorted(found, key=lambda one: one.name)}
