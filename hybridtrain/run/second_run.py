"""A second run of a script that ran out of memory, on a card without limit: what the whole run needs.

The second run is a new process, in the folder and the environment in which the first began. Its output is dropped. The
script itself still sees the error of a full card, in the first run.
"""

import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridtrain.errors import short_text
from hybridtrain.run.child_card import FOLDER, calling
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
_BY_CLASS_ALONE = {TensorClass.WEIGHT, TensorClass.MASTER, TensorClass.GRAD, TensorClass.OPTIM_STATE}


@dataclass(frozen=True, slots=True)
class Begin:
    """What a script may change, as it is now. Processes of the script are on no card in a second run."""

    folder: str = field(default_factory=os.getcwd)
    environment: dict[str, str] = field(
        default_factory=lambda: {name: value for name, value in os.environ.items() if name != FOLDER}
    )
    path: list[str] = field(default_factory=lambda: sys.path[:])


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


def second_run(python: PythonCommand, gpu: VirtualGpu, begin: Begin, failed_step: int) -> WholeRun | None:
    """Run a script again, in a new process, on a card without limit; None where that ends without answer.

    Args:
        python: The script.
        gpu: The card of the first run.
        begin: Folder and environment in which the first run began.
        failed_step: The step in which that ran out of memory; without a number of steps asked for, the second run ends
            after two more, but not before growth would show.
    """
    with TemporaryDirectory(prefix="hybridtrain-second-") as name:
        job, answer = Path(name, "job"), Path(name, "answer")
        job.write_bytes(pickle.dumps((python, gpu.settings(), failed_step, begin.path)))
        subprocess.run(  # noqa: S603  our own module
            [sys.executable, "-c", calling(__name__, "main"), str(job), str(answer)], cwd=begin.folder,
            env=begin.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip
        return pickle.loads(answer.read_bytes()) if answer.exists() else None  # noqa: S301  from our own process


def main() -> None:
    """Run the job that ``second_run`` left."""
    job, answer = map(Path, sys.argv[1:])
    python, settings, failed_step, sys.path[:] = pickle.loads(job.read_bytes())  # noqa: S301  from our parent
    answer.write_bytes(pickle.dumps(run_whole(python, VirtualGpu(**settings), failed_step)))


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
            problem = short_text(error)
    run, notes = whole.report(), whole.ledger.seen
    return WholeRun(
        capacity_bytes=least_capacity(run.trace, whole.config),
        num_steps=whole.steps_done,
        largest=_largest(run.trace, notes.allocated_at),
        savings=savings(
            run.trace, whole.config, gpu.card, float32_state=whole.float32_state, can_fuse=whole.can_fuse
        ),
        growth=whole.basis().growth,
        problem=problem,
    )  # fmt: skip


def _largest(trace: LedgerTrace, places: Mapping[int, str]) -> tuple[tuple[str, int], ...]:
    peak = find_peak(trace, range(len(trace.events)))
    found = Counter[str]()
    for index in trace.alive(peak.event):
        kind = trace.classes[index]
        name = kind.replace("_", " ")
        if kind not in _BY_CLASS_ALONE:
            name = f"{trace.units[index] or name} ({places.get(index, 'unknown line')})"
        found[name] += trace.sizes[index]
    return tuple(found.most_common(_LARGEST))
