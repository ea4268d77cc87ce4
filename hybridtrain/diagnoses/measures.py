"""Measures over a whole log: each returns its figures by name, or None."""

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, takewhile
from statistics import median
from typing import Final, NamedTuple

from hybridtrain.diagnoses.allocation import failed_allocation

Measure = Callable[[str], Mapping[str, str] | None]

_NUMBER = r"((?:nan|[-+]?inf(?:inity)?)\b|[-+]?\d[\d,]*+\.?\d*+(?:e[-+]?\d++)?)"
"""Possessive quantifiers, against backtracking over thousands of digits."""
_SERIES = r"(?:(?:train(?:ing)?|avg|average|avr|mean|step|total|lm)[_ /]?)?loss(?:/train)?"
_LOSS: Final = re.compile(rf"""(?<![\w]){_SERIES}['"]?\s*[:=]?\s*['"]?{_NUMBER}""", re.IGNORECASE)
_NULL_LOSS: Final = re.compile(r"""^(?!.*"phase"\s*:\s*"predict").*"loss"\s*:\s*null""")
"""Predicted steps in our own logs have no loss."""
_SPEED: Final = re.compile(
    rf"""tokens_per_s(?:ec(?:ond)?)?['"]?\s*[:=]\s*{_NUMBER}|(?<![\d,.]){_NUMBER}\s*+(?:tok(?:ens)?|it)/s""",
    re.IGNORECASE,
)
_BAR: Final = re.compile(r"(?:\d{1,3}%[^\r\n|]{0,12}\|[^|\r\n]{0,300}\|?|\[) *(\d{1,9})/(\d{1,9})\s*(\[?[^\]\r\n]*)?")
"""A progress bar of tqdm or of transformers in a notebook: steps done, steps in all, times and speed in brackets."""
_BAR_SPEED: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s?(it/s|s/it)")
_NO_STEPS: Final = re.compile(
    r"load|fetch|map|token|generat|filter|pack|sav|encod|convert|eval|valid|predict|test", re.IGNORECASE
)
"""Progress bars of work other than training steps."""
_GRADIENT: Final = re.compile(rf"""(?<![\w])grad(?:ient)?[_ ]?norm['"]?\s*[:=]?\s*['"]?{_NUMBER}""", re.IGNORECASE)
_SUMMARY: Final = re.compile(r"^.*['\"]train_runtime['\"].*$", re.MULTILINE)
"""Summary of a whole run: transformers reports the mean loss as train_loss."""
_REWARDS: Final = re.compile(r"""['"](?:rewards?\b|(?:objective/)?kl['"])""")
"""Loggers of reinforcement and preference learning, whose losses need not fall."""
_OUT_OF_MEMORY: Final = re.compile(r"out of memory", re.IGNORECASE)
_ERROR: Final = re.compile(r"Traceback|\w(?:Error|Exception)\b")
_LOSS_LINE: Final = re.compile(r"^.*loss.*$", re.MULTILINE | re.IGNORECASE)
_COUNTER: Final = re.compile(
    r"\b(?:global_?step|step|iter(?:ation)?)\W{1,3}(\d{1,9})\b|\[ *(\d{1,9})/\d{1,9}\]|(\d{1,9})batch\b", re.IGNORECASE
)
"""Number of a step in a line with its loss."""
_HOSTED: Final = re.compile(r"/content/|/kaggle/|/dist-packages/|tcmalloc: large alloc")
_PROFILE_HEADER: Final = "step,phase,"
ENOUGH: Final = 12
"""Fewest steps for a trend."""
_FEW: Final = 3
"""Steps before and after a change."""
_FAR = 0.5
"""Loss too large to round to 0 in the next step."""
_RISE, _FALL, _SPIKE = 1.05, 0.7, 1.5
"""Thresholds: rise over the smoothed best loss, fall below the first speed, spike over the median around a step."""
_RISE_NOISE, _SPIKE_NOISE = 5.0, 8.0
"""Thresholds in standard deviations, for a smoothed loss and for a single one. The best of many smoothed losses is 2
below the mean by chance."""


def _numbers(pattern: re.Pattern[str], text: str) -> list[float]:
    found = (next(part for part in match.groups() if part) for match in pattern.finditer(text))
    return [float(part.replace(",", "")) for part in found]


def counted(text: str) -> tuple[int, int]:
    """Return the numbers of losses and of speeds in a log."""
    return len(_losses(text)), len(_speeds(text))


@lru_cache(maxsize=1)
def _losses(text: str) -> list[float]:
    return _numbers(_LOSS, _SUMMARY.sub("", text))


def _course(text: str) -> list[float]:
    """Return the finite losses of a run whose loss should fall."""
    return [] if _REWARDS.search(text) else [loss for loss in _losses(text) if math.isfinite(loss)]


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation around a smooth course, from the median of normal differences."""
    return median(abs(after - before) for before, after in pairwise(values)) / (0.6745 * math.sqrt(2))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return means over a tenth of the run, at least three steps."""
    width = max(3, len(values) // 10)
    return [_mean(values[at : at + width]) for at in range(len(values) - width + 1)]


def loss_not_finite(text: str) -> Mapping[str, str] | None:
    """Find the first loss that is NaN or infinite (null in JSON)."""
    losses = _losses(text)
    first = next((at for at, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if first is not None:
        return {"at": f"the {first}. loss of the log"}
    null = next((number for number, line in enumerate(text.splitlines(), 1) if _NULL_LOSS.search(line)), None)
    return None if null is None else {"at": f"line {null}, null"}


def loss_rises(text: str) -> Mapping[str, str] | None:
    """Find a loss that ends above its best by more than noise."""
    losses = _course(text)
    if len(losses) < ENOUGH:
        return None
    course = _smooth(losses)
    best = min(course)
    margin = _RISE_NOISE * _noise(losses) / math.sqrt(len(losses) - len(course) + 1)
    if best <= 0 or course[-1] <= max(_RISE * best, best + margin):
        return None
    return {"last": f"{course[-1]:.3f}", "best": f"{best:.3f}", "near": f"the {course.index(best) + 1}. loss"}


def loss_spikes(text: str) -> Mapping[str, str] | None:
    """Find losses far above their neighbours."""
    losses = _course(text)
    if len(losses) < ENOUGH:
        return None
    around = [median(losses[max(0, at - 5) : at + 6]) for at in range(len(losses))]
    inner, margin = range(3, len(losses) - 3), _SPIKE_NOISE * _noise(losses)
    steps = [str(at + 1) for at in inner if losses[at] > max(_SPIKE * around[at], around[at] + margin) > 0]
    return {"at": f"the losses {', '.join(steps[:5])} of the log"} if steps else None


def gradient_not_finite(text: str) -> Mapping[str, str] | None:
    """Find gradient norms that stay NaN or infinite to the end: three, or one with a loss of 0."""
    steps = [(_numbers(_GRADIENT, line), _numbers(_LOSS, line)) for line in text.splitlines() if "norm" in line]
    ends = list(takewhile(lambda step: not math.isfinite(step[0][0]), (step for step in reversed(steps) if step[0])))
    zero = sum(losses[:1] == [0.0] for _, losses in ends)
    if (len(ends) < _FEW and not zero) or not all(map(math.isfinite, _losses(text))):
        return None
    return {"steps": f"the last {len(ends)} of {len(steps)} have gradient norm {ends[0][0][0]}, {zero} of them loss 0"}


def loss_falls_to_zero(text: str) -> Mapping[str, str] | None:
    """Find that the last losses are exactly 0 after one that was far from it."""
    losses = _losses(text)
    zeros = sum(1 for _ in takewhile(lambda loss: loss == 0, reversed(losses)))
    if not _FEW <= zeros < len(losses) or losses[-zeros - 1] < _FAR or _REWARDS.search(text):
        return None
    return {"losses": f"{losses[-zeros - 1]:.3f}, then {zeros} times 0"}


def zero_loss_and_gradient(text: str) -> Mapping[str, str] | None:
    """Find that all losses and gradient norms are 0."""
    course, gradients = _course(text), _numbers(_GRADIENT, text) if "norm" in text else []
    nothing = len(course) > _FEW and len(gradients) > _FEW and not any(course) and not any(gradients)
    return {"losses": f"all {len(course)} are 0, and so are gradient norms"} if nothing else None


def gradual_slowdown(text: str) -> Mapping[str, str] | None:
    """Find a speed that gradually falls by more than 30 %."""
    speeds = _speeds(text)[1:]  # the first step warms up
    return _fallen(speeds) if _drop(speeds) is None else None


def sudden_slowdown(text: str) -> Mapping[str, str] | None:
    """Find a step after which all are more than 30 % slower, with steady speed before and after."""
    speeds = _speeds(text)[1:]
    at = _drop(speeds)
    if at is None:
        return None
    before, after = median(speeds[:at]), median(speeds[at:])
    return {"before": _told(before), "after": _told(after), "from": f"the {at + 2}. speed of the log on"}


def _drop(speeds: Sequence[float]) -> int | None:
    """Return which speed is the first of the slow ones; None where they do not fall at once."""
    slowest = list(accumulate(speeds, min))
    fastest = list(accumulate(reversed(speeds), max))[::-1]
    at = next((n for n in range(_FEW, len(speeds) - _FEW + 1) if fastest[n] < _FALL * slowest[n - 1]), None)
    holds = at is not None and _fallen(speeds[:at]) is None and _fallen(speeds[at:]) is None
    return at if holds else None


@lru_cache(maxsize=1)
def _speeds(text: str) -> list[float]:
    """Return those of the log or, if they are more, of its longest progress bar; bars of evaluation are others."""
    bars: dict[tuple[str, int], list[float]] = {}
    for bar in _bars(text):
        if bar.speed and not _NO_STEPS.search(bar.what):
            bars.setdefault((re.sub(r"[\d.]", "", bar.what), bar.total), []).append(bar.speed)
    logged = [speed for speed in _numbers(_SPEED, _BAR.sub("", text) if bars else text) if math.isfinite(speed)]
    return max([logged, *bars.values()], key=len)


class _Bar(NamedTuple):
    what: str
    done: int
    total: int
    speed: float
    end: int
    """Offset in the log."""


def _bars(text: str) -> Iterator[_Bar]:
    for found in _BAR.finditer(text):
        before = text[max(0, found.start() - 80) : found.start()].splitlines() or [""]
        speed = _BAR_SPEED.search(found[3] or "")
        value = float(speed[1]) if speed else 0.0
        per_second = 1 / value if speed and value and speed[2] == "s/it" else value
        yield _Bar(before[-1].strip(), int(found[1]), int(found[2]), per_second, found.end())


def _told(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}" if speed >= 1 else f"{1 / speed:.3g} s/it"


def _fallen(speeds: Sequence[float]) -> Mapping[str, str] | None:
    if len(speeds) < ENOUGH - 1:
        return None
    third = len(speeds) // 3
    first, last = median(speeds[:third]), median(speeds[-third:])
    return {"first": _told(first), "last": _told(last)} if last < _FALL * first else None


def steps_before_out_of_memory(text: str) -> Mapping[str, str] | None:
    """Find that many steps succeeded before memory ran out."""
    failed = _OUT_OF_MEMORY.search(text)
    before = text[: failed.start()] if failed else ""
    last = next(iter(deque(_bars(before), maxlen=1)), None)
    in_training = last is not None and last.speed > 0 and last.done < last.total and not _NO_STEPS.search(last.what)
    numbers = [at for line in _LOSS_LINE.findall(before) for match in _COUNTER.findall(line) for at in match if at]
    done = max(last.done if last is not None and in_training else 0, len(_losses(before)), *map(int, numbers))
    return {"after": f"{done} steps"} if done >= ENOUGH else None


def ends_while_loading(text: str) -> Mapping[str, str] | None:
    """Find that a log ends within the progress bar of loading a model, with no Python error after it."""
    last = next(iter(deque(_bars(text), maxlen=1)), None)
    if last is None or "loading" not in last.what.lower() or last.done >= last.total or _ERROR.search(text, last.end):
        return None
    return {"loaded": f"{last.done} of {last.total}"}


def ends_in_interrupt(text: str) -> Mapping[str, str] | None:
    """Find that a log ends in ^C with no Python traceback, as hosted notebooks end a process."""
    is_hosted = text.rstrip().endswith("\n^C") and _HOSTED.search(text) and not _ERROR.search(text)
    return {"end": "^C"} if is_hosted else None


def _of_allocation(name: str) -> Measure:
    """Return the measure of a property of the failed allocation."""
    return lambda text: {} if getattr(failed_allocation(text), name, False) else None


def empty_profile(text: str) -> Mapping[str, str] | None:
    """Find a memory profile without a row."""
    lines = text.strip().splitlines()
    return {} if len(lines) == 1 and lines[0].startswith(_PROFILE_HEADER) else None


MEASURES: Final[Mapping[str, Measure]] = {
    measure.__name__: measure
    for measure in (
        loss_not_finite,
        loss_rises,
        loss_spikes,
        gradient_not_finite,
        loss_falls_to_zero,
        zero_loss_and_gradient,
        sudden_slowdown,
        gradual_slowdown,
        steps_before_out_of_memory,
        ends_while_loading,
        ends_in_interrupt,
        empty_profile,
    )
} | {
    name: _of_allocation(f"is_{name}")
    for name in ("absurd", "limited", "refused_beside_free_memory", "shared", "fragmented")
}
