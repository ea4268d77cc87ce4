"""What campaigns of faults found."""

from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from hybridtrain.reports.tables import MARKDOWN, write_page
from hybridvalidation.records.faults import FaultRecord, read_faults
from hybridvalidation.records.makers import made_by
from hybridvalidation.show.kinds import Page

_HOW = (
    "Executed on the processor, the newest run of each campaign. Not survived: a traceback, a hang, a signal, "
    "something executed that a file named, a state or record that was lost or accepted with other content. "
    "`nox -s faults -- NAME` repeats one with the same seed."
)


def faults_table(records: Sequence[FaultRecord], style: str) -> str:
    """Return one row per campaign."""
    rows = [
        [
            record.key, f"{_num_attempts(record):,}", f"{record.num_faults:,}", str(record.seed),
            f"{record.duration_s:,.0f}",
        ]
        for record in records
    ]  # fmt: skip
    headers = ("campaign", "attempts", "not survived", "seed", "seconds")
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def _num_attempts(record: FaultRecord) -> int:
    return sum(sum(outcomes.values()) for outcomes in record.counts.values())


def _subjects(record: FaultRecord) -> str:
    outcomes = sorted({outcome for counts in record.counts.values() for outcome in counts})
    rows = [
        [subject, *(f"{counts.get(outcome, 0):,}" for outcome in outcomes)]
        for subject, counts in sorted(record.counts.items())
    ]
    return tabulate(rows, headers=["subject", *outcomes], tablefmt=MARKDOWN, disable_numparse=True)


def write_faults(results: Path) -> list[Path]:
    """Write ``tables/faults.md`` below ``results``; nothing without records."""
    newest = list({record.key: record for record in read_faults(results / "records")}.values())
    if not newest:
        return []
    parts = ["# Faults that were survived, and those that were not", faults_table(newest, MARKDOWN), _HOW]
    for record in newest:
        parts += [f"## {record.key}", record.says, _subjects(record)]
        if record.first_faults:
            parts.append("\n".join(f"- {fault}" for fault in record.first_faults))
    parts.append(made_by(("", record) for record in newest))
    return [write_page(results, "faults", "\n\n".join(parts))]


PAGE = Page(order=65, group="Evidence", write=lambda _files, results: write_faults(results))
