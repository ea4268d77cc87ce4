"""Header of every record: written once, never edited. Bytes are integers, times seconds."""

from dataclasses import dataclass

from hybridtrain.config.rules import added_field
from hybridtrain.run.environment import Environment
from hybridtrain.run.program import torch_series
from hybridvalidation.records.outcome import Evidence, Outcome

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Header of a record; subclasses add figures."""

    key: str
    """Digest or name of the job; runs with equal keys are repetitions."""
    evidence: Evidence
    outcome: Outcome = Outcome.OK
    message: str = ""
    """Reason for an unsuccessful end."""
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    environment: Environment
    program: str = ""
    """``program_digest`` of its program; before November 26, 2026 of the imported files."""
    accepted: str = added_field("")
    """Reason for figures that differ from the previous record of the same job."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        faults = self.faults()
        if self.schema != SCHEMA:
            faults.insert(0, f"schema: {self.schema} must be {SCHEMA}; this version reads no other records")
        if faults:
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Return inconsistencies of the content."""
        return []

    def why_repeat(self) -> str:
        """Return why the run must be repeated; empty: this record is valid.

        The program's version does not matter: ``hybridtrain records`` verifies records with the present one.
        """
        if self.outcome is Outcome.ERROR:
            return f"the run failed: {self.message}"
        made_with = torch_series(self.environment.torch)
        return "" if made_with == torch_series() else f"made with torch {made_with}, this is {torch_series()}"
