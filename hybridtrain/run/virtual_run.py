"""``hybridtrain virtual``: an unmodified script that needs a card, on a virtual one."""

import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from itertools import takewhile

from hybridtrain.errors import ConfigError, HybridTrainError, reasons
from hybridtrain.reports.card_report import (
    bytes_table,
    card_mapping,
    class_table,
    figure_lines,
    peak_figures,
    place_of,
    sizes_text,
    verdict_line,
)
from hybridtrain.run.child_card import ChildAnswer, child_card, run_program
from hybridtrain.run.second_run import Begin, WholeRun, second_run
from hybridtrain.units import format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.reserved_range import ReservedRange, reserved_range
from hybridtrain.virtual_gpu.cards.card import Card, FitVerdict
from hybridtrain.virtual_gpu.facade.basis import PlanBasis, growth_text
from hybridtrain.virtual_gpu.facade.card_run import CardRun
from hybridtrain.virtual_gpu.facade.estimate import by_module
from hybridtrain.virtual_gpu.facade.launchers import PythonCommand, missing_script, python_command
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

_PLACES_SHOWN = 3
_ANY_TRAINING = 10**6
"""Steps: what fills the card later is no leak to speak of, as a loss kept for a plot."""
_RUNNER = "<frozen runpy>"
_COMPILES = (
    "compiles CUDA code, for which there is no toolkit here (CUDA_HOME), and which a virtual card cannot run; choose "
    "an implementation in PyTorch, as torch_adam in a configuration of DeepSpeed."
)


class ScriptError(HybridTrainError):
    """The script raised an error of its own; the message has its traceback without our frames."""

    def __init__(self, name: str, error: Exception) -> None:
        told = traceback.TracebackException.from_exception(error)
        ours = max((n for n, frame in enumerate(told.stack) if frame.filename == _RUNNER), default=-1)
        del told.stack[: ours + 1]
        super().__init__(f"{name} raised an error of its own.\n{''.join(told.format()).rstrip()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """Memory and time of a script on a virtual card."""

    script: str
    gpu: VirtualGpu
    run: CardRun
    basis: PlanBasis
    host_memory_bytes: int | None
    reserved: ReservedRange | None
    """Effect of small changes of the run on reserved bytes; None if memory grows with each step."""
    worst: Mapping[str, str] | None = None
    """A line for each phase, and for the longest row; None: not asked for."""
    whole: WholeRun | None = None
    """The run without limit, if the card was full; None also where there could be no second run."""

    @property
    def fits(self) -> bool:
        """Whether the script was never ended by a full card, and will not be by what grows."""
        return self.run.fits_card and self.full_at_step is None

    @property
    def needed_bytes(self) -> int:
        """Of the card: what the run takes, where memory ran out what the second run needs, with CUDA's context."""
        if self.whole is None or self.whole.problem:
            return self.run.device_used_bytes
        return self.whole.needed_bytes(self.run.card)

    @property
    def full_at_step(self) -> int | None:
        """The step at which growing memory fills the card, if the script was stopped before; None: it does not."""
        return self._growth_fills_at if self.gpu.was_stopped else None

    @property
    def _growth_fills_at(self) -> int | None:
        """The step at which growth fills a card that is not full; None: at none that a training reaches."""
        if not self.run.fits_card or self.basis.growth is None:
            return None
        full = self.basis.growth.full_at(self._num_steps, self._free_bytes)
        return full if full < _ANY_TRAINING else None

    @property
    def _num_steps(self) -> int:
        return self.basis.num_steps or self.basis.num_backwards

    @property
    def _free_bytes(self) -> int:
        return self.run.card.memory_bytes - self.run.device_used_bytes

    def as_mapping(self) -> dict[str, object]:
        """Return the plain figures, bytes and seconds, by the names that ``dry-run --json`` uses."""
        run = self.run
        return card_mapping(run) | {
            "params": self.gpu.num_params,
            "world": self.gpu.world.size,
            "rank": self.gpu.world.rank,
            "reserved_range": None if self.reserved is None else self.reserved.as_mapping(),
            "host_peak_bytes": self.gpu.host_peak_bytes,
            "host_by_class": {},
            "disk_peak_bytes": 0,
            "host_needed_bytes": self.gpu.host_peak_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "fits_host": True,
            "by_module": by_module(run),
            "fits": self.fits,
            "full_at_step": self.full_at_step,
            "step_time_s": run.time.seconds if run.fits_card else None,
            "tokens_per_s": None,
            "bound": run.bound.value if run.fits_card else None,
            "fitting_stacks": None,
            "placeholders": list(map(asdict, self.gpu.placeholders())),
            "without_gradient": list(self.gpu.without_gradient),
            "basis": self.basis.as_mapping(),
            "error_after_oom": self.gpu.error_after_oom,
            "worst": None if self.worst is None else dict(self.worst),
            "whole_run": None if self.whole is None else self.whole.as_mapping(run.card),
        }

    def as_text(self, *, explain: bool = False) -> str:
        """Return the same for a reader: the verdict first; with ``explain`` also tables, and every place."""
        run, world = self.run, self.gpu.world
        cards = run.card.name if world.size == 1 else f"{run.card.name} (rank {world.rank} of {world.size})"
        whole = self.whole
        figures = [*self._of_whole_run(), *(one for one in peak_figures(run) if whole is None or one[0] != "largest")]
        verdict = verdict_line(
            run, self.script, run.verdict, cards=cards, before_steps="before the first step",
            needed_bytes=None if whole is None or whole.problem else whole.needed_bytes(run.card),
            full_at_step=self.full_at_step,
        )  # fmt: skip
        figures.append(("parameters", format_count(self.gpu.num_params)))
        if run.fits_card:
            figures.insert(-1, ("by module", sizes_text(_by_list(by_module(run)))))
            speed = f"{format_seconds(run.time.seconds)} per step, bottleneck: {run.time.bound} (estimated)"
            figures.insert(0, ("speed", speed))
        figures += (self.worst or {}).items()
        lines = [
            verdict,
            *(f"  {caveat}" for caveat in self._caveats()),
            *figure_lines(figures),
            *(f"  {remark}" for remark in self._remarks(explain=explain)),
            f"  {self.basis.as_text()}",
            *([f"  {run.card.note}"] if run.card.note else []),
        ]
        if explain:
            lines += [
                f"\n{class_table(run)}",
                f"\n{bytes_table('by module', by_module(run))}\n",
                *(
                    f"step {step.step}: {to_gib(step.allocated_bytes):.2f} GiB at {place_of(step)}"
                    for step in run.steps
                ),
                f"host memory: {format_bytes(self.gpu.host_peak_bytes)} of tensors (planned)",
                *([] if self.reserved is None else [self.reserved.as_text()]),
            ]
        return "\n".join(lines)

    def _caveats(self) -> list[str]:
        """Return why the verdict may be another on a real card."""
        basis, run = self.basis, self.run
        found = basis.caveats(fits=run.fits_card)
        free, steps = self._free_bytes, self._num_steps
        if basis.growth is not None and (not run.fits_card or self._growth_fills_at is not None):
            found.append(f"GROWS: {growth_text(basis.growth, steps, free if run.fits_card else None)}")
        reserved = self.reserved
        if run.fits_card and reserved is not None and (reserved.margin_bytes > free or reserved.lengths_fit is False):
            found.append(reserved.as_text())
        if self.gpu.error_after_oom:
            found.append(f"UNCLEAR: the script caught this error, and then ended in {self.gpu.error_after_oom}")
        if not run.fits_card and self.whole is None:
            found.append("a larger --card shows what the whole step takes")
        return found

    def _of_whole_run(self) -> Iterator[tuple[str, str]]:
        """Yield what the second run told: the need, who holds it, and what would lower it."""
        whole, card = self.whole, self.run.card
        if whole is None:
            return
        missing = whole.needed_bytes(card) - card.memory_bytes
        ran = f"run a second time on a card without limit, {whole.num_steps} steps"
        if whole.growth is not None:
            ran += "; each further step needs more"
        if whole.problem:
            yield "missing", f"{format_bytes(max(0, missing))} or more; {ran}, which ended in {whole.problem}"
        else:
            yield "missing", f"{format_bytes(missing)} ({ran})"
        yield "at its peak", sizes_text(dict(whole.largest))
        needs = ((one.technique, one.capacity_bytes + card.context_bytes) for one in whole.savings)
        if whole.growth is None:
            yield "needs with", ", ".join(f"{technique} {_outcome(size, card)}" for technique, size in needs)
        else:  # nothing fits for ever
            until = f"needs until step {whole.num_steps} with"
            yield until, ", ".join(f"{technique} {format_bytes(size)}" for technique, size in needs)
        yield "ran out", f"at {self.basis.ended_at}"

    def _remarks(self, *, explain: bool) -> Iterator[str]:
        placeholders, without_gradient = self.gpu.placeholders(), self.gpu.without_gradient
        if explain and placeholders:
            yield "placeholder values that the script read (nothing was computed):"
            for use in placeholders:
                yield f"  {use.where}: {use.op}, {use.rule}" + (f", {use.times} times" if use.times > 1 else "")
        elif placeholders:
            places = ", ".join(f"{use.where} ({use.rule})" for use in placeholders[:_PLACES_SHOWN])
            more = len(placeholders) - _PLACES_SHOWN
            yield f"placeholder values read at {places}" + (f" and {more} more places (--explain)" if more > 0 else "")
        if without_gradient:
            names = ", ".join(sorted(set(without_gradient))[:3])
            yield f"WARNING: {len(without_gradient)} trainable parameters got no gradient, as in {names}"
        refusals = self.basis.refusals[1:]
        if refusals:
            shown = len(refusals) if explain else _PLACES_SHOWN
            yield "refused by the virtual card, too, and caught by the script:"
            yield from (f"  {text}" for text in refusals[:shown])
            if len(refusals) > shown:
                yield f"  and {len(refusals) - shown} more (--explain lists them)"


def _outcome(needed_bytes: int, card: Card) -> str:
    fits = card.verdict(needed_bytes, fits=needed_bytes <= card.memory_bytes)
    return format_bytes(needed_bytes) + ("" if fits is FitVerdict.NO else f" ({fits.value})")


def _by_list(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by module without the prefix that all share, numbered modules of one list together: ``layers.*``."""
    paths = [name.split(".") for name in sizes if "." in name]
    shared = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
    found = Counter[str]()
    for name, size in sizes.items():
        parts = ["*" if part.isdecimal() else part for part in name.split(".")]
        found[".".join(parts[shared:] or parts) or "(no module)"] += size
    return found


class NothingPlannedError(ConfigError):
    """No tensor was put on the card."""


def run_script(
    command: Sequence[str], gpu: VirtualGpu, *, host_memory_bytes: int | None, quiet: bool = False,
    for_children: object = None,
) -> VirtualRun | ChildAnswer:  # fmt: skip
    """Run a script on a virtual card to its end, to the last requested iteration, or to an out-of-memory error.

    Python processes that it starts apart are on the card too; if it uses no card itself, the answer is theirs.

    Args:
        command: A Python file, ``-m`` and a module, a launcher, or another program that starts Python; then arguments.
        gpu: The card, not entered yet.
        host_memory_bytes: Host memory of the machine; None: unlimited.
        quiet: Send what the script prints to standard error.
        for_children: Settings that child processes are given.

    Raises:
        ConfigError: The script is not there, or it ended by itself with a code of its own, or used no card.
        ScriptError: It ended in an error of its own.
    """
    python = python_command(list(command))
    with child_card(gpu, for_children) as children:
        try:
            if python is not None:
                return run_python(python, gpu, host_memory_bytes=host_memory_bytes, quiet=quiet)
            code = run_program(command, gpu, quiet=quiet)
        except NothingPlannedError:
            answer = children.answer()
            if answer is None:
                raise
            return answer
        answer, errors = children.answer(), children.errors()
    if answer is not None:
        return answer
    if code is None:
        fault = "-m: says no module; give its name after it." if command[0] == "-m" else missing_script(command[0])
        raise ConfigError("virtual", [fault])
    told = "".join(f"\n{error}" for error in errors)
    raise NothingPlannedError(
        "virtual", [f"{command[0]}: exited with code {code}, and no Python that it started used the card.{told}"]
    )


def run_python(
    python: PythonCommand, gpu: VirtualGpu, *, host_memory_bytes: int | None, quiet: bool = False
) -> VirtualRun:
    """Run a script or module in this process; as ``run_script``."""
    output = redirect_stdout(sys.stderr) if quiet else nullcontext()
    begin = Begin()
    with output, _script_errors(python.name, gpu), gpu:
        python.run()
    # A script that searches for what fits by filling the card would fill one without limit, too.
    searches = gpu.ledger.allocator.num_ooms > 1
    whole = None if gpu.oom is None or searches else second_run(python, gpu, begin, gpu.oom.step)
    run, basis = gpu.report(), gpu.basis()
    if not run.trace.sizes and gpu.oom is None:
        fault = (
            f"{python.name}: nothing was put on the card; does it choose the CPU, or start other processes that train?"
        )
        raise NothingPlannedError("virtual", [f"{fault} Name the script that trains."])
    if basis.growth is None and whole is not None:
        basis.growth = whole.growth
    reserved = None
    if basis.growth is None:
        reserved = reserved_range(
            run.trace, workspace_bytes=run.card.cublas_workspace_bytes, config=gpu.config or AllocatorConfig(),
            capacity_bytes=run.card.allocator_capacity_bytes,
        )  # fmt: skip
    return VirtualRun(
        script=gpu.script or python.name, gpu=gpu, run=run, basis=basis, host_memory_bytes=host_memory_bytes,
        reserved=reserved, worst=None if gpu.ledger.worst is None else gpu.ledger.worst.rows(run.trace), whole=whole,
    )  # fmt: skip


@contextmanager
def _script_errors(name: str, gpu: VirtualGpu) -> Iterator[None]:
    """Wrap a script's own errors in ``ScriptError``; suppress those after an out-of-memory, which the report shows.

    Ctrl-C ends the script where it is, as a number of steps would, once there is a step to tell of.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not gpu.steps_done:
            raise
        gpu.was_stopped = True
    except HybridTrainError:
        raise
    except (Exception, SystemExit) as error:
        if gpu.oom is not None:
            return
        refusal = next((cause for cause in reasons(error) if isinstance(cause, HybridTrainError)), None)
        if refusal is not None:
            raise refusal from error
        if not isinstance(error, SystemExit):
            if any(isinstance(cause, OSError) and "CUDA_HOME" in str(cause) for cause in reasons(error)):
                raise ConfigError("virtual", [f"{name}: {_COMPILES}"]) from error
            raise ScriptError(name, error) from error
        if error.code not in {None, 0}:
            told = "".join(f" {text}" for text in gpu.ledger.seen.refusals[-1:])
            raise ConfigError("virtual", [f"{name}: the script exited with code {error.code}.{told}"]) from error
