"""The runs that make the atlas, and those that check it.

A case is a model. Its cards share their short runs, and a full dry run is made once for all cards that chose the same
option: bytes of a plan do not depend on the card, but for its context, workspaces and kernels of attention; the time is
each card's own.
A check is a cell's command, in a process of its own.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from hybridtrain.config.encode import digest
from hybridtrain.planning.candidates import ARRANGEMENTS, Candidate, FitRequest, Numerics
from hybridtrain.planning.dry_runs import DryRun, on_card
from hybridtrain.planning.fitting import (
    Refused,
    TrainingOption,
    after_run,
    few_micro_batches,
    fit,
    following_option,
    precisions,
    verdict_of,
)
from hybridtrain.planning.short_run import ShortRuns
from hybridtrain.planning.solving import longest_sequence
from hybridtrain.reports.fit_arguments import FitArguments
from hybridtrain.reports.fit_report import fit_command
from hybridtrain.units import MIB, format_seconds
from hybridtrain.virtual_gpu.cards.card import Card
from hybridvalidation.child import Child, ChildResult
from hybridvalidation.experiment import Experiment, answer_of, child_header, in_children
from hybridvalidation.experiments.atlas import (
    ATLAS_FILE,
    CHECKS_FILE,
    Atlas,
    AtlasCheck,
    AtlasJob,
    AtlasRecord,
    Cell,
    Columns,
    chosen_cells,
    columns_of,
    newest_records,
    read_atlas,
    read_atlas_file,
    read_checks,
)

_RARELY = (100_000, 50, 50)
"""Thresholds of the garbage collector in a child: plans make millions of objects, and few cycles."""
_Kernels = tuple[int, bool]
_Plan = tuple[Candidate, _Kernels]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A cell to plan in full."""

    card: str
    request: FitRequest
    option: TrainingOption
    refused: Refused


def make_columns(job: AtlasJob) -> Columns:
    """Fit a model on all cards at all lengths, and plan what fits in full."""
    gc.set_threshold(*_RARELY)
    kinds = {_kind(job.cards[card]): card for card in job.card_names}
    cells, resident = dict[tuple[str, int, str], Cell](), dict[tuple[_Kernels, int, str], float]()
    for seq_len in job.lengths:
        cells |= {(cell.card, seq_len, cell.level): cell for cell in _cells(job, seq_len)}
        for (_, kernels), card in kinds.items():
            for _, level in precisions(job.levels):
                if (kernels, seq_len, level.name) not in resident:
                    resident[kernels, seq_len, level.name] = _resident_bytes(_request(job, card, seq_len), level)
    return columns_of(
        [cells[place] for place in product(job.card_names, job.lengths, job.levels)],
        kind=[[*kinds].index(_kind(job.cards[card])) for card in job.card_names],
        resident_mib=[
            round((context + resident[kernels, seq_len, level]) / MIB)
            for (context, kernels), seq_len, level in product(kinds, job.lengths, job.levels)
        ],
        longest=list(_longest(job)),
    )  # fmt: skip


def _longest(job: AtlasJob) -> Iterator[int]:
    """Yield the longest sequence of each card and level, by short runs."""
    found, runs = dict[tuple[str, str], int](), ShortRuns()
    for card, (method, level) in product(job.card_names, precisions(job.levels)):
        best = longest_sequence(
            _request(job, card, job.lengths[0]), method, level, lengths=job.longest, runs=runs
        )  # fmt: skip
        found[card, level.name] = best.value if best is not None else 0
    for place in product(job.card_names, job.levels):
        yield found[place]


def _request(job: AtlasJob, card: str, seq_len: int) -> FitRequest:
    """Return what is asked of a cell; tiles, which go farther, take minutes a card."""
    return replace(job.arguments(card, seq_len).resolve(), card=job.cards[card], tries_tiles=False)


def _kind(card: Card) -> tuple[int, _Kernels]:
    """Return what of a card decides how many bytes a plan takes of it."""
    return card.context_bytes, _kernels(card)


def _kernels(card: Card) -> _Kernels:
    """Return what of a card decides on the events of a plan: workspaces of cuBLAS, and flash attention."""
    return card.cublas_workspace_bytes, card.has_bfloat16_tensor_cores


def _cells(job: AtlasJob, seq_len: int) -> Iterator[Cell]:
    """Yield the cells of one length: those of short runs, then what was planned in full."""
    runs, waiting = ShortRuns(), dict[_Plan, list[_Asked]]()
    for card in job.card_names:
        request = _request(job, card, seq_len)
        for option in fit(request, methods=job.levels, runs=runs):
            if option.fits and seq_len in job.planned:
                asked = _Asked(card, request, option, {})
                waiting.setdefault(_plan(asked), []).append(asked)
            else:
                yield _cell(job.model, card, request, option, is_planned=seq_len in job.planned)
    while waiting:
        plan = max(waiting, key=lambda plan: plan[0].keep_last)  # the others of its kind may need fewer kept blocks
        run: DryRun | None = None
        for asked in waiting.pop(plan):
            request, option = asked.request, asked.option
            if run is None:
                run = request.run(few_micro_batches(option.candidate))
            whole = after_run(request, option, on_card(run, request.card, request.host))
            following = None if whole.fits else following_option(request, whole, asked.refused, runs=runs)
            if following is None:
                yield _cell(job.model, asked.card, request, whole, is_planned=True)
            else:
                again = replace(asked, option=replace(following, run=None))
                waiting.setdefault(_plan(again), []).append(again)


def _plan(asked: _Asked) -> _Plan:
    candidate = replace(asked.option.candidate, kept_bytes=0.0, tokens_per_s=0.0)
    return candidate, _kernels(asked.request.card)


def _cell(model: str, card: str, request: FitRequest, option: TrainingOption, *, is_planned: bool) -> Cell:
    return Cell(
        model=model, card=card, seq_len=request.seq_len, level=option.name, verdict=verdict_of(request, option),
        device_mib=round(option.device_bytes / MIB), host_mib=round(option.host_bytes / MIB),
        disk_mib=round(option.disk_bytes / MIB), tokens_per_s=round(option.tokens_per_s or 0) if option.fits else 0,
        offload=option.candidate.arrangement.offload, micro_batch_size=option.candidate.micro_batch_size,
        is_planned=is_planned,
    )  # fmt: skip


def _resident_bytes(request: FitRequest, level: Numerics) -> float:
    """Return the bytes of a card, its context apart, that a step takes at least with nothing off it."""
    candidate = Candidate(
        level=level, arrangement=ARRANGEMENTS[0], micro_batch_size=1, num_micro_batches=request.num_sequences,
        keep_last=0,
    )  # fmt: skip
    enough = replace(request, card=replace(request.card, memory_mib=_ENOUGH_MIB))
    few = few_micro_batches(candidate)
    option = TrainingOption(method="full", candidate=candidate, device_bytes=0, host_bytes=0, fits=True)
    return after_run(enough, option, enough.run(few)).device_bytes - request.card.context_bytes


_ENOUGH_MIB = 2**30
"""A petabyte: bytes without a cap."""


def _start(job: AtlasJob) -> Child[Columns]:
    return Child("hybridvalidation.experiments.atlas_runs:make_columns", job, Columns)


def _record(job: AtlasJob, ended: ChildResult[Columns]) -> AtlasRecord:
    return AtlasRecord(
        key=job.key, model=job.model, num_params=job.shape.num_params, cards=job.card_names,
        card_mib=tuple(job.cards[name].memory_mib for name in job.card_names), lengths=job.lengths,
        planned=job.planned, levels=job.levels, host_memory=job.host_memory,
        columns=answer_of(ended, job.model, "atlas"), **child_header(ended),
    )  # fmt: skip


def make_atlas(
    folder: Path, records: Path, *, models: Sequence[str], width: int, max_runs: int | None,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Fit the models that have no record yet; then, where none was named, run the commands of some cells again.

    Args:
        folder: Of scenarios.
        records: Where new records are appended.
        models: Names of some; none: all.
        width: Processes at a time.
        max_runs: Stop after so many.
        say: Takes a line about each.
    """
    fits = Experiment[AtlasJob, AtlasRecord](
        name="atlas", key=lambda job: job.key, run=in_children(_start, _record, width), file=lambda _: ATLAS_FILE,
        line=lambda job, record: f"{job.model}: {_told(record)}, {format_seconds(record.duration_s)}",
    )  # fmt: skip
    jobs = list(read_atlas_file(folder).jobs(models).values())
    made = fits.run_missing(jobs, newest_records(records).values(), records=records, say=say, max_runs=max_runs)
    atlas = read_atlas(folder, records)
    if models or atlas is None or made.not_run:
        return
    checks = Experiment[CheckJob, AtlasCheck](
        name="atlas, commands", key=lambda job: job.key, run=in_children(_start_check, _check_record, width),
        file=lambda _: CHECKS_FILE, line=lambda _, record: _check_line(record),
    )  # fmt: skip
    left = None if max_runs is None else max_runs - len(made.new)
    checks.run_missing(check_jobs(atlas), read_checks(records), records=records, say=say, max_runs=left)


def _told(record: AtlasRecord) -> str:
    return f"{record.columns.verdicts.count('y')} of {len(record.columns.verdicts)} cells fit"


# ---- checks


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckJob:
    """A cell whose command is run again."""

    atlas: str
    """Key of its model's record."""
    cell: Cell
    host_memory: str
    in_full: bool
    """Run with every block even where the cell's command does not."""

    @property
    def key(self) -> str:
        """Digest of all fields."""
        return digest(self)


def check_jobs(atlas: Atlas) -> list[CheckJob]:
    """Return the cells to check, all with every block: of those that fit, as many planned as extrapolated ones."""
    fitting = [cell for record in atlas.records.values() for cell in record.cells() if cell.fits]
    kinds = ([cell for cell in fitting if cell.is_planned is kind] for kind in (True, False))
    return [
        CheckJob(
            atlas=atlas.records[cell.model].key, cell=cell, host_memory=atlas.file.host_memory, in_full=True
        )
        for cells in kinds for cell in chosen_cells(cells, atlas.file.checks)
    ]  # fmt: skip


def answer_of_command(job: CheckJob) -> Cell:
    """Return a cell as its command answers it, or as it does without --quick."""
    cell = job.cell
    arguments = FitArguments(model=cell.model, card=cell.card, host_memory=job.host_memory, seq=cell.seq_len)
    report = fit_command(arguments, methods=[cell.level], confirm=job.in_full or cell.is_planned)
    (option,) = report.options
    return _cell(cell.model, cell.card, report.request, option, is_planned=cell.is_planned)


def _start_check(job: CheckJob) -> Child[Cell]:
    return Child("hybridvalidation.experiments.atlas_runs:answer_of_command", job, Cell)


def _check_record(job: CheckJob, ended: ChildResult[Cell]) -> AtlasCheck:
    return AtlasCheck(key=job.key, cell=job.cell, again=answer_of(ended, job.cell.name, "atlas"), **child_header(ended))


def _check_line(check: AtlasCheck) -> str:
    return (
        f"{check.cell.name}: {check.memory_error:+.2%} of memory, {check.speed_error:+.2%} of speed, "
        f"{format_seconds(check.duration_s)}"
    )
