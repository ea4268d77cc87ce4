"""``hybridtrain virtual``: a script that wants a card, unmodified, on one that is not there."""

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass

from hybridtrain.errors import ConfigError, HybridTrainError, reasons
from hybridtrain.reports.card_report import (
    bytes_table,
    card_mapping,
    class_table,
    holders_text,
    memory_line,
    refusal_line,
)
from hybridtrain.units import format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.reserved_range import ReservedRange, reserved_range
from hybridtrain.virtual_gpu.facade.basis import Basis, growth_text
from hybridtrain.virtual_gpu.facade.card_run import CardRun
from hybridtrain.virtual_gpu.facade.estimate import by_module
from hybridtrain.virtual_gpu.facade.launchers import missing_script, python_command
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

_MODULES_SHOWN = 8
_STAND_INS_SHOWN = 8
_REFUSALS_SHOWN = 3
_STEPS_SHOWN = 6
_RUNNER = "<frozen runpy>"


class ScriptError(HybridTrainError):
    """A script ended in an error of its own: its traceback, without our frames, is what its author needs."""

    def __init__(self, name: str, error: Exception) -> None:
        told = traceback.TracebackException.from_exception(error)
        ours = max((n for n, frame in enumerate(told.stack) if frame.filename == _RUNNER), default=-1)
        del told.stack[: ours + 1]
        super().__init__(f"{name} ended in an error of its own.\n{''.join(told.format()).rstrip()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """Memory and time of a script on the card that it asked for."""

    script: str
    gpu: VirtualGpu
    run: CardRun
    basis: Basis
    host_memory_bytes: int | None
    reserved: ReservedRange | None
    """By how much reserved bytes move when a run is not quite this one; None of a run that grows with each step."""

    @property
    def fits(self) -> bool:
        """Whether the script was never ended by a full card."""
        return self.run.fits_card

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
            "step_time_s": run.time.seconds if self.fits else None,
            "tokens_per_s": None,
            "bound": run.bound.value if self.fits else None,
            "fitting_stacks": None,
            "stand_ins": list(map(asdict, self.gpu.stand_ins())),
            "without_gradient": list(self.gpu.without_gradient),
            "basis": self.basis.as_mapping(),
        }

    def as_text(self) -> str:
        """Return the same for a reader."""
        run, world = self.run, self.gpu.world
        cards = run.card.name if world.size == 1 else f"rank {world.rank} of {world.size} x {run.card.name}"
        held = [(name or "(no module)", size) for name, size in by_module(run).items()]
        modules, rest = dict(held[:_MODULES_SHOWN]), held[_MODULES_SHOWN:]
        if rest:
            modules[f"({len(rest)} others)"] = sum(size for _, size in rest)
        peaks = [
            f"step {step.step} {to_gib(step.allocated_bytes):.2f} GiB at {step.stage} {step.unit}".strip()
            for step in run.steps
        ]
        if len(peaks) > _STEPS_SHOWN:
            peaks[_STEPS_SHOWN // 2 : -_STEPS_SHOWN // 2] = [f"{len(peaks) - _STEPS_SHOWN} more"]
        lines = [
            f"{self.script}, {cards}: {format_count(self.gpu.num_params)} parameters\n",
            class_table(run),
            f"\n{bytes_table('by module', modules)}",
            f"\n{memory_line(run)}",
            *filter(None, [run.card.note, "" if self.reserved is None else self.reserved.as_text()]),
            f"{format_bytes(self.gpu.host_peak_bytes)} of tensors on the host (planned)",
            "; ".join(peaks),
            f"{format_seconds(run.time.seconds)} a step, {run.time.bound}-bound (estimated)"
            if self.fits
            else "no time of a step: the last one did not end",
            *self._remarks(),
            self.basis.as_text(),
            holders_text(run),
            self._verdict(),
        ]
        return "\n".join(filter(None, lines))

    def _remarks(self) -> Iterator[str]:
        stand_ins, without_gradient = self.gpu.stand_ins(), self.gpu.without_gradient
        if stand_ins:
            yield "placeholder values that the script read (nothing was computed):"
            for use in stand_ins[:_STAND_INS_SHOWN]:
                yield f"  {use.where}: {use.op}, {use.rule}" + (f", {use.times} times" if use.times > 1 else "")
            if len(stand_ins) > _STAND_INS_SHOWN:
                yield f"  and {len(stand_ins) - _STAND_INS_SHOWN} more places (--json lists them)"
        if without_gradient:
            names = ", ".join(sorted(set(without_gradient))[:3])
            yield f"WARNING: {len(without_gradient)} trainable parameters got no gradient, as in {names}"
        refusals = self.basis.refusals[1:]
        if refusals:
            yield "refused by the virtual card, too, and caught by the script:"
            yield from (f"  {text}" for text in refusals[:_REFUSALS_SHOWN])
            if len(refusals) > _REFUSALS_SHOWN:
                yield f"  and {len(refusals) - _REFUSALS_SHOWN} more (--json lists them)"

    def _verdict(self) -> str:
        basis = self.basis
        worth = basis.worth(fits=self.fits)
        if basis.growth is not None and self.fits:
            free = self.run.card.memory_bytes - self.run.device_used_bytes
            worth.append(f"GROWS: {growth_text(basis.growth, basis.num_steps or basis.num_backwards, free)}")
        if self.fits:
            return "; ".join([self.run.card.told(self.run.verdict), *worth])
        refused = refusal_line(self.run, before_steps="before the first step")
        return "; ".join([refused, "what the whole step takes, a larger --card tells", *worth])


def run_script(
    command: Sequence[str], gpu: VirtualGpu, *, host_memory_bytes: int | None, quiet: bool = False
) -> VirtualRun:
    """Run a script on a virtual card to its end, to the last iteration asked for, or to the request that is refused.

    Args:
        command: A Python file, ``-m`` and a module, or a launcher; then the script's own arguments.
        gpu: The card, not entered yet.
        host_memory_bytes: Of the machine around the card; None: as much as is asked for.
        quiet: Send what the script prints to standard error.

    Raises:
        ConfigError: The script is not there, or it ended by itself with a code of its own, or used no card.
        ScriptError: It ended in an error of its own.
    """
    python = python_command(list(command))
    if python is None:
        fault = "-m: says no module; give its name after it." if command[0] == "-m" else missing_script(command[0])
        raise ConfigError("virtual", [fault])
    output = redirect_stdout(sys.stderr) if quiet else nullcontext()
    with output, _script_errors(python.name, gpu), gpu:
        python.run()
    run, basis = gpu.report(), gpu.basis()
    if not run.trace.sizes and gpu.oom is None:
        fault = (
            f"{python.name}: nothing was put on the card; does it choose the CPU, or start other processes that train?"
        )
        raise ConfigError("virtual", [f"{fault} Name the script that trains."])
    reserved = None
    if basis.growth is None:
        reserved = reserved_range(
            run.trace, workspace_bytes=run.card.cublas_workspace_bytes, config=gpu.config or AllocatorConfig(),
            capacity_bytes=run.card.allocator_capacity_bytes,
        )  # fmt: skip
    return VirtualRun(
        script=python.name, gpu=gpu, run=run, basis=basis, host_memory_bytes=host_memory_bytes, reserved=reserved
    )


@contextmanager
def _script_errors(name: str, gpu: VirtualGpu) -> Iterator[None]:
    """Wrap a script's own errors in ``ScriptError``; suppress those after an out-of-memory, which the report shows."""
    try:
        yield
    except HybridTrainError:
        raise
    except (Exception, SystemExit) as error:
        if gpu.oom is not None:
            return
        refusal = next((cause for cause in reasons(error) if isinstance(cause, HybridTrainError)), None)
        if refusal is not None:
            raise refusal from error
        if not isinstance(error, SystemExit):
            raise ScriptError(name, error) from error
        if error.code not in {None, 0}:
            told = "".join(f" {text}" for text in gpu.ledger.seen.refusals[-1:])
            raise ConfigError(
                "virtual", [f"{name}: the script ended by itself with code {error.code}.{told}"]
            ) from error
