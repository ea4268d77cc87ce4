"""A scenario's page: fit, memory by class, quality, stated figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from hybridtrain.planning.figures import MemoryFigures
from hybridtrain.reports.card_report import fits_cell
from hybridtrain.reports.tables import MARKDOWN, table
from hybridtrain.units import format_count, to_gib
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.cards.card import MARGIN_TOLD
from hybridtrain.virtual_gpu.cards.kernels import curves_of
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.joint import judge_all, judge_jointly
from hybridvalidation.judge.metrics import accuracy_retention, perplexity_ratio
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.judge.tables import joint_table, verdict_table
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.show.page import Page, Source, png_links
from hybridvalidation.show.results import Results
from hybridvalidation.show.scenario_pictures import scenario_pictures
from hybridvalidation.study.quality import Quality

_PLANNED: Mapping[str, Callable[[MemoryFigures], str]] = {
    "device GiB": lambda memory: f"{to_gib(memory.device_used_bytes):.2f}",
    "tokens/s": lambda memory: f"{memory.tokens_per_s:,.0f}",
    "host GiB": lambda memory: f"{to_gib(memory.host_peak_bytes):.2f}",
    "step s": lambda memory: f"{memory.step_time_s:.3f}",
    "bottleneck": lambda memory: memory.bound,
    "allocated GiB": lambda memory: f"{to_gib(memory.peak_allocated_bytes):.2f}",
    "reserved GiB": lambda memory: f"{to_gib(memory.peak_reserved_bytes):.2f}",
    "disk GiB": lambda memory: f"{to_gib(memory.disk_peak_bytes):.2f}",
    "tokens/step": lambda memory: f"{memory.tokens_per_step:,}",
}
"""Columns of the first table, and how a cell is got."""
_NUM_MAIN = 5
_TOGETHER = (
    "Rows about the scenario are judged together: every stack that fits, on all of them. Each such row below has the "
    "verdict of the best stack: fewest missed, then most held. Other rows are about the stacks that they name."
)
_HOW_QUALITY = (
    "Executed: small models of the sizes told, trained from the start on the CPU; no figure of this scenario's size. "
    "Adapters start from where the baseline ended, on another text. Loss above and top-1 accuracy over those of the "
    "reference configuration, means and 95 % intervals over paired seeds. Stacks that compute the same share a "
    "configuration's runs. The ladder has a page of its own."
)


def headline(run: ScenarioRun) -> str:
    """Return model, card and workload in a line."""
    return f"{run.scenario.description}: {_facts(run)}"


def _facts(run: ScenarioRun) -> str:
    scenario = run.scenario
    model, card = scenario.model.resolve(), scenario.card.resolve()
    tokens = scenario.workload.batch_size * scenario.workload.seq_len
    cards = f"{scenario.world} x " if scenario.world > 1 else ""
    return (
        f"{format_count(model.num_params)} parameters on {cards}{card.name} "
        f"({to_gib(card.memory_bytes):.2f} GiB), {tokens} tokens per step "
        f"({scenario.workload.batch_size} x {scenario.workload.seq_len})"
    )


def report_text(run: ScenarioRun, results: Results, style: str) -> str:
    """Return headline, tables and sentences of a scenario, for a terminal or as Markdown."""
    is_markdown = style == MARKDOWN
    sections: dict[str, Sequence[str]] = {
        "": [summary_table(run, style), _how(run)],
        "Where the memory goes, GiB allocated at the peak (planned)": [class_table(run, style)],
        "Phase by phase through a cycle, GiB allocated at the peak (planned)": [phase_table(run, style)],
        "Planned / measured under the card's cap": [measured_table(run, style)],
        "What it costs in quality, on small models": _quality(run, results.quality, style),
        "Stated targets": _targets(run, results, style),
    }
    outcomes = [f"{'- ' if is_markdown else ''}{line}" for line in outcome_lines(run)]
    parts = [f"# {run.scenario.description}", f"{_facts(run)}."] if is_markdown else [headline(run)]
    for title, texts in sections.items():
        if any(texts):
            parts += [f"{'## ' if is_markdown else ''}{title}", *texts] if title else texts
        if title.startswith("Phase by phase"):
            parts += outcomes
    return "\n\n".join([*parts, made_by((kind, record) for (kind, _), record in sorted(run.records.items()))])


def scenario_page(run: ScenarioRun, results: Results) -> Page:
    """Return a scenario's page with its pictures."""
    name, pictures = run.scenario.name, scenario_pictures(run)
    text = f"{report_text(run, results, MARKDOWN)}\n\n## Pictures\n\n{png_links(name, pictures)}"
    return Page(name=name, group="Scenarios", text=text, pictures=pictures)


def summary_table(run: ScenarioRun, style: str, stacks: Iterable[str] = (), *, only_main: bool = False) -> str:
    """Return one row per stack, in wide tables of Markdown the main columns first.

    Args:
        run: A scenario.
        style: Of tabulate.
        stacks: Which; none: all.
        only_main: Leave out all but the columns whether it fits, what it takes and how fast it is.
    """
    trained = {"top-1 kept %": accuracy_retention, "perplexity %": perplexity_ratio} if _is_trained(run) else {}
    columns = dict(list(_PLANNED.items())[: _NUM_MAIN if only_main else None])
    rows = []
    for stack in stacks or run.scenario.stacks:
        memory, cells = run.memory(stack), ["unknown", *["-"] * len(columns)]
        if memory is not None:
            fits = fits_cell(memory.verdict(run.scenario.card.resolve())) if memory.fits_host else "NO, host"
            cells = [fits, *(cell(memory) for cell in columns.values())]
        rows.append([stack, *cells, *([] if only_main else [_interval(kept(run, stack)) for kept in trained.values()])])
    return table(["stack", "fits", *columns, *([] if only_main else trained)], rows, style)


def class_table(run: ScenarioRun, style: str) -> str:
    """Return GiB by tensor class at each stack's peak."""
    rows = []
    for stack in run.scenario.stacks:
        memory = run.memory(stack)
        cells = ["-"] * (len(TensorClass) + 1)
        if memory is not None:
            peak = max(memory.steps, key=lambda step: step.allocated_bytes)
            cells = [
                *(f"{to_gib(memory.by_class[name]):.2f}" for name in TensorClass),
                f"step {peak.step}, {peak.stage} {peak.unit}".strip(),
            ]
        rows.append([stack, *cells])
    return table(["stack", *(name.replace("_", " ") for name in TensorClass), "peak at"], rows, style)


def phase_table(run: ScenarioRun, style: str) -> str:
    """Return the peak of each phase, for stacks whose steps have several; empty without any."""
    peaks = {
        stack: {phase: max(step.allocated_bytes for step in memory.steps if step.phase == phase) for phase in phases}
        for stack in run.scenario.stacks
        if (memory := run.memory(stack)) is not None
        and len(phases := list(dict.fromkeys(step.phase for step in memory.steps))) > 1
    }
    names = list(dict.fromkeys(phase for of_phase in peaks.values() for phase in of_phase))
    rows = [
        [stack, *(f"{to_gib(of_phase[name]):.2f}" if name in of_phase else "-" for name in names)]
        for stack, of_phase in peaks.items()
    ]
    return table(["stack", *names], rows, style) if rows else ""


def outcome_lines(run: ScenarioRun) -> list[str]:
    """Return a sentence for every run that did not end well, and for every refused request."""
    lines = []
    for (kind, stack), record in sorted(run.records.items()):
        memory = record.memory
        if memory is not None and memory.oom is not None:
            oom = memory.oom
            place = f"step {oom.step}, {oom.stage} {oom.unit}".strip() if oom.step else "while the model is built"
            held = sorted(((name, size) for name, size in oom.by_class.items() if size), key=lambda item: -item[1])
            largest = ", ".join(f"{name} {to_gib(size):.2f} GiB" for name, size in held[:3])
            lines.append(
                f"{stack}: out of memory ({place}): {to_gib(oom.requested_bytes):.2f} GiB requested with "
                f"{to_gib(oom.allocated_bytes):.2f} of {to_gib(oom.capacity_bytes):.2f} GiB allocated ({largest})."
            )
        elif record.outcome is not Outcome.OK:
            shortage = "" if memory is None else memory.shortage(run.scenario.host)
            reason = record.message or shortage or "no reason was recorded"
            lines.append(f"{stack}: {kind} ended as {record.outcome}: {reason}")
    return lines


def measured_table(run: ScenarioRun, style: str) -> str:
    """Return plan against measurement per stack; empty where nothing was measured."""
    rows = []
    for stack in run.scenario.stacks:
        record, planned = run.get("measured", stack), run.memory(stack)
        if record is None or planned is None:
            continue
        cells, found = ["-"] * 4, record.measured
        if found is not None:
            names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
            cells = [_against(getattr(planned, name), getattr(found, name)) for name in names]
            cells.append(f"{planned.tokens_per_s:,.0f} / {found.tokens_per_s:,.0f}")
        rows.append([stack, record.outcome, *cells])
    headers = ["stack", "outcome", "allocated", "reserved", "device", "tokens/s"]
    return table(headers, rows, style) if rows else ""


def _against(planned: int, measured: int) -> str:
    return f"{to_gib(planned):.2f} / {to_gib(measured):.2f} GiB ({100 * (planned / measured - 1):+.1f} %)"


def _is_trained(run: ScenarioRun) -> bool:
    return any(kind == "accuracy" for kind, _ in run.records)


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _how(run: ScenarioRun) -> str:
    """Return the evidence of each kind of figure."""
    curves, host = curves_of(run.scenario.card.resolve()), run.rank_host
    each = " of one rank" if run.scenario.world > 1 else ""
    limit = (
        "" if host.memory_gib is None else f", of {to_gib(int(host.tensor_bytes)):.1f} GiB that the host has for them"
    )
    told = (
        f"Memory: planned, by a dry run of the trainer on the virtual GPU. Host GiB are offloaded tensors{each}, "
        f"without the process itself{limit}. Barely: {MARGIN_TOLD}. "
        f"Speed: estimated, by a roofline at "
        f"{100 * curves.gemm:.0f} % of the card's matmul rate for large products, less for small ones, and "
        f"{100 * curves.memory:.0f} % of its memory's bandwidth."
    )
    if not _is_trained(run):
        return told
    return (
        f"{told} Accuracy: executed, by training a small proxy on the CPU; 95 % intervals over paired seeds; top-1 "
        "above 100 and perplexity below 100 are better than vanilla."
    )


def _quality(run: ScenarioRun, quality: Quality, style: str) -> list[str]:
    rows = []
    for stack in run.scenario.stacks:
        if stack in quality:
            name, size, tokens, seeds, other, loss, kept, verdict = quality[stack]
            rows.append([stack, f"{name} over {other}", f"{size}, {tokens}", seeds, loss, kept, verdict])
    headers = (
        "stack", "configuration", "parameters, tokens per parameter", "seeds", "loss above, nats", "top-1 kept %",
        "verdict",
    )  # fmt: skip
    return [table(headers, rows, style), _HOW_QUALITY] if rows else []


def _targets(run: ScenarioRun, results: Results, style: str) -> list[str]:
    """Return verdicts: those about the scenario together, those about single stacks one by one."""
    if not run.scenario.targets:
        return []
    joint = judge_jointly(run, results.targets, results.elsewhere)
    together = [] if joint is None else [joint.sentence, joint_table(joint, style), _TOGETHER]
    return [*together, verdict_table(judge_all(run, results.targets, results.elsewhere), style)]


SOURCE = Source(order=0, pages=lambda results: (scenario_page(run, results) for run in results.runs()))
