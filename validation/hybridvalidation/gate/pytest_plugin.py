"""The pytest plugin: the fixture ``memory_plan``, with a baseline in the repository.

Tests compare in their own process; reports carry the figures to the writing process (pytest-xdist).
"""

from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from hybridtrain.config.decode import decode
from hybridtrain.config.encode import encode
from hybridtrain.errors import RecordError
from hybridtrain.virtual_gpu.cards.card import MARGIN_TOLD
from hybridvalidation.gate.baseline_file import read_baseline, write_baseline
from hybridvalidation.gate.gate import annotation, markdown_table, write_markdown
from hybridvalidation.gate.memory_baseline import CELL_HEADERS, MemoryBaseline, PlanChange, PlanFigures
from hybridvalidation.gate.planned_memory import MemoryPlanner, PlannedMemory

MARKER = "memory_plan"
"""Marker of all tests with the fixture: ``pytest -m memory_plan`` selects them."""
COMMENT = "<!-- hybridtrain-memory -->"
"""Marker by which the action finds its comment on a pull request."""
_DEFAULT_FILE = "memory-baseline.json"
_PLANNER = pytest.StashKey[MemoryPlanner]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("memory", "planned GPU memory, by hybridtrain")
    group.addoption(
        "--memory-baseline", metavar="FILE",
        help=f"baseline file to compare plans with; default: {_DEFAULT_FILE} in the root directory, if it exists",
    )  # fmt: skip
    group.addoption("--memory-approve", action="store_true", help="write the plans of this run to the baseline")
    group.addoption("--memory-report", metavar="FILE.md", help="write the comparison as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    """Read the baseline."""
    config.addinivalue_line("markers", f"{MARKER}: plans GPU memory (set by the fixture {MARKER})")
    try:
        config.pluginmanager.register(MemoryGate(config), "hybridtrain-memory-gate")
    except RecordError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with the fixture, before -m selects."""
    for item in items:
        if MARKER in getattr(item, "fixturenames", ()):
            item.add_marker(MARKER)


@pytest.fixture
def memory_plan(request: pytest.FixtureRequest) -> MemoryPlanner:
    """Plan the memory of a training step: ``memory_plan(model, batch, card="rtx-4090")``, no GPU and no weights."""
    planner = MemoryPlanner(test=request.node.nodeid)
    request.node.stash[_PLANNER] = planner
    return planner


class MemoryGate:
    """Baseline and plans of a test run."""

    def __init__(self, config: pytest.Config) -> None:
        named = config.getoption("--memory-baseline")
        self.config = config
        self.file = config.invocation_params.dir / named if named else config.rootpath / _DEFAULT_FILE
        self.approves = config.getoption("--memory-approve")
        read = read_baseline(self.file, MemoryBaseline)
        self.old = {} if read is None else read.plans
        self.compares = self.approves or named is not None or read is not None
        self.changes: dict[str, PlanChange] = {}
        self.clashes: list[str] = []
        self.unfinished: set[str] = set()
        """Tests that failed, so that plans may be missing."""
        self.gone: list[str] = []

    def change(self, name: str, new: PlanFigures) -> PlanChange:
        """Compare a plan with its baseline."""
        return PlanChange(
            name=name, new=new, old=self.old.get(name), is_compared=self.compares, is_approved=self.approves
        )  # fmt: skip

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run the test, then compare; if the test itself fails, the comparison is added to its report."""
        try:
            result = yield
        except BaseException:
            if told := self._told(item):
                item.add_report_section("call", "planned memory", told)
            raise
        if told := self._told(item):
            pytest.fail(told, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the plans into the report: bytes as properties, which JUnit XML shows, and all figures for ``note``."""
        plans = _plans_of(item) if call.when == "call" else []
        found = [(plan.name, plan.figures(item.nodeid), min(plan.limits_bytes, default=None)) for plan in plans]
        for name, figures, _ in found:
            of_plan = "" if name == item.nodeid else f"[{name}]"
            item.user_properties.append((f"memory_peak_bytes{of_plan}", figures.peak_bytes))
            if name in self.old:
                item.user_properties.append((f"memory_baseline_bytes{of_plan}", self.old[name].peak_bytes))
        report = yield
        # pytest-xdist carries every attribute of a report that JSON has a word for.
        vars(report)["memory_plans"] = [(name, encode(figures), limit) for name, figures, limit in found]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Read the plans from a report, also of another process."""
        if not report.passed:
            self.unfinished.add(report.nodeid)
        for name, encoded, limit in getattr(report, "memory_plans", ()):
            figures = decode(PlanFigures, encoded, source=name)
            known = self.changes.get(name)
            if known is not None and known.new.test != figures.test:
                self.clashes.append(f"'{name}' is planned by {known.new.test} and by {figures.test}")
            path, line, _ = report.location
            change = self.change(name, figures)
            self.changes[name] = replace(change, limit_bytes=limit, path=path, line=(line or 0) + 1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the requested baseline and report."""
        if hasattr(self.config, "workerinput") or self.config.option.collectonly:
            return
        if exitstatus == pytest.ExitCode.OK and self._runs_all():
            self.gone = sorted(
                name for name, old in self.old.items() if name not in self.changes and old.test not in self.unfinished
            )
        if self.clashes:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif self.approves and self.changes:
            kept = {name: old for name, old in self.old.items() if name not in self.gone}
            made = {name: change.new for name, change in self.changes.items()}
            write_baseline(self.file, MemoryBaseline(plans=kept | made))
        asked = self.config.getoption("--memory-report")
        if self.changes or asked:
            write_markdown(self.markdown(), self.config.invocation_params.dir / asked if asked else None)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line for every plan, and annotate those that fail."""
        changes = [change for _, change in sorted(self.changes.items())]
        hint = ", dropped" if self.approves else "; pytest --memory-approve removes it"
        lines = [
            *(f"{change.words}: {change.name}: {change.peak}" for change in changes),
            *(f"gone: {name}: no test plans it any more{hint}" for name in self.gone),
            *(f"two plans share a name: {clash}; give each its own name=" for clash in self.clashes),
            *([MARGIN_TOLD] if any(change.new.fits_barely for change in changes) else []),
            *filter(None, (self._annotation(change) for change in self.changes.values())),
        ]
        if self.approves and changes and not self.clashes:
            lines.append(f"written: {self.file}")
        if lines:
            terminalreporter.section("planned memory")
            for line in lines:
                terminalreporter.write_line(line)

    def markdown(self) -> str:
        """Return the comparison for a pull request, failures first."""
        changes = sorted(self.changes.values(), key=lambda change: (not change.fails, change.name))
        counts = Counter(change.words for change in changes)
        told = ", ".join(f"{count} {words}" for words, count in sorted(counts.items())) or "no plans"
        parts = [
            COMMENT, f"### Planned GPU memory: {told}",
            markdown_table(CELL_HEADERS, [change.cells() for change in changes]) if changes else "",
            *(f"Gone: `{name}`, no test plans it any more." for name in self.gone),
            MARGIN_TOLD if any(change.new.fits_barely for change in changes) else "",
            "If intended, run `pytest --memory-approve` to update the "
            "baseline." if any(c.is_unlike for c in changes) else "",
        ]  # fmt: skip
        return "\n\n".join(part for part in parts if part) + "\n"

    def _told(self, item: pytest.Item) -> str:
        """Return the failures of a test's plans against the baseline."""
        changes = [self.change(plan.name, plan.figures(item.nodeid)) for plan in _plans_of(item)]
        return "\n\n".join(change.text(self.file.name) for change in changes if change.is_unlike)

    def _runs_all(self) -> bool:
        """Return whether no path, -k or -m deselects tests: only then is a missing plan gone."""
        option, args_source = self.config.option, self.config.args_source
        selects = option.keyword or option.markexpr not in {"", MARKER} or getattr(option, "lf", False)
        return not selects and args_source is not pytest.Config.ArgsSource.ARGS

    def _annotation(self, change: PlanChange) -> str:
        if not change.fails:
            return ""
        title, file = f"planned memory: {change.words}", self.config.rootpath / change.path
        return annotation(change.text(self.file.name), title=title, file=file, line=change.line)


def _plans_of(item: pytest.Item) -> list[PlannedMemory]:
    planner = item.stash.get(_PLANNER, None)
    return [] if planner is None else planner.plans
