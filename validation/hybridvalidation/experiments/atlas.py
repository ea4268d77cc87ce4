"""``hybridtrain atlas``: the answers of ``fit`` for many models, cards and lengths, and full dry runs of some of them.

A case is a model: its cards, methods and lengths share their short runs. Some cells, chosen by a digest of their names,
are run again with every block; the largest difference says how far off the others may be.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Final

from hybridtrain.config.decode import load_toml
from hybridtrain.config.encode import digest
from hybridtrain.config.rules import below_least, refuse, repeated
from hybridtrain.errors import unknown_name
from hybridtrain.models.model_config import PRESETS, ModelConfig
from hybridtrain.planning.candidates import ARRANGEMENTS, Candidate, FitRequest
from hybridtrain.planning.fitting import METHODS, Method, TrainingOption, fit, levels_of, whole_run
from hybridtrain.planning.short_run import ShortRuns
from hybridtrain.reports.fit_arguments import FitArguments
from hybridtrain.units import MIB, format_seconds
from hybridtrain.virtual_gpu.cards.card import Card, FitVerdict, card_catalogue
from hybridvalidation.child import Child, Ended
from hybridvalidation.experiment import Experiment, answer_of, child_header, in_children
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import keep_lines, read_lines

_QUESTIONS = Path("atlas", "atlas.toml")
_FILE, _CHECKS_FILE = "atlas.jsonl", "atlas-checks.jsonl"
_VERDICTS: Final[Mapping[str, FitVerdict]] = {"y": FitVerdict.FITS, "b": FitVerdict.BARELY, "n": FitVerdict.NO}
_LETTERS: Final[Mapping[FitVerdict, str]] = {verdict: letter for letter, verdict in _VERDICTS.items()}
_FIGURES = ("device_mib", "host_mib", "disk_mib", "tokens_per_s", "micro_batch_size")
"""Columns with a number per cell."""
LEVELS: Final[Mapping[str, Method]] = {level.name: method for method in METHODS for level in levels_of(method)}
"""Method of each precision."""


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
    levels: tuple[str, ...]
    """Precisions, by their names in ``fit``."""
    checks: int
    """Cells that are run with every block."""
    models: tuple[AtlasModel, ...]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        refuse([
            *(f"models: '{name}' is there twice; drop one" for name in repeated(names)),
            *(f"models: {unknown_name('model', name, PRESETS)}" for name in names if name not in PRESETS),
            *(f"levels: {unknown_name('precision', name, LEVELS)}" for name in self.levels if name not in LEVELS),
            *below_least(self, ["checks"]),
            *(f"lengths: {length} must be at least 1" for length in self.lengths if length < 1),
        ])  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasJob:
    """One model, to fit on all cards; equal jobs have equal answers."""

    model: str
    shape: ModelConfig
    cards: Mapping[str, Card]
    lengths: tuple[int, ...]
    levels: tuple[str, ...]
    host_memory: str

    @property
    def card_names(self) -> tuple[str, ...]:
        """Names of the cards, sorted: a mapping that has been a file has no other order."""
        return tuple(sorted(self.cards))

    @property
    def key(self) -> str:
        """Digest of all fields."""
        return digest(self)

    @property
    def methods(self) -> tuple[Method, ...]:
        """Methods to which the levels belong."""
        return tuple(dict.fromkeys(LEVELS[level] for level in self.levels))

    def request(self, card: str, seq_len: int) -> FitRequest:
        """Return what ``fit MODEL --card CARD --seq N`` asks for."""
        arguments = FitArguments(model=self.model, card=card, host_memory=self.host_memory, seq=seq_len)
        return replace(arguments.resolve(), card=self.cards[card])


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Figures of one model, a value per cell: cards, then lengths, then levels, which change fastest."""

    verdicts: str
    """A letter per cell: y fits, b fits barely, n does not fit."""
    device_mib: tuple[int, ...]
    """CUDA context included; where it does not fit what the smallest option needs, by arithmetic."""
    host_mib: tuple[int, ...]
    disk_mib: tuple[int, ...]
    tokens_per_s: tuple[int, ...]
    """0: it does not fit."""
    offloads: tuple[str, ...]
    """What is kept off the card, for a reader."""
    offload: tuple[int, ...]
    """Place in ``offloads``."""
    micro_batch_size: tuple[int, ...]
    kind: tuple[int, ...]
    """A number per card: cards of one kind have as large a CUDA context and workspaces."""
    resident_mib: tuple[int, ...]
    """Bytes with nothing off the card, micro-batches of one sequence and every block recomputed: a value per kind,
    length and level."""

    def per_cell(self) -> Mapping[str, Sequence[object]]:
        """Return the columns with a value per cell, by name."""
        return {name: getattr(self, name) for name in ("verdicts", "offload", *_FIGURES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model, card, length and precision."""

    model: str
    card: str
    seq_len: int
    level: str
    verdict: FitVerdict
    device_mib: int
    host_mib: int
    disk_mib: int
    resident_mib: int
    tokens_per_s: int
    offload: str
    micro_batch_size: int

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
        return command_of(self.model, self.card, self.seq_len, self.level)


def command_of(model: str, card: str, seq_len: object, level: str) -> str:
    """Return the command that answers with a cell's figures."""
    return f"hybridtrain fit {model} --card {card} --method {LEVELS[level]} --seq {seq_len} --quick"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasRecord(Record):
    """All cells of one model. Bytes and times are ``estimated`` from short runs; of what does not fit, arithmetic."""

    model: str
    num_params: int
    cards: tuple[str, ...]
    card_mib: tuple[int, ...]
    """Memory of each card."""
    lengths: tuple[int, ...]
    levels: tuple[str, ...]
    host_memory: str
    columns: Columns
    evidence: Evidence = Evidence.ESTIMATED

    def faults(self) -> list[str]:
        """Return inconsistencies of the content."""
        count = len(self.cards) * len(self.lengths) * len(self.levels)
        per_card = {"card_mib": self.card_mib, "columns.kind": self.columns.kind}
        faults = [
            f"{name}: {len(column)} values must be {len(self.cards)}, one per card"
            for name, column in per_card.items()
            if len(column) != len(self.cards)
        ]
        return faults + [
            f"columns.{name}: {len(column)} values must be {count}, one per card, length and level"
            for name, column in self.columns.per_cell().items()
            if len(column) != count
        ]

    def cells(self) -> Iterator[Cell]:
        """Yield all cells."""
        columns = self.columns
        places = product(enumerate(self.cards), enumerate(self.lengths), enumerate(self.levels))
        for place, ((card_place, card), (length_place, seq_len), (level_place, level)) in enumerate(places):
            of_kind = (columns.kind[card_place] * len(self.lengths) + length_place) * len(self.levels) + level_place
            yield Cell(
                model=self.model, card=card, seq_len=seq_len, level=level, verdict=_VERDICTS[columns.verdicts[place]],
                resident_mib=columns.resident_mib[of_kind], offload=columns.offloads[columns.offload[place]],
                **{name: getattr(columns, name)[place] for name in _FIGURES},
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckJob:
    """One cell, to run with every block."""

    atlas: AtlasJob
    card: str
    seq_len: int
    level: str

    @property
    def key(self) -> str:
        """Digest of the question."""
        return digest(replace(self, atlas=replace(self.atlas, cards={self.card: self.atlas.cards[self.card]})))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFigures:
    """One option by short runs, and by a full dry run."""

    estimated_device_bytes: int
    planned_device_bytes: int
    estimated_host_bytes: int
    planned_host_bytes: int
    estimated_tokens_per_s: float
    planned_tokens_per_s: float
    fits: bool
    """By the full dry run."""
    micro_batches_run: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasCheck(Record):
    """One cell, run with every block."""

    model: str
    card: str
    seq_len: int
    level: str
    figures: CheckFigures
    evidence: Evidence = Evidence.PLANNED

    @property
    def cell(self) -> tuple[str, str, int, str]:
        """What was run."""
        return self.model, self.card, self.seq_len, self.level

    @property
    def memory_error(self) -> float:
        """Estimated over planned bytes of the card, less 1."""
        return self.figures.estimated_device_bytes / self.figures.planned_device_bytes - 1

    @property
    def host_error(self) -> float | None:
        """Likewise of the host, as a share of the card's bytes and the host's; None where nothing is offloaded."""
        figures = self.figures
        return figures.estimated_host_bytes / figures.planned_host_bytes - 1 if figures.planned_host_bytes else None

    @property
    def speed_error(self) -> float:
        """Estimated over planned tokens per second, less 1: of the short runs alone, not of the roofline."""
        return self.figures.estimated_tokens_per_s / self.figures.planned_tokens_per_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Atlas:
    """What was asked, and what there are records of."""

    file: AtlasFile
    records: Mapping[str, AtlasRecord]
    """By model, in the order of the file."""
    checks: Sequence[AtlasCheck]
    """Full dry runs of cells."""

    def of(self, models: Sequence[str]) -> "Atlas":
        """Return the part of some models."""
        records = {name: record for name, record in self.records.items() if name in models}
        return replace(self, records=records, checks=[check for check in self.checks if check.model in records])

    @property
    def num_cells(self) -> int:
        """Cells with a record."""
        return sum(len(record.columns.verdicts) for record in self.records.values())


def read_atlas(folder: Path, records: Path) -> Atlas | None:
    """Read an atlas from a folder of scenarios and one of records; None without either's file.

    Raises:
        ConfigError, RecordError: A file is damaged.
    """
    if not (folder / _QUESTIONS).exists() or not (newest := _newest(records)):
        return None
    file = read_atlas_file(folder)
    found = {model.name: newest[model.name] for model in file.models if model.name in newest}
    checks = {check.cell: check for check in _checks(records)}
    return Atlas(file=file, records=found, checks=[check for check in checks.values() if check.model in found])


def read_atlas_file(folder: Path) -> AtlasFile:
    """Read what the atlas holds from a folder of scenarios; raises ``ConfigError``."""
    return load_toml(AtlasFile, folder / _QUESTIONS)


def _newest(records: Path) -> dict[str, AtlasRecord]:
    return {record.model: record for record in read_lines(records / _FILE, AtlasRecord)}


def _checks(records: Path) -> list[AtlasCheck]:
    return read_lines(records / _CHECKS_FILE, AtlasCheck)


def jobs_of(file: AtlasFile, names: Sequence[str] = ()) -> dict[str, AtlasJob]:
    """Return the jobs of models by name, of all without names."""
    chosen = [model.name for model in file.models if not names or model.name in names]
    return {
        name: AtlasJob(
            model=name, shape=PRESETS[name], cards=card_catalogue(),
            lengths=tuple(dict.fromkeys(min(length, PRESETS[name].max_seq_len) for length in file.lengths)),
            levels=file.levels, host_memory=file.host_memory,
        )
        for name in chosen
    }  # fmt: skip


# ---- the cells of a model


def make_columns(job: AtlasJob) -> Columns:
    """Fit a model on all cards at all lengths."""
    found = dict[tuple[str, int, str], Cell]()
    for seq_len in job.lengths:
        runs = ShortRuns()  # of one length: another shares none
        for card in job.card_names:
            found |= {(cell.card, cell.seq_len, cell.level): cell for cell in make_cells(job, card, seq_len, runs)}
    cells = [found[place] for place in product(job.card_names, job.lengths, job.levels)]
    offloads = sorted({cell.offload for cell in cells})
    kinds = {_kind(job.cards[card]): card for card in job.card_names}
    return Columns(
        verdicts="".join(_LETTERS[cell.verdict] for cell in cells),
        offloads=tuple(offloads), offload=tuple(offloads.index(cell.offload) for cell in cells),
        kind=tuple([*kinds].index(_kind(job.cards[card])) for card in job.card_names),
        resident_mib=tuple(found[place].resident_mib for place in product(kinds.values(), job.lengths, job.levels)),
        **{name: tuple(getattr(cell, name) for cell in cells) for name in _FIGURES},
    )  # fmt: skip


def make_cells(job: AtlasJob, card: str, seq_len: int, runs: ShortRuns) -> Iterator[Cell]:
    """Yield the cells of one card and length."""
    request = job.request(card, seq_len)
    for level, option in answers(job, card, seq_len, runs).items():
        yield Cell(
            model=job.model, card=card, seq_len=seq_len, level=level, verdict=_verdict(request, option),
            device_mib=round(option.device_bytes / MIB), host_mib=round(option.host_bytes / MIB),
            disk_mib=round(option.disk_bytes / MIB), tokens_per_s=round(option.tokens_per_s or 0),
            resident_mib=round(_resident_bytes(request, option, runs) / MIB),
            offload=option.candidate.arrangement.offload, micro_batch_size=option.candidate.micro_batch_size,
        )  # fmt: skip


def answers(job: AtlasJob, card: str, seq_len: int, runs: ShortRuns) -> dict[str, TrainingOption]:
    """Return what fit answers of one card and length, by precision."""
    options = fit(job.request(card, seq_len), methods=job.methods, runs=runs)
    return {option.name: option for option in options if option.name in job.levels}


def make_again(job: AtlasJob, cell: Cell) -> Cell:
    """Return a cell as the present program fits it."""
    job = replace(job, levels=(cell.level,))
    return next(make_cells(job, cell.card, cell.seq_len, ShortRuns()))


def _kind(card: Card) -> tuple[int, int]:
    """Return what of a card decides how many bytes a plan takes of it."""
    return card.context_bytes, card.cublas_workspace_bytes


def _resident_bytes(request: FitRequest, option: TrainingOption, runs: ShortRuns) -> float:
    candidate = Candidate(
        level=option.candidate.level, arrangement=ARRANGEMENTS[0], micro_batch_size=1,
        num_micro_batches=request.num_sequences, keep_last=0,
    )  # fmt: skip
    return runs.of(request, candidate).device_bytes(0)


def _verdict(request: FitRequest, option: TrainingOption) -> FitVerdict:
    is_within = option.device_bytes <= request.card.memory_bytes and option.host_bytes <= request.rank_host.tensor_bytes
    return FitVerdict.FITS if option.fits else FitVerdict.BARELY if is_within else FitVerdict.NO


def _start(job: AtlasJob) -> Child[Columns]:
    return Child("hybridvalidation.experiments.atlas:make_columns", job, Columns)


def _record(job: AtlasJob, ended: Ended[Columns]) -> AtlasRecord:
    return AtlasRecord(
        key=job.key, model=job.model, num_params=job.shape.num_params, cards=job.card_names,
        card_mib=tuple(job.cards[name].memory_mib for name in job.card_names), lengths=job.lengths, levels=job.levels,
        host_memory=job.host_memory, columns=answer_of(ended, job.model, "atlas"), **child_header(ended),
    )  # fmt: skip


def make_atlas(
    folder: Path, records: Path, *, models: Sequence[str], width: int, max_runs: int | None,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Fit the models that have no record yet; then, where none was named, run some cells with every block.

    Args:
        folder: Of scenarios.
        records: Where new records are appended.
        models: Names of some; none: all.
        width: Processes at a time.
        max_runs: Stop after so many.
        say: Takes a line about each.
    """
    fits = Experiment[AtlasJob, AtlasRecord](
        name="atlas", key=lambda job: job.key, run=in_children(_start, _record, width), file=lambda _: _FILE,
        line=lambda job, record: f"{job.model}: {_told(record)}, {format_seconds(record.duration_s)}",
    )  # fmt: skip
    jobs = list(jobs_of(read_atlas_file(folder), models).values())
    made = fits.run_missing(jobs, _newest(records).values(), records=records, say=say, max_runs=max_runs)
    atlas = read_atlas(folder, records)
    if models or atlas is None or made.not_run:
        return
    checks = Experiment[CheckJob, AtlasCheck](
        name="atlas, full dry runs", key=lambda job: job.key, run=in_children(_start_check, _check_record, width),
        file=lambda _: _CHECKS_FILE, line=lambda _, record: _check_line(record),
    )  # fmt: skip
    left = None if max_runs is None else max_runs - len(made.new)
    checks.run_missing(check_jobs(atlas), _checks(records), records=records, say=say, max_runs=left)


def _told(record: AtlasRecord) -> str:
    return f"{record.columns.verdicts.count('y')} of {len(record.columns.verdicts)} cells fit"


# ---- full dry runs of some cells


def chosen_cells(cells: Iterable[Cell], count: int, salt: str = "") -> list[Cell]:
    """Return cells in the order of a digest of their names, the precisions in turn, each model at most once in a turn.

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


def check_jobs(atlas: Atlas) -> list[CheckJob]:
    """Return the cells to run with every block: of those that fit, as many as the file says."""
    jobs = jobs_of(atlas.file)
    fitting = [cell for record in atlas.records.values() for cell in record.cells() if cell.fits]
    return [
        CheckJob(atlas=jobs[cell.model], card=cell.card, seq_len=cell.seq_len, level=cell.level)
        for cell in chosen_cells(fitting, atlas.file.checks)
    ]


def check(job: CheckJob) -> CheckFigures:
    """Estimate one cell, and run the same option with every block."""
    request = job.atlas.request(job.card, job.seq_len)
    option = answers(job.atlas, job.card, job.seq_len, ShortRuns())[job.level]
    whole = whole_run(request, option)
    return CheckFigures(
        estimated_device_bytes=round(option.device_bytes), planned_device_bytes=round(whole.device_bytes),
        estimated_host_bytes=round(option.host_bytes), planned_host_bytes=round(whole.host_bytes),
        estimated_tokens_per_s=option.tokens_per_s or 0.0, planned_tokens_per_s=whole.tokens_per_s or 0.0,
        fits=whole.fits, micro_batches_run=whole.micro_batches_run,
        num_micro_batches=option.candidate.num_micro_batches,
    )  # fmt: skip


def _start_check(job: CheckJob) -> Child[CheckFigures]:
    return Child("hybridvalidation.experiments.atlas:check", job, CheckFigures)


def _check_record(job: CheckJob, ended: Ended[CheckFigures]) -> AtlasCheck:
    return AtlasCheck(
        key=job.key, model=job.atlas.model, card=job.card, seq_len=job.seq_len, level=job.level,
        figures=answer_of(ended, f"{job.atlas.model} on {job.card}", "atlas"), **child_header(ended),
    )  # fmt: skip


def prune_atlas(records: Path) -> int:
    """Drop the records of models and checks that newer ones replace; return their number."""
    checks = {check.cell: check for check in _checks(records)}
    count = keep_lines(records / _FILE, AtlasRecord, list(_newest(records).values()))
    return count + keep_lines(records / _CHECKS_FILE, AtlasCheck, list(checks.values()))


def _check_line(check: AtlasCheck) -> str:
    return (
        f"{check.model} on {check.card}, {check.seq_len} tokens, {check.level}: {check.memory_error:+.2%} of memory, "
        f"{check.speed_error:+.2%} of speed, {format_seconds(check.duration_s)}"
    )
