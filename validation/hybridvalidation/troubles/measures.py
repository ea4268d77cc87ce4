"""What the figures in a log show that no single line does: each measure tells its figures by name, or None."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Final

Measure = Callable[[str], Mapping[str, str] | None]

_NUMBER = r"(nan|[-+]?inf(?:inity)?|[-+]?\d[\d,]*+\.?\d*+(?:e[-+]?\d++)?)"
"""Possessive: of thousands of digits none is tried twice."""
_LOSS: Final = re.compile(rf"""(?<![\w])(?:train[_ /]?)?loss['"]?\s*[:=]?\s*{_NUMBER}""", re.IGNORECASE)
_NULL_LOSS: Final = re.compile(r"""^(?!.*"phase"\s*:\s*"predict").*"loss"\s*:\s*null""")
"""Predicted steps of our own have none."""
_SPEED: Final = re.compile(
    rf"""tokens_per_s(?:ec(?:ond)?)?['"]?\s*[:=]\s*{_NUMBER}|(?<![\d,.]){_NUMBER}\s*+(?:tok(?:ens)?|it)/s""",
    re.IGNORECASE,
)
_ASKED: Final = re.compile(
    r"Tried to allocate (?P<asked>[\d.]+ .?i?B).*?(?P<unused>[\d.]+ .?i?B) (?:is )?reserved by PyTorch but unallocated"
)
_PROFILE_HEADER: Final = "step,phase,"
_UNITS: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9}
ENOUGH: Final = 12
"""Steps without which a course says nothing."""
_FEW: Final = 3
"""Steps on either side of one at which something changes."""
_RISE, _FALL, _SPIKE = 1.05, 0.7, 1.5
"""Of the smoothed best loss; of the first speed; of the median around a step."""


def _numbers(pattern: re.Pattern[str], text: str) -> list[float]:
    found = (next(part for part in match.groups() if part) for match in pattern.finditer(text))
    return [float(part.replace(",", "")) for part in found]


def counted(text: str) -> tuple[int, int]:
    """Return how many losses and how many speeds a log has."""
    return len(_numbers(_LOSS, text)), len(_numbers(_SPEED, text))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return means over a tenth of the run, at least three steps."""
    width = max(3, len(values) // 10)
    return [_mean(values[at : at + width]) for at in range(len(values) - width + 1)]


def loss_no_number(text: str) -> Mapping[str, str] | None:
    """Find the first loss that is nan or inf, or null, which is what JSON has for them."""
    losses = _numbers(_LOSS, text)
    first = next((at for at, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if first is not None:
        return {"at": f"the {first}. loss of the log"}
    null = next((number for number, line in enumerate(text.splitlines(), 1) if _NULL_LOSS.search(line)), None)
    return None if null is None else {"at": f"line {null}, null"}


def loss_rises(text: str) -> Mapping[str, str] | None:
    """Find a loss that ends above its best by more than noise."""
    losses = [loss for loss in _numbers(_LOSS, text) if math.isfinite(loss)]
    if len(losses) < ENOUGH:
        return None
    course = _smooth(losses)
    best = min(course)
    if best <= 0 or course[-1] <= _RISE * best:
        return None
    return {"last": f"{course[-1]:.3f}", "best": f"{best:.3f}", "near": f"the {course.index(best) + 1}. loss"}


def loss_spikes(text: str) -> Mapping[str, str] | None:
    """Find single losses far above those around them."""
    losses = [loss for loss in _numbers(_LOSS, text) if math.isfinite(loss)]
    if len(losses) < ENOUGH:
        return None
    around = [median(losses[max(0, at - 5) : at + 6]) for at in range(len(losses))]
    inner = range(3, len(losses) - 3)
    steps = [str(at + 1) for at in inner if losses[at] > _SPIKE * around[at] > 0]
    return {"at": f"the losses {', '.join(steps[:5])} of the log"} if steps else None


def slowing_down(text: str) -> Mapping[str, str] | None:
    """Find a speed that falls by more than three tenths, little by little."""
    speeds = _speeds(text)
    return _fallen(speeds) if _drop(speeds) is None else None


def slower_at_once(text: str) -> Mapping[str, str] | None:
    """Find a step from which on all are slower by more than three tenths, while before and after it speed holds."""
    speeds = _speeds(text)
    at = _drop(speeds)
    if at is None:
        return None
    before, after = median(speeds[:at]), median(speeds[at:])
    return {"before": f"{before:,.0f}", "after": f"{after:,.0f}", "from": f"the {at + 2}. speed of the log on"}


def _drop(speeds: Sequence[float]) -> int | None:
    """Return which speed is the first of the slow ones; None where they do not fall at once."""
    slowest = list(accumulate(speeds, min))
    fastest = list(accumulate(reversed(speeds), max))[::-1]
    at = next((n for n in range(_FEW, len(speeds) - _FEW + 1) if fastest[n] < _FALL * slowest[n - 1]), None)
    holds = at is not None and _fallen(speeds[:at]) is None and _fallen(speeds[at:]) is None
    return at if holds else None


def _speeds(text: str) -> list[float]:
    """Return all but the first, whose step warms up."""
    return [speed for speed in _numbers(_SPEED, text) if math.isfinite(speed)][1:]


def _fallen(speeds: Sequence[float]) -> Mapping[str, str] | None:
    if len(speeds) < ENOUGH - 1:
        return None
    third = len(speeds) // 3
    first, last = median(speeds[:third]), median(speeds[-third:])
    return {"first": f"{first:,.0f}", "last": f"{last:,.0f}"} if last < _FALL * first else None


def fragmented(text: str) -> Mapping[str, str] | None:
    """Find an allocation that failed although as much was reserved and not in use."""
    found = _ASKED.search(" ".join(text.split()))
    if found is None or _bytes(found["unused"]) < _bytes(found["asked"]):
        return None
    return found.groupdict()


def empty_profile(text: str) -> Mapping[str, str] | None:
    """Find a memory profile without a row."""
    lines = text.strip().splitlines()
    return {} if len(lines) == 1 and lines[0].startswith(_PROFILE_HEADER) else None


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * _UNITS[unit]


MEASURES: Final[Mapping[str, Measure]] = {
    measure.__name__: measure
    for measure in (
        loss_no_number,
        loss_rises,
        loss_spikes,
        slower_at_once,
        slowing_down,
        fragmented,
        empty_profile,
    )
}
