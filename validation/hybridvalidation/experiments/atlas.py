"""The atlas: what ``fit`` answers of many models, cards, methods and lengths. Its question, its records, its cells."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Final

from hybridtrain.config.decode import load_toml
from hybridtrain.config.encode import digest
from hybridtrain.config.rules import below_least, refuse, repeated
from hybridtrain.errors import unknown_name
from hybridtrain.models.model_config import MOST_TOKENS, PRESETS, ModelConfig
from hybridtrain.planning.fitting import METHODS, precisions
from hybridtrain.reports.fit_arguments import FitArguments
from hybridtrain.virtual_gpu.cards.card import Card, FitVerdict, card_catalogue
from hybridtrain.virtual_gpu.cards.kernels import Curves, curves_of
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import keep_lines, read_lines

ATLAS_FILE, CHECKS_FILE = "atlas.jsonl", "atlas-checks.jsonl"
_QUESTIONS = Path("atlas", "atlas.toml")
LABELS: Final[Mapping[str, str]] = {level.name: level.label for _, level in precisions(METHODS)}
"""What a reader calls each precision."""
_VERDICTS: Final[Mapping[str, FitVerdict]] = {"y": FitVerdict.FITS, "b": FitVerdict.BARELY, "n": FitVerdict.NO}
_LETTERS: Final[Mapping[FitVerdict, str]] = {verdict: letter for letter, verdict in _VERDICTS.items()}
_FIGURES = ("device_mib", "host_mib", "disk_mib", "tokens_per_s", "micro_batch_size")
"""Columns with a number per cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasModel:
    """A model of the atlas."""

    name: str
    """Of its preset."""
    title: str
    """For a reader."""
    also: tuple[str, ...] = ()
    """Others of the same shape, which a search finds too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasFile:
    """``scenarios/atlas/atlas.toml``."""

    host_memory: str
    lengths: tuple[int, ...]
    """Tokens of a sequence, or all positions of a model that has fewer."""
    planned: tuple[int, ...]
    """Those at which what fits is run with every block; the others are extrapolated, as by ``fit --quick``."""
    longest: tuple[int, ...]
    """Lengths that are tried for the longest sequence; all positions of a model are too."""
    levels: tuple[str, ...]
    """Precisions, by their names in ``fit``."""
    checks: int
    """Planned cells, and as many extrapolated ones, that are run with every block again."""
    readme: tuple[str, ...]
    """Cells that the README shows, as model/card/precision."""
    models: tuple[AtlasModel, ...]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        refuse([
            *(f"models: '{name}' is there twice; drop one" for name in repeated(names)),
            *(f"models: {unknown_name('model', name, PRESETS)}" for name in names if name not in PRESETS),
            *(f"levels: {unknown_name('precision', name, LABELS)}" for name in self.levels if name not in LABELS),
            *below_least(self, ["checks"]),
            *(f"readme: '{place}' must be as model/card/precision" for place in self.readme if place.count("/") != 2),
            *(f"lengths: {length} must be at least 1" for length in self.lengths if length < 1),
        ])  # fmt: skip

    def jobs(self, names: Sequence[str] = ()) -> dict[str, "AtlasJob"]:
        """Return the jobs of models by name, of all without names."""
        return {model.name: self._job(model.name) for model in self.models if not names or model.name in names}

    def _job(self, name: str) -> "AtlasJob":
        def within(lengths: Iterable[int]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(min(length, PRESETS[name].max_seq_len) for length in lengths))

        return AtlasJob(
            model=name, shape=PRESETS[name], cards=card_catalogue(), lengths=within(self.lengths),
            planned=within(self.planned), longest=within((*self.longest, MOST_TOKENS)), levels=self.levels,
            host_memory=self.host_memory, curves={name: curves_of(card) for name, card in card_catalogue().items()},
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasJob:
    """One model, to fit on all cards; equal jobs have equal answers."""

    model: str
    shape: ModelConfig
    cards: Mapping[str, Card]
    lengths: tuple[int, ...]
    planned: tuple[int, ...]
    """Lengths at which what fits is run with every block."""
    longest: tuple[int, ...]
    """Lengths that are tried for the longest sequence."""
    levels: tuple[str, ...]
    host_memory: str
    curves: Mapping[str, Curves]
    """What kernels reach on the cards: the fastest option depends on it."""

    @property
    def card_names(self) -> tuple[str, ...]:
        """Names of the cards, sorted: a mapping that has been a file has no other order."""
        return tuple(sorted(self.cards))

    @property
    def key(self) -> str:
        """Digest of all fields."""
        return digest(self)

    def arguments(self, card: str, seq_len: int) -> FitArguments:
        """Return what ``fit MODEL --card CARD --seq N`` is given."""
        return FitArguments(model=self.model, card=card, host_memory=self.host_memory, seq=seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model, card, length and precision."""

    model: str
    card: str
    seq_len: int
    level: str
    verdict: FitVerdict
    device_mib: int
    """CUDA context included."""
    host_mib: int
    disk_mib: int
    tokens_per_s: int
    """0: it does not fit."""
    offload: str
    """What is kept off the card, for a reader."""
    micro_batch_size: int
    is_planned: bool
    """Of what fits bytes were planned by a run with every block, and not extrapolated from three."""

    @property
    def name(self) -> str:
        """For messages and for choosing."""
        return f"{self.model} {self.card} {self.seq_len} {self.level}"

    @property
    def fits(self) -> bool:
        """Whether it fits and leaves the margin free."""
        return self.verdict is FitVerdict.FITS

    @property
    def command(self) -> str:
        """The command that answers with these figures."""
        return command_of(self.model, self.card, self.seq_len, self.level) + ("" if self.is_planned else QUICK)


def command_of(model: str, card: str, seq_len: object, level: str) -> str:
    """Return the command that answers with a planned cell's figures."""
    return f"hybridtrain fit {model} --card {card} --method {level} --seq {seq_len}"


QUICK = " --quick"
"""Ends the command of a cell that was not planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Figures of one model, a value per cell: cards, then lengths, then levels, which change fastest."""

    verdicts: str
    """A letter per cell: y fits, b fits barely, n does not fit."""
    device_mib: tuple[int, ...]
    host_mib: tuple[int, ...]
    disk_mib: tuple[int, ...]
    tokens_per_s: tuple[int, ...]
    micro_batch_size: tuple[int, ...]
    offload: tuple[int, ...]
    """Place in ``offloads``."""
    offloads: tuple[str, ...]
    kind: tuple[int, ...]
    """A number per card: cards of one kind have as large a CUDA context and workspaces, and the same kernels."""
    resident_mib: tuple[int, ...]
    """Of the card, with nothing off it, micro-batches of one sequence and every block recomputed: a value per kind,
    length and level."""
    longest: tuple[int, ...]
    """Tokens of the longest sequence of those tried that fits, in micro-batches of one and with every block recomputed;
    0: none does. A value per card and level."""

    def per_cell(self) -> Mapping[str, Sequence[object]]:
        """Return the columns with a value per cell, by name."""
        return {name: getattr(self, name) for name in ("verdicts", "offload", *_FIGURES)}


def columns_of(
    cells: Sequence[Cell], *, kind: Sequence[int], resident_mib: Sequence[int], longest: Sequence[int]
) -> Columns:
    """Return cells, in their order, as columns beside those that are not per cell."""
    offloads = sorted({cell.offload for cell in cells})
    return Columns(
        verdicts="".join(_LETTERS[cell.verdict] for cell in cells), offloads=tuple(offloads),
        offload=tuple(offloads.index(cell.offload) for cell in cells), kind=tuple(kind),
        resident_mib=tuple(resident_mib), longest=tuple(longest),
        **{name: tuple(getattr(cell, name) for cell in cells) for name in _FIGURES},
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasRecord(Record):
    """All cells of one model. Bytes of what fits at ``planned`` lengths are planned; others and times estimated."""

    model: str
    num_params: int
    cards: tuple[str, ...]
    card_mib: tuple[int, ...]
    """Memory of each card."""
    lengths: tuple[int, ...]
    planned: tuple[int, ...]
    """Lengths at which what fits was run with every block."""
    levels: tuple[str, ...]
    host_memory: str
    columns: Columns
    evidence: Evidence = Evidence.PLANNED

    def faults(self) -> list[str]:
        """Return inconsistencies of the content."""
        cards, each = len(self.cards), len(self.lengths) * len(self.levels)
        kinds = len(set(self.columns.kind))
        sizes: dict[str, tuple[Sequence[object], int]] = {
            "card_mib": (self.card_mib, cards), "columns.kind": (self.columns.kind, cards),
            "columns.resident_mib": (self.columns.resident_mib, kinds * each),
            "columns.longest": (self.columns.longest, cards * len(self.levels)),
        }  # fmt: skip
        sizes |= {f"columns.{name}": (column, cards * each) for name, column in self.columns.per_cell().items()}
        return [
            f"{name}: {len(column)} values must be {size}; restore the file from version control"
            for name, (column, size) in sizes.items()
            if len(column) != size
        ]

    def cells(self) -> Iterator[Cell]:
        """Yield all cells."""
        columns = self.columns
        for place, (card, seq_len, level) in enumerate(product(self.cards, self.lengths, self.levels)):
            yield Cell(
                model=self.model, card=card, seq_len=seq_len, level=level, verdict=_VERDICTS[columns.verdicts[place]],
                offload=columns.offloads[columns.offload[place]], is_planned=seq_len in self.planned,
                **{name: getattr(columns, name)[place] for name in _FIGURES},
            )  # fmt: skip

    def longest(self, card: str, level: str) -> int:
        """Return the tokens of the longest sequence, of those tried, that fits a card; 0: none does."""
        return self.columns.longest[self.cards.index(card) * len(self.levels) + self.levels.index(level)]

    def resident_mib(self, card: str, seq_len: int, level: str) -> int:
        """Return the bytes of a card with nothing off it, in MiB."""
        kind, lengths, levels = self.columns.kind[self.cards.index(card)], self.lengths, self.levels
        return self.columns.resident_mib[
            (kind * len(lengths) + lengths.index(seq_len)) * len(levels) + levels.index(level)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasCheck(Record):
    """One cell of the atlas, and what a run with every block answered afterwards."""

    cell: Cell
    again: Cell
    evidence: Evidence = Evidence.PLANNED

    @property
    def memory_error(self) -> float:
        """Bytes of the card in the atlas over those planned afterwards, less 1."""
        return self.cell.device_mib / self.again.device_mib - 1

    @property
    def speed_error(self) -> float:
        """Likewise of tokens per second."""
        return self.cell.tokens_per_s / max(1, self.again.tokens_per_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Atlas:
    """What was asked, and what there are records of."""

    file: AtlasFile
    records: Mapping[str, AtlasRecord]
    """By model, those of a family together."""
    checks: Sequence[AtlasCheck]

    def of(self, models: Sequence[str]) -> "Atlas":
        """Return the part of some models."""
        records = {name: record for name, record in self.records.items() if name in models}
        return replace(self, records=records, checks=[check for check in self.checks if check.cell.model in records])

    def outdated(self) -> tuple[str, ...]:
        """Return the models that were fitted on other cards, at other lengths or by an earlier time model."""
        jobs = self.file.jobs()
        return tuple(name for name, record in self.records.items() if record.key != jobs[name].key)

    @property
    def num_cells(self) -> int:
        """Cells with a record."""
        return sum(len(record.columns.verdicts) for record in self.records.values())


def read_atlas(folder: Path, records: Path) -> Atlas | None:
    """Read an atlas from a folder of scenarios and one of records; None without either's file.

    Raises:
        ConfigError, RecordError: A file is damaged.
    """
    if not (folder / _QUESTIONS).exists() or not (newest := newest_records(records)):
        return None
    file = read_atlas_file(folder)
    models = sorted(
        file.models, key=lambda model: (model.title.split()[0], PRESETS[model.name].num_params, model.title)
    )
    found = {model.name: newest[model.name] for model in models if model.name in newest}
    known = {cell for record in found.values() for cell in record.cells()}
    checks = {check.cell.name: check for check in read_checks(records)}
    return Atlas(file=file, records=found, checks=[check for check in checks.values() if check.cell in known])


def read_atlas_file(folder: Path) -> AtlasFile:
    """Read what the atlas holds from a folder of scenarios; raises ``ConfigError``."""
    return load_toml(AtlasFile, folder / _QUESTIONS)


def newest_records(records: Path) -> dict[str, AtlasRecord]:
    """Return the newest record of each model; raises ``RecordError`` for a line that is none."""
    return {record.model: record for record in read_lines(records / ATLAS_FILE, AtlasRecord)}


def read_checks(records: Path) -> list[AtlasCheck]:
    """Return all checks, oldest first; raises ``RecordError`` for a line that is none."""
    return read_lines(records / CHECKS_FILE, AtlasCheck)


def prune_atlas(records: Path) -> int:
    """Drop the records of models and checks that newer ones replace; return their number."""
    checks = {check.cell.name: check for check in read_checks(records)}
    count = keep_lines(records / ATLAS_FILE, AtlasRecord, list(newest_records(records).values()))
    return count + keep_lines(records / CHECKS_FILE, AtlasCheck, list(checks.values()))


def chosen_cells(cells: Iterable[Cell], count: int, salt: str = "") -> list[Cell]:
    """Return cells in the order of a digest of their names: the precisions in turn, and as many models as there are.

    Args:
        cells: To choose among.
        count: At most so many.
        salt: Another one chooses others.
    """
    ranked = sorted(cells, key=lambda cell: sha256(f"{salt} {cell.name}".encode()).digest())
    levels = sorted({cell.level for cell in ranked})
    chosen, taken = list[Cell](), set[str]()
    while len(chosen) < count and ranked:
        level = levels[len(chosen) % len(levels)]
        here = [cell for cell in ranked if cell.level == level] or ranked
        cell = next((cell for cell in here if cell.model not in taken), here[0])
        taken = {cell.model} if cell.model in taken else taken | {cell.model}
        chosen.append(cell)
        ranked.remove(cell)
    return chosen
