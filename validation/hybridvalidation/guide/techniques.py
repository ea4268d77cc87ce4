"""What a page on a technique says in figures: a step with it and without, records, stated targets, quality."""

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tabulate import tabulate

from hybridtrain.config.decode import decode
from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import ModelConfig, Workload, model_preset
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.optimizations.grad_accumulation import GradAccumulation
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import DryRun, dry_run
from hybridtrain.planning.savings import without
from hybridtrain.reports.tables import MARKDOWN, fits_cell
from hybridtrain.stacks import STACK_UNIONS, Stack
from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.experiments.stack_runs import run_from_records
from hybridvalidation.guide.settings import settings_table
from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario import BASELINE_STACK, RATE_BASELINE
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.pages.targets import all_targets
from hybridvalidation.show.report import headline
from hybridvalidation.show.sections.summary import summary_table
from hybridvalidation.study.ladder.equivalence import judge_rung
from hybridvalidation.study.ladder.protocol import ladder_names, read_ladder_file
from hybridvalidation.study.ladder.runner import read_ladder
from hybridvalidation.study.quality_notes import interim_text

MODEL, CARD, WORK = "llama-3.2-1b", "rtx-4090", Workload(micro_batch_size=4, seq_len=1024)
"""What a technique is looked at on."""
_SCENARIO = "techniques"
_FEW = 2
"""Optimizations of a stack that is about one of them: itself, and what it needs."""


def technique_sections(kind: str, step: str, files: ScenarioFiles, results: Path) -> str:
    """Return all that is generated of a technique's page.

    Args:
        kind: Of the optimization.
        step: What ``step_table`` says of the page's example.
        files: Scenarios and stacks.
        results: Folder of records.
    """
    stacks = [files.stack(name) for name in files.stack_names()]
    parts = {
        "Settings": settings_table(OPTIMIZATIONS[kind]),
        "A step with it, and without": step,
        "On record": _recorded(_about(kind, stacks), files, results),
        "Quality": _quality(_about(kind, stacks), files, results),
    }
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items() if text)


def step_table(
    kind: str, example: str, *, model: ModelConfig | None = None, card: str = CARD, workload: Workload = WORK
) -> str:
    """Return a step of the example's stack with the technique and without, planned now.

    Args:
        kind: The technique.
        example: Its stack, as TOML.
        model: None: MODEL.
        card: By name.
        workload: Of a step; accumulation splits it.

    Raises:
        ConfigError: the example does not have the technique, or is no stack.
    """
    stack, mine = example_stack(kind, example)
    shape = model or model_preset(MODEL)
    rows = [_row("with it", _run(shape, stack, card, workload))]
    rows.append(_row("without", _run(shape, without(stack, mine), card, workload)))
    headers = ["the stack above", "fits", "allocated GiB", "device GiB", "host GiB", "disk GiB", "step s", "tokens/s"]
    table = tabulate(rows, headers=headers, tablefmt=MARKDOWN, disable_numparse=True)
    name = MODEL if model is None else "the model"
    return (
        f"{table}\n\n{name} on {find_card(card).name}, {workload.micro_batch_size} x {workload.seq_len} tokens a step. "
        "Bytes are planned, by a dry run when this page was built; times are estimated (roofline). What other stacks "
        "gain differs: `hybridtrain dry-run ... --savings` tells it of yours."
    )


def example_stack(kind: str, example: str) -> tuple[tuple[Optimization, ...], Optimization]:
    """Return the stack of a page's example, and what the page is about in it.

    Raises:
        ConfigError: the example does not have the technique, or is no stack.
    """
    stack = decode(Stack, {"name": kind, "says": kind, **tomllib.loads(example)}, source=kind, unions=STACK_UNIONS)
    for item in stack.optimizations:
        if item.kind == kind:
            return stack.optimizations, item
    raise ConfigError(kind, [f"the page's example has no [[optimizations]] of kind '{kind}'; put one there"])


def catalogue() -> str:
    """Return every technique with the first line of what it is."""
    rows = [
        [f"[{kind}]({kind}.md)", (cls.__doc__ or "").partition("\n")[0]] for kind, cls in sorted(OPTIMIZATIONS.items())
    ]
    return tabulate(rows, headers=["kind", "what it does"], tablefmt=MARKDOWN)


def _run(model: ModelConfig, stack: Sequence[Optimization], card: str, workload: Workload) -> DryRun:
    steps = next((item.grad_accum_steps for item in stack if isinstance(item, GradAccumulation)), 1)
    micro_batch = Workload(micro_batch_size=workload.micro_batch_size // steps, seq_len=workload.seq_len)
    return dry_run(model, compose(stack), find_card(card), micro_batch)


def _row(name: str, run: DryRun) -> list[str]:
    sizes = (run.peak.allocated_bytes, run.device_used_bytes, run.host_peak_bytes, run.disk_peak_bytes)
    return [
        name, fits_cell(run.verdict), *(f"{to_gib(size):.2f}" for size in sizes), f"{run.time.seconds:.3f}",
        f"{run.tokens_per_s:,.0f}",
    ]  # fmt: skip


def _about(kind: str, stacks: Sequence[Stack]) -> list[str]:
    """Return the stacks that have a technique and the fewest others."""
    sizes = {
        stack.name: len(stack.optimizations)
        for stack in stacks
        if any(item.kind == kind for item in stack.optimizations)
    }
    most = max(_FEW, min(sizes.values(), default=0))
    return [name for name, size in sizes.items() if size <= most]


@cache
def _targets(folder: Path, results: Path) -> list[tuple[str, str, str]]:
    rows = all_targets(ScenarioFiles(folder), results)
    return [(row.stack, row.target, f"{row.says}: {row.status}, {row.evidence or '-'}. {row.reason}") for row in rows]


def _recorded(names: Sequence[str], files: ScenarioFiles, results: Path) -> str:
    """Return the rows of the committed scenario about single techniques, and verdicts on stated figures."""
    scenario = files.scenario(_SCENARIO)
    mine = [name for name in scenario.stacks if name in names]
    told = ""
    if mine:
        run = run_from_records(
            scenario, [files.stack(stack) for stack in scenario.stacks], RecordStore(results / "records")
        )
        shown = {BASELINE_STACK, *mine, *([RATE_BASELINE] if any("int8" in name for name in mine) else [])}
        lines = summary_table(run, MARKDOWN).splitlines()
        rows = [line for line in lines if line.split("|")[1].strip() in shown]
        told = "\n".join([f"{headline(run)}.\n", *lines[:2], *rows])
        told += f"\n\n[How each figure was got](../results/tables/{_SCENARIO}.md); read from committed records."
    verdicts = [
        f"- {target}: {text}"
        for stack, target, text in _targets(files.folder, results)
        if set(stack.split(", ")) & (set(mine) or set(names))
    ]
    return "\n\n".join(part for part in (told, "\n".join(verdicts)) if part)


def _quality(names: Sequence[str], files: ScenarioFiles, results: Path) -> str:
    """Return what the quality ladders say of stacks."""
    rows = []
    for name in ladder_names(files.folder):
        ladder, made = read_ladder_file(files.folder, name), read_ladder(results, name)
        for stack in names:
            arm = ladder.arm_of(stack)
            if arm is None:
                continue
            found = [
                f"{judged.comparison.rung.name}: {judged.finding} ({len(judged.comparison.pairs)} of "
                f"{len(judged.comparison.seeds)} seeds{interim_text(judged, ladder.margin_nats)})"
                for rung in ladder.rungs
                for judged in judge_rung(ladder, made, rung)
                if judged.comparison.arm.name == arm.name and judged.comparison.pairs
            ]
            is_baseline = arm is ladder.baseline
            same = "equal to the baseline to the bit" if is_baseline else "; ".join(found) or "no runs yet"
            rows.append([stack, arm.says, same])
    if not rows:
        return ""
    table = tabulate(rows, headers=["stack", "computes", "against plain float32"], tablefmt=MARKDOWN)
    return (
        f"{table}\n\nExecuted on small models: [the ladder](../results/tables/study-quality-ladder.md), from committed "
        "records."
    )
