"""What a gate finds, and its exit codes: today's figures against those that are kept, to the byte."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class GateExit(IntEnum):
    """Exit codes of the gate, worst first in precedence."""

    OK = 0
    OVER_BUDGET = 3
    """A stack that fitted its card does not fit any more."""
    REGRESSED = 4
    IMPROVED = 5
    """Better than what is kept: accept the win, or it can be lost unseen."""
    COULD_NOT_MEASURE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure that changed, or a run that could not be made."""

    scenario: str
    stack: str
    exit: GateExit
    message: str
    settled_by_accept: bool = True
    """Whether keeping today's figures answers it; a run that failed has none."""


def worst_exit(findings: Iterable[Finding]) -> GateExit:
    """Return the code of the most serious finding."""
    order = (GateExit.COULD_NOT_MEASURE, GateExit.OVER_BUDGET, GateExit.REGRESSED, GateExit.IMPROVED)
    found = {finding.exit for finding in findings}
    return next((code for code in order if code in found), GateExit.OK)
