"""Runs of many steps with resident memory sampled: growth per step would end a run of weeks."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from faults.campaign import Campaign, Order, Tally
from faults.runs import KINDS, Run, corpus, number_of, training_file
from hybridtrain.profiler.memory_reader import read_process_memory
from hybridtrain.run.train import train
from hybridtrain.units import MIB

_STEPS: Final = 2000
_WARM_UP: Final = 500
_SAVE_EVERY: Final = 100
_MOST_GROWTH_BYTES: Final = MIB
_LOOK_EVERY_S: Final = 0.01


class Looks:
    """Peaks of each window of steps after warm-up; a list of all samples would itself grow.

    Args:
        warm_up: Steps that do not count.
        window: Of steps; at least as long as from one checkpoint to the next, whose copy comes and goes.
    """

    def __init__(self, warm_up: int, window: int) -> None:
        self._warm_up = warm_up
        self._window = window
        self._most: dict[int, int] = {}

    def add(self, step: int, size: int) -> None:
        """Record the bytes in use after a number of steps."""
        if step >= self._warm_up:
            number = (step - self._warm_up) // self._window
            self._most[number] = max(self._most.get(number, 0), size)

    @property
    def growth(self) -> int:
        """Growth in bytes of the highest window over the first one, at least 0."""
        first, *later = [self._most[number] for number in sorted(self._most)]
        return max([0, *(size - first for size in later)])


def _watched(run: Run, steps: int, warm_up: int, save_every: int) -> Callable[[], int]:
    """Return work that trains to the end and reports its growth in KiB."""

    def work() -> int:
        looks = Looks(warm_up, 2 * save_every)
        ends = threading.Event()
        log = run.folder / "log.jsonl"

        def look() -> None:
            done, position = 0, 0
            while not ends.wait(_LOOK_EVERY_S):
                if log.exists():
                    with log.open("rb") as file:
                        file.seek(position)
                        new = file.read()
                    done, position = done + new.count(b"\n"), position + len(new)
                looks.add(done, read_process_memory().rss_bytes)

        planned = training_file(run.kind, run.width)
        schedule = replace(planned.schedule, total_steps=steps)
        longer = replace(planned, num_steps=steps, save_every=save_every, schedule=schedule)
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        train(
            longer, corpus(), run.folder, resume=False, say=lambda _: None, progress=False,
            disk_folder=run.folder.with_name("disk"),
        )  # fmt: skip
        ends.set()
        thread.join()
        return looks.growth // 1024

    return work


def _go_on(order: Order) -> Tally:
    tally = Tally()
    while tally.num_attempts < order.count:
        kind = list(KINDS)[tally.num_attempts % len(KINDS)]
        run = Run(kind, order.folder / str(tally.num_attempts) / "run")
        run.folder.parent.mkdir(parents=True)
        begin = time.monotonic()
        grown = number_of(run, _watched(run, _STEPS, _WARM_UP, _SAVE_EVERY)) * 1024
        order.say(f"{kind}: {grown // 1024} KiB more, {time.monotonic() - begin:.0f} s")
        is_flat = grown <= _MOST_GROWTH_BYTES
        tally.add(kind, "flat" if is_flat else "grew", "" if is_flat else f"{grown // 1024} KiB")
    return tally


LONG_RUNS: Final = Campaign(
    name="long-runs",
    description=(
        f"Runs of each kind take {_STEPS:,} steps and save every {_SAVE_EVERY}; resident memory is sampled every "
        f"{_LOOK_EVERY_S * 1e3:g} ms. Passed: after {_WARM_UP} steps the peak of any {2 * _SAVE_EVERY} steps is "
        f"within {_MOST_GROWTH_BYTES // MIB} MiB of the first one."
    ),
    count=len(KINDS),
    run=_go_on,
)
