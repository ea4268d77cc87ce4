"""The HTML site: a page for every page of the Markdown report and every scenario, and an index."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtrain.atomic_write import replace_file
from hybridtrain.errors import ConfigError
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.joint import judge_all, judge_jointly
from hybridvalidation.judge.verdict import Status
from hybridvalidation.pictures.plotly import page_spec
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.page import Page, png_name
from hybridvalidation.show.pages.scenario import headline
from hybridvalidation.show.report import all_pages
from hybridvalidation.show.results import Results
from hybridvalidation.show.scenario_pictures import with_memory
from hybridvalidation.show.web.environment import environment_text

if TYPE_CHECKING:
    from hybridvalidation.show.web.markdown import Rendered

_HERE = Path(__file__).parent
_TARGETS = "targets"


def write_site(files: ScenarioFiles, folder_of_results: Path, folder: Path) -> list[Path]:
    """Write all pages into a folder, made if need be, from records alone; the folder of results stays as it is.

    Raises:
        ConfigError: there are no records.
    """
    results = Results(files, folder_of_results)
    if not results.records.is_dir():
        advice = "a report is made of records; run: hybridtrain validate SCENARIO --record"
        raise ConfigError("report --html", [f"{results.records}: no such folder; {advice}"])
    notes = [
        Page(name=path.stem, group="Notes", text=path.read_text(encoding="utf-8"))
        for path in sorted(results.folder.glob("*.md"))  # beside the tables: printed by benchmarks, and what was tried
    ]
    environment = Page(name="environment", group="Environment", text=environment_text(results.records))
    cards = [_card(run, results) for run in results.runs()]
    return _Writer([*all_pages(results), environment, *notes], cards, results.folder / "plots", folder).write()


def _card(run: ScenarioRun, results: Results) -> dict[str, object]:
    """Return a scenario as the first page shows it."""
    joint, stacks = judge_jointly(run, results.targets, results.elsewhere), with_memory(run)
    found = Counter(verdict.status for verdict in judge_all(run, results.targets, results.elsewhere))
    return {
        "name": run.scenario.name, "headline": headline(run), "num_stacks": len(stacks),
        "num_fitting": sum(memory.fits for _, memory in stacks), "joint": "" if joint is None else joint.sentence,
        "counts": {status: found[status] for status in Status if found[status]},
    }  # fmt: skip


class _Writer:
    """Writes the pages and their assets."""

    def __init__(self, pages: Sequence[Page], cards: Sequence[dict[str, object]], plots: Path, folder: Path) -> None:
        from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415  slow

        self._pages, self._cards, self._plots, self._folder = pages, cards, plots, folder
        self._names = {page.name for page in pages}
        self._drawn = {name: content for page in pages for name, content in page.files.items()}
        self._written: list[Path] = []
        self._templates = Environment(
            loader=PackageLoader("hybridvalidation.show.web"), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.filters["spec"] = page_spec
        exact = {"sort_keys": False, "separators": (",", ":"), "allow_nan": False}
        self._templates.policies["json.dumps_kwargs"] = exact

    def write(self) -> list[Path]:
        """Write the site; the first path is that of the page to open."""
        from plotly.offline import get_plotlyjs  # noqa: PLC0415  slow

        targets = next((page for page in self._pages if page.name == _TARGETS), None)
        about = None if targets is None else self._render(targets)
        self._page("index.html.jinja", "index", title="Overview", cards=self._cards, about=about)
        for page in self._pages:
            rendered = self._render(page)
            title = rendered.title or page.name
            self._page("page.html.jinja", page.name, title=title, about=rendered, pictures=page.pictures)
        for asset in sorted((_HERE / "assets").iterdir()):
            self._add(asset.name, asset.read_bytes())
        self._add("plotly.min.js", get_plotlyjs().encode())
        return self._written

    def _page(self, template: str, name: str, **values: object) -> None:
        groups: dict[str, list[Page]] = {}
        for page in self._pages:
            groups.setdefault(page.group, []).append(page)
        text = self._templates.get_template(template).render(name=name, groups=groups, **values)
        self._add(f"{name}.html", text.encode())

    def _render(self, page: Page) -> "Rendered":
        from hybridvalidation.show.web.markdown import render  # noqa: PLC0415  slow

        shown = {png_name(page.name, picture) for picture in page.pictures}
        return render(page.text, lambda target: self._locate(target, shown))

    def _locate(self, target: str, shown: set[str]) -> str | None:
        """Return the target of a Markdown link within the folder; copy pictures that are not shown."""
        if target.startswith(("https://", "http://", "#")):
            return target
        path = Path(target.partition("#")[0])
        if path.suffix == ".md" and path.stem in self._names:
            return f"{path.stem}.html"
        if path.suffix == ".png" and path.name not in shown:
            kept = self._plots / path.name
            content = self._drawn.get(path.name) or (kept.read_bytes() if kept.is_file() else b"")
            if content:
                self._add(f"pictures/{path.name}", content)
                return f"pictures/{path.name}"
        return None

    def _add(self, name: str, content: bytes) -> None:
        path = self._folder / name
        if path not in self._written:
            replace_file(path, content)
            self._written.append(path)
