"""The report: all pages of records as Markdown files with their pictures."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.page import Page, sources
from hybridvalidation.show.pages.scenario import scenario_page
from hybridvalidation.show.results import Results


def all_pages(results: Results) -> Iterable[Page]:
    """Yield every page with records."""
    for source in sources().values():
        yield from source.pages(results)


def write_pages(kind: str, files: ScenarioFiles, folder: Path) -> list[Path]:
    """Write the pages of one module of ``pages`` below a folder of results, and return the files."""
    return [path for page in sources()[kind].pages(Results(files, folder)) for path in page.write(folder)]


def rebuild(files: ScenarioFiles, names: Sequence[str], folder: Path) -> list[Path]:
    """Write the reports of scenarios from their records, nothing is run; without names all, and all other pages."""
    results = Results(files, folder)
    pages: Iterable[Page] = all_pages(results)
    if names:
        pages = (scenario_page(results.run(name), results) for name in names)
    return [path for page in pages for path in page.write(folder)]


def stale_pages(results: Results) -> list[Path]:
    """Return the stale tables, which ``rebuild`` would rewrite or remove.

    Pictures are not compared: another matplotlib draws them otherwise.
    """
    now = {f"{page.name}.md": f"{page.text}\n" for page in all_pages(results)}
    tables = results.folder / "tables"
    names = {*now, *(path.name for path in tables.glob("*.md"))}
    return [tables / name for name in sorted(names) if _text(tables / name) != now.get(name)]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None
