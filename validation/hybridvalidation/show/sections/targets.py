"""Stated figures and their verdicts: those about the scenario together, those about single stacks one by one."""

from hybridvalidation.judge.joint import judge_all, judge_jointly
from hybridvalidation.judge.tables import joint_table, verdict_table
from hybridvalidation.show.kinds import Section, View

_TOGETHER = (
    "Rows about the scenario are judged together: every stack that fits, on all of them; below, such a row has the "
    "verdict of the stack that comes first: it misses fewest, then holds most. Others are about the stacks that they "
    "name."
)


def _parts(view: View) -> list[str]:
    if not view.run.scenario.targets:
        return []
    joint = judge_jointly(view.run, view.targets, view.elsewhere)
    together = [] if joint is None else [joint.sentence, joint_table(joint, view.style), _TOGETHER]
    verdicts = judge_all(view.run, view.targets, view.elsewhere)
    return [view.title("Stated targets"), *together, verdict_table(verdicts, view.style)]


SECTION = Section(order=40, parts=_parts)
