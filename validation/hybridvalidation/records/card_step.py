"""A card's step to hold a processor's work against: a processor's own step is far longer and hides what work costs."""

from pathlib import Path

from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario import BASELINE_STACK

CARD_STEP_OF = "gpt2-small"
"""Scenario."""


def card_step_s(records: Path) -> float | None:
    """Return the estimated seconds of the scenario's unoptimised step; None without its record."""
    steps = [
        record.memory.step_time_s
        for record in RecordStore(records).read(CARD_STEP_OF)
        if record.stack == BASELINE_STACK and record.memory is not None
    ]
    return steps[-1] if steps else None
