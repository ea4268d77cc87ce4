"""Step time of a card, as reference for the cost of CPU work."""

from pathlib import Path

from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario import RATE_BASELINE

_SCENARIO = "gpt2-small"
CARD_STEP_OF = f"{_SCENARIO} in bf16, of that scenario's card and 4 x 1024 tokens"
"""Description of the step."""


def card_step_s(records: Path) -> float | None:
    """Return the estimated seconds of the bf16 step without further optimizations; None without its record."""
    steps = [
        record.memory.step_time_s
        for record in RecordStore(records).read(_SCENARIO)
        if record.stack == RATE_BASELINE and record.memory is not None
    ]
    return steps[-1] if steps else None
