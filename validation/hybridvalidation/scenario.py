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
"""Baseline of savings and quality, unless a target names another stack."""
RATE_BASELINE = "mixed"
"""Baseline of slow-downs and relative throughputs: bf16 on tensor cores, which costs nothing but a flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSpec:
    """A card of the catalogue by name, or a custom one."""

    name: str | None = None
    """A name of ``hybridtrain list cards``."""
    custom: Card | None = None
    """Figures of one's own."""

    def __post_init__(self) -> None:
        if (self.name is None) == (self.custom is None):
            raise ValueError('give either name = "card" or a table [card.custom], not both and not neither')
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
    """Of the paired runs, at least three."""
    num_steps: int
    """Optimizer steps of each."""
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
    """A stated figure to judge, and its stacks."""

    id: str
    """Of ``targets.toml``."""
    stacks: tuple[str, ...] = ()
    """Stacks it is about; empty: the scenario, so that one stack must hold all such rows together."""
    baseline: str | None = None
    """Stack to compare with; None: ``vanilla``, of slow-downs and relative throughputs ``rate_baselines``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario file."""

    name: str
    """Records, tables and plots are called after it."""
    description: str
    """Description in a line."""
    model: ModelSpec
    card: CardSpec
    workload: BatchWorkload
    stacks: tuple[str, ...]
    """Names of stack files."""
    host: Host = field(default_factory=Host)
    """The machine around the card, or around as many of them as it holds."""
    world: int = 1
    """Cards that train together, a rank each."""
    link: str = "pcie"
    """Between cards of a machine: a name of links.toml, or a .toml file of the same entries."""
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sequences per optimizer step of single stacks, where they are not the workload's."""
    rate_baselines: tuple[str, ...] = (RATE_BASELINE,)
    """Baselines of speeds: of these the stack with as many tokens per step."""
    accuracy: AccuracySpec | None = None
    """None: nothing is trained for this scenario."""
    accuracy_stacks: tuple[str, ...] = ()
    """Stacks whose cost in quality is found out, with what they are compared with; empty: all."""
    targets: tuple[ScenarioTarget, ...] = ()
    """Stated figures that it judges."""

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
            faults.append("accuracy_stacks: there is no table [accuracy]; add one or drop the list")
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
        """Return one of the ranks and what joins them."""
        return World(size=self.world, rank=rank, link=self.link)

    def baseline_of(self, stack: str, baselines: Sequence[str]) -> str:
        """Return the first of some baselines with as many tokens per step as ``stack``, else the first."""
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
    """Bytes per parameter, as the next two."""
    grad: float
    optim_state: float = 0.0
    activation_gb: float = 0.0
    """Of the whole step, as stated: a figure without its sequence length cannot be derived."""
    num_params: float | None = None
    """As the document rounds them; None: those of the scenario's model."""

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
    """Why the figure is met whatever a program does, where it follows from how the recipe is written down."""
    parts: StatedParts | None = None
    """Of totals that are recomputed from the model's shape."""

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
            raise ValueError(f"target: stated twice: {', '.join(twice)}; give each its own id")
