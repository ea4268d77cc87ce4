"""Input and output of a metric."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hybridtrain.models.model_config import ModelConfig
from hybridtrain.planning.figures import MemoryFigures
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.statistics import Interval
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.stack_run import StackRun
from hybridvalidation.scenario import BASELINE_STACK, Target

RATE_METRICS = frozenset({"slowdown_x", "relative_throughput_x"})
"""Metrics relative to the scenario's ``rate_baselines``, at equal tokens per step."""
ACCURACY_METRICS = frozenset({"accuracy_retention_pct", "accuracy_loss_pct", "relative_weight_difference"})
"""Metrics of trained proxies."""


@dataclass(frozen=True, slots=True)
class Decider:
    """The deciding figure, if the stated one is an average or only a part."""

    value: float
    evidence: Evidence
    stated_is: str
    """What the stated figure is, in words."""
    decides: str
    """Name of the deciding figure."""
    is_saving: bool = True
    """Whether exceeding the stated value is as good; a total must match on both sides."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of one stack."""

    value: float
    evidence: Evidence
    unit: str
    interval: Interval | None = None
    error: Interval | None = None
    """Range of an estimated value by the time model's own error."""
    fits: bool = True
    """Whether the stack fits the scenario's card."""
    remark: str = ""
    """Remark on the value."""
    decider: Decider | None = None
    decimal: float | None = None
    """The value in decimal GB, if the statement's GB are read as GiB."""
    is_untested: bool = False
    """Whether no recorded run tests such an estimate."""
    blunt: str = ""
    """Why the bound is not informative: a harmful control meets it, or does not clearly miss it. Empty: it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One stated figure for one stack."""

    run: ScenarioRun
    target: Target
    stack: str
    baseline: str = BASELINE_STACK
    """Stack to compare with."""

    @property
    def missing(self) -> str:
        """Describe the missing record."""
        if self.target.metric in ACCURACY_METRICS:
            return f"no proxy trained under both {self.stack} and {self.baseline}"
        names = [name for name in (self.stack, self.baseline) if self.run.memory(name) is None]
        if names:
            return f"no dry run of {names[0]}"
        if self.target.metric in RATE_METRICS:
            tokens = self.run.scenario.workload_of(self.stack).batch_size * self.run.scenario.workload.seq_len
            return f"no dry run of {self.baseline} with {tokens:,} tokens per step"
        return f"nothing computes {self.target.metric}"

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


MetricOf: TypeAlias = Callable[[Case], Metric | None]
"""Computes a metric; None without evidence."""


def joined(*remarks: str) -> str:
    """Join the remarks that are not empty."""
    return "; ".join(filter(None, remarks))
