"""``hybridtrain dry-run``: one configuration, its figures, and what to try when it does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from hybridtrain.config.decode import load_toml
from hybridtrain.dry_run import DryRun, dry_run
from hybridtrain.errors import HybridTrainError
from hybridtrain.models.model_config import ModelConfig, Workload, model_preset
from hybridtrain.units import format_bytes, format_count, format_seconds, to_gib
from hybridtrain.virtual_gpu.allocator import AllocatorConfig, round_size, segment_size
from hybridtrain.virtual_gpu.card import Host, find_card
from hybridtrain.virtual_gpu.tensor_class import TensorClass
from hybridvalidation.records.stack_run import MemoryFigures, StepPeaks
from hybridvalidation.runs.figures import memory_figures
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.exports import write_run_snapshot, write_run_trace

_HOLDERS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunReport:
    """The answer to: does it fit, where does the memory go, how fast would it be."""

    run: DryRun
    figures: MemoryFigures
    stack: str
    model: str
    fitting_stacks: tuple[str, ...]
    """Stacks that would fit; only looked for when this one does not."""

    @property
    def fits(self) -> bool:
        """Whether it runs on the card."""
        return self.run.fits

    def as_mapping(self) -> dict[str, object]:
        """Return the plain figures, bytes and seconds."""
        figures = self.figures
        oom = figures.oom
        return {
            "params": figures.num_params,
            "peak_allocated_bytes": figures.peak_allocated_bytes,
            "peak_active_bytes": max(step.active_bytes for step in figures.steps),
            "peak_reserved_bytes": figures.peak_reserved_bytes,
            "device_used_bytes": figures.device_used_bytes,
            "host_peak_bytes": figures.host_peak_bytes,
            "host_by_class": dict(figures.host_by_class),
            "disk_peak_bytes": figures.disk_peak_bytes,
            "fits_host": figures.fits_host,
            "by_class": dict(figures.by_class),
            "fits": figures.fits,
            "step_time_s": figures.step_time_s,
            "tokens_per_s": figures.tokens_per_s,
            "bound": figures.bound,
            "steps": [
                {
                    "step": step.step, "phase": step.phase, "allocated_bytes": step.allocated_bytes,
                    "reserved_bytes": step.reserved_bytes,
                }
                for step in figures.steps
            ],
            "oom": None
            if oom is None
            else {
                "step": oom.step, "stage": oom.stage, "unit": oom.unit, "requested_bytes": oom.requested_bytes,
                "allocated_bytes": oom.allocated_bytes, "reserved_bytes": oom.reserved_bytes,
                "capacity_bytes": oom.capacity_bytes, "by_class": dict(oom.by_class), "by_unit": dict(oom.by_unit),
                "fitting_stacks": list(self.fitting_stacks),
            },
            "evidence": {"memory": "planned", "time": "estimated"},
        }  # fmt: skip

    def as_text(self) -> str:
        """Return the same for a reader."""
        run, figures = self.run, self.figures
        rows = [[name.replace("_", " "), f"{to_gib(figures.by_class[name]):.3f}"] for name in TensorClass]
        steps = "; ".join(
            f"step {step.step}{_phase(step, run)} {to_gib(step.allocated_bytes):.2f} GiB at {step.stage} "
            f"{step.unit}".strip()
            for step in figures.steps
        )
        title = (
            f"{self.model}, stack {self.stack}, {run.card.name}: {format_count(figures.num_params)} parameters, "
            f"{figures.tokens_per_step} tokens per step\n"
        )
        memory = (
            f"\nallocated {to_gib(figures.peak_allocated_bytes):.2f}, "
            f"reserved {to_gib(figures.peak_reserved_bytes):.2f}, "
            f"device {to_gib(figures.device_used_bytes):.2f} of {to_gib(run.card.memory_bytes):.2f} GiB (planned)"
        )
        speed = (
            f"{format_seconds(figures.step_time_s)} a step, {figures.tokens_per_s:,.0f} tokens/s, "
            f"{figures.bound}-bound (estimated)"
        )
        table = tabulate(rows, headers=["at the peak", "GiB"], tablefmt="simple", disable_numparse=True)
        below = (
            f"host {format_bytes(figures.host_peak_bytes)}, disk {format_bytes(figures.disk_peak_bytes)} beside the "
            "process itself (planned)"
        )
        lines = [title, table, memory, below, steps, speed, self._answer()]
        return "\n".join(lines)

    def _answer(self) -> str:
        if self.figures.oom is not None:
            return self._oom_text()
        if self.run.fits_host:
            return "fits"
        host = self.run.host
        return (
            f"DOES NOT FIT: host {format_bytes(self.figures.host_peak_bytes)} of {format_bytes(host.tensor_bytes)}, "
            f"disk {format_bytes(self.figures.disk_peak_bytes)} of {format_bytes(host.disk_bytes)}; move a tensor "
            "class to disk (tier = 'disk'), store it in fewer bytes (int8_weights, int8_optimizer, "
            "factored_optimizer), or ask hybridtrain recommend"
        )

    def _oom_text(self) -> str:
        oom = self.figures.oom
        assert oom is not None, "a run that does not fit was refused something"
        place = f"at step {oom.step}, {oom.stage} {oom.unit}".strip() if oom.step else "while the model is built"
        holders = "\n".join(
            f"  {name}: {format_bytes(size)}" for name, size in list(oom.by_unit.items())[:_HOLDERS_SHOWN]
        )
        classes = ", ".join(f"{name} {format_bytes(size)}" for name, size in oom.by_class.items() if size)
        advice = f"stacks that would fit: {', '.join(self.fitting_stacks)}" if self.fitting_stacks else (
            "no stack at hand fits; lower --micro-batch or --seq, or choose a smaller model or a larger card"
        )  # fmt: skip
        segment = segment_size(round_size(oom.requested_bytes))
        return (
            f"DOES NOT FIT: out of memory {place}: {format_bytes(oom.requested_bytes)} requested "
            f"(a segment of {format_bytes(segment)}), "
            f"{format_bytes(oom.allocated_bytes)} allocated and {format_bytes(oom.reserved_bytes)} reserved of "
            f"{format_bytes(oom.capacity_bytes)}\nlive by class: {classes}\nlargest holders:\n{holders}\n{advice}"
        )


def plan_run(
    files: ScenarioFiles,
    *,
    model: str,
    stack: str,
    card: str,
    micro_batch_size: int,
    seq_len: int,
    accum_steps: int | None,
    host: Host | None = None,
    expandable_segments: bool = False,
    snapshot: Path | None = None,
    trace: Path | None = None,
) -> DryRunReport:
    """Dry-run one configuration; raises ``ConfigError`` for unknown names and faulty files."""
    shape = read_model(model)
    chosen = files.stack(stack)
    workload = Workload(micro_batch_size=micro_batch_size, seq_len=seq_len)
    allocator = AllocatorConfig(expandable_segments=expandable_segments)
    found_card = find_card(card)
    plan = chosen.plan(accum_steps)
    run = dry_run(
        shape, plan, found_card, workload, host=host, allocator=allocator, record_history=snapshot is not None
    )
    if snapshot is not None:
        write_run_snapshot(run, snapshot, allocator)
    if trace is not None:
        write_run_trace(run, trace)
    fitting = () if run.fits else _fitting_stacks(files, chosen.name, shape, run, workload, accum_steps)
    return DryRunReport(
        run=run,
        figures=memory_figures(run, with_timeline=False),
        stack=chosen.name,
        model=model,
        fitting_stacks=tuple(fitting),
    )


def read_model(name: str) -> ModelConfig:
    """Return a preset by name, or the shape in a TOML file; raises ``ConfigError``."""
    return load_toml(ModelConfig, Path(name)) if name.endswith(".toml") else model_preset(name)


def _phase(step: StepPeaks, run: DryRun) -> str:
    return f" ({step.phase})" if run.phases else ""


def _fitting_stacks(
    files: ScenarioFiles,
    refused: str,
    shape: ModelConfig,
    run: DryRun,
    workload: Workload,
    accum_steps: int | None,
) -> Sequence[str]:
    fitting = []
    for name in files.stack_names():
        if name == refused:
            continue
        try:
            plan = files.stack(name).plan(accum_steps)
        except HybridTrainError:  # a faulty file beside the chosen one is not what was asked about
            continue
        if dry_run(shape, plan, run.card, workload, host=run.host).fits:
            fitting.append(name)
    return fitting
