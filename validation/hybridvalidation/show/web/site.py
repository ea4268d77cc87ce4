"""The HTML site: a page for every page of the Markdown report and every scenario, and an index."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtrain.atomic_write import replace_file
from hybridtrain.errors import ConfigError
from hybridtrain.planning.time_error import TIME_ERROR
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.joint import judge_all
from hybridvalidation.judge.verdict import Status
from hybridvalidation.pictures.plotly import page_spec
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.page import Page, png_name
from hybridvalidation.show.report import all_pages
from hybridvalidation.show.results import Results
from hybridvalidation.show.scenario_pictures import with_memory
from hybridvalidation.show.web.atlas import DATA_FILE, AtlasView, atlas_view
from hybridvalidation.show.web.environment import environment_text

if TYPE_CHECKING:
    from hybridvalidation.show.web.markdown import Rendered

_HERE = Path(__file__).parent


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
    atlas = None if results.atlas is None else atlas_view(results.atlas)
    pages = [*all_pages(results), environment, *notes]
    return _Writer(pages, cards, atlas, results.folder / "plots", folder).write()


def _card(run: ScenarioRun, results: Results) -> dict[str, object]:
    """Return a scenario as the first page shows it."""
    stacks = with_memory(run)
    fitting = [item for item in stacks if item[1].fits]
    stack, fastest = max(fitting, key=lambda item: item[1].tokens_per_s, default=("", None))
    found = Counter(verdict.status for verdict in judge_all(run, results.targets, results.elsewhere))
    return {
        "name": run.scenario.name, "description": run.scenario.description, "num_stacks": len(stacks),
        "num_fitting": len(fitting),
        "fastest": "" if fastest is None else f"{stack}, {fastest.tokens_per_s:,.0f} tokens/s estimated",
        "counts": {status: found[status] for status in Status if found[status]},
    }  # fmt: skip


class _Writer:
    """Writes the pages and their assets."""

    def __init__(
        self, pages: Sequence[Page], cards: Sequence[dict[str, object]], atlas: AtlasView | None, plots: Path,
        folder: Path,
    ) -> None:  # fmt: skip
        from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415  slow

        self._atlas = atlas
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

        summaries = {name: self._summary(name) for name in ("recorded", "targets")}
        self._page(
            "index.html.jinja", "index", title="Does it fit your card, and how fast is it?", cards=self._cards,
            atlas=self._atlas, summaries=summaries, time_error=f"{100 * TIME_ERROR:.0f} %",
        )  # fmt: skip
        self._page("scenarios.html.jinja", "scenarios", title="All scenarios", cards=self._cards)
        for page in self._pages:
            rendered = self._render(page)
            title = rendered.title or page.name
            self._page("page.html.jinja", page.name, title=title, about=rendered, pictures=page.pictures)
        if self._atlas is not None:
            self._add(DATA_FILE, self._atlas.script)
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

    def _summary(self, name: str) -> str:
        return next((page.summary for page in self._pages if page.name == name), "")

    def _render(self, page: Page) -> "Rendered":
        from hybridvalidation.show.web.markdown import render  # noqa: PLC0415  slow

        text = page.text
        for file in (Path(png_name(page.name, picture)) for picture in page.pictures):
            text = text.replace(f"![{file.stem}](../plots/{file.name})", "")
        return render(text.rstrip().removesuffix("## Pictures"), self._locate)

    def _locate(self, target: str) -> str | None:
        """Return the target of a Markdown link within the folder; copy pictures that no chart draws."""
        if target.startswith(("https://", "http://", "#")):
            return target
        path = Path(target.partition("#")[0])
        if path.suffix == ".md" and path.stem in self._names:
            return f"{path.stem}.html"
        if path.suffix == ".png":
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
