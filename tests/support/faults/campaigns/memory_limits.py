"""Processes that run out of memory (``ulimit -v``, ``ulimit -d``) at a random point of a run."""

import random
import resource
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from faults.campaign import Campaign, Order, Tally
from faults.runs import KINDS, Run, ended, fork, go_unbroken, number_of
from hybridtrain.units import KIB

_LIMITS: Final[Mapping[str, tuple[int, str]]] = {
    "address space": (resource.RLIMIT_AS, "VmSize"), "data": (resource.RLIMIT_DATA, "VmData"),
}  # fmt: skip
"""Limit, and its name in /proc/self/status."""
_WIDTH: Final = 256
"""Of models whose tensors are too large for memory that the process was given back."""
_MORE: Final = 1.1
"""Of what a run takes beside what its process holds; mostly threads', so small limits are drawn more often."""
_TOLD: Final = {1, 2}
"""Exit codes of user-facing errors."""
_LONGEST_S: Final = 120


def _held(what: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{what}:"))


def _taken(run: Run) -> int:
    """Return the bytes of address space that an undisturbed run adds to those of its process."""

    def measured() -> int:
        before = _held("VmSize")
        run.go()
        return _held("VmPeak") - before

    return number_of(run, measured)


def _limit(order: Order) -> Tally:
    tally, draw = Tally(), random.Random(order.seed)  # noqa: S311  not a secret
    for number, kind in enumerate(KINDS):
        counted = Run(kind, order.folder / kind / "counted" / "run", _WIDTH)
        counted.folder.parent.mkdir(parents=True)
        taken, whole = _taken(counted), Run(kind, order.folder / kind / "by-command" / "whole", _WIDTH)
        go_unbroken(whole, whole.command)
        wanted = whole.outcome()
        while tally.num_attempts < order.count * (number + 1) // len(KINDS):
            run = Run(kind, order.folder / kind / "run", _WIDTH)
            shutil.rmtree(run.folder, ignore_errors=True)
            tally.add(kind, *_once(run, draw.choice(list(_LIMITS)), int(_MORE * taken * draw.random() ** 5), wanted))
        order.say(f"{kind}: {tally.counts.get(kind, {})}")
    return tally


def _once(run: Run, name: str, num_bytes: int, wanted: tuple[object, ...]) -> tuple[str, str]:
    """Run with limited additional memory, then without a limit; return the outcome."""
    kind, held = _LIMITS[name]

    def begin() -> None:
        signal.alarm(_LONGEST_S)
        resource.setrlimit(kind, (_held(held) + num_bytes, resource.RLIM_INFINITY))

    code = ended(fork(lambda: run.command(begin)))
    said, told = run.said.read_text(), f"{name} + {num_bytes} bytes"
    if code not in {0, *_TOLD} or "Traceback" in said:
        return "ended otherwise", f"code {code} with {told}: {said[-300:]!r}"
    if again := ended(fork(run.command)):
        return "not resumed", f"code {again} after {told}: {run.said.read_text()[-300:]!r}"
    if run.outcome() != wanted:
        return "other values", f"after {told}"
    if run.leftovers():
        return "leftovers", f"{run.leftovers()[:3]} after {told}"
    return ("told, and resumed" if code else "not met"), ""


MEMORY_LIMITS: Final = Campaign(
    name="memory-limits",
    description=(
        "Runs of each kind, by the command, with a limit of address space or data (RLIMIT_AS, RLIMIT_DATA) at a "
        "random part of a run's need. Passed: the run ends with a message, without traceback, signal or hang. "
        "Resumed without the limit, it ends with the undisturbed run's tensors and losses, to the bit, and no "
        "leftovers."
    ),
    count=100,
    run=_limit,
)
