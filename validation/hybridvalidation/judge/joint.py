"""Joint verdict on a scenario's rows: whether a single stack meets all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.verdict import NOWHERE_ELSE, Elsewhere, Status, Verdict, is_about_most_frugal_stack, judge
from hybridvalidation.scenario import ScenarioTarget, Target

_BEST_FIRST = list(Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointVerdict:
    """Verdicts of every stack that fits, on all rows of the scenario."""

    rows: tuple[str, ...]
    """Targets, in the scenario's order."""
    stacks: Mapping[str, tuple[Verdict, ...]]
    """Verdicts by stack, in the order of rows; the best stack first."""

    @property
    def best(self) -> str:
        """The best stack over all rows."""
        return next(iter(self.stacks))

    def verdict(self, row: str) -> Verdict:
        """Return the best stack's verdict on a row."""
        return self.stacks[self.best][self.rows.index(row)]

    def alone(self, row: str) -> dict[Status, list[str]]:
        """Return the stacks that do better on a row than the best stack, by status."""
        place, found = self.rows.index(row), dict[Status, list[str]]()
        for stack, verdicts in self.stacks.items():
            status = verdicts[place].status
            if _BEST_FIRST.index(status) < _BEST_FIRST.index(self.verdict(row).status):
                found.setdefault(status, []).append(stack)
        return found

    @property
    def sentence(self) -> str:
        """State the stack that meets all rows, or the rows that the best one misses."""
        count = "the row" if len(self.rows) == 1 else f"all {len(self.rows)} rows"
        lacks = [verdict for verdict in self.stacks[self.best] if not verdict.status.is_met]
        if lacks:
            told = ", ".join(f"{verdict.target} ({verdict.status})" for verdict in lacks)
            return f"No stack holds {count}: nearest is {self.best}, which lacks {told}."
        others = [
            name for name, found in self.stacks.items() if name != self.best and all(v.status.is_met for v in found)
        ]
        also = f"; so {'do' if len(others) > 1 else 'does'} {', '.join(others)}" if others else ""
        return f"{self.best} holds {count}{also}."


def judge_jointly(
    run: ScenarioRun, targets: Mapping[str, Target], elsewhere: Elsewhere = NOWHERE_ELSE
) -> JointVerdict | None:
    """Judge every stack that fits (all, if none fits) on every row without a stack. None without rows.

    The best stack misses the fewest rows (unknown ones count), then holds the most; ties are broken by the largest
    smallest margin.
    """
    items = [item for item in run.scenario.targets if is_joint(item, targets)]
    if not items:
        return None
    of_stack = {
        stack: tuple(judge(run, targets[item.id], stack, item, elsewhere) for item in items)
        for stack in run.scenario.stacks
    }
    fitting = {stack: found for stack, found in of_stack.items() if _fits(run, stack)} or of_stack
    ranked = dict(sorted(fitting.items(), key=lambda item: _rank(item[1])))
    return JointVerdict(rows=tuple(item.id for item in items), stacks=ranked)


def judge_all(run: ScenarioRun, targets: Mapping[str, Target], elsewhere: Elsewhere = NOWHERE_ELSE) -> list[Verdict]:
    """Return the verdicts in file order: one per stack that a row names, else the best stack's.

    A lower bound on memory is decided by the stack with the least.
    """
    joint, found = judge_jointly(run, targets, elsewhere), list[Verdict]()
    for item in run.scenario.targets:
        target = targets[item.id]
        if item.stacks:
            found += [judge(run, target, stack, item, elsewhere) for stack in item.stacks]
        elif joint is not None and is_joint(item, targets):
            found.append(replace(joint.verdict(item.id), is_of_scenario=True))
        else:
            needs = [judge(run, target, stack, item, elsewhere) for stack in run.scenario.stacks]
            most_frugal = max(needs, key=lambda v: (_BEST_FIRST.index(v.status), v.fits, -(v.value or 0.0)))
            found.append(replace(most_frugal, is_of_scenario=True))
    return found


def is_joint(item: ScenarioTarget, targets: Mapping[str, Target]) -> bool:
    """Return whether a row has no stacks, so that one stack must meet all such rows."""
    return not item.stacks and not is_about_most_frugal_stack(targets[item.id])


def _fits(run: ScenarioRun, stack: str) -> bool:
    record, memory = run.get("measured", stack), run.memory(stack)
    return memory is not None and (memory.fits if record is None else record.measured is not None)


def _rank(verdicts: Sequence[Verdict]) -> tuple[int, int, int, float]:
    met, missed = (sum(getattr(verdict.status, name) for verdict in verdicts) for name in ("is_met", "is_missed"))
    unknown = sum(verdict.evidence is None for verdict in verdicts)
    return missed + unknown, missed, -met, -min(verdict.margin for verdict in verdicts)
