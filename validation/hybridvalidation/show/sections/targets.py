"""Stated figures and their verdicts."""

from hybridvalidation.judge.verdict import judge_all
from hybridvalidation.show.kinds import Section, View
from hybridvalidation.show.tables import verdict_table


def _parts(view: View) -> list[str]:
    return [view.title("Stated targets"), verdict_table(judge_all(view.run, view.targets), view.style)]


SECTION = Section(order=40, parts=_parts)
