"""Runs a study in parallel processes, records every run as it ends, and replays probes."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hybridtrain.data.pinned_corpus import pinned_corpus
from hybridtrain.errors import RecordError
from hybridtrain.run.environment import processor_name
from hybridtrain.stacks import Stack
from hybridvalidation.child import Child, run_side_by_side
from hybridvalidation.experiment import Experiment, answer_of, in_children
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.store import append_record, read_lines
from hybridvalidation.study.order import next_runs, of_one_processor
from hybridvalidation.study.protocol import (
    Configuration,
    LadderFile,
    LadderMade,
    LadderRecord,
    Probe,
    ReplayRecord,
    Study,
    StudyFile,
    StudyRecord,
    ladder_record,
    read_study,
    record_path,
    run_key,
)
from hybridvalidation.study.trials import (
    LOSSES_BEFORE_JUMP,
    OTHER_TEXT,
    TEXT,
    LadderJob,
    StudyJob,
    corpus_of,
    recipe_of,
    run_probe,
)

_BASES = Path("runs") / "ladder-bases"
_TRIALS = "hybridvalidation.study.trials"
LARGEST_REPLAY_DIFFERENCE = 1e-2
"""Tolerance of a loss in nats on another CPU or torch version, after at most eight steps. Sums have another order
there, and AdamW's first steps have the size of the learning rate, however small the gradient."""


def run_study(
    study: Study, results: Path, *, jobs: int, max_runs: int | None, size: str | None = None,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Make all missing runs; return all records.

    Args:
        study: The study.
        results: Folder of results.
        jobs: Parallel processes, one thread each.
        max_runs: Most runs to make; None: all.
        size: Ladders only: restrict to this model size.
        say: Called with a line about every run.

    Raises:
        DataError: the pinned texts of a ladder are not installed.
        RecordError: the runs made so far had another text.
        HybridTrainError: a process crashed; finished runs are recorded.
    """
    made, path = read_study(results, study), record_path(results, study.name)
    if isinstance(study, LadderFile):
        made = of_one_processor(study, made, processor_name())
    if next_runs(study, made, size) and max_runs != 0:
        _check_text(study, {record.corpus_digest for record in made.values()}, path)
    experiment: Experiment[Any, Any] = Experiment(
        name=study.name, key=partial(run_key, study),
        run=in_children(partial(_start, study), lambda run, ended: answer_of(ended, run, study.name), jobs),
        file=lambda _: path.relative_to(results / "records"), line=lambda run, record: f"{run}: {_ending(record)}",
        holds=lambda _: True,  # whatever program made it: replays say whether today's computes the same
    )  # fmt: skip
    found = experiment.run_missing(
        lambda answers: next_runs(study, answers, size), made.values(), records=results / "records", say=say,
        max_runs=max_runs,
    )  # fmt: skip
    return dict(found.answers)


def _start(study: Study, run: Any) -> Child[Any]:
    if isinstance(study, StudyFile):
        return Child(f"{_TRIALS}:run_study_job", StudyJob(study=study, run=run), StudyRecord)
    job = LadderJob(ladder=study, run=run, bases=_BASES / study.name)
    return Child(f"{_TRIALS}:run_ladder_job", job, LadderRecord)


def _check_text(study: Study, found: set[str], path: Path) -> None:
    """Refuse to compare runs on different texts: the embedded corpus is that of this machine's Python."""
    if isinstance(study, StudyFile):
        known = {corpus_of(study).digest}
    else:
        known = {pinned_corpus(name).digest for name in (TEXT, OTHER_TEXT)}
    if others := sorted(digest[:8] for digest in found - known):
        raise RecordError(
            f"{path}: its runs used the text {', '.join(others)}, this machine has "
            f"{', '.join(sorted(digest[:8] for digest in known))}; resume with the same Python version, or use "
            "another --results"
        )


def _ending(record: Any) -> str:
    loss = record.message if record.validation_loss is None else f"{record.validation_loss:.4f}"
    return f"{loss}, {record.jumps} jumps, {record.cpu_seconds:.0f} s"


def read_replays(results: Path, ladder: LadderFile) -> dict[str, ReplayRecord]:
    """Return the latest replay of every replayed run, by key."""
    return {record.key: record for record in read_lines(record_path(results, _replays(ladder)), ReplayRecord)}


def verify_ladder(
    ladder: LadderFile, stacks: Iterable[Stack], results: Path, *, jobs: int, say: Callable[[str], None]
) -> tuple[list[ReplayRecord], int, list[str]]:
    """Replay probes; return the replays, the number reproduced, and stacks that differ from their configuration."""
    shared = {stack: own.name for own in ladder.arms for stack in own.stacks}
    same = configurations_of_stacks(ladder, stacks)
    astray = sorted(stack for stack, name in same.items() if name is None or shared.get(stack) != name)
    replays = replay(ladder, read_study(results, ladder), results, jobs=jobs, say=say)
    return replays, sum(map(holds, replays)), astray


def replay(
    ladder: LadderFile, made: LadderMade, results: Path, *, jobs: int, say: Callable[[str], None]
) -> list[ReplayRecord]:
    """Replay the probe of one run per configuration and model size; record the results."""
    firsts = {}
    for size in ladder.rungs:
        for own in ladder.configurations_at(size):
            records = (ladder_record(ladder, made, size, own, seed) for seed in size.seeds)
            if (first := next((record for record in records if record is not None), None)) is not None:
                firsts[first.key] = first
    work = [LadderJob(ladder=ladder, run=record.run, is_whole=False) for record in firsts.values()]
    replays, path = [], record_path(Path(), _replays(ladder)).relative_to("records")
    for job, ended in run_side_by_side(work, lambda job: Child(f"{_TRIALS}:run_ladder_job", job, LadderRecord), jobs):
        again = answer_of(ended, f"the probe of {job.run}", ladder.name)
        found = _replayed(ladder, firsts[again.key], again)
        append_record(results / "records", path, found)
        replays.append(found)
        say(f"{found.run}: {replay_sentence(found)}")
    return replays


def replay_sentence(found: ReplayRecord) -> str:
    """Return the result of a replay as a sentence."""
    if found.is_equal:
        return "bit-equal"
    where = "on the same machine" if found.same_machine else "on another processor or torch"
    word = "within" if holds(found) else "beyond"
    return f"{word} the band, {found.largest_difference:.1e} nats apart {where}"


def holds(found: ReplayRecord) -> bool:
    """Return whether the record is reproduced: bit-equal, or within rounding on another machine."""
    return found.is_equal or (not found.same_machine and found.largest_difference <= LARGEST_REPLAY_DIFFERENCE)


def configurations_of_stacks(ladder: LadderFile, stacks: Iterable[Stack]) -> dict[str, str | None]:
    """Return by stack the configuration with bit-equal arithmetic; None: there is none.

    Both train a few steps of the first model size through every phase. Fine-tuned configurations are compared from
    random weights, which does not change the arithmetic.
    """
    size, corpus, names = ladder.rungs[0], pinned_corpus(TEXT), dict[Probe, str]()

    def probe(own: Configuration | Stack) -> Probe:
        return run_probe(size, recipe_of(ladder, own, size.lrs[0]), ladder.tuning_seed, corpus)

    for own in ladder.arms:
        names.setdefault(probe(own), own.name)
    return {stack.name: names.get(probe(stack)) for stack in stacks}


def _replayed(ladder: LadderFile, record: LadderRecord, again: LadderRecord) -> ReplayRecord:
    """Compare all losses on the same machine; on another one those before the first jump.

    Behind it, whether a jump is taken back is a yes or no, which the order of a sum may decide.
    """
    machines = [
        (r.environment.cpu, r.environment.torch, r.environment.int8_update, r.products) for r in (record, again)
    ]
    is_same = machines[0] == machines[1]
    count = None if is_same or not ladder.configuration(record.run.arm).jumps else LOSSES_BEFORE_JUMP
    own, other = ((*probe.first_losses, *probe.losses[:count]) for probe in (record.probe, again.probe))
    is_as_long = len(own) == len(other)
    apart = max(abs(a - b) for a, b in zip(own, other, strict=True)) if is_as_long else 1e9
    return ReplayRecord(
        key=record.key, run=record.run, outcome=Outcome.OK, started_at=again.started_at, duration_s=again.duration_s,
        environment=again.environment, program=again.program, is_equal=record.probe == again.probe,
        largest_difference=apart, same_machine=is_same,
    )  # fmt: skip


def _replays(ladder: LadderFile) -> str:
    return f"{ladder.name}-replays"
