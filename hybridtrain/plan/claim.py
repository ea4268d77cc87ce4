"""A claim: one optimization's request for one cell or setting of the memory plan."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hybridtrain.config.rules import refuse
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import SETTINGS, PlanValue

Presets = Mapping[str, Mapping[str, object]]
"""Presets of an optimization's settings, selected by ``preset = "conservative"``."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One value for one path of the plan, for one phase or for all of them."""

    path: str
    """One of ``SETTINGS``."""
    value: PlanValue
    phase: Phase | None = None
    """None: every phase."""

    def __post_init__(self) -> None:
        assert self.path in SETTINGS, f"no such path in the memory plan: {self.path}"


def setting_claims(owner: object, phase: Phase | None = None) -> Iterator[Claim]:
    """Yield a claim for each field of ``owner`` that has a value and the name of a plan setting."""
    for path, setting in SETTINGS.items():
        if (value := getattr(owner, path, None)) is not None:
            yield Claim(path, setting.read(value), phase)


def check_settings(owner: object, faults: Iterable[str] = ()) -> None:
    """Raise ``ValueError`` if an optimization has faults, no phase, or settings out of range."""
    switch = getattr(owner, "SWITCH", "")
    found = []
    for path, setting in SETTINGS.items():
        if setting.least is None or (value := getattr(owner, path, None)) is None:
            continue
        least = 1 if path == switch else setting.least
        if value < least:
            advice = "; drop the optimization instead" if path == switch else ""
            found.append(f"{path}: {value} must be at least {least}{advice}")
        if value > setting.most:
            found.append(f"{path}: {value} must be at most {setting.most}")
    if getattr(owner, "active_phases", tuple(Phase)) == ():
        found.append("active_phases: empty; name at least one phase or drop the optimization")
    refuse([*found, *faults])


def claimed_phases(active: Iterable[Phase]) -> list[Phase | None]:
    """Return the phases of an optimization's claims; None alone for all phases."""
    chosen = [phase for phase in Phase if phase in set(active)]
    return [None] if len(chosen) == len(Phase) else list(chosen)
