"""Executed runs: what training really held, beside its dry run."""

from collections.abc import Iterator, Sequence
from statistics import median

from hybridtrain.reports.tables import MARKDOWN, table
from hybridtrain.units import format_count, to_gib
from hybridvalidation.experiments.executed import ExecutedRun, read_executed
from hybridvalidation.pictures.picture import Axis, Picture, View, bars_by
from hybridvalidation.records.makers import made_by
from hybridvalidation.show.page import Page, Source

_HEADERS = (
    "model", "stack", "tokens/step", "steps", "loss", "step s", "dry run equals execution", "device GiB", "host GiB",
    "disk GiB", "process GiB", "torch's allocator",
)  # fmt: skip
_HOW = (
    "Executed: the real model, trained with real arithmetic on the CPU. Device: peak bytes that a card would have "
    "held, as requested, the building of the model included. Process: largest resident set, device and host bytes "
    "included. Step: median time of the true ones. The dry run is compared event by event: every allocation and "
    "release with its bytes, class, unit and step. Peaks of host and disk are compared too. Of several ranks, each a "
    "process, the figures are those of the largest; each is compared with its own dry run. Torch's allocator: what it "
    "held at most by events of its own, which the ledger does not see, less device bytes; of short runs. 5,056 bytes "
    "are the state of torch's random generator."
)
_TIERS = {"card": "device_bytes", "host": "host_bytes", "disk": "disk_bytes"}


def executed_table(runs: Sequence[ExecutedRun], style: str) -> str:
    """Return one row per run."""
    return table(_HEADERS, [_row(run) for run in runs], style, keys=2)


def equality_line(run: ExecutedRun) -> str:
    """Return a sentence on the equality of dry run and execution."""
    if run.is_equal:
        return f"dry run equals execution: yes, {run.num_events} events"
    return f"dry run equals execution: no, {run.difference}"


def _row(run: ExecutedRun) -> list[str]:
    true_steps = [step.seconds for step in run.steps if step.loss is not None]
    losses = [step.loss for step in run.steps if step.loss is not None]
    phases = len(run.steps) - len(true_steps)
    peaks = (run.executed.device_bytes, run.executed.host_bytes, run.executed.disk_bytes, run.process_peak_bytes)
    return [
        f"{run.model} ({format_count(run.num_params)})", _stack(run),
        f"{run.accum_steps} x {run.micro_batch_size} x {run.seq_len}",
        f"{len(true_steps)}, {phases} phases PREDICT" if phases else str(len(true_steps)),
        f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "-", f"{median(true_steps):.1f}",
        f"yes, {run.num_events} events" if run.is_equal else "NO", *(f"{to_gib(size):.2f}" for size in peaks),
        f"{run.allocator_peak_bytes - run.executed.device_bytes:+,} B" if run.allocator_peak_bytes else "-",
    ]  # fmt: skip


def _stack(run: ExecutedRun) -> str:
    return f"{run.stack} on {len(run.ranks)} ranks" if run.ranks else run.stack


def _of_run(run: ExecutedRun) -> Iterator[str]:
    yield f"## {run.model} under {_stack(run)}, lr {run.lr:g}"
    if run.ranks:
        ranks = [
            [
                str(rank.rank), f"{rank.executed.device_bytes:,}", f"{rank.planned.device_bytes:,}",
                f"{rank.executed.host_bytes:,}", f"{rank.planned.host_bytes:,}", str(rank.num_events),
                rank.difference or "none",
            ]
            for rank in run.ranks
        ]  # fmt: skip
        headers = ("rank", "device bytes", "planned", "host bytes", "planned", "events", "difference")
        yield table(headers, ranks, MARKDOWN)
    steps = [
        [
            str(step.step), step.phase,
            f"{step.predicted_steps:.2f} steps predicted" if step.loss is None else f"{step.loss:.4f}",
            "-" if step.grad_norm is None else f"{step.grad_norm:.3f}", f"{step.seconds:.1f}",
            f"{to_gib(step.device_peak_bytes):.3f}", f"{to_gib(step.planned_device_peak_bytes):.3f}",
        ]
        for step in run.steps
    ]  # fmt: skip
    headers = ("step", "phase", "loss", "gradient norm", "seconds", "device GiB", "planned GiB")
    yield table(headers, steps, MARKDOWN)
    yield (
        f"{run.environment.cpu}, {run.num_threads} threads, torch {run.environment.torch}; "
        f"{run.build_s:.0f} s to draw the initial weights, {run.duration_s:.0f} s in all; corpus {run.corpus}."
    )
    if not run.is_equal:
        yield f"The dry run differs: {run.difference}."


def _picture(runs: Sequence[ExecutedRun]) -> Picture:
    names = {f"{number}: {run.model}, {run.stack}": run for number, run in enumerate(runs, 1)}
    views = {}
    for tier, field in _TIERS.items():
        points = [
            (kind, name, to_gib(getattr(getattr(run, kind), field)))
            for kind in ("executed", "planned")
            for name, run in names.items()
        ]
        if any(size for _, _, size in points):
            bars = bars_by(points, unit="GiB", digits=3)
            views[tier] = View(series=bars, x=Axis(title="GiB"), y=Axis(names=list(names)), is_grouped=True)
    equal = sum(run.is_equal for run in runs)
    return Picture(
        name="executed", title="Planned and executed, most bytes at once", choice="tier", views=views,
        evidence="executed: trained with real arithmetic on the CPU, bytes counted; planned: by a dry run",
        description=f"{equal} of {len(runs)} executed runs held what was planned, event by event.",
    )  # fmt: skip


def executed_pages(runs: Sequence[ExecutedRun]) -> Iterator[Page]:
    """Yield the page of the newest run of each subject; nothing without runs."""
    newest = list({run.key: run for run in runs}.values())
    if newest:
        parts = ["# Executed runs", executed_table(newest, MARKDOWN), _HOW]
        parts += [part for run in newest for part in _of_run(run)]
        text = "\n\n".join([*parts, made_by(("", run) for run in newest)])
        yield Page(name="executed", group="Evidence", text=text, pictures=[_picture(newest)])


SOURCE = Source(order=10, pages=lambda results: executed_pages(read_executed(results.records)))
