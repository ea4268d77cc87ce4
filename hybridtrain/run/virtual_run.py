"""``hybridtrain virtual``: a script that wants a card, unmodified, on one that is not there."""

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.errors import ConfigError, HybridTrainError, reasons
from hybridtrain.reports.card_report import (
    bytes_table,
    card_mapping,
    class_table,
    holders_text,
    memory_line,
    refusal_line,
)
from hybridtrain.reports.exports import write_run_snapshot, write_run_trace
from hybridtrain.units import format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.reserved_range import ReservedRange, reserved_range
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.cards.links import World
from hybridtrain.virtual_gpu.facade.basis import Basis, growth_text
from hybridtrain.virtual_gpu.facade.card_run import CardRun
from hybridtrain.virtual_gpu.facade.estimate import by_module
from hybridtrain.virtual_gpu.facade.launchers import missing_script, python_command
from hybridtrain.virtual_gpu.facade.stand_in import StandIn
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
    """What a script takes of the card that it asked for."""

    script: str
    run: CardRun
    world: World
    num_params: int
    host_peak_bytes: int
    host_memory_bytes: int | None
    stand_ins: tuple[StandIn, ...]
    without_gradient: tuple[str, ...]
    basis: Basis
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
            "params": self.num_params,
            "world": self.world.size,
            "rank": self.world.rank,
            "reserved_range": None if self.reserved is None else self.reserved.as_mapping(),
            "host_peak_bytes": self.host_peak_bytes,
            "host_by_class": {},
            "disk_peak_bytes": 0,
            "host_needed_bytes": self.host_peak_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "fits_host": True,
            "by_module": by_module(run),
            "fits": self.fits,
            "step_time_s": run.time.seconds if self.fits else None,
            "tokens_per_s": None,
            "bound": run.bound.value if self.fits else None,
            "fitting_stacks": None,
            "stand_ins": [
                {"where": use.where, "op": use.op, "rule": use.rule, "times": use.times} for use in self.stand_ins
            ],
            "without_gradient": list(self.without_gradient),
            "basis": self.basis.as_mapping(),
        }

    def as_text(self) -> str:
        """Return the same for a reader."""
        run = self.run
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
            f"{self.script}, {self._cards()}: {format_count(self.num_params)} parameters\n",
            class_table(run),
            f"\n{bytes_table('by module', modules)}",
            f"\n{memory_line(run)}",
            *filter(None, [run.card.source_note, "" if self.reserved is None else self.reserved.as_text()]),
            f"{format_bytes(self.host_peak_bytes)} of tensors on the host (planned)",
            "; ".join(peaks),
            self._speed(),
        ]
        lines += [*self._remarks(), self.basis.as_text(), holders_text(run), self._verdict()]
        return "\n".join(filter(None, lines))

    def _speed(self) -> str:
        if not self.fits:
            return "no time of a step: the last one did not end"
        time = self.run.time
        return f"{format_seconds(time.seconds)} a step, {time.bound}-bound (estimated)"

    def _cards(self) -> str:
        name, world = self.run.card.name, self.world
        return name if world.size == 1 else f"rank {world.rank} of {world.size} x {name}"

    def _remarks(self) -> Iterator[str]:
        if self.stand_ins:
            yield "placeholder values that the script read (nothing was computed):"
            for use in self.stand_ins[:_STAND_INS_SHOWN]:
                yield f"  {use.where}: {use.op}, {use.rule}" + (f", {use.times} times" if use.times > 1 else "")
            if len(self.stand_ins) > _STAND_INS_SHOWN:
                yield f"  and {len(self.stand_ins) - _STAND_INS_SHOWN} more places (--json lists them)"
        if self.without_gradient:
            names = ", ".join(sorted(set(self.without_gradient))[:3])
            yield f"WARNING: {len(self.without_gradient)} trainable parameters got no gradient, as in {names}"

        refusals = self.basis.refusals[1:]
        if refusals:
            yield "refused by the virtual card, too, and caught by the script:"
            yield from (f"  {text}" for text in refusals[:_REFUSALS_SHOWN])
            if len(refusals) > _REFUSALS_SHOWN:
                yield f"  and {len(refusals) - _REFUSALS_SHOWN} more (--json lists them)"

    def _verdict(self) -> str:
        """Return whether it fits, and in the same line what that is worth."""
        basis = self.basis
        worth = basis.worth(fits=self.fits)
        if basis.growth is not None and self.fits:
            free = self.run.card.memory_bytes - self.run.device_used_bytes
            worth.append(f"GROWS: {growth_text(basis.growth, basis.num_steps or basis.num_backwards, free)}")
        refused = refusal_line(self.run, before_steps="before the first step") if self.run.oom else ""
        hint = [refused, "what the whole step takes, a larger --card tells"]
        return "; ".join([*([self.run.card.told(self.run.verdict)] if self.fits else hint), *worth])


def run_script(
    script: str, arguments: Sequence[str], *, card: str, host_memory: float | None = None, steps: int | None = None,
    world: int | None = None, rank: int = 0, link: str = "pcie",
    expandable_segments: bool = False, snapshot: Path | None = None, trace: Path | None = None, quiet: bool = False,
) -> VirtualRun:  # fmt: skip
    """Run a script to its end, to its ``steps``-th iteration or to the request that the card refuses.

    Args:
        script: A Python file, ``-m`` and then the module as the first argument, or a launcher.
        arguments: The script's own.
        card: Name of a card, or a .toml file with its figures.
        host_memory: Bytes of the machine around the card; None: as much as is asked for.
        steps: After how many iterations the script is stopped, each a step of every optimizer.
        world: Cards that torchrun would start it on; None: one that nobody launched, or what a launcher says.
        rank: Which of them this run is.
        link: What joins them.
        expandable_segments: Plan with torch's expandable_segments:True.
        snapshot: Where to write a memory_viz snapshot.
        trace: Where to write a Chrome trace.
        quiet: Send what the script prints to standard error.

    Raises:
        ConfigError: The script is not there, or it ended by itself with a code of its own, or used no card.
        ScriptError: It ended in an error of its own.
    """
    command = python_command([script, *arguments])
    if command is None:
        fault = "-m: says no module; give its name after it." if script == "-m" else missing_script(script)
        raise ConfigError("virtual", [fault])
    allocator = AllocatorConfig(expandable_segments=expandable_segments)
    try:
        gpu = VirtualGpu(
            find_card(card), host_memory=host_memory, steps=steps, allocator=allocator, world=world, rank=rank,
            link=link, record_history=snapshot is not None,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError("virtual", [str(error)]) from error
    name = command.name
    output = redirect_stdout(sys.stderr) if quiet else nullcontext()
    with output, _script_errors(name, gpu), gpu:
        command.run()
    run, basis = gpu.report(), gpu.basis()
    if not run.trace.sizes and gpu.oom is None:
        fault = f"{name}: nothing was put on the card; does it choose the CPU, or start other processes that train?"
        raise ConfigError("virtual", [f"{fault} Name the script that trains."])
    if snapshot is not None:
        write_run_snapshot(run, snapshot, allocator)
    if trace is not None:
        write_run_trace(run, trace)
    return VirtualRun(
        script=name, run=run, world=gpu.world, num_params=gpu.num_params, host_peak_bytes=gpu.host_peak_bytes,
        host_memory_bytes=None if host_memory is None else round(host_memory), stand_ins=gpu.stand_ins(),
        without_gradient=gpu.without_gradient, basis=basis,
        reserved=None if basis.growth is not None else reserved_range(
            run.trace, workspace_bytes=run.card.cublas_workspace_bytes, config=allocator,
            capacity_bytes=run.card.allocator_capacity_bytes,
        ),
    )  # fmt: skip


@contextmanager
def _script_errors(name: str, gpu: VirtualGpu) -> Iterator[None]:
    """Wrap a script's own errors in ``ScriptError``; end quietly where the card is full, as the report says where."""
    try:
        yield
    except HybridTrainError:
        raise
    except (Exception, SystemExit) as error:
        if gpu.oom is not None:
            return
        refusal = next((one for one in reasons(error) if isinstance(one, HybridTrainError)), None)
        if refusal is not None:
            raise refusal from error
        if not isinstance(error, SystemExit):
            raise ScriptError(name, error) from error
        if error.code not in {None, 0}:
            told = "".join(f" {text}" for text in gpu.ledger.seen.refusals[-1:])
            raise ConfigError(
                "virtual", [f"{name}: the script ended by itself with code {error.code}.{told}"]
            ) from error
