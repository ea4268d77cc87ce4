"""Error of the time model on held-out recorded steps: smaller differences are inconclusive."""

from collections.abc import Callable

from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.planning.time_error import RATIO_ERROR, TIME_ERROR, WAITING_ERROR
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck
from hybridvalidation.judge.statistics import Interval

LEAST_WAITING, MOST_WAITING = 0.04, 0.18
"""Shares of waiting in recorded steps with transfer as bottleneck (results/time-model.md)."""
_WAITING = (Bottleneck.TRANSFER, Bottleneck.HOST, Bottleneck.DISK, Bottleneck.LINK)


def waiting_share(memory: MemoryFigures) -> float:
    """Return the share of a planned step in which the card waits for copies, the host, the disk or other cards."""
    waits = sum(memory.time_by_bound.get(bound.value, 0.0) for bound in _WAITING)
    return waits / memory.step_time_s


def time_error_of(*memories: MemoryFigures) -> float:
    """Return the relative error of a speed, or of the ratio of two; larger for steps that wait."""
    if any(waiting_share(memory) >= LEAST_WAITING for memory in memories):
        return WAITING_ERROR
    return TIME_ERROR if len(memories) == 1 else RATIO_ERROR


def waiting_text(memory: MemoryFigures) -> str:
    """Return a remark if a step waits more than any recorded one; else empty."""
    share = waiting_share(memory)
    if share <= MOST_WAITING:
        return ""
    return f"waits {share:.0%} of its step; recorded steps test {LEAST_WAITING:.0%} to {MOST_WAITING:.0%}"


def within_error(
    value: float, express: Callable[[float], float] = lambda rate: rate, *, error: float = TIME_ERROR
) -> Interval:
    """Return an estimate with its range by the speed's error.

    Args:
        value: A speed, or a ratio of two.
        express: Monotonic function of it to report.
        error: Relative error.
    """
    low, high = sorted(express(value * factor) for factor in (1 - error, 1 + error))
    return Interval(express(value), low, high)
