"""Comparison of two plans: changed figures, and changes by tensor class and block.

Bytes have no tolerance, as a dry run is deterministic.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace

from hybridtrain.config.encode import JsonValue, encode
from hybridtrain.planning.figures import MemoryFigures, StepPeaks, Timeline
from hybridvalidation.gate.gate import GateExit
from hybridvalidation.gate.holders import change_text, moved_lines

_TIME_TOLERANCE = 1e-9
"""Relative tolerance of times: since Python 3.12 sum() of floats is compensated, which changes last digits."""
_MEMORY = (("allocated", "allocated_bytes"), ("active", "active_bytes"), ("reserved", "reserved_bytes"))
_TIERS = (("host memory", "host_peak_bytes"), ("disk", "disk_peak_bytes"))


def compare(old: MemoryFigures, new: MemoryFigures) -> list[tuple[GateExit, str]]:
    """Return the changes, each with its exit code; empty only for equal plans.

    Other fields are listed only if nothing else changed.
    """
    found: list[tuple[GateExit, str]] = []
    if old.fits and not new.fits:
        found.append((GateExit.OVER_BUDGET, f"no longer fits the card; {moved(old, new)}"))
    elif new.fits and not old.fits:
        found.append((GateExit.IMPROVED, "now fits the card"))
    found += _of_steps(old, new)
    for what, name in _TIERS:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            found.append((_code(before, after), f"{what}: {change_text(before, after)}"))
    if not _is_close(old.step_time_s, new.step_time_s):
        change = f"{old.step_time_s:.6g} s -> {new.step_time_s:.6g} s"
        found.append((_code(old.step_time_s, new.step_time_s), f"estimated step time: {change}"))
    if not found and (names := list(_changed(encode(old), encode(new)))):
        where = _named(old.by_unit, new.by_unit) or _moments(old.timeline, new.timeline)
        found.append((GateExit.REGRESSED, f"changed: {', '.join(names)}; {where}"))
    return found


def moved(old: MemoryFigures, new: MemoryFigures) -> str:
    """List the holders whose bytes at the peak changed, largest change first; equal blocks are grouped."""
    return _named(old.by_unit, new.by_unit) or "no change at the peak"


def is_equal(old: object, new: object) -> bool:
    """Return whether two dataclasses are equal, times up to rounding."""
    assert is_dataclass(old), "a value that is not a dataclass"
    return next(_changed(encode(old), encode(new)), None) is None


def _of_steps(old: MemoryFigures, new: MemoryFigures) -> Iterator[tuple[GateExit, str]]:
    if [step.phase for step in old.steps] != [step.phase for step in new.steps]:
        most = change_text(old.peak_allocated_bytes, new.peak_allocated_bytes)
        message = f"number of steps: {len(old.steps)} -> {len(new.steps)}, peak allocated {most}; {moved(old, new)}"
        yield _code(old.peak_allocated_bytes, new.peak_allocated_bytes), message
        return
    peak = max(new.steps, key=lambda step: step.allocated_bytes)
    for before, after in zip(old.steps, new.steps, strict=True):
        name = after.phase if len({step.phase for step in new.steps}) > 1 else f"step {after.step}"
        told = moved(old, new) if after is peak else _named(before.by_class, after.by_class)
        for what, field in _MEMORY:
            was, now = getattr(before, field), getattr(after, field)
            if was != now:  # who holds the bytes is told once for a step, beside the first figure that changed
                yield _code(was, now), f"{what}, {name}: {change_text(was, now)}" + (f"; {told}" if told else "")
                told = ""
        rest = [
            field.name
            for field in fields(StepPeaks)
            if getattr(before, field.name) != getattr(after, field.name) and field.name not in dict(_MEMORY).values()
        ]
        if rest and replace(before, **{name: getattr(after, name) for name in rest}) == after:
            yield (
                GateExit.REGRESSED,
                f"{name}: {', '.join(rest)} changed, bytes did not" + (f"; {told}" if told else ""),
            )


def _code(before: float, after: float) -> GateExit:
    return GateExit.REGRESSED if after > before else GateExit.IMPROVED


def _named(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    lines = moved_lines(old, new)
    return f"moved: {'; '.join(lines)}" if lines else ""


def _moments(old: Timeline | None, new: Timeline | None) -> str:
    """Name the classes whose bytes away from the peak changed."""
    if old is None or new is None or old.times_s != new.times_s:
        return "the timeline of the step changed"
    pairs = {name: zip(old.sizes(name), new.sizes(name), strict=True) for name in {*old.by_class, *new.by_class}}
    most = {name: max((after - before for before, after in pair), key=abs, default=0) for name, pair in pairs.items()}
    return _named({}, most) or "no bytes changed"


def _changed(old: JsonValue, new: JsonValue, path: str = "") -> Iterator[str]:
    """Yield the top-level names under which two encoded dataclasses differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            if next(_changed(old.get(name), new.get(name), name), None) is not None:
                yield name
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        yield from (name for a, b in zip(old, new, strict=True) for name in _changed(a, b, path))
    elif not (_is_close(old, new) if isinstance(old, float) and isinstance(new, float) else old == new):
        yield path


def _is_close(old: float, new: float) -> bool:
    return math.isclose(old, new, rel_tol=_TIME_TOLERANCE)
