"""Runs that are interrupted by a signal, once or twice, at random moments, also while saving and loading."""

import os
import random
import shutil
import signal
import threading
import time
from typing import Final

from faults.campaign import Campaign, Order, Tally
from faults.runs import KINDS, NUM_STEPS, Run, ended, fork, go_unbroken, on_touch, touches

_MOST_STOPS: Final = 4
"""Of one run; then it runs to its end."""
_LONGEST_PAUSE_S: Final = 0.05
"""Before a second signal."""
_LEAST_S: Final = 0.002
"""Before a first one: earlier signals reach the interpreter, not the command."""
_ASKED: Final = "stopping after this step"
"""Message of a run that will save and end."""
_SAVED: Final = 75
_AT_ONCE: Final = {signal.SIGINT: {130}, signal.SIGTERM: {143, -signal.SIGTERM}}
"""Exit codes without an end of its own; a shell says 143 of both."""


def _signalled(run: Run, number: signal.Signals, touch: int, after_s: float, again_s: float | None) -> None:
    """Run the command; send one signal or two at its ``touch``-th access to checkpoints (0: after a time)."""
    left = touch

    def later(seconds: float) -> None:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    def note() -> None:
        nonlocal left
        left -= 1
        if not left:
            if again_s is not None:
                later(again_s)
            os.kill(os.getpid(), number)

    def begin() -> None:  # whatever comes before is none of the command's
        on_touch(run.states, note)
        if not touch:
            later(after_s)
        if not touch and again_s is not None:
            later(after_s + again_s)

    run.command(begin)


def _stop(order: Order) -> Tally:
    tally, draw = Tally(), random.Random(order.seed)  # noqa: S311  not a secret
    for number, kind in enumerate(KINDS):
        num_touches = touches(Run(kind, order.folder / kind / "counted" / "run"))
        whole = Run(kind, order.folder / kind / "by-command" / "whole")
        begin = time.monotonic()
        go_unbroken(whole, whole.command)
        seconds, wanted = time.monotonic() - begin, whole.outcome()
        while tally.num_attempts < order.count * (number + 1) // len(KINDS):
            run = Run(kind, order.folder / kind / "run")
            shutil.rmtree(run.folder, ignore_errors=True)
            stops = []
            for _ in range(draw.randint(1, _MOST_STOPS)):
                stops.append(_once(run, draw, seconds, num_touches, tally))
                if run.steps_saved() == NUM_STEPS:
                    break
            if code := ended(fork(run.command)):
                tally.add(kind, "not resumed", f"code {code} after {stops}: {run.said.read_text()[-200:]!r}")
            elif run.outcome() != wanted:
                tally.add(kind, "other values", f"after {stops}")
            elif run.leftovers():
                tally.add(kind, "leftovers", f"{run.leftovers()[:3]} after {stops}")
        order.say(f"{kind}: {tally.counts.get(kind, {})}")
    return tally


def _once(run: Run, draw: random.Random, seconds: float, num_touches: int, tally: Tally) -> str:
    """Resume a run and interrupt it; count the outcome."""
    before, number = run.steps_saved(), draw.choice((signal.SIGINT, signal.SIGTERM))
    touch = draw.randint(1, num_touches) if draw.random() < 0.5 else 0
    after_s = draw.uniform(_LEAST_S, seconds)
    again_s = draw.uniform(0, _LONGEST_PAUSE_S) if draw.random() < 1 / 3 else None
    code = ended(fork(lambda: _signalled(run, number, touch, after_s, again_s)))
    told = f"{number.name} at {f'touch {touch}' if touch else f'{after_s:.3f} s'}"
    told += "" if again_s is None else f" and {again_s:.3f} s later"
    fault = _fault(run, before, code, number, is_one=again_s is None)
    tally.add(run.kind, fault or _outcome(run, code), f"{told}: code {code}, {_of(run)}" if fault else "")
    return told


def _fault(run: Run, before: int, code: int, number: signal.Signals, *, is_one: bool) -> str:
    """Return the failure; empty: none."""
    said, saved, logged = run.said.read_text(), run.steps_saved(), run.steps_logged()
    if "Traceback" in said or code not in {0, _SAVED, *_AT_ONCE[number]}:
        return "ended otherwise"
    if saved < before:
        return "steps lost"
    if (code == 0 and saved < NUM_STEPS) or (code == _SAVED and saved == NUM_STEPS):
        return "another exit code"
    was_asked = _ASKED in said
    if code == _SAVED and (saved < logged or not was_asked):
        return "not all saved"
    if code in _AT_ONCE[number] and is_one and (was_asked or before < saved < NUM_STEPS):
        return "not let end its step"
    return ""


def _outcome(run: Run, code: int) -> str:
    if code in {0, _SAVED}:
        return "saved, and told to go on" if code else "done before"
    if _ASKED in run.said.read_text():
        return "ended at once by the second"
    return "ended after the last save" if run.steps_saved() == NUM_STEPS else "ended before the first step"


def _of(run: Run) -> str:
    return f"{run.steps_saved()} steps saved, {run.steps_logged()} logged, said {run.said.read_text()[-200:]!r}"


SIGNALS: Final = Campaign(
    name="signals",
    description=(
        "Runs of each kind, by the command, get SIGINT or SIGTERM up to four times, at a random moment or a random "
        f"access to checkpoints. A third of them get a second one within {_LONGEST_PAUSE_S:g} s. Passed: a signal in "
        "training ends the run after its step, which is saved, with exit code 75. Before and after, and after a "
        "second one, the codes are 130 and 143, or 0 for a finished run. No traceback, no saved step lost; resumed, "
        "it ends with the undisturbed run's tensors and losses, to the bit, and no leftovers."
    ),
    count=200,
    run=_stop,
)
