"""Sources of pages: scenario files and the records of a folder of results, each read once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hybridvalidation.experiments.atlas import Atlas, read_atlas
from hybridvalidation.experiments.recorded import Row, read_planned, read_sources, rows_of
from hybridvalidation.experiments.stack_runs import ScenarioRun, run_from_records
from hybridvalidation.judge.verdict import Elsewhere
from hybridvalidation.records.store import RecordStore
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.study.equivalence import Comparison
from hybridvalidation.study.protocol import StudyFile, studies
from hybridvalidation.study.quality import Quality, ladder_verdicts, most_informative_comparisons, stack_quality


@dataclass(frozen=True)
class Results:
    """Scenario files beside a folder of results."""

    files: ScenarioFiles
    folder: Path

    @property
    def records(self) -> Path:
        """The folder of records."""
        return self.folder / "records"

    @cached_property
    def targets(self) -> Mapping[str, Target]:
        """Stated figures."""
        return self.files.targets()

    @cached_property
    def elsewhere(self) -> Elsewhere:
        """Verdicts of quality ladders on the targets of scenarios."""
        return ladder_verdicts(self.files, self.folder)

    @cached_property
    def quality(self) -> Quality:
        """Cells of the quality section by stack."""
        return stack_quality(self.files, self.folder)

    @cached_property
    def telling(self) -> Mapping[str, Comparison]:
        """The most informative comparison of each stack on a ladder."""
        return most_informative_comparisons(self.files, self.folder)

    @cached_property
    def published(self) -> list[Row]:
        """Figures that others measured, beside the planned ones."""
        return rows_of(read_sources(self.files.folder), read_planned(self.records))

    @cached_property
    def atlas(self) -> Atlas | None:
        """Models on cards; None without records."""
        return read_atlas(self.files.folder, self.records)

    def run(self, name: str) -> ScenarioRun:
        """Return a scenario with its newest records; nothing is run."""
        if name not in self._runs:
            self._runs[name] = self._read_run(name)
        return self._runs[name]

    @cached_property
    def _runs(self) -> dict[str, ScenarioRun]:
        return {}

    def _read_run(self, name: str) -> ScenarioRun:
        scenario = self.files.scenario(name)
        stacks = [self.files.stack(stack) for stack in scenario.stacks]
        return run_from_records(scenario, stacks, RecordStore(self.records))

    def runs(self) -> Iterator[ScenarioRun]:
        """Yield every scenario that has records."""
        recorded = RecordStore(self.records).scenarios()
        return (self.run(name) for name in self.files.scenario_names() if name in recorded)

    def studies(self) -> Iterator[StudyFile]:
        """Yield every registered study."""
        yield from studies(self.files.folder)
