"""Outcomes of fault campaigns."""

from collections.abc import Iterator, Sequence

from hybridtrain.reports.tables import MARKDOWN, table
from hybridvalidation.records.faults import FaultRecord, read_faults
from hybridvalidation.records.makers import made_by
from hybridvalidation.show.page import Page, Source
from hybridvalidation.show.results import Results

_HOW = (
    "Executed on the processor, the newest run of each campaign. Failed: a traceback, a hang, a signal, "
    "something executed that a file named, a state or record that was lost or accepted with other content. "
    "`nox -s faults -- NAME` repeats one with the same seed."
)


def faults_table(records: Sequence[FaultRecord], style: str) -> str:
    """Return one row per campaign."""
    rows = [
        [
            record.key, f"{sum(sum(outcomes.values()) for outcomes in record.counts.values()):,}",
            f"{record.num_faults:,}", str(record.seed), f"{record.duration_s:,.0f}",
        ]
        for record in records
    ]  # fmt: skip
    headers = ("campaign", "attempts", "failed", "seed", "seconds")
    return table(headers, rows, style)


def _subjects(record: FaultRecord) -> str:
    outcomes = sorted({outcome for counts in record.counts.values() for outcome in counts})
    rows = [
        [subject, *(f"{counts.get(outcome, 0):,}" for outcome in outcomes)]
        for subject, counts in sorted(record.counts.items())
    ]
    return table(["subject", *outcomes], rows, MARKDOWN)


def _pages(results: Results) -> Iterator[Page]:
    newest = list({record.key: record for record in read_faults(results.records)}.values())
    if newest:
        parts = ["# Injected faults: outcomes", faults_table(newest, MARKDOWN), _HOW]
        for record in newest:
            parts += [f"## {record.key}", record.says, _subjects(record)]
            parts += ["\n".join(f"- {fault}" for fault in record.first_faults)] if record.first_faults else []
        text = "\n\n".join([*parts, made_by(("", record) for record in newest)])
        yield Page(name="faults", group="Evidence", text=text)


SOURCE = Source(order=65, pages=_pages)
