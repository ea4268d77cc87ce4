"""Trainers of others beside ours: a page for each scenario that has a file of peers."""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import stdev

from hybridtrain.planning.time_error import TIME_ERROR, WAITING_ERROR
from hybridtrain.reports.tables import MARKDOWN, write_page
from hybridtrain.units import format_count, to_gib
from hybridvalidation.experiments.peers import (
    PeerScenario,
    Row,
    peer_table,
    read_peer_records,
    read_peers,
    rows_of,
    versions_lines,
)
from hybridvalidation.experiments.recorded import read_planned, read_sources, recipe_errors
from hybridvalidation.experiments.recorded import rows_of as rows_of_recorded
from hybridvalidation.records.makers import made_by
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.kinds import Page

_HOW = (
    "Planned: the engine's own trainer, run for two steps on a virtual card; nothing was computed and no card was "
    "there. Peaks are of allocated and of reserved bytes, host bytes those of tensors. Where a recipe does not fit, "
    "they are what it would take of a larger card, and the remark says where it was refused. Steps are timed by a "
    f"roofline of eager ops (estimated), which was {100 * TIME_ERROR:.1f} % off on average over recorded runs, all of "
    f"them full training by LLMQ and ml_dataflow, {100 * WAITING_ERROR:.0f} % where a step waits for copies. Not among "
    "the recipes: kernels of Unsloth and Liger, compiled models, torchtune; any of them may be faster than all rows."
)
_TRAINED = (
    "Executed small: the same recipe trained five steps on the CPU, at a size for that; the loss is finite and falls."
)


def write_peers(files: ScenarioFiles, results: Path) -> list[Path]:
    """Write ``tables/peers-NAME.md`` for every scenario of which anything was run."""
    records = read_peer_records(results / "records")
    spread = spread_text(recipe_errors(rows_of_recorded(read_sources(files.folder), read_planned(results / "records"))))
    written = []
    for name, scenario in read_peers(files).items():
        rows = rows_of(scenario, files, records)
        if any(row.records for row in rows):
            written.append(write_page(results, f"peers-{name}", peers_text(scenario, rows, spread)))
    return written


def spread_text(errors: Sequence[float]) -> str:
    """Say how far apart two trainers may be by the error of their estimates alone; nothing without recorded steps."""
    if len(errors) < 2:
        return ""
    deviation = stdev(errors)
    return (
        f"Between recipes: of {len(errors)} recorded steps of PEFT's on one card, the nearest to these trainers that "
        f"are published, planned ones were {100 * min(errors):+.0f} to {100 * max(errors):+.0f} % off, with a "
        f"deviation of {100 * deviation:.0f} %, so two recipes that are equally fast come out "
        f"{100 * sqrt(2) * deviation:.0f} % apart (standard deviation) by that alone: smaller differences decide "
        "nothing. No recorded run tests the speed of a step with 4-bit weights, or of a trainer of ours."
    )


def peers_text(scenario: PeerScenario, rows: list[Row], spread: str = "") -> str:
    """Return the page of a scenario.

    Args:
        scenario: The file of peers.
        rows: Its recipes with their records.
        spread: What ``spread_text`` says.
    """
    card, workload, memory = scenario.card.resolve(), scenario.workload, scenario.host.memory_gib
    made = [("", record) for row in rows for record in row.records.values()]
    facts = (
        f"{format_count(scenario.model.resolve().num_params)} parameters on {card.name} "
        f"({to_gib(card.memory_bytes):.2f} GiB), {scenario.tokens_per_step} tokens per step "
        f"({workload.batch_size} x {workload.seq_len}){'' if memory is None else f', {memory:g} GiB of host memory'}."
    )
    versions = "\n".join(f"- {line}" for line in versions_lines(rows))
    trained = _TRAINED if any(Evidence.EXECUTED in row.records for row in rows) else ""
    how = " ".join(part for part in (_HOW, spread, trained) if part)
    parts = [
        f"# {scenario.title}", facts, scenario.says.strip(), peer_table(rows, MARKDOWN), how, versions, made_by(made),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


PAGE = Page(order=6, group="Comparisons", write=write_peers)
