"""Runs on several ranks of which one is killed, or hangs, at a random moment; then all restart."""

import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from faults.campaign import Campaign, Order, Tally
from faults.runs import NUM_STEPS, RANK_KINDS, SAVE_EVERY, Run, ended, fork, on_touch
from hybridtrain.checkpoint.generations import generations, remove_generation
from hybridtrain.memory.group import TorchGroup

KINDS: Sequence[str] = tuple(RANK_KINDS)
RANK_TIMEOUT_S = 15.0
"""Timeout of a rank for another; the command's own is longer."""
_LATE_S: Final = 15.0
"""Within which a rank must end that has waited as long as it may: a machine with few cores runs all of them."""
_POLL_S: Final = 0.01
_WORLDS: Final = (2, 4)
_LAST_WORLDS: Final = (1, 2, 4)
_MOST_KILLS: Final = 3
"""Of one run; then it runs to its end."""
_LATE: Final = "done before"
_RESUMED: Final = "resumed to the end"
_TOLD: Final = ("another rank ended or did not answer in time", "not all ranks joined")
_IN_PROGRAM: Final = ("a file", "a collective")
_PLACES: Final = ("a moment", *_IN_PROGRAM)
_STAND_STILL: Final = 0.15
"""Share of the broken ranks that are stopped and not killed: their connections stay open."""

Started = Mapping[int, int]
"""Process id by rank."""


@dataclass(frozen=True, slots=True)
class _Break:
    """Fault of one rank."""

    world: int
    rank: int
    place: str
    number: int
    """Of the file touched, or the collective begun, from 1."""
    after_s: float
    signal: signal.Signals

    def __str__(self) -> str:
        at = f"{self.after_s:.3f} s" if self.place == "a moment" else f"{self.place.removeprefix('a ')} {self.number}"
        return f"{self.signal.name} of rank {self.rank} of {self.world} at {at}"


@dataclass(frozen=True, slots=True)
class _Known:
    """Results of undisturbed runs of one kind."""

    seconds: float
    counts: Mapping[tuple[int, int, str, bool], int]
    """Visits to a place, by number of ranks, rank and place, in a new run; False: in loading its end."""

    def most(self, world: int, rank: int, place: str, saved: int) -> int:
        """Return the number of visits to a place by a run that resumes after some steps."""
        loads = self.counts[world, rank, place, False] if saved else 0
        return loads + self.counts[world, rank, place, True] * (NUM_STEPS - saved) // NUM_STEPS


def _watch(place: str, states: Path, note: Callable[[], object]) -> None:
    """Call ``note`` whenever this process accesses checkpoints, or begins a collective."""
    if place == "a file":
        on_touch(states, note)
    if place == "a collective":
        start = TorchGroup._start

        def noted(group: TorchGroup, *arguments: Any, **settings: bool) -> Callable[[], None]:
            note()
            return start(group, *arguments, **settings)

        setattr(TorchGroup, "_start", noted)  # noqa: B010  this process is a child


def _said(run: Run, rank: int) -> Path:
    return run.said.with_name(f"said-{rank}.txt")


def _start(run: Run, world: int, begin: Callable[[int], None] = lambda _: None) -> dict[int, int]:
    """Start the command on each rank, with the environment that torchrun sets."""
    arguments = [*run.asked(), "--rank-timeout-s", str(RANK_TIMEOUT_S)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    scratch = run.folder.with_name("scratch")
    scratch.mkdir(exist_ok=True)

    def go(rank: int) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        tempfile.tempdir = str(scratch)  # what a killed one leaves goes with the campaign
        run.command(lambda: begin(rank), arguments, _said(run, rank))

    return {rank: fork(lambda rank=rank: go(rank)) for rank in range(world)}  # type: ignore[misc]


def _wait(started: Started, limit_s: float) -> dict[int, int]:
    """Return the exit codes of the ranks that ended within a time; the others are then killed."""
    codes: dict[int, int] = {}
    last = time.monotonic() + limit_s
    while len(codes) < len(started) and time.monotonic() < last:
        time.sleep(_POLL_S)
        for rank, process in started.items():
            if rank not in codes:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    codes[rank] = os.waitstatus_to_exitcode(status)
    for rank in started.keys() - codes.keys():
        os.kill(started[rank], signal.SIGKILL)
        ended(started[rank])
    return codes


def _unbroken(kind: str, folder: Path) -> _Known:
    """Return the results and the duration of undisturbed ranks."""
    seconds, counts = 0.0, dict[tuple[int, int, str, bool], int]()
    for world in _WORLDS:
        run = Run(kind, folder / f"unbroken-{world}" / "run")
        run.folder.parent.mkdir(parents=True)

        def begin(rank: int, run: Run = run) -> None:
            for place in _IN_PROGRAM:
                file = _counts(run, rank, place).open("ab", buffering=0)
                _watch(place, run.states, lambda file=file: file.write(b"."))  # type: ignore[misc]

        for is_new in (True, False):  # the second one loads the state and is done
            start = time.monotonic()
            codes = _wait(_start(run, world, begin), 4 * RANK_TIMEOUT_S)
            if codes != dict.fromkeys(range(world), 0):
                raise AssertionError(f"the unbroken run '{kind}' failed on {world} ranks: {codes}")
            seconds = max(seconds, time.monotonic() - start)
            for rank, place in product(range(world), _IN_PROGRAM):
                file = _counts(run, rank, place)
                counts[world, rank, place, is_new] = file.stat().st_size
                file.unlink()
    return _Known(seconds, counts)


def _counts(run: Run, rank: int, place: str) -> Path:
    """Return a file with a byte for each visit of a rank to a place."""
    return run.folder.with_name(f"{place} {rank}")


def _draw(draw: random.Random, known: _Known, saved: int) -> _Break:
    world = draw.choice(_WORLDS)
    rank, place = draw.randrange(world), draw.choice(_PLACES)
    most = known.most(world, rank, place, saved) if place in _IN_PROGRAM else 0
    number = draw.randint(1, most) if most else 0
    how = signal.SIGSTOP if draw.random() < _STAND_STILL else signal.SIGKILL
    return _Break(world, rank, place if number else "a moment", number, draw.uniform(0, known.seconds), how)


def _broken(run: Run, what: _Break) -> tuple[bool, dict[int, int]]:
    """Resume the ranks and break one; return whether it was running, and the exit codes of the others that ended."""

    def begin(rank: int) -> None:
        left = what.number

        def note() -> None:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), what.signal)

        if rank == what.rank:
            _watch(what.place, run.states, note)

    started = _start(run, what.world, begin)
    victim = started.pop(what.rank)
    if what.place == "a moment":
        time.sleep(what.after_s)
        os.kill(victim, what.signal)
    limit_s = 3 * RANK_TIMEOUT_S + _LATE_S  # to meet, in a step, and in the save before it
    codes = _wait(started, limit_s)
    os.kill(victim, signal.SIGKILL)
    return ended(victim) == -signal.SIGKILL, codes


def _once(run: Run, what: _Break, tally: Tally) -> None:
    """Break a rank; count a fault where the others hang, end without a reason, or saved steps are lost."""
    saved = run.steps_saved()
    was_at_work, codes = _broken(run, what)
    said = {rank: _said(run, rank).read_text() for rank in codes}
    now, lost = run.steps_saved(), run.steps_logged() - run.steps_saved()
    silent = [rank for rank, code in codes.items() if code != 1 or not any(told in said[rank] for told in _TOLD)]
    if len(codes) < what.world - 1:
        tally.add(run.kind, "hang", f"{what}: of the others {sorted(codes)} alone ended")
    elif any("Traceback" in text for text in said.values()):
        tally.add(run.kind, "traceback", f"{what}: {said}")
    elif silent and any(codes[rank] for rank in silent):
        tally.add(run.kind, "ended otherwise", f"{what}: codes {codes}, {[said[rank][-300:] for rank in silent]}")
    elif silent and now < NUM_STEPS:
        tally.add(run.kind, "ended as if done", f"{what}: codes {codes} after {now} steps")
    elif now < saved or lost > 2 * SAVE_EVERY:
        tally.add(run.kind, "steps lost", f"{what}: {saved} were saved, {now} are, {lost} more were logged")
    elif run.states.exists() and (torn := sorted(path.name for path in run.states.glob("damaged-*"))):
        tally.add(run.kind, "torn state", f"{what}: {torn}")
    elif not was_at_work or len(silent) == len(codes):
        tally.add(run.kind, _LATE)
    else:
        how = "stopped" if what.signal == signal.SIGSTOP else "killed"
        tally.add(run.kind, f"{how} at {what.place}")


History = tuple[tuple[int, int], ...]
"""Steps saved, and the number of ranks that resume from there."""


def _with(history: History, step: int, world: int) -> History:
    """Return a resumed history without the steps that were never saved."""
    kept = tuple(part for part in history if part[0] < step)
    return kept if step == NUM_STEPS or (kept and kept[-1][1] == world) else (*kept, (step, world))


def _alone(kind: str, folder: Path, history: History) -> Run:
    """Return the run of one process that sums as the ranks of a history do, each from the checkpoint before."""
    run = Run(kind, folder / "-".join(f"{step}x{world}" for step, world in history) / "run")
    if run.folder.exists():
        return run
    step, world = history[-1]
    run.folder.parent.mkdir(parents=True)
    if history[:-1]:
        shutil.copytree(_alone(kind, folder, history[:-1]).folder, run.folder)
        for path in generations(run.states)[step // SAVE_EVERY :]:
            remove_generation(path)
    if ended(fork(lambda: run.go(shares=world))):
        raise AssertionError(f"the unbroken run '{kind}' failed in one process: {history}")
    return run


def _finish(run: Run, world: int, history: History, folder: Path, tally: Tally) -> None:
    """Run to the end; count a fault where the result differs from that of one process."""
    if world == 1:
        codes = {0: ended(fork(lambda: run.command(said=_said(run, 0))))}
    else:
        codes = _wait(_start(run, world), 4 * RANK_TIMEOUT_S + _LATE_S)
    told = ", ".join(f"{step} on {ranks}" for step, ranks in history)
    if codes != dict.fromkeys(range(world), 0):
        said = [_said(run, rank).read_text()[-300:] for rank in range(world)]
        tally.add(run.kind, "not resumed", f"steps from {told}: codes {codes}, {said}")
    elif run.outcome() != _alone(run.kind, folder, history).outcome():
        tally.add(run.kind, "other values", f"steps from {told}")
    elif run.leftovers():
        tally.add(run.kind, "leftovers", f"{run.leftovers()[:3]}, steps from {told}")
    else:
        tally.add(run.kind, _RESUMED)


def _break(order: Order) -> Tally:
    tally, draw = Tally(), random.Random(order.seed)  # noqa: S311  not a secret
    for number, kind in enumerate(KINDS):
        folder = order.folder / kind
        known = _unbroken(kind, folder)
        while _num_broken(tally) < order.count * (number + 1) // len(KINDS):
            run, history, before = Run(kind, folder / "broken" / "run"), History(), tally.num_faults
            shutil.rmtree(run.folder.parent, ignore_errors=True)
            run.folder.parent.mkdir(parents=True)
            for _ in range(draw.randint(1, _MOST_KILLS)):
                if (saved := run.steps_saved()) == NUM_STEPS:
                    break
                what = _draw(draw, known, saved)
                history = _with(history, saved, what.world)
                _once(run, what, tally)
            world = draw.choice(_LAST_WORLDS)
            _finish(run, world, _with(history, run.steps_saved(), world), folder / "alone", tally)
            if tally.num_faults > before:
                order.say(tally.faults[-1])
        order.say(f"{kind}: {tally.counts.get(kind, {})}")
    return tally


def _num_broken(tally: Tally) -> int:
    """Return the number of ranks that were broken while running."""
    free = {_LATE, _RESUMED}
    return sum(count for outcomes in tally.counts.values() for name, count in outcomes.items() if name not in free)


RANK_KILLS: Final = Campaign(
    name="rank-kills",
    description=(
        f"Runs on {' and '.join(map(str, _WORLDS))} ranks (gloo), started by the command with torchrun's environment, "
        f"lose one rank up to {_MOST_KILLS} times. It is killed (SIGKILL), or stopped (SIGSTOP, {_STAND_STILL:.0%} of "
        "the times), at a random moment, checkpoint access or collective. The run then resumes, in part on another "
        "number of ranks, at last on 1, 2 or 4. Passed: the other ranks exit with code 1 and a message that names "
        f"the cause, within the timeout ({RANK_TIMEOUT_S:.0f} s here) of meeting, saving and the step. No checkpoint "
        "is torn and no saved step lost. The run ends with the tensors and losses of one process that sums as these "
        "ranks do, to the bit, and no leftovers."
    ),
    count=50,
    run=_break,
)
