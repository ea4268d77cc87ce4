"""Provenance of records."""

from collections.abc import Iterable

from hybridvalidation.records.record import Record


def made_by(records: Iterable[tuple[str, Record]]) -> str:
    """Return the programs, commits and days of records.

    Args:
        records: Records, each with the name of its kind; empty if all are of one kind.
    """
    counts: dict[str, dict[str, int]] = {}
    for kind, record in records:
        commit = record.environment.commit[:8] or "unknown"
        changes = ", with changes" if record.environment.dirty else ""
        maker = f"program {record.program or 'unknown'} (commit {commit}{changes}, {record.started_at[:10]})"
        of_maker = counts.setdefault(maker, {})
        of_maker[kind] = of_maker.get(kind, 0) + 1
    told = (
        f"{', '.join(f'{count} {kind}'.strip() for kind, count in kinds.items())} by {maker}"
        for maker, kinds in counts.items()
    )
    return f"Records: {'; '.join(told)}." if counts else "Records: none."
