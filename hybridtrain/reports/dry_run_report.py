"""``hybridtrain dry-run``: one configuration, its figures, and what to try when it does not fit."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from tabulate import tabulate

from hybridtrain.errors import HybridTrainError
from hybridtrain.optimizations.grad_accumulation import with_accumulation
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import Cell, MemoryPlan, PhasePlan
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.planning.dry_runs import DryRun, DryRunInputs
from hybridtrain.planning.figures import MemoryFigures, figures_of_ranks
from hybridtrain.planning.plan_bytes import bytes_of
from hybridtrain.planning.plan_changes import plan_changes
from hybridtrain.planning.savings import Saving, planned_savings, savings_table
from hybridtrain.progress import progress_bar
from hybridtrain.reports.card_report import card_mapping, figure_lines, peak_figures, verdict_line
from hybridtrain.stacks import Stack, StackFiles
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import GIB, format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.account.op_record import Lane
from hybridtrain.virtual_gpu.allocator.replay import SETTLING_STEPS
from hybridtrain.virtual_gpu.allocator.reserved_range import ReservedRange, reserved_range
from hybridtrain.virtual_gpu.cards.card import FitVerdict

_FIGURES = (
    "host_peak_bytes", "host_by_class", "disk_peak_bytes", "fits_host", "fits", "step_time_s", "tokens_per_s", "bound",
)  # fmt: skip
_LOWER = "lower --micro-batch or --seq, or choose a smaller model or a larger card"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunReport:
    """The answer to: does it fit, where does the memory go, how fast would it be."""

    run: DryRun
    figures: MemoryFigures
    stack: str
    model: str
    fitting_stacks: tuple[str, ...] = ()
    """Stacks that would fit and leave the margin free; only looked for when this one does not fit."""
    are_run_dry: bool = False
    """Whether those were run dry; else they fit by arithmetic."""
    phases: Mapping[str, Mapping[str, str]] | None = None
    """Precision and place of each class by phase, where phases differ."""
    reserved: ReservedRange
    """By how much reserved bytes move when a run is not quite this one."""
    ranks: tuple[DryRun, ...] = ()
    """Of several cards those that differ, by number; ``run`` is the one that holds the most."""
    savings: tuple[Saving, ...] | None = None
    """Of each optimization; None unless requested."""
    changes: tuple[str, ...] = ()
    """Settings that this run does not use as asked."""

    @property
    def fits(self) -> bool:
        """Whether it runs on the card, or each of the ranks on its own."""
        return self.figures.fits

    @property
    def verdict(self) -> FitVerdict:
        """Whether it fits, and leaves the card's margin free."""
        return self.figures.verdict(self.run.card)

    def as_mapping(self) -> dict[str, object]:
        """Return the plain figures, bytes and seconds."""
        figures = self.figures
        return card_mapping(self.run, lambda step: self.run.phase_of(step).value) | {
            "params": figures.num_params,
            "reserved_range": self.reserved.as_mapping(),
            "verdict": self.verdict.value,
            **{name: getattr(figures, name) for name in _FIGURES},
            "host_needed_bytes": self.host_needed_bytes,
            "host_memory_bytes": self._host_memory_bytes,
            "fitting_stacks": None
            if figures.fits
            else {"names": list(self.fitting_stacks), "evidence": "planned" if self.are_run_dry else "arithmetic"},
            "phases": self.phases,
            "world": self.run.world.size,
            "link": self.run.world.link if self.ranks else None,
            "ranks": [_rank_mapping(run) for run in self.ranks],
            "savings": None if self.savings is None else list(map(asdict, self.savings)),
            "changes": list(self.changes),
        }  # fmt: skip

    def as_text(self) -> str:
        """Return the same for a reader, the verdict first."""
        run, figures = self.run, self.figures
        low, high = (f"{run.tokens_per_step / seconds:,.0f}" for seconds in reversed(run.time.interval_s))
        speed = (
            f"{figures.tokens_per_s:,.0f} tokens/s, {format_seconds(figures.step_time_s)} per step of "
            f"{figures.tokens_per_step:,} tokens, bottleneck: {figures.bound} "
            f"(estimated; 80 % interval: {low} to {high} tokens/s)"
        )
        phases = [
            f"{step.phase} {format_bytes(step.allocated_bytes)} (step {step.step})"
            for step in figures.steps
            if run.phases
        ]
        return "\n".join(
            [
                verdict_line(
                    run,
                    f"{self.model} with stack {self.stack}",
                    self.verdict,
                    before_steps="while the model is built",
                    needed_bytes=run.device_used_bytes,
                ),
                *(f"  {refusal}" for refusal in self._refusals()),
                *figure_lines(
                    [
                        ("speed", speed),
                        *peak_figures(run),
                        ("by phase", ", ".join(phases)),
                        ("host memory", self._host_text()),
                        ("parameters", format_count(figures.num_params)),
                    ]
                ),
                *(f"  {line}" for line in self._rank_lines()),
                *(f"  not as asked: {change}" for change in self.changes),
                *(f"  {note}" for note in (run.card.note, self.reserved.as_text()) if note),
                *([] if self.phases is None else [f"\n{phase_table(self.phases)}\n"]),
                *([] if self.savings is None else [f"\n{savings_table(self.savings, run)}\n"]),
                *self._suggestions(),
            ]
        )

    def _rank_lines(self) -> Iterator[str]:
        if not self.ranks:
            return
        told = "; ".join(
            f"rank {run.world.rank} {to_gib(run.device_used_bytes):.2f} GiB of its card, "
            f"{format_bytes(run.host_peak_bytes)} of host memory"
            for run in self.ranks
        )
        world = self.run.world
        network = f", {world.network} between machines" if world.size > world.cards_per_machine else ""
        machine = format_bytes(self.run.machine_host_bytes)
        yield (
            f"{world.size} ranks, a card each; rank {world.rank} is the above, it holds the most: {told}; {machine} of "
            f"host memory for tensors in a machine of {world.local_size} (planned); over {world.link}{network}, "
            f"{format_seconds(self.figures.busy_s.get(Lane.LINK, 0.0))} of a step on the link (estimated)"
        )

    @property
    def host_needed_bytes(self) -> int:
        """Host memory of the whole machine: tensors of all its ranks, and what system and process take beside them."""
        return self.run.machine_host_bytes + round(self.run.host.reserved_gib * GIB)

    @property
    def _host_memory_bytes(self) -> int | None:
        """What the machine is assumed to have; None: as much as it takes."""
        memory = self.run.host.memory_gib
        return None if memory is None else round(memory * GIB)

    def _host_text(self) -> str:
        host = self.run.host
        there = "" if host.memory_gib is None else f" of {host.memory_gib:g} GiB"
        return (
            f"{format_bytes(self.host_needed_bytes)}{there}: {format_bytes(self.run.machine_host_bytes)} for tensors "
            f"(planned), {host.reserved_gib:g} GiB for system and process (assumed); disk "
            f"{format_bytes(self.run.machine_disk_bytes)} (planned)"
        )

    def _refusals(self) -> Iterator[str]:
        if not self.figures.fits_host:
            run, host = self.run, self.run.host
            memory = f"{format_bytes(run.machine_host_bytes)} of {format_bytes(host.tensor_bytes)}"
            disk = f"{format_bytes(run.machine_disk_bytes)} of {format_bytes(host.disk_bytes)}"
            yield (
                f"the host is too small: memory {memory}, disk {disk}; move a tensor class to disk (tier = 'disk'), "
                "store it in fewer bytes (int8_weights, int8_optimizer, optimizer = 'adafactor'), or ask hybridtrain "
                "recommend"
            )

    def _suggestions(self) -> Iterator[str]:
        if self.fits or self.ranks:  # other stacks are tried on one card alone
            return
        names = ", ".join(self.fitting_stacks)
        if self.are_run_dry:
            yield f"stacks that fit: {names}" if names else f"no stack at hand fits; {_LOWER}"
        elif names:
            yield f"stacks that fit by arithmetic, none was run dry (--suggest does that): {names}"
        else:
            yield f"by arithmetic no stack at hand fits (--suggest runs them dry); {_LOWER}"


def plan_run(
    setup: DryRunInputs, stack: Stack, model: str, files: StackFiles, *, accum_steps: int | None = None,
    suggest: bool = False, savings: bool = False, progress: bool = False,
) -> DryRunReport:  # fmt: skip
    """Dry-run one configuration, of which ``setup`` has the plan of ``stack`` with ``accum_steps`` micro-batches.

    Where it does not fit, other stacks of ``files`` are tried: by arithmetic, or in dry runs if ``suggest``.
    """
    world = setup.world.size
    optimizations = with_accumulation(stack.optimizations, accum_steps)
    runs = setup.dry_run_ranks()
    run = runs[0]
    others = {} if run.fits or world > 1 else _other_plans(files, stack.name, accum_steps)

    def fits(name: str) -> bool:
        plan, config = others[name]
        if suggest:
            return replace(setup, plan=plan, config=config).dry_run().verdict is FitVerdict.FITS
        return bytes_of(setup.model, plan, setup.workload, config.optimizer).fits(setup.card, setup.host)

    tried = progress_bar(list(others), shown=suggest and progress, unit="stack", desc="stacks run dry")
    idle_link = world == 1 and setup.world.link != "pcie"
    # A step that gives its cache back may end below what was reserved while the model was built.
    reserved_bytes = None if run.trace.cache_releases else max(step.reserved_bytes for step in run.uncapped.steps)
    return DryRunReport(
        run=run, figures=figures_of_ranks(runs, with_timeline=False), stack=stack.name, model=model,
        fitting_stacks=tuple(name for name in tried if fits(name)), are_run_dry=suggest,
        reserved=reserved_range(
            run.trace, workspace_bytes=setup.card.cublas_workspace_bytes, config=setup.allocator,
            repeats=SETTLING_STEPS, planned_bytes=reserved_bytes,
        ),
        phases=phase_precision(setup.plan),
        ranks=() if world == 1 else tuple(sorted(runs, key=lambda run: run.world.rank)),
        savings=planned_savings(optimizations, run, setup, progress=progress) if savings else None,
        changes=(
            *plan_changes(
                optimizations, setup.model, setup.workload, setup.config.optimizer, world=world,
                phases=run.phases or (Phase.FULL,),
            ),
            *([f"link: {setup.world.link} asked, none used; one card has no other to reach"] * idle_link),
        ),
    )  # fmt: skip


def _rank_mapping(run: DryRun) -> dict[str, object]:
    names = ("device_used_bytes", "peak_reserved_bytes", "host_peak_bytes", "disk_peak_bytes")
    sizes = {name: getattr(run, name) for name in names}
    return {"rank": run.world.rank, "peak_allocated_bytes": run.peak.allocated_bytes, **sizes}


def _other_plans(
    files: StackFiles, refused: str, accum_steps: int | None
) -> dict[str, tuple[MemoryPlan, TrainerConfig]]:
    """Return plan and optimizer of all other stacks of one card; a faulty file is not what was asked about."""
    plans = {}
    for name in files.stack_names():
        if name != refused:
            with suppress(HybridTrainError):
                stack = files.stack(name)
                full = stack.plan().for_phase(Phase.FULL)
                if not full.zero_stage and full.pipeline_stages == 1:
                    plans[name] = stack.plan(accum_steps), stack.training()
    return plans


def phase_precision(plan: MemoryPlan) -> dict[str, dict[str, str]] | None:
    """Return, by phase, the type of arithmetic, and codec and place of each class; None: all phases are alike."""
    rows = {phase.value: _phase_row(plan.for_phase(phase), phase) for phase in Phase}
    asked = [row | {"gradients": ""} for row in rows.values()]  # PREDICT never has any
    return None if all(row == asked[0] for row in asked) else rows


def phase_table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Return the same for a reader."""
    told = [[phase, *row.values()] for phase, row in rows.items()]
    headers = ["phase", "compute", "weights", "master", "gradients", "optimizer state"]
    return tabulate(told, headers=headers, tablefmt="simple", disable_numparse=True)


def _phase_row(plan: PhasePlan, phase: Phase) -> dict[str, str]:
    return {
        "compute": str(plan.compute_dtype),
        "weights": _cell_words(plan.weight),
        "master": _cell_words(plan.master),
        "gradients": "none" if phase is Phase.PREDICT else _cell_words(plan.grad),
        "optimizer_state": _cell_words(plan.optim_state),
    }


def _cell_words(cell: Cell) -> str:
    if cell.codec is Codec.ABSENT:
        return "none"
    if cell.placement is Placement.DROPPED:
        return "dropped"
    return f"{str(cell.codec).removesuffix('_blocks')} on {cell.placement}"
