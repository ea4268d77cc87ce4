"""Order of a study's runs: by stage, with more seeds for inconclusive configurations."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridvalidation.study.equivalence import Finding, judge_size, undecided
from hybridvalidation.study.protocol import (
    BASELINE,
    Configuration,
    LadderFile,
    LadderMade,
    LadderRecord,
    LadderRun,
    Made,
    ModelSize,
    Study,
    StudyFile,
    StudyRun,
    best_run,
    chosen,
    ladder_run,
    run_key,
)


def next_runs(study: Study, made: Mapping[str, Any], size: str | None = None) -> list[Any]:
    """Return the missing runs of the first unfinished stage; empty: all are made.

    Args:
        study: A study or ladder.
        made: Records by key.
        size: Ladders only: restrict to this model size.
    """
    if isinstance(study, LadderFile) and study.closed:
        return []
    for stage in _study_stages(study, made) if isinstance(study, StudyFile) else _ladder_stages(study, made, size):
        if missing := [run for run in stage if run_key(study, run) not in made]:
            return list(dict.fromkeys(missing))
    return []


def _study_stages(study: StudyFile, made: Made) -> Iterator[list[StudyRun]]:
    """Yield AdamW's rates, its betas at the best one, then the methods' rates with all seeds and horizons."""
    yield study.first_rates()
    best = best_run(study, made, study.first_rates())
    yield [replace(best, beta1=pair.beta1, beta2=pair.beta2) for pair in study.betas]
    best = chosen(study, made, BASELINE)
    trials = {method.name: [replace(best, method=method.name, lr=lr) for lr in method.lrs] for method in study.methods}
    runs = [run for tried in trials.values() for run in tried]
    for horizon in sorted(study.horizons, key=lambda steps: steps != study.num_steps):
        runs += [replace(best, seed=seed, num_steps=horizon) for seed in study.seeds]
    runs += [replace(best, num_steps=horizon) for horizon in study.tuning_horizons]
    for name, tried in trials.items():
        if all(run_key(study, run) in made for run in tried):
            runs += [replace(chosen(study, made, name), seed=seed) for seed in study.seeds_of(name)]
    yield runs


def _ladder_stages(ladder: LadderFile, made: LadderMade, only: str | None) -> Iterator[list[LadderRun]]:
    """Yield each model size's stages: learning rates, configurations with priority, other rates, all seeds.

    Seed comes after seed, so that a size that was begun has as many of one configuration as of any other. Its second
    interim analysis waits for the next size's first, and has what figures wait for first.
    """
    for size, before in zip((*ladder.rungs, None), (None, *ladder.rungs), strict=True):
        if size is not None and only in {None, size.name} and size.analyses:
            yield from _harm_stages(ladder, made, size)
        elif size is not None and only in {None, size.name}:
            present = ladder.configurations_at(size)
            yield _rates(ladder, made, size, ladder.baseline) if len(size.lrs) > 1 else []
            awaited = [own for name in ladder.first for own in present if own.name == name and not own.lrs]
            yield [ladder_run(ladder, made, size, own, seed) for seed in size.seeds for own in awaited]
            yield [run for own in present if own is not ladder.baseline for run in _rates(ladder, made, size, own)]
            yield first_runs(ladder, made, size)
        if before is not None and only in {None, before.name}:
            yield more_runs(ladder, made, before)


def _harm_stages(ladder: LadderFile, made: LadderMade, size: ModelSize) -> Iterator[list[LadderRun]]:
    """Yield the learning rates, then seed by seed the runs of each analysis of what is undecided, with references."""
    yield _rates(ladder, made, size, ladder.baseline) if len(size.lrs) > 1 else []
    judged = judge_size(ladder, made, size)
    still_open = [one for one in judged if one.finding in {Finding.UNFINISHED, Finding.INCONCLUSIVE}]
    for count in size.analyses:
        pairs = [(one.reference, one.configuration) for one in still_open if len(one.seeds) >= count]
        owed = dict.fromkeys(own for pair in pairs for own in pair)
        yield [ladder_run(ladder, made, size, own, seed) for seed in size.seeds[:count] for own in owed]


def of_one_processor(ladder: LadderFile, made: LadderMade, processor: str) -> dict[str, LadderRecord]:
    """Return the records without those of seeds that are to be made again here, of tests of harm.

    Pairs count only if both runs were made on one processor. So a seed that was begun on another and not ended there is
    made again as a whole, whatever it showed.
    """
    sizes = {size.name for size in ladder.rungs if size.analyses}
    owed = {(run.rung, run.seed) for run in next_runs(ladder, made)}
    at = dict[tuple[str, int], set[str]]()
    for record in made.values():
        at.setdefault((record.run.rung, record.run.seed), set()).add(record.processor)
    again = {
        place for place, processors in at.items()
        if place[0] in sizes and (len(processors) > 1 or (place in owed and processors != {processor}))
    }  # fmt: skip
    return {
        key: record for key, record in made.items()
        if (record.run.rung, record.run.seed) not in again or record.processor == processor
    }  # fmt: skip


def _rates(ladder: LadderFile, made: LadderMade, size: ModelSize, own: Configuration) -> list[LadderRun]:
    return [ladder_run(ladder, made, size, own, ladder.tuning_seed, lr) for lr in ladder.rates_of(size, own)]


def first_runs(ladder: LadderFile, made: LadderMade, size: ModelSize) -> list[LadderRun]:
    """Return the runs of the first interim analysis: all configurations and seeds, at the chosen rates."""
    return [ladder_run(ladder, made, size, own, s) for s in size.seeds for own in ladder.configurations_at(size)]


def more_runs(ladder: LadderFile, made: LadderMade, size: ModelSize) -> list[LadderRun]:
    """Return the runs of the second interim analysis: inconclusive configurations, and their references."""
    pairs = [(one.configuration, one.reference) for one in undecided(ladder, made, size)]
    awaited = [pair for pair in pairs if pair[0].name in ladder.first]
    runs = [
        ladder_run(ladder, made, size, own, seed)
        for some in (awaited, pairs)
        for seed in size.more_seeds
        for own in dict.fromkeys(own for pair in some for own in pair)
    ]
    return list(dict.fromkeys(runs))
