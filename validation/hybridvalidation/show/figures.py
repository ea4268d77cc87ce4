"""Figures in README and the guide: each stands between markers that name it, and ``report`` fills them from records.

    <!--figure recorded median-->0.47 %<!--/figure-->

A marker has the name of a method of ``Figures`` and the words that it takes; where it stands in lines of its own, so
does what it is filled with. Nobody types such a figure, and ``report --check`` fails where text and records differ.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from tabulate import tabulate

from hybridtrain.atomic_write import replace_file
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.reports.tables import MARKDOWN, fits_cell
from hybridtrain.units import format_count, to_gib
from hybridtrain.virtual_gpu.cards.roofline import time_errors
from hybridvalidation.experiments.recorded import Role, Row, read_planned, read_sources, rows_of
from hybridvalidation.experiments.stack_runs import run_from_records
from hybridvalidation.guide.departures import defaults_table, names_table
from hybridvalidation.guide.models import recommendations, scenario_table
from hybridvalidation.judge.roll_up import Row as TargetRow
from hybridvalidation.judge.verdict import Status
from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.pages.recorded import RESIDENT, predicted
from hybridvalidation.show.pages.targets import all_targets
from hybridvalidation.study.figures import method_figures
from hybridvalidation.study.ladder.equivalence import Finding, Judged
from hybridvalidation.study.ladder.quality import all_judged
from hybridvalidation.study.runner import read_study, read_study_file

_MARKED = re.compile(r"<!--figure ([^>]*?)-->(.*?)<!--/figure-->", re.DOTALL)
_PAGES = ("README.md", "docs/*.md", "docs/*/*.md")


@dataclass(frozen=True)
class Figures:
    """What pages can name, from committed records."""

    files: ScenarioFiles
    results: Path

    def recorded(self, what: str) -> str:
        """Return how near plans are to peaks of memory that others measured: count, median, ninety or outcomes.

        Means of what stays between steps are left out, as they are easier to plan; so is what was seen before planning.
        """
        blind = [row for row in self._recorded if row.role is Role.PREDICT]
        sizes = [row for row in predicted(blind, are_times=False) if row.quantity != RESIDENT]
        errors = sorted(abs(row.error or 0.0) for row in sizes)
        answers = [row for row in blind if row.quantity == "oom" and row.error is not None]
        told: dict[str, Callable[[], str]] = {
            "count": lambda: str(len(sizes)),
            "median": lambda: f"{100 * median(errors):.1f} %",
            "ninety": lambda: f"{100 * errors[int(0.9 * len(errors))]:.1f} %",
            "outcomes": lambda: f"{sum(row.error == 0 for row in answers)} of {len(answers)}",
        }
        return _chosen(what, told)

    def speed_error(self) -> str:
        """Return how far estimated speeds are off recorded ones on cards left out of the fit, on average."""
        return f"{100 * time_errors()['leave_one_card_out'].mean_absolute:.0f} %"

    def held(self, what: str) -> str:
        """Return of the stated figures how many there are (``all``), hold, or hold without a remark (``plainly``)."""
        rows = [row for row in self._targets if row.status is Status.HOLDS]
        plain = sum(not row.has_remark for row in rows)
        told = {"all": lambda: str(len(self._targets)), "hold": lambda: str(len(rows)), "plainly": lambda: str(plain)}
        return _chosen(what, told)

    def departures(self, what: str) -> str:
        """Return documented defaults beside ours (``defaults``), or the documents' names of options (``names``)."""
        return _chosen(what, {"defaults": defaults_table, "names": names_table})

    def scenario(self, name: str, *stacks: str) -> str:
        """Return a scenario's dry runs: the whole first table of its page, or the main columns of some stacks."""
        if not stacks:
            return scenario_table(name, self.files, self.results)
        scenario = self.files.scenario(name)
        run = run_from_records(
            scenario, [self.files.stack(stack) for stack in stacks], RecordStore(self.results / "records")
        )
        rows = []
        for stack in stacks:
            found = run.memory(stack)
            assert found is not None, f"{name} has no figures of {stack}"
            rows.append([
                stack, fits_cell(found.verdict(scenario.card.resolve())), f"{to_gib(found.device_used_bytes):.2f}",
                f"{to_gib(found.host_peak_bytes):.2f}", f"{found.step_time_s:.2f}", f"{found.tokens_per_s:,.0f}",
                found.bound,
            ])  # fmt: skip
        headers = ["stack", "fits", "card GiB", "host GiB", "step s", "tokens/s", "bottleneck"]
        return tabulate(rows, headers=headers, tablefmt=MARKDOWN, disable_numparse=True)

    def recommendations(self) -> str:
        """Return the fastest stack on record that fits, for every scenario about a model on a card."""
        return recommendations(self.files, self.results)

    def ladder(self, rung: str, what: str) -> str:
        """Return of a rung of the quality ladder its size, or how many configurations have which verdict."""
        judged = [found for found in self._ladder if found.comparison.rung.name == rung]
        if what == "size":
            return format_count(judged[0].comparison.size[0])
        number = Counter(found.finding for found in judged)
        return _chosen(what, {finding.value: lambda finding=finding: str(number[finding]) for finding in Finding})  # type: ignore[misc]

    def arms(self, rung: str, *names: str) -> str:
        """Return the smallest and the largest mean difference of loss of some configurations on a rung, in nats."""
        means = [
            found.comparison.interval.mean
            for found in self._ladder
            if found.comparison.rung.name == rung and found.comparison.arm.name in names
            if found.comparison.interval is not None
        ]
        ends = [f"{mean:+.3f}" for mean in (min(means), max(means))]
        return " to ".join(dict.fromkeys(ends))

    def factor(self, study: str, method: str) -> str:
        """Return a method's compute factor in a study, with its 95 % interval."""
        file = read_study_file(self.files.folder, study)
        found = method_figures(file, read_study(self.results, study), method)
        assert found is not None, f"{study} has no figures of {method}"
        return f"{found.factor.mean:.2f} (95 % interval {found.factor.low:.2f} to {found.factor.high:.2f})"

    @cached_property
    def _recorded(self) -> list[Row]:
        return rows_of(read_sources(self.files.folder), read_planned(self.results / "records"))

    @cached_property
    def _targets(self) -> list[TargetRow]:
        return all_targets(self.files, self.results)

    @cached_property
    def _ladder(self) -> list[Judged]:
        return [judged for _, judged in all_judged(self.files, self.results)]


def filled(text: str, figures: Figures, source: str) -> str:
    """Return a page with every marked figure as the records have it.

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
        lines = "\n\n" if found[2].startswith("\n") else ""
        if not lines and not text[text.rfind("\n", 0, found.start()) + 1 : found.start()].strip():
            fault = "begins a line, which Markdown takes for HTML to its end; put a word before it"
            raise ConfigError(source, [f"<!--figure {found[1]}-->: {fault}"])
        return f"<!--figure {found[1]}-->{lines}{told}{lines}<!--/figure-->"

    return _MARKED.sub(fill, text)


def marked_pages(root: Path) -> Iterator[Path]:
    """Yield the pages of a checkout that have marked figures."""
    paths = (path for pattern in _PAGES for path in sorted(root.glob(pattern)))
    return (path for path in paths if "<!--figure " in path.read_text(encoding="utf-8"))


def fill_pages(root: Path, figures: Figures) -> list[Path]:
    """Fill every marked figure of a checkout's pages; return the pages that changed."""
    changed = []
    for path in marked_pages(root):
        before = path.read_text(encoding="utf-8")
        after = filled(before, figures, str(path))
        if after != before:
            replace_file(path, after.encode())
            changed.append(path)
    return changed


def _chosen(what: str, told: "dict[str, Callable[[], str]]") -> str:
    if what not in told:
        raise TypeError(unknown_name("word", what, list(told)))
    return told[what]()
