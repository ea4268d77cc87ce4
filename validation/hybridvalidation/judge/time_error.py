"""Error of the time model on held-out recorded steps: differences below it decide nothing."""

from collections.abc import Callable

from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck
from hybridvalidation.judge.statistics import Interval

LEAST_WAITING, MOST_WAITING = 0.05, 0.18
"""Shares of a step in which these wait (results/time-model.md, runs bound by transfer)."""
_WAITING = (Bottleneck.TRANSFER, Bottleneck.HOST, Bottleneck.DISK, Bottleneck.LINK)


def waiting_share(memory: MemoryFigures) -> float:
    """Return the share of a planned step in which the card waits for copies, the host, the disk or other cards."""
    waits = sum(memory.time_by_bound.get(bound.value, 0.0) for bound in _WAITING)
    return waits / memory.step_time_s


def time_error_of(*memories: MemoryFigures) -> float:
    """Return the relative error of a speed or a ratio of speeds: that of waiting where a step waits."""
    is_waiting = any(waiting_share(memory) >= LEAST_WAITING for memory in memories)
    return WAITING_ERROR if is_waiting else TIME_ERROR


def waiting_text(memory: MemoryFigures) -> str:
    """Return a remark where a step waits more than any recorded one that tests it; else empty."""
    share = waiting_share(memory)
    if share <= MOST_WAITING:
        return ""
    return f"waits {share:.0%} of its step, recorded steps that test this {LEAST_WAITING:.0%} to {MOST_WAITING:.0%}"


def within_error(
    value: float, express: Callable[[float], float] = lambda rate: rate, *, error: float = TIME_ERROR
) -> Interval:
    """Return an estimate with its ends when the speed is off by the error.

    Args:
        value: A speed, or a ratio of two.
        express: What is told of it, rising or falling.
        error: Relative.
    """
    low, high = sorted(express(value * factor) for factor in (1 - error, 1 + error))
    return Interval(express(value), low, high)
