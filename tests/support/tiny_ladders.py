"""A ladder of a tiny GPT-2, and made-up records that say what a test needs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridtrain.config.decode import decode
from hybridtrain.run.environment import read_environment
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.study.order import next_runs
from hybridvalidation.study.protocol import UNIONS, LadderFile, LadderRecord, LadderRun, Probe, run_key

ENVIRONMENT = read_environment()
MODEL = {
    "family": "gpt2", "vocab_size": 256, "max_seq_len": 16, "num_blocks": 2, "width": 16, "num_heads": 2,
    "num_kv_heads": 2, "ffn_width": 32, "tied": True,
}  # fmt: skip
RUNG: dict[str, Any] = {
    "name": "small", "model": MODEL, "seq_len": 16, "batch_size": 4, "num_steps": 12, "warmup_steps": 2, "lrs": [0.01],
    "seeds": [0, 1, 2],
}  # fmt: skip
ABSENT = {"kind": "mixed_precision", "master": "absent"}
ARMS: list[dict[str, Any]] = [
    {"name": "vanilla", "description": "plain", "stacks": ["vanilla", "checkpointing"]},
    {"name": "mixed", "description": "bf16", "optimizations": [{"kind": "mixed_precision"}], "stacks": ["mixed"]},
    {"name": "jumps", "description": "jumps", "family": "method", "optimizations": [{"kind": "predictor_state"}]},
    {"name": "nearest", "description": "loses", "family": "control", "rounds_to_nearest": True,
     "optimizations": [ABSENT]},
    {"name": "tuned", "description": "goes on", "family": "method", "fine_tunes": True, "lrs": [0.01]},
    {
        "name": "lora", "description": "adapters", "family": "method", "fine_tunes": True, "against": "tuned",
        "optimizations": [{"kind": "lora", "rank": 2}, {"kind": "mixed_precision"}],
    },
]  # fmt: skip
LADDER: dict[str, Any] = {
    "name": "tiny", "description": "tiny models", "target": "all are alike",
    "stop_rule": "Three seeds.", "margin_nats": 0.005,
    "tuning_seed": 100, "validation_batches": 2, "fine_tune_steps": 6, "optimizer": {"beta2": 0.99},
    "hybrid": {"full_steps": 4, "forecaster": "ema"}, "rungs": [RUNG], "arms": ARMS,
}  # fmt: skip
"""As a file has it."""

LossOf = Callable[[LadderRun], float | None]
"""What a run ends with; None: it diverges."""


def ladder_of(**changes: Any) -> LadderFile:
    """Return the ladder with some keys changed, read as from a file."""
    return decode(LadderFile, LADDER | changes, source="tiny", unions=UNIONS)


def record_of(ladder: LadderFile, run: LadderRun, loss: float | None, **changes: Any) -> LadderRecord:
    """Return a made-up record; top-1 accuracy falls by a tenth of what the loss rises."""
    size = ladder.size(run.rung)
    record = LadderRecord(
        key=run_key(ladder, run), run=run, outcome=Outcome.DIVERGED if loss is None else Outcome.OK,
        message="loss nan" if loss is None else "", validation_loss=loss,
        validation_accuracy=None if loss is None else 1 - loss / 10, started_at="2026-01-01T00:00:00+00:00",
        duration_s=1.0, cpu_seconds=1.0, environment=ENVIRONMENT, program="p", num_params=size.model.num_params,
        num_tokens=size.num_tokens, probe=Probe(first_losses=(5.0,), losses=(5.0,), weights_digest="w"),
        corpus="sympy", corpus_digest="d",
    )  # fmt: skip
    return replace(record, **changes)


def finished(ladder: LadderFile, loss_of: LossOf, max_runs: int | None = None) -> dict[str, LadderRecord]:
    """Return the records of a ladder that is complete, or that was stopped after so many runs."""
    made: dict[str, LadderRecord] = {}
    while runs := next_runs(ladder, made)[: None if max_runs is None else max_runs - len(made)]:
        for run in runs:
            record = record_of(ladder, run, loss_of(run))
            made[record.key] = record
    return made
