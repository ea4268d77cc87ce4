"""What every table has: its style, verdicts, and who made its records."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file
from hybridtrain.virtual_gpu.cards.card import FitVerdict
from hybridvalidation.judge.joint import Joint
from hybridvalidation.judge.verdict import Status, Verdict, short_number
from hybridvalidation.records.record import Record

TERMINAL, MARKDOWN = "simple", "github"
_FITS = {FitVerdict.FITS: "yes", FitVerdict.BARELY: "barely", FitVerdict.NO: "NO"}


def fits_cell(verdict: FitVerdict) -> str:
    """Return whether a plan fits as a cell of a column 'fits'."""
    return _FITS[verdict]


def verdict_table(verdicts: Sequence[Verdict], style: str) -> str:
    """Return one row per target: what is stated, the verdict, why."""
    rows = [[v.target, v.status, v.shown_by or "-", v.reason] for v in verdicts]
    widths = [None, None, None, 90] if style == TERMINAL else None
    return tabulate(
        rows,
        headers=["target", "verdict", "evidence", "because"],
        tablefmt=style,
        maxcolwidths=widths,
        disable_numparse=True,
    )


def joint_table(joint: Joint, style: str) -> str:
    """Return one row per stack, the best first, and one column per row of the scenario."""
    rows = [[stack, *(_joint_cell(verdict) for verdict in verdicts)] for stack, verdicts in joint.stacks.items()]
    return tabulate(rows, headers=["stack", *joint.rows], tablefmt=style, disable_numparse=True)


def _joint_cell(verdict: Verdict) -> str:
    word = "misses" if verdict.status is Status.REFUTED else verdict.status.value
    return word if verdict.value is None else f"{word}, {short_number(verdict.value)} {verdict.unit}"


def made_by(records: Iterable[tuple[str, Record]]) -> str:
    """Return by which programs records were made, at which commits, on which days.

    Args:
        records: Each with the name of its kind, empty where all are of one.
    """
    counts: dict[str, dict[str, int]] = {}
    for kind, record in records:
        commit = record.environment.commit[:8] or "of no checkout"
        changes = ", with changes" if record.environment.dirty else ""
        maker = f"program {record.program or 'unknown'} (commit {commit}{changes}, {record.started_at[:10]})"
        of_maker = counts.setdefault(maker, {})
        of_maker[kind] = of_maker.get(kind, 0) + 1
    told = (
        f"{', '.join(f'{count} {kind}'.strip() for kind, count in kinds.items())} by {maker}"
        for maker, kinds in counts.items()
    )
    return f"Records: {'; '.join(told)}." if counts else "Records: none."


def write_page(results: Path, name: str, text: str) -> Path:
    """Write a page of Markdown as ``tables/NAME.md`` below the folder of results."""
    path = results / "tables" / f"{name}.md"
    replace_file(path, f"{text}\n".encode())
    return path
