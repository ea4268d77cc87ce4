"""Runs that are killed repeatedly at random moments, also while saving and loading."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from faults.campaign import Campaign, Order, Tally
from faults.runs import KINDS, SAVE_EVERY, Run, ended, fork, on_touch, touches

_MOST_KILLS: Final = 8
"""Of one run; then it runs to its end."""
_LATE: Final = "done before"


def _killing_at(states: Path, number: int, work: Callable[[], None]) -> Callable[[], None]:
    """Return work that kills its own process at its ``number``-th access to checkpoints."""

    def killed() -> None:
        left = number

        def note() -> None:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        on_touch(states, note)
        work()

    return killed


def _kill(order: Order) -> Tally:
    tally, draw = Tally(), random.Random(order.seed)  # noqa: S311  not a secret
    for number, kind in enumerate(KINDS):
        whole = Run(kind, order.folder / kind / "whole")
        whole.folder.parent.mkdir(parents=True)
        begin = time.monotonic()
        num_touches = touches(whole)
        seconds, wanted = time.monotonic() - begin, whole.outcome()
        end = order.count * (number + 1) // len(KINDS)
        while tally.num_attempts - _num_late(tally) < end:
            run = Run(kind, order.folder / kind / "run")
            shutil.rmtree(run.folder, ignore_errors=True)
            before = tally.num_faults
            killed = [_once(run, draw, seconds, num_touches, tally) for _ in range(draw.randint(1, _MOST_KILLS))]
            if ended(fork(run.go)):
                tally.add(kind, "not resumed", f"after kills {killed}")
            elif run.outcome() != wanted:
                tally.add(kind, "other values", f"after kills {killed}")
            elif run.leftovers():
                tally.add(kind, "leftovers", f"{run.leftovers()[:3]} after kills {killed}")
            if tally.num_faults > before:
                order.say(tally.faults[-1])
        order.say(f"{kind}: {tally.counts.get(kind, {})}")
    return tally


def _num_late(tally: Tally) -> int:
    """Return the number of kills that came too late to count."""
    return sum(outcomes.get(_LATE, 0) for outcomes in tally.counts.values())


def _once(run: Run, draw: random.Random, seconds: float, num_touches: int, tally: Tally) -> str:
    """Resume a run and kill it; count the kill, and a fault where saved steps are lost."""
    saved = run.steps_saved()
    in_files = draw.random() < 0.5
    at = draw.randint(1, num_touches) if in_files else draw.uniform(0, 1.2 * seconds)
    if in_files:
        process = fork(_killing_at(run.states, int(at), run.go))
    else:
        process = fork(run.go)
        time.sleep(at)
        os.kill(process, signal.SIGKILL)
    code, told = ended(process), f"touch {at}" if in_files else f"{at:.3f} s"
    if code not in {0, -signal.SIGKILL}:
        tally.add(run.kind, "ended by itself", f"code {code}, to be killed at {told}")
    elif run.steps_saved() < saved:
        tally.add(run.kind, "steps lost", f"{saved} were saved, {run.steps_saved()} are, killed at {told}")
    elif not code:
        tally.add(run.kind, _LATE)
    elif (lost := run.steps_logged() - run.steps_saved()) > 2 * SAVE_EVERY:
        tally.add(run.kind, "too many steps lost", f"{lost}, killed at {told}")
    else:
        more = f", more than {SAVE_EVERY} steps to repeat" if lost > SAVE_EVERY else ""
        tally.add(run.kind, ("killed while saving or loading" if in_files else "killed at a moment") + more)
    return told


KILLS: Final = Campaign(
    name="kills",
    description=(
        "Runs of each kind are killed (SIGKILL) up to eight times and resumed, at a random moment or a random access "
        f"to checkpoints. They save every {SAVE_EVERY} steps, beside the following steps. Passed: no saved step is "
        "lost, and of others at most those since the save before the current one. The run ends with the undisturbed "
        "run's tensors and losses, to the bit, and no leftovers."
    ),
    count=1_000,
    run=_kill,
)
