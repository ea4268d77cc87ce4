"""Figures of a technique's page: a step with it and without, records, stated targets, quality."""

import re
import tomllib
from collections.abc import Sequence

from hybridtrain.config.decode import decode
from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import ModelConfig, Workload, model_preset
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.planning.savings import without
from hybridtrain.reports.card_report import fits_cell
from hybridtrain.reports.tables import MARKDOWN, table
from hybridtrain.stacks import STACK_UNIONS, Stack
from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.guide.reference import settings_table
from hybridvalidation.scenario import BASELINE_STACK, RATE_BASELINE
from hybridvalidation.show.pages.scenario import headline, summary_table
from hybridvalidation.show.results import Results
from hybridvalidation.study.equivalence import judge_size
from hybridvalidation.study.protocol import ladders, read_study
from hybridvalidation.study.quality_notes import interim_text

MODEL, CARD, WORK = "llama-3.2-1b", "rtx-4090", Workload(micro_batch_size=4, seq_len=1024)
"""Model of a technique's example."""
_EXAMPLE = re.compile(r"```toml\n(.*?)```", re.DOTALL)
_SCENARIO = "techniques"
_FEW = 2
"""Optimizations of a stack that is about one of them: itself, and what it needs."""


def technique_sections(kind: str, results: Results) -> str:
    """Return the sections of a technique's page on its settings, its records and its quality."""
    stacks = [results.files.stack(name) for name in results.files.stack_names()]
    parts = {
        "Settings": settings_table(OPTIMIZATIONS[kind]),
        "On record": _recorded(_about(kind, stacks), results),
        "Quality": _quality(_about(kind, stacks), results),
    }
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items() if text)


def step_table(
    kind: str, example: str, *, model: ModelConfig | None = None, card: str = CARD, workload: Workload = WORK
) -> str:
    """Return a step of the example's stack (TOML) with the technique and without, planned now; None: ``MODEL``.

    Raises:
        ConfigError: the example does not have the technique, or is no stack.
    """
    stack, mine = example_stack(kind, example)
    rows = []
    for name, items in (("with it", stack), ("without", without(stack, mine))):
        steps = next((item.grad_accum_steps for item in items if isinstance(item, GradAccumulation)), 1)
        micro_batch = Workload(micro_batch_size=workload.micro_batch_size // steps, seq_len=workload.seq_len)
        run = dry_run(model or model_preset(MODEL), compose(items), find_card(card), micro_batch)
        sizes = (run.peak.allocated_bytes, run.device_used_bytes, run.host_peak_bytes, run.disk_peak_bytes)
        rows.append([
            name, fits_cell(run.verdict), *(f"{to_gib(size):.2f}" for size in sizes), f"{run.time.seconds:.3f}",
            f"{run.tokens_per_s:,.0f}",
        ])  # fmt: skip
    headers = ["the stack above", "fits", "allocated GiB", "device GiB", "host GiB", "disk GiB", "step s", "tokens/s"]
    name = MODEL if model is None else "the model"
    return (
        f"{table(headers, rows, MARKDOWN)}\n\n{name} on {find_card(card).name}, {workload.micro_batch_size} x "
        f"{workload.seq_len} tokens per step. Bytes are planned by a dry run, times are estimated (roofline). "
        "`hybridtrain dry-run ... --savings` shows what a technique saves in a stack of yours."
    )


def page_example(text: str, kind: str) -> str:
    """Return the TOML of a technique's page; raises ``ConfigError`` if it has none."""
    found = _EXAMPLE.search(text)
    if found is None:
        raise ConfigError(kind, ["a technique's page needs an example, as ```toml ... ```; put one there"])
    return found[1]


def example_stack(kind: str, example: str) -> tuple[tuple[Optimization, ...], Optimization]:
    """Return the stack of a page's example, and the page's technique in it.

    Raises:
        ConfigError: the example does not have the technique, or is no stack.
    """
    stack = decode(
        Stack, {"name": kind, "description": kind, **tomllib.loads(example)}, source=kind, unions=STACK_UNIONS
    )
    for item in stack.optimizations:
        if item.kind == kind:
            return stack.optimizations, item
    raise ConfigError(kind, [f"the page's example has no [[optimizations]] of kind '{kind}'; put one there"])


def catalogue() -> str:
    """Return every technique with the first line of its description."""
    rows = [
        [f"[{kind}]({kind}.md)", (cls.__doc__ or "").partition("\n")[0]] for kind, cls in sorted(OPTIMIZATIONS.items())
    ]
    return table(["kind", "what it does"], rows, MARKDOWN)


def _about(kind: str, stacks: Sequence[Stack]) -> list[str]:
    """Return the stacks with a technique and the fewest others."""
    sizes = {
        stack.name: len(stack.optimizations)
        for stack in stacks
        if any(item.kind == kind for item in stack.optimizations)
    }
    most = max(_FEW, min(sizes.values(), default=0))
    return [name for name, size in sizes.items() if size <= most]


def _recorded(names: Sequence[str], results: Results) -> str:
    """Return the rows of the committed scenario about single techniques."""
    run = results.run(_SCENARIO)
    mine = [name for name in run.scenario.stacks if name in names]
    if not mine:
        return ""
    wanted = {BASELINE_STACK, *mine, *([RATE_BASELINE] if any("int8" in name for name in mine) else [])}
    shown = summary_table(run, MARKDOWN, [stack for stack in run.scenario.stacks if stack in wanted])
    page = f"[How each figure was got](../../results/tables/{_SCENARIO}.md)"
    judged = "[what the design documents state, and whether it holds](../../results/tables/targets.md)"
    return f"{headline(run)}.\n\n{shown}\n\n{page}; {judged}."


def _quality(names: Sequence[str], results: Results) -> str:
    """Return the verdicts of the quality ladders on stacks."""
    rows = []
    for ladder in ladders(results.files.folder):
        made = read_study(results.folder, ladder)
        for stack in names:
            own = ladder.configuration_of(stack)
            if own is None:
                continue
            found = [
                f"{judged.size.name}: {judged.finding} ({len(judged.pairs)} of {len(judged.seeds)} seeds"
                f"{interim_text(judged, ladder.margin_nats)})"
                for size in ladder.rungs
                for judged in judge_size(ladder, made, size)
                if judged.configuration.name == own.name and judged.pairs
            ]
            is_baseline, reference = own is ladder.baseline, ladder.reference_of(own)
            result = "equal to the baseline to the bit" if is_baseline else "; ".join(found) or "no runs yet"
            rows.append([stack, own.description, "-" if reference is None else reference.description, result])
    if not rows:
        return ""
    shown = table(["stack", "computes", "compared with", "result"], rows, MARKDOWN)
    return f"{shown}\n\nExecuted on small models: [the ladder](../../results/tables/study-quality-ladder.md)."
