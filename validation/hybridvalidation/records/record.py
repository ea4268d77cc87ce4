"""What every record says, whatever was run: written once, never edited. Bytes are integers, times seconds."""

from dataclasses import dataclass

from hybridvalidation.records.environment import Environment
from hybridvalidation.records.outcome import Evidence, Outcome

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The header; a subclass adds what its kind of run found."""

    key: str
    """What was asked for, as a digest or in words: runs with an equal key answer the same question."""
    evidence: Evidence
    outcome: Outcome = Outcome.OK
    message: str = ""
    """Why a run that did not end well ended."""
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    environment: Environment
    program: str = ""
    """Digest of the ``Program`` that made it; its files stand in ``programs.jsonl``. Empty: nobody knows."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        faults = self.faults()
        if self.schema != SCHEMA:
            faults.insert(0, f"schema: {self.schema} must be {SCHEMA}; this version cannot read other records")
        if faults:
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Return what cannot be in a record of this kind."""
        return []
