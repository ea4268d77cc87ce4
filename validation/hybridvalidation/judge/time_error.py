"""How far the time model was from recorded steps that it had not seen: differences below it decide nothing."""

from collections.abc import Callable
from typing import Final

from hybridtrain.virtual_gpu.cards.roofline import Bound, time_errors
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.records.stack_run import MemoryFigures

_BEFORE_CHANGES = 0.088
"""Of the first cross-validation. Two things were changed with its runs known, so what is told since is flattered
(results/time-model.md, what is not independent)."""
TIME_ERROR: Final = max(time_errors()["leave_one_card_out"].mean_absolute, _BEFORE_CHANGES)
"""Mean absolute error, relative, of recorded steps on cards that the model was not fitted on. It is no bound, and of
single speeds: of two runs on one card that wait for the same, errors have one sign, and a ratio's is smaller."""
_WAITING_BEFORE_CHANGES = 0.22
"""Of four recorded runs that wait, predicted at -20, -20, +2 and +46 % before a rule was added with them known
(results/time-model.md, runs bound by transfer)."""
WAITING_ERROR: Final = max(time_errors()["waiting"].mean_absolute, _WAITING_BEFORE_CHANGES)
"""That of recorded steps in which the card waits for copies. None was fitted; other runs on their cards were."""
LEAST_WAITING, MOST_WAITING = 0.05, 0.18
"""Shares of a step in which these wait (results/time-model.md, runs bound by transfer)."""
_WAITING = (Bound.TRANSFER, Bound.HOST, Bound.DISK, Bound.LINK)


def waiting_share(memory: MemoryFigures) -> float:
    """Return the share of a planned step in which the card waits for copies, the host, the disk or other cards."""
    waits = sum(memory.time_by_bound.get(bound.value, 0.0) for bound in _WAITING)
    return waits / memory.step_time_s


def time_error_of(*memories: MemoryFigures) -> float:
    """Return the error, relative, of a speed or of a ratio of speeds: that of waiting where a step waits."""
    is_waiting = any(waiting_share(memory) >= LEAST_WAITING for memory in memories)
    return WAITING_ERROR if is_waiting else TIME_ERROR


def waiting_text(memory: MemoryFigures) -> str:
    """Say that a step waits more than any recorded one that tests it; empty where it does not."""
    share = waiting_share(memory)
    if share <= MOST_WAITING:
        return ""
    return f"waits {share:.0%} of its step, recorded steps that test this {LEAST_WAITING:.0%} to {MOST_WAITING:.0%}"


def within_error(
    value: float, express: Callable[[float], float] = lambda rate: rate, *, error: float = TIME_ERROR
) -> Interval:
    """Return an estimate with the ends that it has when the speed is off by the error.

    Args:
        value: A speed, or a ratio of two.
        express: What is told of it, rising or falling.
        error: Relative.
    """
    low, high = sorted(express(value * factor) for factor in (1 - error, 1 + error))
    return Interval(express(value), low, high)
