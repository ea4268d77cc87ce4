"""Studies of a tiny GPT-2, and made-up records that say what a test needs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridtrain.config.decode import decode
from hybridtrain.run.environment import read_environment
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import BASELINE, StudyFile, StudyRecord, StudyRun, ValidationPoint, run_key

TRUE_STEP_COST = 3.0
ENVIRONMENT = read_environment()
MODEL = {
    "family": "gpt2", "vocab_size": 256, "max_seq_len": 16, "num_blocks": 1, "width": 16, "num_heads": 2,
    "num_kv_heads": 2, "ffn_width": 32, "tied": True,
}  # fmt: skip
METHOD = {"name": "slow_gradient", "description": "jumps", "hybrid": {"full_steps": 2, "slow": {"beta": 0.9}}}
STUDY: dict[str, Any] = {
    "name": "tiny", "description": "a tiny model", "target": "it gains", "stop_rule": "Three seeds.", "least_gain": 1.1,
    "seq_len": 16, "batch_size": 2, "corpus_mib": 1, "validation_batches": 2, "num_steps": 12, "seeds": [0, 1, 2],
    "tuning_seed": 0, "lrs": [0.01], "horizons": [8, 12, 18], "model": MODEL,
    "optimizer": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99},
    "schedule": {"warmup_steps": 2, "total_steps": 12, "final_fraction": 0.0},
    "methods": [METHOD],
}  # fmt: skip
"""As a file has it."""

LossOf = Callable[[StudyRun], float | None]
"""What a run ends with; None: it diverges."""


def study_of(**changes: Any) -> StudyFile:
    """Return the study with some keys changed, read as from a file."""
    return decode(StudyFile, STUDY | changes, source="tiny")


def record_of(study: StudyFile, run: StudyRun, loss: float | None, **changes: Any) -> StudyRecord:
    """Return a made-up record."""
    record = StudyRecord(
        key=run_key(study, run), run=run, outcome=Outcome.DIVERGED if loss is None else Outcome.OK,
        message="loss nan" if loss is None else "", validation_loss=loss, test_loss=loss, final_train_loss=loss,
        cost=TRUE_STEP_COST * run.num_steps, started_at="2026-01-01T00:00:00+00:00",
        duration_s=float(run.num_steps), cpu_seconds=float(run.num_steps),
        environment=ENVIRONMENT, program="p", corpus_digest="d",
    )  # fmt: skip
    if study.is_constant and loss is not None and run.method == BASELINE:
        every = study.validate_every
        curve = (
            ValidationPoint(step=step, cost=TRUE_STEP_COST * step, loss=loss + 0.01 * (run.num_steps - step))
            for step in range(every, run.num_steps + 1, every)
        )
        record = replace(record, curve=tuple(curve))
    return replace(record, **changes)


def finished(study: StudyFile, loss_of: LossOf, **changes: Any) -> dict[str, StudyRecord]:
    """Return the records of a complete study."""
    made: dict[str, StudyRecord] = {}
    while runs := next_runs(study, made):
        for run in runs:
            record = record_of(study, run, loss_of(run), **(changes if run.method != BASELINE else {}))
            made[record.key] = record
    return made
