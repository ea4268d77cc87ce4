"""Full disks and failing disks at a random moment of a run."""

import errno
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from typing import Final

from faults.campaign import Campaign, Order, Tally
from faults.runs import KINDS, TOLD, Run, ended, fork, go_unbroken, telling

_MOST_SYNCS: Final = 60
"""As often as a run waits for the disk, or a little more."""


def _limited(num_bytes: int, work: Callable[[], None]) -> Callable[[], None]:
    """Return work whose process cannot make a file larger than a limit (EFBIG, as under a quota)."""

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
        work()

    return limited


def _failing(number: int, code: int, work: Callable[[], None]) -> Callable[[], None]:
    """Return work for which waiting for the disk fails from the ``number``-th time on."""

    def failing() -> None:
        left, sync = number, os.fsync

        def fail(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise OSError(code, os.strerror(code))
            sync(descriptor)

        os.fsync = fail  # type: ignore[assignment]  # the project gives descriptors only
        work()

    return failing


def _fill(order: Order) -> Tally:
    tally, draw = Tally(), random.Random(order.seed)  # noqa: S311  not a secret
    for number, kind in enumerate(KINDS):
        whole = Run(kind, order.folder / kind / "whole")
        go_unbroken(whole)
        wanted = whole.outcome()
        largest = max(path.stat().st_size for path in whole.states.rglob("*") if path.is_file())
        while tally.num_attempts < order.count * (number + 1) // len(KINDS):
            run = Run(kind, order.folder / kind / "run")
            shutil.rmtree(run.folder, ignore_errors=True)
            tally.add(kind, *_once(run, draw, largest, wanted))
        order.say(f"{kind}: {tally.counts.get(kind, {})}")
    return tally


def _once(run: Run, draw: random.Random, largest: int, wanted: tuple[object, ...]) -> tuple[str, str]:
    """Run on the faulty disk, then on a sound one; return the outcome."""
    if draw.random() < 0.5:
        limit = draw.randint(0, largest)
        told, work = f"files of at most {limit} bytes", _limited(limit, telling(run.go))
    else:
        first, code = draw.randint(1, _MOST_SYNCS), draw.choice((errno.EIO, errno.ENOSPC))
        told, work = f"fsync {first}: {errno.errorcode[code]}", _failing(first, code, telling(run.go))
    code = ended(fork(work))
    if code not in {0, TOLD}:
        return "traceback", f"code {code} with {told}"
    if ended(fork(run.go)):
        return "not resumed", f"after {told}"
    if run.outcome() != wanted:
        return "other values", f"after {told}"
    if run.leftovers():
        return "leftovers", f"{run.leftovers()[:3]} after {told}"
    return "told, and resumed" if code else "not met", ""


FULL_DISK: Final = Campaign(
    name="full-disk",
    description=(
        "Runs of each kind on a disk that takes files up to a random size (RLIMIT_FSIZE), or whose fsync fails with "
        "EIO or ENOSPC from a random call on. Passed: the run ends with a message. Resumed on a sound disk, it ends "
        "with the undisturbed run's tensors and losses, to the bit, and no leftovers."
    ),
    count=200,
    run=_fill,
)
