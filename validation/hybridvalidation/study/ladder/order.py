"""Which runs of a ladder come next: rung after rung, seed after seed; more seeds where the first decide nothing."""

from collections.abc import Iterator

from hybridvalidation.study.ladder.equivalence import undecided
from hybridvalidation.study.ladder.protocol import LadderFile, LadderRun, Made, Rung, run_key, run_of


def next_runs(ladder: LadderFile, made: Made, rung_name: str | None = None) -> list[LadderRun]:
    """Return the missing runs of the first stage that is not finished, of one rung or of all; empty: all are made.

    A rung's learning rates come first, then the arms that figures wait for, then the rates of other optimizers; then
    seed after seed, so that a rung that was begun has as many seeds of one arm as of any other. Its second look waits
    for the next rung's first, and has the arms that figures wait for first.
    """
    stages = [
        (stage, rung)
        for rung, before in zip([*ladder.rungs, None], [None, *ladder.rungs], strict=True)
        for stage, rung in (
            (_rates, rung),
            (_awaited_runs, rung),
            (_own_rates, rung),
            (first_runs, rung),
            (more_runs, before),
        )
        if rung is not None and rung_name in {None, rung.name}
    ]
    for stage, rung in stages:
        missing = [run for run in stage(ladder, rung, made) if run_key(ladder, run) not in made]
        if missing:
            return list(dict.fromkeys(missing))
    return []


def _rates(ladder: LadderFile, rung: Rung, made: Made) -> Iterator[LadderRun]:
    for lr in rung.lrs if len(rung.lrs) > 1 else ():
        yield run_of(ladder, made, rung, ladder.baseline, ladder.tuning_seed, lr)


def _awaited_runs(ladder: LadderFile, rung: Rung, made: Made) -> Iterator[LadderRun]:
    arms = {arm.name: arm for arm in ladder.arms_of(rung)}
    for seed in rung.seeds if ladder.first else ():
        for name in ladder.first:
            if name in arms and not arms[name].lrs:
                yield run_of(ladder, made, rung, arms[name], seed)


def _own_rates(ladder: LadderFile, rung: Rung, made: Made) -> Iterator[LadderRun]:
    for arm in ladder.arms_of(rung):
        for lr in () if arm is ladder.baseline else arm.lrs:
            yield run_of(ladder, made, rung, arm, ladder.tuning_seed, lr)


def first_runs(ladder: LadderFile, rung: Rung, made: Made) -> Iterator[LadderRun]:
    """Yield every arm at every seed of the first look, at the rates that were chosen."""
    for seed in rung.seeds:
        for arm in ladder.arms_of(rung):
            yield run_of(ladder, made, rung, arm, seed)


def more_runs(ladder: LadderFile, rung: Rung, made: Made) -> Iterator[LadderRun]:
    """Yield the runs of a second look: of what the first one leaves inconclusive, and of what that is compared with."""
    pairs = undecided(ladder, made, rung)
    awaited = [pair for pair in pairs if pair[0].name in ladder.first]
    runs = [
        run_of(ladder, made, rung, arm, seed)
        for some in (awaited, pairs)
        for seed in rung.more_seeds
        for arm in dict.fromkeys(arm for pair in some for arm in pair)
    ]
    yield from dict.fromkeys(runs)
