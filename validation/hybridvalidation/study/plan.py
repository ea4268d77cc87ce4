"""Which runs a study needs next, given those that were made: tuning first, then horizons, methods and controls."""

from collections.abc import Iterator, Mapping

from hybridvalidation.study.protocol import BASELINE, Betas, StudyFile, StudyRecord, StudyRun
from hybridvalidation.study.run import run_key

Made = Mapping[str, StudyRecord]
"""Records by key."""


def next_runs(study: StudyFile, made: Made) -> list[StudyRun]:
    """Return the runs of the first stage that is not finished; empty when the study is complete."""
    for stage in (learning_rates, betas, comparisons):
        missing = [run for run in stage(study, made) if run_key(study, run) not in made]
        if missing:
            return list(dict.fromkeys(missing))
    return []


def learning_rates(study: StudyFile, made: Made) -> Iterator[StudyRun]:
    """Yield AdamW's learning rates at the tuning seed."""
    del made  # the first stage needs none
    base = study.optimizer
    for lr in study.lrs:
        yield _run(BASELINE, lr, Betas(beta1=base.beta1, beta2=base.beta2), study.tuning_seed, study.num_steps)


def betas(study: StudyFile, made: Made) -> Iterator[StudyRun]:
    """Yield AdamW's other betas at its best learning rate."""
    lr = _best_lr(study, made, BASELINE, Betas(beta1=study.optimizer.beta1, beta2=study.optimizer.beta2), study.lrs)
    for pair in study.betas:
        yield _run(BASELINE, lr, pair, study.tuning_seed, study.num_steps)


def comparisons(study: StudyFile, made: Made) -> Iterator[StudyRun]:
    """Yield every method's learning rates at the tuning seed, then all seeds and horizons at the best ones."""
    lr, pair = chosen(study, made, BASELINE)
    for method in study.methods:
        for tried in method.lrs:
            yield _run(method.name, tried, pair, study.tuning_seed, study.num_steps)
    for horizon in sorted(study.horizons, key=lambda steps: steps != study.num_steps):
        for seed in study.seeds:
            yield _run(BASELINE, lr, pair, seed, horizon)
    for horizon in study.tuning_horizons:
        yield _run(BASELINE, lr, pair, study.tuning_seed, horizon)
    for method in study.methods:
        trials = [_run(method.name, one, pair, study.tuning_seed, study.num_steps) for one in method.lrs]
        if all(run_key(study, run) in made for run in trials):
            best, _ = chosen(study, made, method.name)
            for seed in study.seeds_of(method.name):
                yield _run(method.name, best, pair, seed, study.num_steps)


def chosen(study: StudyFile, made: Made, method: str) -> tuple[float, Betas]:
    """Return learning rate and betas of a method, as far as its tuning runs were made."""
    own = Betas(beta1=study.optimizer.beta1, beta2=study.optimizer.beta2)
    lr = _best_lr(study, made, BASELINE, own, study.lrs)
    pairs = {own, *study.betas}
    pair = min(pairs, key=lambda p: _loss(study, made, _run_at(study, BASELINE, lr, p)))
    found = study.method(method)
    if found is not None and found.lrs:
        lr = _best_lr(study, made, method, pair, found.lrs)
    return lr, pair


def _best_lr(study: StudyFile, made: Made, method: str, pair: Betas, lrs: tuple[float, ...]) -> float:
    return min(lrs, key=lambda lr: _loss(study, made, _run_at(study, method, lr, pair)))


def _loss(study: StudyFile, made: Made, run: StudyRun) -> float:
    record = made.get(run_key(study, run))
    return float("inf") if record is None or record.validation_loss is None else record.validation_loss


def _run_at(study: StudyFile, method: str, lr: float, pair: Betas) -> StudyRun:
    return _run(method, lr, pair, study.tuning_seed, study.num_steps)


def _run(method: str, lr: float, pair: Betas, seed: int, num_steps: int) -> StudyRun:
    return StudyRun(method=method, lr=lr, beta1=pair.beta1, beta2=pair.beta2, seed=seed, num_steps=num_steps)
