"""``hybridtrain recorded``: plan what others measured, and say how far off the plans are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from hybridvalidation.recorded.job import PlannedFigures, RecordedJob
from hybridvalidation.recorded.planned import (
    PlannedRun,
    Row,
    append_planned,
    job_of,
    read_planned,
    rows_of,
    scores,
)
from hybridvalidation.recorded.source import RecordedRun, Role, Source, read_sources
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.store import RecordStore
from hybridvalidation.runs.child import Child, Ended
from hybridvalidation.runs.foreign import header, missing_package, run_jobs, versions_of

_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReport:
    """Every figure, recorded and planned."""

    rows: tuple[Row, ...]
    made: int
    notes: tuple[str, ...]

    def as_list(self) -> list[dict[str, object]]:
        """Return the rows as plain data."""
        return [row.as_mapping() for row in self.rows]

    def as_text(self) -> str:
        """Return a table of scores, and what could not be planned."""
        return "\n".join([score_table(self.rows, "simple"), *self.notes, f"{self.made} runs planned now"])


def recorded_command(
    *, scenarios: Path, results: Path, source: str | None, record: bool, jobs: int, say: Callable[[str], None]
) -> RecordedReport:
    """Plan what has no record that holds, and return all rows.

    Args:
        scenarios: Folder of scenario files.
        results: Folder of results; records are read from it.
        source: One source only.
        record: Append what is planned to the records.
        jobs: Processes at a time.
        say: Told what is done.

    Raises:
        ConfigError: No such source, or a faulty file.
    """
    sources = read_sources(scenarios, source)
    store = RecordStore(results / "records")
    known = read_planned(store.folder)
    valid = [found for found in known if not found.why_repeat()]
    notes, missing = [], list[RecordedJob]()
    for name, found in sources.items():
        wanted = [job for job in _jobs(name, found) if not any(r.key == job.key for r in valid)]
        absent = missing_package(found.packages)
        if absent and wanted:
            notes.append(
                f"{name}: {len(wanted)} runs are shown as last recorded, for {absent} is not installed "
                "(pip install hybridtrain[peers])"
            )
        missing += [] if absent else wanted
    made = []
    for job, planned in run_jobs(
        missing, start_plan, lambda job, ended: plan_record(job, ended, sources[job.source]), jobs,
        (lambda planned: append_planned(store.folder, planned)) if record else None,
    ):  # fmt: skip
        made.append(planned)
        say(f"{job.source} {job.run}: {planned.outcome.value} {planned.message} in {planned.duration_s:.0f} s")
    rows = rows_of(sources, [*known, *made])
    return RecordedReport(rows=tuple(rows), made=len(made), notes=tuple(notes))


def score_table(rows: Sequence[Row], style: str) -> str:
    """Return errors by source and quantity."""
    table = [
        [
            score.source, score.quantity.replace("_", " "), str(score.count),
            "yes" if score.worst.role is Role.SEEN else "", f"{100 * score.mean_error:+.2f} %",
            f"{100 * score.mean_absolute:.2f} %", f"{100 * (score.worst.error or 0):+.2f} % ({score.worst.id})",
        ]
        for score in scores(rows)
    ]  # fmt: skip
    headers = ("source", "quantity", "predicted", "seen before", "mean error", "mean absolute", "worst")
    return tabulate(table, headers=headers, tablefmt=style, disable_numparse=True)


def _jobs(name: str, source: Source) -> list[RecordedJob]:
    return [job_of(name, source, run) for run in source.runs if _is_planned(run)]


def _is_planned(run: RecordedRun) -> bool:
    return run.role is not Role.LEFT_OUT


def start_plan(job: RecordedJob) -> Child[PlannedFigures]:
    """Plan one run in a process of its own."""
    return Child("hybridvalidation.recorded.job:work", job, PlannedFigures, limit_s=_LIMIT_S)


def plan_record(job: RecordedJob, ended: Ended[PlannedFigures], source: Source) -> PlannedRun:
    """Return the record of a plan that ended."""
    return PlannedRun(
        **header(job.key, Evidence.PLANNED, ended), source=job.source, run=job.run,
        figures={} if ended.answer is None else ended.answer.figures, packages=versions_of(source.packages),
    )  # fmt: skip
