"""Header of every record: written once, never edited. Bytes are integers, times seconds."""

from dataclasses import dataclass

from hybridtrain.config.rules import added_field
from hybridtrain.run.environment import Environment
from hybridtrain.run.program import torch_series
from hybridvalidation.records.outcome import Evidence, Outcome

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The header; a subclass adds the figures of its kind of run."""

    key: str
    """Digest or name of the job: runs with an equal key answer the same question."""
    evidence: Evidence
    outcome: Outcome = Outcome.OK
    message: str = ""
    """Why a run that did not end well ended."""
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    environment: Environment
    program: str = ""
    """``program_digest`` of what made it; before November 26, 2026 of the files that its process had imported."""
    accepted: str = added_field("")
    """Why its figures may differ from those of the record before it that answers the same."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        faults = self.faults()
        if self.schema != SCHEMA:
            faults.insert(0, f"schema: {self.schema} must be {SCHEMA}; this version cannot read other records")
        if faults:
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Return inconsistencies of the content."""
        return []

    def why_repeat(self) -> str:
        """Return the reason to repeat the same run; empty: this record is valid.

        Whatever program made it: ``hybridtrain records`` tells whether the present one finds the same.
        """
        if self.outcome is Outcome.ERROR:
            return f"the run failed: {self.message}"
        made_with = torch_series(self.environment.torch)
        return "" if made_with == torch_series() else f"made with torch {made_with}, this is {torch_series()}"
