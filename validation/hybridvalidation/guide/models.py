"""What to train a model with: the fastest stacks on record, and what ``hybridtrain fit`` says as a page is built."""

from pathlib import Path

from tabulate import tabulate

from hybridtrain.models.hf_config import hf_architectures
from hybridtrain.reports.fit_report import fit_command
from hybridtrain.reports.tables import MARKDOWN, fits_cell
from hybridtrain.units import format_count, to_gib
from hybridtrain.virtual_gpu.cards.card import FitVerdict
from hybridvalidation.experiments.stack_runs import run_from_records
from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.sections.summary import summary_table
from hybridvalidation.study.ladder.quality import telling_of_stacks, told_in_short

_ABOUT_OTHERS = {"hybrid", "techniques"}
"""Scenarios that compare ways, not models on cards."""


def architectures() -> str:
    """Return the architectures of Hugging Face folders that are read, and the families that they are here."""
    rows = [[f"`{name}`", family] for name, family in hf_architectures().items()]
    return tabulate(rows, headers=["`architectures` in config.json", "family"], tablefmt=MARKDOWN)


def recommendations(files: ScenarioFiles, results: Path) -> str:
    """Return the fastest stack on record that fits, for every scenario about a model on a card, and what it costs."""
    store, rows, telling = RecordStore(results / "records"), [], telling_of_stacks(files, results)
    for name in files.scenario_names():
        if name in _ABOUT_OTHERS:
            continue
        scenario = files.scenario(name)
        run = run_from_records(scenario, [files.stack(stack) for stack in scenario.stacks], store)
        model, card = scenario.model.resolve(), scenario.card.resolve()
        found = [(memory, stack) for stack in scenario.stacks if (memory := run.memory(stack)) and memory.fits]
        head = [f"[{format_count(model.num_params)}](../results/tables/{name}.md)", card.name]
        if not found:
            rows.append([*head, "nothing on record fits", *["-"] * 6])
            continue
        memory, stack = max(found, key=lambda each: (each[0].verdict(card) is FitVerdict.FITS, each[0].tokens_per_s))
        barely = " (fits barely)" if memory.verdict(card) is FitVerdict.BARELY else ""
        rows.append([
            *head, f"{stack}{barely}", f"{memory.tokens_per_step:,}", f"{to_gib(memory.device_used_bytes):.2f}",
            f"{to_gib(memory.host_peak_bytes):.2f}", f"{memory.tokens_per_s:,.0f}", memory.bound,
            told_in_short(telling.get(stack)),
        ])  # fmt: skip
    headers = [
        "parameters", "card", "stack", "tokens a step", "device GiB", "host GiB", "tokens/s", "bound",
        "loss above float32's, executed small",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt=MARKDOWN, disable_numparse=True)


def scenario_table(name: str, files: ScenarioFiles, results: Path) -> str:
    """Return a scenario's first table, from its records."""
    scenario = files.scenario(name)
    stacks = [files.stack(stack) for stack in scenario.stacks]
    return summary_table(run_from_records(scenario, stacks, RecordStore(results / "records")), MARKDOWN)


def ways(model: str, card: str, host_memory: str = "64GiB") -> str:
    """Return what ``hybridtrain fit --quick`` says of a model on a card, as Markdown, with the command."""
    report = fit_command(
        model=model, card=card, host_memory=host_memory, seq=None, tokens_per_step=None, tokens=100_000_000,
        methods=("full", "lora", "qlora"), margin=None, confirm=False, write=None, say=lambda _line: None,
    )  # fmt: skip
    rows = []
    for way in report.options:
        hours = way.hours(report.tokens)
        rows.append([
            way.name, fits_cell(report.verdict(way)),
            *(f"{to_gib(size):.1f}" for size in (way.device_bytes, way.host_bytes, way.disk_bytes)),
            "-" if way.tokens_per_s is None else f"{way.tokens_per_s:,.0f}", "-" if hours is None else f"{hours:.1f}",
            way.candidate.arrangement.name, way.evidence,
        ])  # fmt: skip
    headers = [
        "numbers",
        "fits",
        "device GiB",
        "host GiB",
        "disk GiB",
        "tokens/s",
        "h / 100M tokens",
        "where",
        "bytes are",
    ]
    table = tabulate(rows, headers=headers, tablefmt=MARKDOWN, disable_numparse=True)
    question = report.request
    command = f"hybridtrain fit {model} --card {card} --host-memory {host_memory} --write ways/"
    return (
        f"{format_count(question.model.num_params)} parameters on {question.card.name}, {host_memory} of host memory, "
        f"{question.num_sequences} x {question.seq_len} tokens a step, {report.free_percent:g} % of the card free."
        f"\n\n{table}\n\n"
        f"Found when this page was built; times are estimated (roofline). Files that train each way:\n\n    {command}"
    )
