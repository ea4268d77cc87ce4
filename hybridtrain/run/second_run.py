"""A second run of a script that ran out of memory, on a card without limit: what the whole run needs.

The second run is a process that was copied before the first one began, so it finds everything as the first did. Its
output is dropped. The script itself still sees the error of a full card, in the first run.
"""

import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, find_peak
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.cards.card import Card
from hybridtrain.virtual_gpu.facade.basis import NUM_STEPS_OF_GROWTH, Growth
from hybridtrain.virtual_gpu.facade.launchers import PythonCommand
from hybridtrain.virtual_gpu.facade.savings import Saving, least_capacity, savings
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

_LARGEST = 4
_STEPS_AFTER = 2
"""Steps beyond the one that failed."""
_EXIT = os._exit
"""The true one, also while a virtual card replaces it."""
_BY_CLASS_ALONE = {TensorClass.WEIGHT, TensorClass.MASTER, TensorClass.GRAD, TensorClass.OPTIM_STATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """Memory of a run that no card limited."""

    capacity_bytes: int
    """Least reserved bytes under which the run gets through."""
    num_steps: int
    largest: tuple[tuple[str, int], ...]
    """Largest holders at the peak: a class of tensors, or a module and the line that allocated them."""
    savings: tuple[Saving, ...]
    growth: Growth | None
    problem: str
    """The error that ended the run; empty: none."""

    def needed_bytes(self, card: Card) -> int:
        """Return the need on a card, with its CUDA context."""
        return self.capacity_bytes + card.context_bytes

    def as_mapping(self, card: Card) -> dict[str, object]:
        """Return plain figures for a card, in bytes."""
        return {
            "needed_bytes": self.needed_bytes(card),
            "missing_bytes": self.needed_bytes(card) - card.memory_bytes,
            "num_steps": self.num_steps,
            "largest": dict(self.largest),
            "with": {one.technique: one.capacity_bytes + card.context_bytes for one in self.savings},
            "problem": self.problem,
        }


class Spare:
    """A copy of this process that waits; where processes cannot be copied there is none.

    Args:
        work: Called in the copy with what ``run`` is given; its result must be picklable.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._process = 0
        if not hasattr(os, "fork"):
            return
        (self._inbox, outbox_of_here), (inbox_of_here, outbox) = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the copy does not use
            self._process = os.fork()
        if self._process:
            os.close(self._inbox)
            os.close(outbox)
            self._inbox, self._outbox = inbox_of_here, outbox_of_here
            return
        try:
            os.close(outbox_of_here)
            os.close(inbox_of_here)
            asked = _read_all(self._inbox)
            if asked:
                _silence()
                with os.fdopen(outbox, "wb") as file:
                    pickle.dump(work(pickle.loads(asked)), file)  # noqa: S301  from this process
        finally:
            _EXIT(0)

    def run(self, asked: Any) -> Any:
        """Return the result of the work; None without a copy, or where it failed."""
        if not self._process:
            return None
        with os.fdopen(self._outbox, "wb") as file:
            pickle.dump(asked, file)
        found = _read_all(self._inbox)
        self._end()
        return pickle.loads(found) if found else None  # noqa: S301  from a copy of this process

    def dismiss(self) -> None:
        """End the copy without work."""
        if self._process:
            os.close(self._outbox)
            self._end()

    def _end(self) -> None:
        os.close(self._inbox)
        os.waitpid(self._process, 0)
        self._process = 0


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read()


def _silence() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)


def run_whole(python: PythonCommand, gpu: VirtualGpu, failed_step: int) -> WholeRun:
    """Run a script on a card without limit.

    Args:
        python: The script.
        gpu: The card of the first run.
        failed_step: The step in which that ran out of memory; without a number of steps asked for, the run ends after
            two more, but not before growth would show.
    """
    whole = gpu.without_limit(steps=max(NUM_STEPS_OF_GROWTH, failed_step + _STEPS_AFTER))
    problem = ""
    try:
        with whole:
            python.run()
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the script raises
        if not isinstance(error, SystemExit) or error.code not in {None, 0}:
            problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    run, notes = whole.report(), whole.ledger.seen
    return WholeRun(
        capacity_bytes=least_capacity(run.trace, whole.config),
        num_steps=whole.steps_done,
        largest=_largest(run.trace, notes.allocated_at),
        savings=savings(run.trace, whole.config, float32_state=whole.float32_state, can_fuse=whole.can_fuse),
        growth=whole.basis().growth,
        problem=problem,
    )  # fmt: skip


def _largest(trace: LedgerTrace, places: Mapping[int, str]) -> tuple[tuple[str, int], ...]:
    peak = find_peak(trace, range(len(trace.events)))
    held = dict.fromkeys(trace.events[: peak.event + 1])
    found = Counter[str]()
    for index in held:
        if index >= 0 and ~index not in held:
            kind = trace.classes[index]
            name = kind.replace("_", " ")
            if kind not in _BY_CLASS_ALONE:
                name = f"{trace.units[index] or name} ({places.get(index, 'unknown line')})"
            found[name] += trace.sizes[index]
    return tuple(found.most_common(_LARGEST))
