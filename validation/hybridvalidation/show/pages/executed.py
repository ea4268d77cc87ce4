"""Executed runs as tables, for the terminal and for Markdown."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tabulate import tabulate

from hybridtrain.reports.tables import MARKDOWN, write_page
from hybridtrain.units import format_count, to_gib
from hybridvalidation.experiments.executed import ExecutedRun, ExecutedStep, read_executed
from hybridvalidation.records.makers import made_by
from hybridvalidation.show.kinds import Page

_HEADERS = (
    "model", "stack", "tokens/step", "steps", "loss", "device GiB", "host GiB", "disk GiB", "process GiB", "step s",
    "dry run equals execution",
)  # fmt: skip
_HOW = (
    "Executed: the real model, trained with real arithmetic on the CPU. Device: most bytes at once that a card would "
    "have held, counted by the ledger as requested, the building of the model included; process: largest resident set, "
    "device and host bytes included. Step: median of the true ones. The dry run of the same steps is compared event by "
    "event: every allocation and release with its bytes, class, unit and step, and the peaks of host and disk. Of "
    "several ranks, each a process, the figures are those of the one that held the most, and each is compared with its "
    "own dry run."
)


def executed_table(runs: Sequence[ExecutedRun], style: str) -> str:
    """Return one row per run."""
    return tabulate([_row(run) for run in runs], headers=_HEADERS, tablefmt=style, disable_numparse=True)


def step_table(run: ExecutedRun, style: str) -> str:
    """Return one row per step of a run."""
    rows = [
        [
            str(step.step), step.phase, _loss(step), "-" if step.grad_norm is None else f"{step.grad_norm:.3f}",
            f"{step.seconds:.1f}", f"{to_gib(step.device_peak_bytes):.3f}",
            f"{to_gib(step.planned_device_peak_bytes):.3f}",
        ]
        for step in run.steps
    ]  # fmt: skip
    headers = ("step", "phase", "loss", "gradient norm", "seconds", "device GiB", "planned GiB")
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def equality_line(run: ExecutedRun) -> str:
    """Return whether the dry run counted the same, in a sentence."""
    if run.is_equal:
        return f"dry run equals execution: yes, {run.num_events} events"
    return f"dry run equals execution: no, {run.difference}"


def write_executed(runs: Sequence[ExecutedRun], results: Path) -> list[Path]:
    """Write ``tables/executed.md`` below ``results``, newest run of each subject; nothing without runs."""
    if not runs:
        return []
    newest = list({run.key: run for run in runs}.values())
    parts = ["# Executed runs", executed_table(newest, MARKDOWN), _HOW]
    for run in newest:
        parts += [f"## {_title(run)}", *([rank_table(run, MARKDOWN)] if run.ranks else [])]
        parts += [step_table(run, MARKDOWN), *_remarks(run)]
    parts.append(made_by(("", run) for run in newest))
    return [write_page(results, "executed", "\n\n".join(parts))]


def rank_table(run: ExecutedRun, style: str) -> str:
    """Return one row per rank of a run on several."""
    rows = [
        [
            str(rank.rank), f"{rank.executed.device_bytes:,}", f"{rank.planned.device_bytes:,}",
            f"{rank.executed.host_bytes:,}", f"{rank.planned.host_bytes:,}", str(rank.num_events),
            rank.difference or "none",
        ]
        for rank in run.ranks
    ]  # fmt: skip
    headers = ("rank", "device bytes", "planned", "host bytes", "planned", "events", "difference")
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def _row(run: ExecutedRun) -> list[str]:
    true_steps = [step.seconds for step in run.steps if step.loss is not None]
    phases = len(run.steps) - len(true_steps)
    told = f"{len(true_steps)}, {phases} phases PREDICT" if phases else str(len(true_steps))
    return [
        f"{run.model} ({format_count(run.num_params)})", _stack(run),
        f"{run.accum_steps} x {run.micro_batch_size} x {run.seq_len}", told, _span(run),
        f"{to_gib(run.executed.device_bytes):.2f}", f"{to_gib(run.executed.host_bytes):.2f}",
        f"{to_gib(run.executed.disk_bytes):.2f}", f"{to_gib(run.process_peak_bytes):.2f}", f"{median(true_steps):.1f}",
        f"yes, {run.num_events} events" if run.is_equal else "NO",
    ]  # fmt: skip


def _span(run: ExecutedRun) -> str:
    losses = [step.loss for step in run.steps if step.loss is not None]
    return f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "-"


def _loss(step: ExecutedStep) -> str:
    return f"{step.predicted_steps:.2f} steps predicted" if step.loss is None else f"{step.loss:.4f}"


def _title(run: ExecutedRun) -> str:
    return f"{run.model} under {_stack(run)}, lr {run.lr:g}"


def _stack(run: ExecutedRun) -> str:
    return f"{run.stack} on {len(run.ranks)} ranks" if run.ranks else run.stack


def _remarks(run: ExecutedRun) -> list[str]:
    made = (
        f"{run.environment.cpu}, {run.num_threads} threads, torch {run.environment.torch}; "
        f"{run.build_s:.0f} s to draw the initial weights, {run.duration_s:.0f} s in all; corpus {run.corpus}."
    )
    return [made] if run.is_equal else [made, f"The dry run differs: {run.difference}."]


PAGE = Page(
    order=10,
    group="Evidence",
    write=lambda _files, results: write_executed(read_executed(results / "records"), results),
)
