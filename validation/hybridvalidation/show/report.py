"""Everything that records say, as Markdown files with their pictures."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridtrain.reports.tables import MARKDOWN, TERMINAL, write_page
from hybridtrain.units import format_count, to_gib
from hybridvalidation.experiments.stack_runs import ScenarioRun, run_from_records
from hybridvalidation.judge.verdict import NOWHERE_ELSE, Elsewhere
from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.kinds import Page, Section, View, kinds_in
from hybridvalidation.study.ladder.quality import NO_QUALITY, Quality, stack_quality
from hybridvalidation.study.ladder.targets import ladder_verdicts


def headline(run: ScenarioRun) -> str:
    """Return model, card and workload in a line."""
    scenario = run.scenario
    model, card = scenario.model.resolve(), scenario.card.resolve()
    tokens = scenario.workload.batch_size * scenario.workload.seq_len
    cards = f"{scenario.world} x " if scenario.world > 1 else ""
    return (
        f"{scenario.says}: {format_count(model.num_params)} parameters on {cards}{card.name} "
        f"({to_gib(card.memory_bytes):.2f} GiB), {tokens} tokens per step "
        f"({scenario.workload.batch_size} x {scenario.workload.seq_len})"
    )


def report_text(
    run: ScenarioRun,
    targets: Mapping[str, Target],
    style: str,
    elsewhere: Elsewhere = NOWHERE_ELSE,
    quality: Quality = NO_QUALITY,
) -> str:
    """Return headline, tables and sentences of a scenario."""
    view = View(run=run, targets=targets, style=style, elsewhere=elsewhere, quality=quality)
    parts = [part for section in kinds_in("sections", Section) for part in section.parts(view)]
    return "\n\n".join([f"{'# ' if style == MARKDOWN else ''}{headline(run)}", *parts])


def write_report(
    run: ScenarioRun, targets: Mapping[str, Target], results: Path, elsewhere: Elsewhere, quality: Quality
) -> list[Path]:
    """Write ``tables/NAME.md`` and ``plots/NAME-*.png`` below ``results``; return the paths."""
    from hybridvalidation.show.pictures import write_plots  # noqa: PLC0415  matplotlib takes half a second

    plots = write_plots(run, results / "plots")
    pictures = "\n".join(f"![{path.stem}](../plots/{path.name})" for path in plots)
    text = f"{report_text(run, targets, MARKDOWN, elsewhere, quality)}\n\n## Pictures\n\n{pictures}"
    return [write_page(results, run.scenario.name, text), *plots]


def rebuild(files: ScenarioFiles, names: Sequence[str], results: Path) -> list[Path]:
    """Write the reports of scenarios from their records, nothing is run; without names all, and all other pages."""
    store, written = RecordStore(results / "records"), list[Path]()
    elsewhere, quality = ladder_verdicts(files, results), stack_quality(files, results)
    for name in names or [name for name in store.scenarios() if name in files.scenario_names()]:
        scenario = files.scenario(name)
        run = run_from_records(scenario, [files.stack(stack) for stack in scenario.stacks], store)
        written += write_report(run, files.targets(), results, elsewhere, quality)
    for page in [] if names else kinds_in("pages", Page):
        written += page.write(files, results)
    return written


def check_report(files: ScenarioFiles, results: Path) -> list[str]:
    """Return what ``report`` would write otherwise than it stands: tables, and figures in the pages of a checkout.

    Pictures are drawn and not compared: another matplotlib draws them otherwise.
    """
    from hybridvalidation.show.figures import Figures, filled, marked_pages  # noqa: PLC0415  figures show pages

    figures = Figures(files, results)
    stale = [
        path
        for path in marked_pages(results.parent)
        if filled(text := path.read_text(encoding="utf-8"), figures, str(path)) != text
    ]
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "results"
        shutil.copytree(results / "records", again / "records")
        rebuild(files, (), again)
        names = {path.name for place in (results, again) for path in (place / "tables").glob("*.md")}
        stale += [
            results / "tables" / name
            for name in sorted(names)
            if _text(results / "tables" / name) != _text(again / "tables" / name)
        ]
    return [path.as_posix() for path in stale]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


__all__ = ["MARKDOWN", "TERMINAL", "check_report", "headline", "rebuild", "report_text", "write_report"]
