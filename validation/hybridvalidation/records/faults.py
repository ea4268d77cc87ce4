"""The record of a fault campaign."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridvalidation.records.record import Record
from hybridvalidation.records.store import append_record, read_lines

_FILE = "faults.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord(Record):
    """Counts and failures of one campaign. Its key is the campaign's name."""

    says: str
    seed: int
    counts: Mapping[str, Mapping[str, int]]
    """Number of attempts by subject and outcome."""
    num_faults: int
    """Failed attempts."""
    first_faults: tuple[str, ...]


def append_faults(records: Path, record: FaultRecord) -> Path:
    """Add a campaign to the folder's ``faults.jsonl``."""
    return append_record(records, _FILE, record)


def read_faults(records: Path) -> list[FaultRecord]:
    """Return all campaigns, oldest first; raises ``RecordError`` for an invalid line."""
    return read_lines(records / _FILE, FaultRecord)
