"""Trainers of others beside ours: a page for each scenario that has a file of peers."""

from pathlib import Path

from hybridtrain.units import format_count, to_gib
from hybridvalidation.judge.time_error import TIME_ERROR, WAITING_ERROR
from hybridvalidation.peers.figures import Row, read_peer_records, rows_of
from hybridvalidation.peers.scenario import PeerScenario, read_peers
from hybridvalidation.peers.table import peer_table, versions_lines
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.kinds import Page
from hybridvalidation.show.tables import MARKDOWN, made_by, write_page

_HOW = (
    "Planned: the engine's own trainer, run for two steps on a virtual card; nothing was computed and no card was "
    "there. Peaks are of allocated and of reserved bytes, host bytes those of tensors. Where a recipe does not fit, "
    "they are what it would take of a larger card, and the remark says where it was refused. Steps are timed by a "
    f"roofline of eager ops (estimated), which was {100 * TIME_ERROR:.1f} % off on average over recorded runs, "
    f"{100 * WAITING_ERROR:.0f} % where a step waits for copies: smaller differences decide nothing. Executed small: "
    "the same recipe trained five steps on the CPU, at a size for that; the loss is finite and falls."
)


def write_peers(files: ScenarioFiles, results: Path) -> list[Path]:
    """Write ``tables/peers-NAME.md`` for every scenario of which anything was run."""
    records = read_peer_records(results / "records")
    written = []
    for name, scenario in read_peers(files).items():
        rows = rows_of(scenario, files, records)
        if any(row.records for row in rows):
            written.append(write_page(results, f"peers-{name}", peers_text(scenario, rows)))
    return written


def peers_text(scenario: PeerScenario, rows: list[Row]) -> str:
    """Return the page of a scenario."""
    card, workload, memory = scenario.card.resolve(), scenario.workload, scenario.host.memory_gib
    made = [("", record) for row in rows for record in row.records.values()]
    facts = (
        f"{format_count(scenario.model.resolve().num_params)} parameters on {card.name} "
        f"({to_gib(card.memory_bytes):.2f} GiB), {scenario.tokens_per_step} tokens per step "
        f"({workload.batch_size} x {workload.seq_len}){'' if memory is None else f', {memory:g} GiB of host memory'}."
    )
    versions = "\n".join(f"- {line}" for line in versions_lines(rows))
    parts = [
        f"# {scenario.title}", facts, scenario.says.strip(), peer_table(rows, MARKDOWN), _HOW, versions, made_by(made),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


PAGE = Page(order=6, group="Comparisons", write=write_peers)
