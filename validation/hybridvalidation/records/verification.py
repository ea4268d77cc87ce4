"""Verifications: programs that reproduced a scenario's planned records, which need not be planned again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

VERIFIED = "verified"
"""File of these records, beside those of the scenarios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Record):
    """One check that reproduced every plan of some scenarios."""

    evidence: Evidence = Evidence.PLANNED
    scenarios: Mapping[str, str]
    """Digest of the questions and records of each as they were compared."""


def read_verifications(records: Path) -> list[Verification]:
    """Return all checks, oldest first; raises ``RecordError`` for a line that is none."""
    return read_lines(records / f"{VERIFIED}.jsonl", Verification)


def append_verification(records: Path, verification: Verification) -> Path:
    """Add a check; return the file."""
    return append_record(records, f"{VERIFIED}.jsonl", verification)
