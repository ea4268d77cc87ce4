"""Runs a ladder: processes side by side, every run written down as it ends; and repeats probes with today's program."""

from collections.abc import Callable
from pathlib import Path

from hybridtrain.data.pinned_corpus import pinned_corpus
from hybridtrain.errors import HybridTrainError, RecordError
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.runs.child import Child, run_side_by_side
from hybridvalidation.study.ladder.order import next_runs
from hybridvalidation.study.ladder.protocol import (
    Arm,
    LadderFile,
    LadderJob,
    LadderRecord,
    LadderRun,
    Made,
    Probe,
    ReplayRecord,
    Rung,
    record_of,
)
from hybridvalidation.study.ladder.run import LOSSES_BEFORE_JUMP, OTHER_TEXT, TEXT
from hybridvalidation.study.runner import record_path, study_file

_BASES = Path("runs") / "ladder-bases"
LARGEST_REPLAY_DIFFERENCE = 1e-2
"""Of a loss in nats, on another processor or torch, after at most eight steps: sums have another order there, and the
first steps of AdamW move a weight by a whole learning rate whichever sign its gradient has, however small that is."""


def read_ladder(results: Path, name: str) -> dict[str, LadderRecord]:
    """Return the runs made so far by key; a later record of a run replaces an earlier one."""
    return {record.key: record for record in read_lines(record_path(results, name), LadderRecord)}


def read_replays(results: Path, name: str) -> dict[str, ReplayRecord]:
    """Return the latest replay of every run that has one, by key."""
    return {record.key: record for record in read_lines(record_path(results, _replays(name)), ReplayRecord)}


def run_ladder(
    ladder: LadderFile, results: Path, *, jobs: int, max_runs: int | None, rung: str | None = None,
    say: Callable[[str], None],
) -> dict[str, LadderRecord]:  # fmt: skip
    """Make all runs that are missing, of one rung or of all, ``jobs`` at a time, and return all records.

    Raises:
        DataError: the pinned texts are not installed.
        RecordError: the runs made so far had another text.
        HybridTrainError: a process crashed; what ended before it is written down.
    """
    made, count, path = read_ladder(results, ladder.name), 0, record_path(results, ladder.name)
    digests = {pinned_corpus(name).digest for name in (TEXT, OTHER_TEXT)}
    if others := {record.corpus_digest[:8] for record in made.values() if record.corpus_digest not in digests}:
        raise RecordError(f"{path}: its runs had the texts {sorted(others)}; begin anew with other --results")
    while runs := next_runs(ladder, made, rung)[: None if max_runs is None else max_runs - count]:
        say(f"{ladder.name}: {len(runs)} runs of this stage ({runs[0].rung}) are missing")
        work = [LadderJob(ladder=ladder, run=run, bases=_BASES / ladder.name) for run in runs]
        for job, ended in run_side_by_side(work, _start, jobs):
            if ended.answer is None:
                raise HybridTrainError(
                    f"{ladder.name}: {job.run} has no record: {ended.fault}; runs that ended are kept, the same "
                    "command goes on behind them"
                )
            append_record(results / "records", study_file(ladder.name), ended.answer)
            made[ended.answer.key] = ended.answer
            count += 1
            say(_told(ended.answer))
    return made


def replay(
    ladder: LadderFile, made: Made, results: Path, *, jobs: int, say: Callable[[str], None]
) -> list[ReplayRecord]:
    """Repeat the probe of one run of every arm and rung with the program as it is; write down what it says."""
    each = [_first(ladder, made, rung, arm) for rung in ladder.rungs for arm in ladder.arms_of(rung)]
    chosen = [record for record in each if record is not None]
    work = [LadderJob(ladder=ladder, run=record.run) for record in chosen]
    replays = []
    for job, ended in run_side_by_side(work, _start_probe, jobs):
        if ended.answer is None:
            raise HybridTrainError(f"{ladder.name}: the probe of {job.run} has no record: {ended.fault}")
        found = _replayed(ladder, next(record for record in chosen if record.run == job.run), ended.answer)
        append_record(results / "records", study_file(_replays(ladder.name)), found)
        replays.append(found)
        say(f"{_name(found.run)}: {replay_sentence(found)}")
    return replays


def replay_sentence(found: ReplayRecord) -> str:
    """Return what a replay says."""
    if found.is_equal:
        return "equal to the bit"
    where = "on the same machine" if found.same_machine else "on another processor or torch"
    word = "within" if holds(found) else "beyond"
    return f"{word} the band, {found.largest_difference:.1e} nats apart {where}"


def holds(found: ReplayRecord) -> bool:
    """Return whether the record is one of today's program: to the bit, within rounding on another machine."""
    return found.is_equal or (not found.same_machine and found.largest_difference <= LARGEST_REPLAY_DIFFERENCE)


def _first(ladder: LadderFile, made: Made, rung: Rung, arm: Arm) -> LadderRecord | None:
    records = (record_of(ladder, made, rung, arm, seed) for seed in rung.seeds)
    return next((record for record in records if record is not None), None)


def _replayed(ladder: LadderFile, record: LadderRecord, again: LadderRecord) -> ReplayRecord:
    """Compare all losses on the same machine; on another one those before the first jump.

    Behind it, whether a jump is taken back is a yes or no, which the order of a sum may decide.
    """
    is_same = _machine(record) == _machine(again)
    count = None if is_same or not ladder.arm(record.run.arm).jumps else LOSSES_BEFORE_JUMP
    return ReplayRecord(
        key=record.key, run=record.run, outcome=Outcome.OK, started_at=again.started_at, duration_s=again.duration_s,
        environment=again.environment, program=again.program, is_equal=record.probe == again.probe,
        largest_difference=_apart(record.probe, again.probe, count), same_machine=is_same,
    )  # fmt: skip


def _apart(one: Probe, other: Probe, count: int | None) -> float:
    """Return the largest difference of a loss, of the run in little ``count`` or all; huge where one has more."""
    losses = [(*probe.first_losses, *probe.losses[:count]) for probe in (one, other)]
    if len(losses[0]) != len(losses[1]):
        return 1e9
    return max(abs(own - its) for own, its in zip(losses[0], losses[1], strict=True))


def _machine(record: LadderRecord) -> tuple[str, ...]:
    environment = record.environment
    return environment.cpu, environment.torch, environment.int8_update, record.products


def _replays(name: str) -> str:
    return f"{name}-replays"


def _start(job: LadderJob) -> Child[LadderRecord]:
    return Child("hybridvalidation.study.ladder.run:make_in_child", job, LadderRecord)


def _start_probe(job: LadderJob) -> Child[LadderRecord]:
    return Child("hybridvalidation.study.ladder.run:probe_in_child", job, LadderRecord)


def _name(run: LadderRun) -> str:
    return f"{run.rung} {run.arm} lr {run.lr:g} seed {run.seed}"


def _told(record: LadderRecord) -> str:
    loss = record.message if record.validation_loss is None else f"{record.validation_loss:.4f}"
    return f"{_name(record.run)}: {loss}, {record.cpu_seconds:.0f} s"
