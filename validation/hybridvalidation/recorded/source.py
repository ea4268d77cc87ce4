"""Files of recorded figures: who measured what, with which recipe, and which part each run plays."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hybridtrain.config.decode import load_toml
from hybridtrain.errors import ConfigError, unknown_name


class Role(StrEnum):
    """What a run is for; said before anything is predicted."""

    CALIBRATE = "calibrate"
    """What its source does not say was fitted on it; at most one run of a source."""
    PREDICT = "predict"
    SEEN = "seen"
    """Predicted by code or a recipe that was written or changed when the figure was known: no blind prediction."""
    LEFT_OUT = "left_out"
    """Not planned; ``why`` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run that others measured."""

    id: str
    role: Role
    config: str = "{}"
    """The recipe beside what all runs of the source share: JSON, in the words of the engine."""
    recorded: Mapping[str, float]
    """Quantity to value: bytes, but for ``..._seconds``, ``..._params`` and ``oom`` (1: the run ran out of memory)."""
    why: str = ""
    """Why it is left out; or the cause of a miss that is known."""

    def __post_init__(self) -> None:
        if self.role is Role.LEFT_OUT and not self.why:
            raise ValueError("why: missing; say why the run is left out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A publication with measured figures."""

    title: str
    where: str
    """Repository, commit, file."""
    engine: str
    """File in ``engines/``."""
    card: str
    versions: str
    """Of torch and the libraries, as the source says them; empty where it does not."""
    protocol: str
    """What is fitted, on what; what counts as an error. Written before predicting."""
    common: str = "{}"
    """The recipe that all runs share: JSON."""
    packages: tuple[str, ...] = ()
    """What must be installed to plan it."""
    seen: tuple[str, ...] = ()
    """Quantities that were known of all predicted runs when what plans them was settled; the protocol says how."""
    runs: tuple[RecordedRun, ...]

    def __post_init__(self) -> None:
        names = [run.id for run in self.runs]
        faults = [f"runs: '{name}' is there twice" for name in sorted({n for n in names if names.count(n) > 1})]
        if sum(run.role is Role.CALIBRATE for run in self.runs) > 1:
            faults.append("runs: more than one has the role 'calibrate'; at most one run of a source is fitted on")
        known = {quantity for run in self.runs for quantity in run.recorded}
        faults += [f"seen: {unknown_name('quantity', name, sorted(known))}" for name in self.seen if name not in known]
        if faults:
            raise ValueError("\n".join(faults))


def read_sources(scenarios: Path, only: str | None = None) -> dict[str, Source]:
    """Return sources by name, all or one.

    Raises:
        ConfigError: No such source, or a faulty file.
    """
    folder = scenarios / "recorded"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if only is not None and only not in names:
        raise ConfigError("recorded", [unknown_name("source", only, names)])
    return {name: load_toml(Source, folder / f"{name}.toml") for name in names if only in {None, name}}
