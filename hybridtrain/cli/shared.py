"""Options that verbs share, the kinds of numbers they take, and their answer."""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, Token

from hybridtrain.extension import harness
from hybridtrain.units import GIB

if TYPE_CHECKING:
    from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
    from hybridtrain.virtual_gpu.facade.card_run import CardRun

Flag = Annotated[bool, Parameter(show_default=False)]
"""Off unless given."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Options of every verb."""

    json: Flag = False
    """Print one JSON object instead of text."""
    scenarios: Path | None = None
    """Folder with scenario files, stacks/ and targets.toml."""

    def say(self, text: str) -> None:
        """Print a line while the verb works, on standard output; with ``--json`` nothing."""
        if not self.json:
            sys.stdout.write(text + "\n")

    def note(self, text: str) -> None:
        """Print a line that is not part of the answer, on standard error; with ``--json`` nothing."""
        if not self.json:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Common):
    """Options of verbs that read or write records."""

    results: Path = Path("results")
    """Folder of records, baselines, tables and plots."""

    @property
    def records(self) -> Path:
        """The folder of records."""
        return self.results / "records"

    @property
    def evidence(self) -> Path:
        """The folder of results to read in: what came with hybridtrain where this folder has no records of its own."""
        from hybridtrain.stacks import evidence_folder

        return evidence_folder(self.results)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Options of verbs that plan memory: the allocator, and files for other viewers."""

    expandable_segments: Flag = False
    """Plan with torch's expandable_segments:True."""
    snapshot: Path | None = None
    """Write a memory_viz snapshot (.pickle)."""
    trace: Path | None = None
    """Write a Chrome trace (.json)."""

    def config(self) -> "AllocatorConfig":
        """Return the settings of the allocator."""
        from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig

        return AllocatorConfig(expandable_segments=self.expandable_segments)

    def absolute(self) -> "Allocation":
        """Return the same with whole paths, for a process in another folder."""
        snapshot, trace = (None if path is None else path.absolute() for path in (self.snapshot, self.trace))
        return replace(self, snapshot=snapshot, trace=trace)

    def write(self, run: "CardRun") -> None:
        """Write the files that were asked for."""
        from hybridtrain.reports.exports import write_run_snapshot, write_run_trace

        if self.snapshot is not None:
            write_run_snapshot(run, self.snapshot, self.config())
        if self.trace is not None:
            write_run_trace(run, self.trace)


COMMON = Common()
RECORDED = Recorded()
ALLOCATION = Allocation()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a verb, as text and as data, and the exit code."""

    text: str
    content: Mapping[str, object] | Sequence[Mapping[str, object]]
    code: int = 0

    def show(self, *, as_json: bool) -> int:
        """Print it, of several ranks the first alone, and return the exit code."""
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write((json.dumps(self.content, allow_nan=False) if as_json else self.text) + "\n")
        return self.code


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return paths as an answer names them."""
    return [path.as_posix() for path in paths]


_INDENT = "\n    "
Kind = Literal["scenarios", "stacks", "optimizations", "optimizers", "models", "cards", "targets"]


def known_names(kind: Kind, folder: Path | None = None) -> list[str]:
    """Return every name of a kind, without torch but for optimizers; ``folder``: of scenario files."""
    from hybridtrain.models.model_config import PRESETS
    from hybridtrain.optimizations import OPTIMIZATIONS
    from hybridtrain.stacks import stack_folder
    from hybridtrain.virtual_gpu.cards.card import card_catalogue

    if kind == "optimizers":
        return sorted(_optimizers())
    if kind in {"optimizations", "models", "cards"}:
        return list({"optimizations": sorted(OPTIMIZATIONS), "models": PRESETS, "cards": card_catalogue()}[kind])
    if kind == "stacks":
        return stack_folder(folder).stack_names()
    return harness().names[kind](folder)


def described(kind: Kind) -> dict[str, str]:
    """Return settings, defaults and presets of optimizations and optimizers by name."""
    from dataclasses import MISSING, fields, is_dataclass

    from hybridtrain.optimizations import OPTIMIZATIONS

    catalogue: Mapping[str, type] = {}
    if kind in {"optimizations", "optimizers"}:
        catalogue = OPTIMIZATIONS if kind == "optimizations" else _optimizers()
    told = {}
    for name, found in sorted(catalogue.items()):
        assert is_dataclass(found), "a kind is a dataclass"
        settings = [
            f"{field.name} = {_as_toml(field.default)}" for field in fields(found) if field.default is not MISSING
        ]
        presets = [f"preset = {_as_toml(preset)}" for preset in getattr(found, "PRESETS", {})]
        lines = [(found.__doc__ or "").partition("\n")[0], ", ".join(settings), " or ".join(presets)]
        told[name] = _INDENT.join(line for line in lines if line)
    return told


def _optimizers() -> Mapping[str, type]:
    from hybridtrain.optim import OPTIMIZERS

    return OPTIMIZERS


def _as_toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    return "unset" if value is None else json.dumps(value)


def _completer(kind: Kind) -> Callable[[object], list[str]]:
    return lambda _context: known_names(kind)


def limit_bytes(gib: float | None) -> int | None:
    """Return a limit of host memory in bytes."""
    return None if gib is None else int(gib * GIB)


def _whole(_type: object, tokens: Sequence[Token]) -> int:
    text = tokens[0].value
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"'{text}' must be a whole number of at least 1") from None
    if value < 1:
        raise ValueError(f"{value} must be at least 1")
    return value


def _finite(_type: object, tokens: Sequence[Token]) -> float:
    text = tokens[0].value
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"'{text}' must be a number above 0") from None
    if not 0 < value < math.inf:
        raise ValueError(f"{text} must be a finite number above 0")
    return value


def _parts(_type: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(part for token in tokens for part in token.value.split(","))


Count = Annotated[int, Parameter(converter=_whole, n_tokens=1)]
Amount = Annotated[float, Parameter(converter=_finite, n_tokens=1)]
Names = Annotated[tuple[str, ...], Parameter(converter=_parts, n_tokens=1, show_default=False)]
_MODEL = "A preset, a .toml file with a shape, a Hugging Face folder or config.json, or a name on the hub."
ModelName = Annotated[str, Parameter(completer=_completer("models"), help=_MODEL)]
StackName = Annotated[str, Parameter(completer=_completer("stacks"), help="Name of a stack, or a .toml file.")]
CardName = Annotated[
    str, Parameter(completer=_completer("cards"), help="Name of a card, or a .toml file with its figures.")
]
ScenarioName = Annotated[str, Parameter(completer=_completer("scenarios"))]
"""Names that the shell completes; a .toml file may stand for each."""
HostMemory = Annotated[str, Parameter(help="RAM of the machine around the card, as 64GiB or 128GB.")]
_LINK = "Between cards of a machine: pcie (the card's own bus), nvlink, ethernet, or a .toml file with its figures."
Link = Annotated[str, Parameter(help=_LINK)]
DiskFolder = Annotated[Path | None, Parameter(help="Folder for tensors that are offloaded to disk.")]
HostLimit = Annotated[
    Amount | None, Parameter(help="Most GiB of host memory for offloaded tensors; default: what is free.")
]
