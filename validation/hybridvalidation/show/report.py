"""Everything a scenario's records say, as one Markdown file with its pictures."""

from pathlib import Path

from hybridtrain.atomic_write import replace_file
from hybridtrain.virtual_gpu.roofline import efficiency_of
from hybridvalidation.judge.verdict import judge_all
from hybridvalidation.runs.runner import ScenarioRun
from hybridvalidation.scenario import Target
from hybridvalidation.show.tables import (
    MARKDOWN,
    TERMINAL,
    class_table,
    headline,
    measured_table,
    outcome_lines,
    summary_table,
    verdict_table,
)


def _how(run: ScenarioRun) -> str:
    """Return how each kind of figure was got."""
    efficiency = efficiency_of(run.scenario.card.resolve())
    return (
        "Memory: planned, by a dry run of the trainer on the virtual GPU; host GiB are offloaded tensors, without the "
        f"process itself. Speed: estimated, by a roofline at {100 * efficiency.matmul:.0f} % of the card's matmul rate "
        f"and {100 * efficiency.memory:.0f} % of its bandwidths. Accuracy: executed, by training a small proxy on the "
        "CPU; 95 % intervals over paired seeds; top-1 above 100 and perplexity below 100 are better than vanilla."
    )


def report_text(run: ScenarioRun, targets: dict[str, Target], style: str) -> str:
    """Return headline, tables and sentences."""
    title = "## " if style == MARKDOWN else ""
    measured = measured_table(run, style)
    parts = [
        f"{'# ' if style == MARKDOWN else ''}{headline(run)}",
        summary_table(run, style),
        _how(run),
        f"{title}Where the memory goes, GiB allocated at the peak (planned)",
        class_table(run, style),
        *(f"{'- ' if style == MARKDOWN else ''}{line}" for line in outcome_lines(run)),
        *([f"{title}Planned / measured under the card's cap", measured] if measured else []),
        f"{title}Stated targets",
        verdict_table(judge_all(run, targets), style),
    ]
    return "\n\n".join(parts)


def write_report(run: ScenarioRun, targets: dict[str, Target], results: Path) -> list[Path]:
    """Write ``tables/NAME.md`` and ``plots/NAME-*.png`` below ``results``; return the paths."""
    from hybridvalidation.show.plots import write_plots  # noqa: PLC0415  matplotlib takes half a second, a dry run needs none

    plots = write_plots(run, results / "plots")
    pictures = "\n".join(f"![{path.stem}](../plots/{path.name})" for path in plots)
    table = results / "tables" / f"{run.scenario.name}.md"
    replace_file(table, f"{report_text(run, targets, MARKDOWN)}\n\n## Pictures\n\n{pictures}\n".encode())
    return [table, *plots]


__all__ = ["MARKDOWN", "TERMINAL", "report_text", "write_report"]
