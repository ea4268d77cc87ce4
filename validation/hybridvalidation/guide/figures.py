"""Figures and tables in README and the guide: each stands between markers that name it, and ``report`` fills them.

    <!--figure held all-->51<!--/figure-->

A marker has the name of a method of ``Figures`` and the words that it takes; where it stands in lines of its own, so
does what it is filled with. Nobody types them, and ``report --check`` fails where a page says something else than
records and program do.
"""

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from hybridtrain.atomic_write import replace_file
from hybridtrain.diagnoses import troubles_page
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.planning.time_error import KEPT_BACK_ERROR, TIME_ERROR
from hybridtrain.reports.tables import MARKDOWN
from hybridtrain.units import format_count
from hybridvalidation.guide.departures import defaults_table, names_table
from hybridvalidation.guide.models import architectures, recommendations, training_options
from hybridvalidation.guide.reference import api_errors, api_names, commands, file_settings, optimizers
from hybridvalidation.guide.techniques import catalogue, page_example, step_table, technique_sections
from hybridvalidation.judge.verdict import Status, Verdict
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.pages.atlas import cells_table
from hybridvalidation.show.pages.recorded import blind_scores, first_error
from hybridvalidation.show.pages.scenario import summary_table
from hybridvalidation.show.pages.targets import all_targets
from hybridvalidation.show.report import stale_pages
from hybridvalidation.show.results import Results
from hybridvalidation.study.duel import duel_words
from hybridvalidation.study.equivalence import Comparison, Finding
from hybridvalidation.study.factors import method_figures
from hybridvalidation.study.protocol import LadderFile, StudyFile, read_study, read_study_file
from hybridvalidation.study.quality import all_judged

_MARKED = re.compile(r"<!--figure ([^>]*?)-->(.*?)<!--/figure-->", re.DOTALL)
_PRECISIONS = {
    "mixed": "bfloat16",
    "adamw8bit": "8-bit optimizer state",
    "int8": "8-bit weights",
    "int8-matmul": "int8 matmuls",
}
"""Configurations of the tests of harm, in a reader's words."""
_PAGES = ("README.md", "docs/*.md", "docs/*/*.md")


class Figures(Results):
    """What pages can name: from committed records, from the program itself, from dry runs of it."""

    def trust(self) -> str:
        """Return a sentence each on how far memory, speed and quality are to be trusted."""
        peaks = blind_scores(self.published)
        memory = (
            f"predicted peaks are {100 * (first_error(peaks) or 0.0):.0f} % off on average, on "
            f"{sum(len(one.errors) for one in peaks)} that {len(peaks)} publications measured on CUDA, not seen before"
        )
        speed = (
            f"estimated; {100 * TIME_ERROR:.0f} % off on average on published runs left out of the fit, "
            f"{100 * KEPT_BACK_ERROR:.0f} % on runs not looked at before"
        )
        rows = {
            "Memory": (memory, "each", "results/tables/recorded.md"),
            "Speed": (speed, "runs", "results/time-model.md"),
            "Quality": (self._harm(), "test", "results/tables/study-quality-harm.md"),
            "Predicted steps": (
                self.duel("predict-ademamix-0.1m"), "study", "results/tables/study-predict-ademamix-0.1m.md",
            ),
        }  # fmt: skip
        return "\n".join(f"- **{head}**: {told} ([{name}]({page}))." for head, (told, name, page) in rows.items())

    def held(self, word: str) -> str:
        """Return of the stated figures how many there are (``all``), hold, or hold without a remark (``plainly``)."""
        rows = [row for row in self._judged if row.status is Status.HOLDS]
        counts = {"all": len(self._judged), "hold": len(rows), "plainly": sum(not row.has_remark for row in rows)}
        return _chosen(word, {name: lambda name=name: str(counts[name]) for name in counts})  # type: ignore[misc]

    def departures(self, word: str) -> str:
        """Return documented defaults beside ours (``defaults``), or the documents' names of options (``names``)."""
        return _chosen(word, {"defaults": defaults_table, "names": names_table})

    def scenario(self, name: str, *stacks: str) -> str:
        """Return a scenario's dry runs: the whole first table of its page, or the main columns of some stacks."""
        return summary_table(self.run(name), MARKDOWN, stacks, only_main=bool(stacks))

    def recommendations(self) -> str:
        """Return the fastest stack on record that fits, for every scenario about a model on a card."""
        return recommendations(self)

    def arms(self, rung: str, *names: str) -> str:
        """Return the smallest and the largest mean difference of loss of configurations at a model size, in nats."""
        means = [
            found.interval.mean
            for _, found in self._ladders
            if found.size.name == rung and found.configuration.name in names
            if found.interval is not None
        ]
        ends = [f"{mean:+.3f}" for mean in (min(means), max(means))]
        return " to ".join(dict.fromkeys(ends))

    def factor(self, study: str, method: str) -> str:
        """Return a method's compute factor in a study, with its 95 % interval."""
        file = read_study_file(self.files.folder, study)
        assert isinstance(file, StudyFile), f"{study} is no study of time to loss"
        found = method_figures(file, read_study(self.folder, file), method)
        assert found is not None, f"{study} has no figures of {method}"
        return f"{found.factor.mean:.2f} (95 % interval {found.factor.low:.2f} to {found.factor.high:.2f})"

    def duel(self, study: str) -> str:
        """Return what a direct comparison of two methods at equal time shows."""
        file = read_study_file(self.files.folder, study)
        assert isinstance(file, StudyFile), f"{study} is no study of methods"
        assert file.duel is not None, f"{study} compares more than two methods"
        size = format_count(file.model.num_params)
        return f"{duel_words(file, file.duel, read_study(self.folder, file))}, {size} parameters"

    def settings(self, file: str) -> str:
        """Return every table of a kind of file (training, stack, model, card, scenario)."""
        return file_settings(file)

    def optimizers(self) -> str:
        """Return every optimizer with its settings."""
        return optimizers()

    def commands(self) -> str:
        """Return the help of every verb."""
        return commands()

    def example(self, name: str) -> str:
        """Return a file of examples/ as a block of code."""
        path = self.folder.parent / "examples" / name
        language = {".py": "python"}.get(path.suffix, path.suffix[1:])
        return f"```{language}\n{path.read_text(encoding='utf-8').strip()}\n```"

    def api(self, word: str) -> str:
        """Return what can be imported from hybridtrain (``names``), or its exceptions (``errors``)."""
        return _chosen(word, {"names": api_names, "errors": api_errors})

    def architectures(self) -> str:
        """Return the architectures of Hugging Face folders that are read."""
        return architectures()

    def diagnoses(self) -> str:
        """Return every diagnosis of ``doctor --from``, by topic."""
        return troubles_page()

    def techniques(self) -> str:
        """Return every technique with what it does."""
        return catalogue()

    def technique(self, kind: str) -> str:
        """Return settings, records and quality of a technique."""
        return technique_sections(kind, self)

    def step(self, kind: str) -> str:
        """Return a step with the technique of a page's example and one without, planned now."""
        path = self.folder.parent / "docs" / "techniques" / f"{kind}.md"
        return step_table(kind, page_example(path.read_text(encoding="utf-8"), kind))

    def options(self, model: str, card: str, host_memory: str = "64GiB") -> str:
        """Return what ``hybridtrain fit`` says of a model on a card, planned now."""
        return training_options(model, card, host_memory)

    def fit(self, model: str, card: str) -> str:
        """Return the first lines of the same."""
        return training_options(model, card, is_short=True)

    def cells(self) -> str:
        """Return the cells of the atlas that the README shows, in short lines, and the size of the atlas."""
        assert self.atlas is not None, "the atlas is committed"
        shown = cells_table(self.atlas, [place.split("/") for place in self.atlas.file.readme], MARKDOWN)
        narrow = re.sub("-{3,}", "---", re.sub(r" +(?= |\|$)", "", shown, flags=re.MULTILINE))
        records = self.atlas.records.values()
        size = f"{len(records)} models on {max(len(record.cards) for record in records)} cards"
        return f"{narrow}\n\nThe [atlas](results/tables/atlas.md) has {size}."

    @cached_property
    def _judged(self) -> list[Verdict]:
        return all_targets(self)

    def _harm(self) -> str:
        """Return what the tests of harm tell of precisions, at the largest model size with a verdict."""
        judged = [
            (ladder, found)
            for ladder, found in self._ladders
            if found.level and found.configuration.name in _PRECISIONS and found.finding is not Finding.UNFINISHED
        ]
        size = max(found.scale[0] for _, found in judged)
        told, margins = dict[Finding, list[str]](), set[float]()
        for ladder, found in judged:
            if found.scale[0] == size:
                told.setdefault(found.finding, []).append(_PRECISIONS[found.configuration.name])
                margins.add(ladder.margin_nats)
        words = "; ".join(f"{finding}: {', '.join(dict.fromkeys(names))}" for finding, names in told.items())
        where = f"executed; margin {max(margins):g} nats of loss, {format_count(size)} parameters"
        return f"{words} ({where}; larger models: undecided)"

    @cached_property
    def _ladders(self) -> list[tuple[LadderFile, Comparison]]:
        return list(all_judged(self.files, self.folder))


def filled(text: str, figures: Figures, source: str) -> str:
    """Return a page with every marked figure as it is now.

    Raises:
        ConfigError: A marker names no figure, or its words are wrong.
    """
    known = [name for name in vars(Figures) if not name.startswith("_") and callable(getattr(Figures, name))]

    def fill(found: re.Match[str]) -> str:
        name, *words = found[1].split()
        if name not in known:
            raise ConfigError(source, [f"<!--figure {found[1]}-->: {unknown_name('figure', name, known)}"])
        try:
            told = str(getattr(figures, name)(*words))
        except TypeError as error:
            raise ConfigError(source, [f"<!--figure {found[1]}-->: {error}; give the words that it takes"]) from error
        lines = next((ends for ends in ("\n\n", "\n") if found[2].startswith(ends)), "")
        if not lines and not text[text.rfind("\n", 0, found.start()) + 1 : found.start()].strip():
            fault = "begins a line, which Markdown takes for HTML to its end; put a word before it"
            raise ConfigError(source, [f"<!--figure {found[1]}-->: {fault}"])
        return f"<!--figure {found[1]}-->{lines}{told}{lines}<!--/figure-->"

    return _MARKED.sub(fill, text)


def fill_pages(root: Path, figures: Figures, *, writes: bool = True) -> list[Path]:
    """Fill every marked figure of a checkout's pages; return the pages that changed, or would."""
    changed = []
    for path in (path for pattern in _PAGES for path in sorted(root.glob(pattern))):
        before = path.read_text(encoding="utf-8")
        after = filled(before, figures, str(path))
        if after != before:
            changed.append(path)
            if writes:
                replace_file(path, after.encode())
    return changed


def check_report(files: ScenarioFiles, folder: Path) -> list[str]:
    """Return what ``report`` would write otherwise than it stands: figures in a checkout's pages, and tables."""
    figures = Figures(files, folder)
    pages = fill_pages(folder.parent, figures, writes=False)
    return [path.as_posix() for path in (*pages, *stale_pages(figures))]


def _chosen(word: str, told: Mapping[str, Callable[[], str]]) -> str:
    if word not in told:
        raise TypeError(unknown_name("word", word, list(told)))
    return told[word]()
