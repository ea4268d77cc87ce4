"""Records as tables, for the terminal and for Markdown."""

from collections.abc import Sequence

from tabulate import tabulate

from hybridtrain.units import format_count, to_gib
from hybridtrain.virtual_gpu.tensor_class import TensorClass
from hybridvalidation.judge.metrics import accuracy_retention, perplexity_ratio
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.judge.verdict import Verdict
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.records.record import MemoryFigures, Record
from hybridvalidation.runs.runner import ScenarioRun

TERMINAL, MARKDOWN = "simple", "github"

_SUMMARY_HEADERS = (
    "stack", "fits", "allocated GiB", "reserved GiB", "device GiB", "host GiB", "disk GiB", "tokens/step",
    "step s", "tokens/s", "bound", "top-1 kept %", "perplexity %",
)  # fmt: skip


def summary_table(run: ScenarioRun, style: str) -> str:
    """Return one row per stack: does it fit, how fast is it, what does it cost."""
    return tabulate(
        [_summary_row(run, stack) for stack in run.scenario.stacks], headers=_SUMMARY_HEADERS, tablefmt=style,
        disable_numparse=True,
    )  # fmt: skip


def class_table(run: ScenarioRun, style: str) -> str:
    """Return where the memory goes: GiB by tensor class at each stack's peak."""
    rows = []
    for stack in run.scenario.stacks:
        memory = _memory(run.get("dry_run", stack))
        cells = ["-"] * (len(TensorClass) + 1)
        if memory is not None:
            peak = max(memory.steps, key=lambda step: step.allocated_bytes)
            cells = [
                *(f"{to_gib(memory.by_class[name]):.2f}" for name in TensorClass),
                f"step {peak.step}, {peak.stage} {peak.unit}".strip(),
            ]
        rows.append([stack, *cells])
    headers = ["stack", *(name.replace("_", " ") for name in TensorClass), "peak at"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def measured_table(run: ScenarioRun, style: str) -> str:
    """Return plan against measurement per stack; empty where nothing was measured."""
    rows = []
    for stack in run.scenario.stacks:
        record, planned = run.get("measured", stack), _memory(run.get("dry_run", stack))
        if record is None or planned is None:
            continue
        if record.measured is None:
            rows.append([stack, record.outcome, "-", "-", "-", "-"])
            continue
        found = record.measured
        rows.append(
            [
                stack, record.outcome,
                _against(planned.peak_allocated_bytes, found.peak_allocated_bytes),
                _against(planned.peak_reserved_bytes, found.peak_reserved_bytes),
                _against(planned.device_used_bytes, found.device_used_bytes),
                f"{planned.tokens_per_s:,.0f} / {found.tokens_per_s:,.0f}",
            ]
        )  # fmt: skip
    headers = ["stack", "outcome", "allocated", "reserved", "device", "tokens/s"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True) if rows else ""


def verdict_table(verdicts: Sequence[Verdict], style: str) -> str:
    """Return one row per target: what is stated, the verdict, why."""
    rows = [[v.target, v.status, v.evidence or "-", v.reason] for v in verdicts]
    widths = [None, None, None, 90] if style == TERMINAL else None
    return tabulate(
        rows,
        headers=["target", "verdict", "evidence", "because"],
        tablefmt=style,
        maxcolwidths=widths,
        disable_numparse=True,
    )


def outcome_lines(run: ScenarioRun) -> list[str]:
    """Return a sentence for every run that did not end well, and for every refused request."""
    lines = []
    for (kind, stack), record in sorted(run.records.items()):
        memory = record.memory
        if memory is not None and memory.oom is not None:
            oom = memory.oom
            place = f"step {oom.step}, {oom.stage} {oom.unit}".strip() if oom.step else "while the model is built"
            largest = ", ".join(f"{name} {to_gib(size):.2f} GiB" for name, size in _largest(oom.by_class))
            lines.append(
                f"{stack}: out of memory ({place}): {to_gib(oom.requested_bytes):.2f} GiB requested with "
                f"{to_gib(oom.allocated_bytes):.2f} of {to_gib(oom.capacity_bytes):.2f} GiB allocated ({largest})."
            )
        elif record.outcome is not Outcome.OK:
            lines.append(f"{stack}: {kind} ended as {record.outcome}: {record.message or _host_reason(memory)}")
    return lines


def _host_reason(memory: MemoryFigures | None) -> str:
    """Return why a dry run that the card holds does not fit."""
    if memory is None or memory.fits_host:
        return "no reason was recorded"
    return (
        f"the machine is too small for {to_gib(memory.host_peak_bytes):.1f} GiB of host memory and "
        f"{to_gib(memory.disk_peak_bytes):.1f} GiB of disk"
    )


def _summary_row(run: ScenarioRun, stack: str) -> list[str]:
    memory = _memory(run.get("dry_run", stack))
    cells = ["unknown", *["-"] * 9]
    if memory is not None:
        cells = [
            "yes" if memory.fits else ("NO" if memory.fits_host else "NO, host"),
            f"{to_gib(memory.peak_allocated_bytes):.2f}",
            f"{to_gib(memory.peak_reserved_bytes):.2f}",
            f"{to_gib(memory.device_used_bytes):.2f}",
            f"{to_gib(memory.host_peak_bytes):.2f}",
            f"{to_gib(memory.disk_peak_bytes):.2f}",
            f"{memory.tokens_per_step:,}",
            f"{memory.step_time_s:.3f}",
            f"{memory.tokens_per_s:,.0f}",
            memory.bound,
        ]
    return [stack, *cells, _interval(accuracy_retention(run, stack)), _interval(perplexity_ratio(run, stack))]


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _largest(by_class: object) -> list[tuple[str, int]]:
    assert isinstance(by_class, dict), "decoded records hold plain mappings"
    return sorted(((name, size) for name, size in by_class.items() if size), key=lambda item: -item[1])[:3]


def _against(planned: int, measured: int) -> str:
    return f"{to_gib(planned):.2f} / {to_gib(measured):.2f} GiB ({100 * (planned / measured - 1):+.1f} %)"


def _memory(record: Record | None) -> MemoryFigures | None:
    return None if record is None else record.memory


def headline(run: ScenarioRun) -> str:
    """Return model, card and workload in a line."""
    scenario = run.scenario
    model, card = scenario.model.resolve(), scenario.card.resolve()
    tokens = scenario.workload.batch_size * scenario.workload.seq_len
    return (
        f"{scenario.says}: {format_count(model.num_params)} parameters on {card.name} "
        f"({to_gib(card.memory_bytes):.2f} GiB), {tokens} tokens per step "
        f"({scenario.workload.batch_size} x {scenario.workload.seq_len})"
    )
