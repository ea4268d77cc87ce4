"""Damaged files of every kind: each reader reports the fault, soon, and does nothing else."""

import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from faults.campaign import Campaign, Order, Tally
from faults.mutate import MUTATIONS, Place
from faults.parsers import Parser, parsers
from hybridtrain.data.template_renderer import PROGRAM
from hybridtrain.errors import HybridTrainError

LONGEST_S: Final = 5.0
"""Of the processor's time: others may be using it."""
_LONGEST_WAIT_S: Final = 60.0
_FORBIDDEN: Final = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect",
    "ctypes.dlopen", "shutil.rmtree", "os.remove", "os.rename", "os.rmdir", "os.symlink", "pty.spawn",
)  # fmt: skip
"""Audit events of what no file may bring about by being read."""

_STEP: Final = st.tuples(
    st.sampled_from(sorted(MUTATIONS)),
    st.builds(Place, st.floats(0, 1, exclude_max=True), st.integers(0, 2**20)),
)
STEPS: Final = st.lists(_STEP, min_size=1, max_size=4)
"""Damages, one after the other."""


class _HangError(BaseException):
    """Raised when reading takes too long; no ``except Exception`` of a reader catches it."""


class _Watch:
    """Records executed calls while a file is read; the hook stays until the process ends."""

    def __init__(self) -> None:
        self._is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._is_on:
            return
        if event == "subprocess.Popen" and isinstance(arguments[1], list) and str(PROGRAM) in arguments[1]:
            return  # it renders templates where they can do nothing
        is_named = event == "open" and not isinstance(arguments[0], int)  # a number: a pipe of that process
        writes = is_named and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if event.startswith(_FORBIDDEN) or writes:
            self.seen.append(f"{event} {arguments[0] if arguments else ''}")

    @contextmanager
    def on(self) -> Iterator[None]:
        self.seen.clear()
        writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # of modules that reading imports
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            sys.dont_write_bytecode = writes_bytecode


def attempt(parser: Parser, content: bytes, folder: Path, watch: _Watch) -> tuple[str, str]:
    """Read a damaged file; return the outcome in a word, and the failure."""
    path = folder / parser.file
    path.write_bytes(content)
    begin = time.process_time()
    # Again and again: an exception that is raised within a callback of the garbage collector is lost.
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S, 0.5)
    signal.setitimer(signal.ITIMER_REAL, _LONGEST_WAIT_S, 0.5)
    try:
        with watch.on():
            parser.read(path)
        outcome, fault = "read", ""
    except (HybridTrainError, OSError):
        outcome, fault = "refused", ""
    except _HangError:
        outcome, fault = "hang", f"longer than {LONGEST_S:g} s"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = str(error).splitlines()[0][:80] if str(error) else ""
        outcome, fault = "traceback", f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno} ({told})"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    if watch.seen:
        return "executed", watch.seen[0]
    if time.process_time() - begin > LONGEST_S:
        return "hang", f"longer than {LONGEST_S:g} s"
    return outcome, fault


def mutate_all(order: Order, subjects: list[Parser] | None = None) -> Tally:
    """Damage the samples of all parsers ``order.count`` times in total."""
    found = list(parsers(order.folder)) if subjects is None else subjects
    tally, watch = Tally(), _Watch()
    alarms = (signal.SIGALRM, signal.SIGPROF)
    previous = [signal.signal(alarm, _ring) for alarm in alarms]
    try:
        for number, parser in enumerate(found):
            count = order.count * (number + 1) // len(found) - order.count * number // len(found)
            outcome, fault = attempt(parser, parser.sample, order.folder, watch)
            if outcome != "read":
                raise AssertionError(f"{parser.name}: the sound file is not read ({fault or outcome})")
            _mutate(parser, count, order, tally, watch)
            order.say(f"{parser.name}: {tally.counts.get(parser.name, {})}")
    finally:
        for alarm, handler in zip(alarms, previous, strict=True):
            signal.signal(alarm, handler)
    return tally


def _mutate(parser: Parser, count: int, order: Order, tally: Tally, watch: _Watch) -> None:
    def damage(steps: list[tuple[str, Place]]) -> None:
        content = parser.sample
        for name, place in steps:
            content = MUTATIONS[name](content, place)
        outcome, fault = attempt(parser, content, order.folder, watch)
        if fault:
            fault = f"{fault} after {', '.join(f'{name} {place.where:.4f} {place.number}' for name, place in steps)}"
        tally.add(parser.name, outcome, fault)

    draws = settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    while (done := sum(tally.counts.get(parser.name, {}).values())) < count:
        before = done
        rest = settings(draws, max_examples=count - done)
        seed(order.seed + done)(rest(given(STEPS)(damage)))()
        if sum(tally.counts.get(parser.name, {}).values()) == before:
            break


def _ring(_number: int, _frame: object) -> None:
    raise _HangError


MUTATIONS_CAMPAIGN: Final = Campaign(
    name="mutations",
    description=(
        "Valid files of every kind that the program reads, damaged by hypothesis in one to four places: bits, "
        "ranges, lines, numbers, texts, nesting of 100 to 100,000. Passed: read, or refused with a message, within "
        f"{LONGEST_S:g} s of CPU time. Audit hooks see no process, no connection and no written file."
    ),
    count=100_000,
    run=mutate_all,
)
