"""What to train a model with: the fastest stacks on record, and what ``hybridtrain fit`` says now."""

from functools import cache

from hybridtrain.models.hf_config import hf_architectures
from hybridtrain.reports.fit_arguments import FitArguments
from hybridtrain.reports.fit_report import fit_command
from hybridtrain.reports.tables import MARKDOWN, table
from hybridtrain.units import format_count, to_gib
from hybridtrain.virtual_gpu.cards.card import FitVerdict
from hybridvalidation.show.results import Results
from hybridvalidation.study.quality import short_verdict

_WIDTH, _SHORT = 118, 9
"""Columns of an answer; lines of a short one."""
_ABOUT_OTHERS = {"hybrid", "techniques"}
"""Scenarios that compare ways, not models on cards."""


def architectures() -> str:
    """Return the architectures of Hugging Face folders that are read, and the families that they are here."""
    rows = [[f"`{name}`", family] for name, family in hf_architectures().items()]
    return table(["`architectures` in config.json", "family"], rows, MARKDOWN)


def recommendations(results: Results) -> str:
    """Return the fastest stack on record that fits, for every scenario about a model on a card, and what it costs."""
    rows = []
    for name in results.files.scenario_names():
        if name in _ABOUT_OTHERS:
            continue
        run = results.run(name)
        card, params = run.scenario.card.resolve(), run.scenario.model.resolve().num_params
        found = [(memory, stack) for stack in run.scenario.stacks if (memory := run.memory(stack)) and memory.fits]
        head = f"[{format_count(params)} on {card.name}](../results/tables/{name}.md)"
        if not found:
            rows.append([head, "nothing on record fits", *["-"] * 5])
            continue
        memory, stack = max(found, key=lambda each: (each[0].verdict(card) is FitVerdict.FITS, each[0].tokens_per_s))
        barely = " (fits barely)" if memory.verdict(card) is FitVerdict.BARELY else ""
        rows.append([
            head, f"{stack}{barely}", f"{memory.tokens_per_step:,}", f"{to_gib(memory.device_used_bytes):.2f}",
            f"{to_gib(memory.host_peak_bytes):.2f}", f"{memory.tokens_per_s:,.0f} ({memory.bound})",
            short_verdict(results.telling.get(stack)),
        ])  # fmt: skip
    headers = [
        "parameters, card", "stack", "tokens per step", "device GiB", "host GiB", "tokens/s (bottleneck)",
        "loss above float32's, executed small",
    ]  # fmt: skip
    return table(headers, rows, MARKDOWN)


def training_options(model: str, card: str, host_memory: str = "64GiB", *, is_short: bool = False) -> str:
    """Return the command ``hybridtrain fit`` and its answer as Markdown, with ``is_short`` its first lines."""
    text = _answer(FitArguments(model=model, card=card, host_memory=host_memory))
    memory = "" if host_memory == "64GiB" else f" --host-memory {host_memory}"
    lines = [f"hybridtrain fit {model} --card {card}{memory}", "", *text.splitlines()]
    if is_short:
        lines = [*lines[:_SHORT], "..."]
    return "\n".join(["```text", *lines, "```"])


@cache
def _answer(asked: FitArguments) -> str:
    """Return an answer that two pages show, made once."""
    return fit_command(asked).as_text(_WIDTH)
