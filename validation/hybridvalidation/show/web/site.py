"""The folder: a page for every page of the Markdown report and for every scenario, and what lies over them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hybridtrain.atomic_write import replace_file
from hybridtrain.errors import ConfigError
from hybridvalidation.experiments.stack_runs import ScenarioRun, run_from_records
from hybridvalidation.judge.joint import judge_all, judge_jointly
from hybridvalidation.judge.verdict import Elsewhere, Status
from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.drawing import Drawing
from hybridvalidation.show.kinds import Chart, Page, PageChart, kinds_in
from hybridvalidation.show.pictures import with_memory
from hybridvalidation.show.report import MARKDOWN, headline, report_text
from hybridvalidation.show.web.environment import environment_text
from hybridvalidation.study.ladder.quality import Quality, stack_quality
from hybridvalidation.study.ladder.targets import ladder_verdicts

if TYPE_CHECKING:
    from hybridvalidation.show.web.markdown import Rendered

_HERE = Path(__file__).parent
_NEEDED = {"jinja2": "jinja2", "markdown_it": "markdown-it-py", "plotly": "plotly"}
_SCENARIOS, _NOTES, _TARGETS = "Scenarios", "Notes", "targets"
_INDEX = "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One page of the folder."""

    name: str
    """Of its file, without the ending."""
    group: str
    label: str
    """In the menu."""
    text: str
    """Markdown."""
    drawings: Sequence[Drawing] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioCard:
    """A scenario on the first page."""

    name: str
    headline: str
    num_stacks: int
    num_fitting: int
    joint: str
    """What one stack holds together; empty without such rows."""
    counts: Mapping[Status, int]


def write_site(files: ScenarioFiles, results: Path, folder: Path) -> list[Path]:
    """Write all pages into a folder, from records alone; nothing is run, and the folder of results stays as it is.

    Args:
        files: Scenarios, stacks, targets.
        results: Folder with records.
        folder: Made if need be; files of the same names are replaced.

    Raises:
        ConfigError: a package of the extra ``html`` is missing, or there are no records.
    """
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        wanted = f"not installed: {', '.join(missing)}; the HTML report needs them; python3 -m pip install "
        raise ConfigError("report --html", [f"{wanted}'hybridtrain[html]'"])
    if not (results / "records").is_dir():
        told = f"{results / 'records'}: no such folder; a report is made of records; run: hybridtrain validate SCENARIO"
        raise ConfigError("report --html", [told])
    with TemporaryDirectory() as scratch:
        made = Path(scratch)
        (made / "records").symlink_to((results / "records").resolve(), target_is_directory=True)
        runs, elsewhere = _runs(files, results), ladder_verdicts(files, results)
        quality = stack_quality(files, results)
        targets = files.targets()
        made_in = environment_text(results / "records")
        sheets = [
            *_scenario_sheets(runs, targets, elsewhere, quality), *_page_sheets(files, made),
            Sheet(name="environment", group="Environment", label="environment", text=made_in), *_note_sheets(results),
        ]  # fmt: skip
        cards = [_card(run, targets, elsewhere) for run in runs]
        return _Writer(sheets, cards, (made, results), folder).write()


def _runs(files: ScenarioFiles, results: Path) -> list[ScenarioRun]:
    store = RecordStore(results / "records")
    scenarios = [files.scenario(name) for name in files.scenario_names() if name in store.scenarios()]
    return [
        run_from_records(scenario, [files.stack(stack) for stack in scenario.stacks], store) for scenario in scenarios
    ]


def _scenario_sheets(
    runs: Iterable[ScenarioRun], targets: Mapping[str, Target], elsewhere: Elsewhere, quality: Quality
) -> Iterator[Sheet]:
    charts = kinds_in("charts", Chart)
    for run in runs:
        yield Sheet(
            name=f"scenario-{run.scenario.name}", group=_SCENARIOS, label=run.scenario.name,
            text=report_text(run, targets, MARKDOWN, elsewhere, quality),
            drawings=[drawing for chart in charts for drawing in chart.draw(run)],
        )  # fmt: skip


def _page_sheets(files: ScenarioFiles, made: Path) -> Iterator[Sheet]:
    """Let every kind of page write its Markdown where nobody minds, and take it from there."""
    drawings: dict[str, list[Drawing]] = {}
    for chart in kinds_in("charts", PageChart):
        for name, found in chart.draw(files, made).items():
            drawings.setdefault(name, []).extend(found)
    for page in kinds_in("pages", Page):
        for path in page.write(files, made):
            if path.suffix == ".md":
                yield Sheet(
                    name=path.stem, group=page.group, label=path.stem, text=path.read_text(encoding="utf-8"),
                    drawings=drawings.get(path.stem, ()),
                )  # fmt: skip


def _note_sheets(results: Path) -> Iterator[Sheet]:
    """Yield the pages that were written beside the tables: what benchmarks printed, and what was tried."""
    for path in sorted(results.glob("*.md")):
        yield Sheet(name=path.stem, group=_NOTES, label=path.stem, text=path.read_text(encoding="utf-8"))


def _card(run: ScenarioRun, targets: Mapping[str, Target], elsewhere: Elsewhere) -> ScenarioCard:
    joint, stacks = judge_jointly(run, targets, elsewhere), with_memory(run)
    found = Counter(verdict.status for verdict in judge_all(run, targets, elsewhere))
    return ScenarioCard(
        name=run.scenario.name, headline=headline(run), num_stacks=len(stacks),
        num_fitting=sum(memory.fits for _, memory in stacks), joint="" if joint is None else joint.sentence,
        counts={status: found[status] for status in Status if found[status]},
    )  # fmt: skip


class _Writer:
    """Writes the pages and what they need."""

    def __init__(
        self, sheets: Sequence[Sheet], cards: Sequence[ScenarioCard], sources: Sequence[Path], folder: Path
    ) -> None:
        from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415  of an extra

        self._sheets, self._cards, self._sources, self._folder = sheets, cards, sources, folder
        self._names = {sheet.name for sheet in sheets}
        self._written: list[Path] = []
        self._templates = Environment(
            loader=PackageLoader("hybridvalidation.show.web"), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.policies["json.dumps_kwargs"] = {
            "sort_keys": False,
            "separators": (",", ":"),
            "allow_nan": False,
        }

    def write(self) -> list[Path]:
        """Write everything; the first path is that of the page to open."""
        from plotly.offline import get_plotlyjs  # noqa: PLC0415  of an extra

        targets = next((sheet for sheet in self._sheets if sheet.name == _TARGETS), None)
        about = None if targets is None else self._render(targets)
        self._page("index.html.jinja", _INDEX, title="Overview", cards=self._cards, about=about)
        for sheet in self._sheets:
            rendered = self._render(sheet)
            title = rendered.title or sheet.label
            self._page("page.html.jinja", sheet.name, title=title, about=rendered, drawings=sheet.drawings)
        for asset in sorted((_HERE / "assets").iterdir()):
            self._add(asset.name, asset.read_bytes())
        self._add("plotly.min.js", get_plotlyjs().encode())
        return self._written

    def _page(self, template: str, name: str, **values: object) -> None:
        groups: dict[str, list[Sheet]] = {}
        for sheet in self._sheets:
            groups.setdefault(sheet.group, []).append(sheet)
        text = self._templates.get_template(template).render(name=name, groups=groups, **values)
        self._add(f"{name}.html", text.encode())

    def _render(self, sheet: Sheet) -> "Rendered":
        from hybridvalidation.show.web.markdown import render  # noqa: PLC0415  of an extra

        shown = tuple(drawing.replaces for drawing in sheet.drawings if drawing.replaces)
        return render(sheet.text, lambda target: self._locate(target, shown))

    def _locate(self, target: str, shown: tuple[str, ...]) -> str | None:
        """Return where a link of the Markdown leads within the folder; pictures come along, but for those shown."""
        if target.startswith(("https://", "http://", "#")):
            return target
        path = Path(target.partition("#")[0])
        if path.suffix == ".md" and path.stem in self._names:
            return f"{path.stem}.html"
        if path.suffix == ".md" and f"scenario-{path.stem}" in self._names:
            return f"scenario-{path.stem}.html"
        if path.suffix == ".png" and not path.stem.endswith(shown):
            for source in self._sources:
                picture = source / "plots" / path.name
                if picture.is_file():
                    self._add(f"pictures/{path.name}", picture.read_bytes())
                    return f"pictures/{path.name}"
        return None

    def _add(self, name: str, content: bytes) -> None:
        path = self._folder / name
        if path not in self._written:
            replace_file(path, content)
            self._written.append(path)
