"""What a metric is asked about, and what it answers."""

from dataclasses import dataclass

from hybridtrain.models.model_config import ModelConfig
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.stack_run import MemoryFigures, StackRun
from hybridvalidation.runs.runner import ScenarioRun
from hybridvalidation.scenario import BASELINE_STACK, Target


@dataclass(frozen=True, slots=True)
class Decider:
    """The figure that decides, where the stated one is an average or counts only a part."""

    value: float
    evidence: Evidence
    stated_is: str
    """What the stated figure is instead."""
    decides: str
    """What this one is."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of one stack."""

    value: float
    evidence: Evidence
    unit: str
    interval: Interval | None = None
    fits: bool = True
    """Whether the stack runs on the scenario's card at all."""
    remark: str = ""
    """What a reader must know beside the value."""
    decider: Decider | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One stated figure, asked of one stack."""

    run: ScenarioRun
    target: Target
    stack: str
    baseline: str = BASELINE_STACK
    """Stack to compare with."""

    @property
    def model(self) -> ModelConfig:
        """The scenario's model."""
        return self.run.scenario.model.resolve()

    @property
    def dry_run(self) -> StackRun | None:
        """The stack's dry run, if there is one with figures."""
        record = self.run.get("dry_run", self.stack)
        return None if record is None or record.memory is None else record

    @property
    def memory(self) -> MemoryFigures | None:
        """Figures of the stack's dry run."""
        return None if self.dry_run is None else self.dry_run.memory

    @property
    def memories(self) -> tuple[MemoryFigures, MemoryFigures] | None:
        """Figures of the stack's dry run and of the baseline's."""
        other = self.run.get("dry_run", self.baseline)
        if self.memory is None or other is None or other.memory is None:
            return None
        return self.memory, other.memory
