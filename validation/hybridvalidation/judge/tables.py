"""Tables of verdicts."""

from collections.abc import Sequence

from hybridtrain.reports.tables import table, table_with_notes
from hybridvalidation.judge.joint import JointVerdict
from hybridvalidation.judge.verdict import Status, Verdict, short_number


def verdict_table(verdicts: Sequence[Verdict], style: str) -> str:
    """Return one row per target: the statement, the verdict, the reason."""
    rows = [[v.target, v.status, v.because, v.shown_by or "-", v.reason] for v in verdicts]
    headers = ["target", "verdict", "because", "evidence", "details"]
    return table_with_notes(headers, rows, style, widths=(None, None, 28, None, 70))


def joint_table(joint: JointVerdict, style: str) -> str:
    """Return one row per stack, the best first, and one column per row of the scenario."""
    rows = [[stack, *(_joint_cell(verdict) for verdict in verdicts)] for stack, verdicts in joint.stacks.items()]
    return table(["stack", *joint.rows], rows, style)


def _joint_cell(verdict: Verdict) -> str:
    word = "misses" if verdict.status is Status.REFUTED else verdict.status.value
    return word if verdict.value is None else f"{word}, {short_number(verdict.value)} {verdict.unit}"
