"""Content of a scenario file: one model on one card, a workload, stacks to try, targets to judge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from hybridtrain.config.rules import AtMost, below_least, faults_above_most, repeated
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.models.model_config import BatchWorkload, ModelConfig
from hybridtrain.models.model_spec import ModelSpec
from hybridtrain.stacks import name_faults
from hybridtrain.virtual_gpu.cards.card import Card, Host, card_catalogue, find_card
from hybridtrain.virtual_gpu.cards.links import World

BASELINE_STACK = "vanilla"
"""Default baseline of savings and quality."""
RATE_BASELINE = "mixed"
"""Default baseline of slow-downs and relative throughputs: bf16 autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSpec:
    """A card of the catalogue by name, or a custom one."""

    name: str | None = None
    """Name of a card (``hybridtrain list cards``)."""
    custom: Card | None = None
    """Data of a custom card."""

    def __post_init__(self) -> None:
        if (self.name is None) == (self.custom is None):
            raise ValueError('give either name = "card" or a table [card.custom]')
        if self.name is not None and self.name not in card_catalogue():
            raise ValueError(f"name: {unknown_name('card', self.name, card_catalogue())}")

    def resolve(self) -> Card:
        """Return the card."""
        if self.custom is not None:
            return self.custom
        assert self.name is not None, "checked at construction"
        return find_card(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracySpec:
    """The paired experiment on a stack's quality cost."""

    proxy: ModelConfig
    """Small model of the same family, trained for real."""
    seeds: tuple[int, ...]
    """Seeds of the paired runs, at least three."""
    num_steps: int
    """Optimizer steps per run."""
    batch_size: Annotated[int, AtMost(2**16)]
    """Sequences per optimizer step."""
    seq_len: int
    """Tokens per sequence."""
    lr: float
    """Peak learning rate."""
    validation_batches: Annotated[int, AtMost(2**16)]
    """Batches of held-out text."""

    def __post_init__(self) -> None:
        faults = below_least(self, ("num_steps", "batch_size", "seq_len", "validation_batches"))
        faults += faults_above_most(self)
        if len(set(self.seeds)) < 3:
            faults.append(f"seeds: {list(self.seeds)} must name at least 3 different seeds")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds, default=0) < 0:
            faults.append(f"seeds: {list(self.seeds)} must be different and at least 0")
        if self.lr <= 0:
            faults.append(f"lr: {self.lr} must be above 0")
        if self.seq_len > self.proxy.max_seq_len:
            faults.append(f"seq_len: {self.seq_len} is above proxy.max_seq_len ({self.proxy.max_seq_len})")
        if self.proxy.vocab_size < 256:
            faults.append(f"proxy.vocab_size: {self.proxy.vocab_size} must be at least 256, the number of byte tokens")
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioTarget:
    """A stated figure to judge, and the stacks to judge it on."""

    id: str
    """Id in ``targets.toml``."""
    stacks: tuple[str, ...] = ()
    """Stacks to judge; empty: one stack must meet all such rows together."""
    baseline: str | None = None
    """Stack to compare with; None: ``vanilla``, or ``rate_baselines`` for slow-downs and relative throughputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario file."""

    name: str
    """Name of the scenario, and of its records, tables and plots."""
    description: str
    """Description in one line."""
    model: ModelSpec
    card: CardSpec
    workload: BatchWorkload
    stacks: tuple[str, ...]
    """Names of stack files."""
    host: Host = field(default_factory=Host)
    """The machine with its cards."""
    world: int = 1
    """Number of ranks, one card each."""
    link: str = "pcie"
    """Link between cards of a machine: a name in links.toml, or a .toml file with the same entries."""
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sequences per optimizer step of stacks that differ from the workload."""
    rate_baselines: tuple[str, ...] = (RATE_BASELINE,)
    """Baselines of speeds; the one with equal tokens per step is used."""
    accuracy: AccuracySpec | None = None
    """Accuracy experiment; None: nothing is trained."""
    accuracy_stacks: tuple[str, ...] = ()
    """Stacks of the accuracy experiment, baselines included; empty: all."""
    targets: tuple[ScenarioTarget, ...] = ()
    """Stated figures to judge."""

    def __post_init__(self) -> None:
        faults = name_faults(self.name)
        if not self.stacks:
            faults.append("stacks: empty; name at least one stack")
        if len(set(self.stacks)) < len(self.stacks):
            faults.append(f"stacks: {list(self.stacks)} names a stack twice")
        model = self.model.resolve()
        if self.workload.seq_len > model.max_seq_len:
            faults.append(
                f"workload.seq_len: {self.workload.seq_len} is above the model's max_seq_len ({model.max_seq_len})"
            )
        if self.accuracy is not None and self.accuracy.proxy.family != model.family:
            faults.append(
                f"accuracy.proxy.family: '{self.accuracy.proxy.family}' must be the model's family, '{model.family}'"
            )
        if self.accuracy_stacks and self.accuracy is None:
            faults.append("accuracy_stacks: there is no table [accuracy]; add one, or remove the list")
        named = [("accuracy_stacks", self.accuracy_stacks), ("batch_sizes", tuple(self.batch_sizes))]
        for position, target in enumerate(self.targets):
            named.append((f"targets[{position}].stacks", target.stacks))
            named.append((f"targets[{position}].baseline", () if target.baseline is None else (target.baseline,)))
        faults += [
            f"{path}: {unknown_name('stack', stack, self.stacks)}"
            for path, stacks in named
            for stack in stacks
            if stack not in self.stacks
        ]
        faults += [
            f"batch_sizes.{stack}: {size} must be at least 1" for stack, size in self.batch_sizes.items() if size < 1
        ]
        try:
            self.ranks()
        except (ValueError, ConfigError) as error:
            faults.append(str(error))
        if faults:
            raise ValueError("\n".join(faults))

    def ranks(self, rank: int = 0) -> World:
        """Return the world of ranks and links, or None for one card."""
        return World(size=self.world, rank=rank, link=self.link)

    def baseline_of(self, stack: str, baselines: Sequence[str]) -> str:
        """Return the first baseline with as many tokens per step as ``stack``, else the first."""
        tokens = self.workload_of(stack).batch_size
        return next((name for name in baselines if self.workload_of(name).batch_size == tokens), baselines[0])

    def workload_of(self, stack: str) -> BatchWorkload:
        """Return the batch of one optimizer step under ``stack``."""
        return replace(self.workload, batch_size=self.batch_sizes.get(stack, self.workload.batch_size))

    def trains(self, stack: str) -> bool:
        """Return whether a proxy is trained under ``stack``."""
        return self.accuracy is not None and stack in (self.accuracy_stacks or self.stacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedParts:
    """Parts of a stated total of memory."""

    weight: float
    """Bytes of weights per parameter; the next two likewise."""
    grad: float
    optim_state: float = 0.0
    activation_gb: float = 0.0
    """Activations of the whole step in GB, as stated: without a sequence length it cannot be derived."""
    num_params: float | None = None
    """Parameters as the document rounds them; None: the scenario's model."""

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weights, gradients and state."""
        return self.weight + self.grad + self.optim_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One stated figure."""

    id: str
    source: tuple[str, ...]
    description: str
    metric: str
    direction: Literal["max", "min", "range", "equal"]
    value: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    by_definition: str = ""
    """Why any program meets the figure, if it follows from the recipe's definition."""
    parts: StatedParts | None = None
    """Parts of a total that is recomputed from the model's shape."""

    def __post_init__(self) -> None:
        wanted = (self.low, self.high) if self.direction == "range" else (self.value,)
        if None in wanted:
            raise ValueError("range needs low and high, every other direction needs value")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """``targets.toml``."""

    target: tuple[Target, ...]

    def __post_init__(self) -> None:
        names = [target.id for target in self.target]
        twice = repeated(names)
        if twice:
            raise ValueError(f"target: repeated ids {', '.join(twice)}; make them unique")
