"""Verifications: program versions that reproduced a scenario's planned records, which need not be planned again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

VERIFIED = "verified"
"""File of verification records, beside the scenarios'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Record):
    """One verification that reproduced all plans of some scenarios."""

    evidence: Evidence = Evidence.PLANNED
    scenarios: Mapping[str, str]
    """Digest of the compared jobs and records, by scenario."""


def read_verifications(records: Path) -> list[Verification]:
    """Return all verifications, oldest first; raises ``RecordError`` for an invalid line."""
    return read_lines(records / f"{VERIFIED}.jsonl", Verification)


def append_verification(records: Path, verification: Verification) -> Path:
    """Append a verification; return the file."""
    return append_record(records, f"{VERIFIED}.jsonl", verification)
