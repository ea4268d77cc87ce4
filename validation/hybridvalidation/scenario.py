"""What a scenario file says: one model on one card, a workload, stacks to try, targets to judge."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from hybridtrain.config.rules import below_least
from hybridtrain.errors import unknown_name
from hybridtrain.models.model_config import BatchWorkload, ModelConfig, ModelSpec
from hybridtrain.optimizations.grad_accumulation import with_accumulation
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.virtual_gpu.card import Card, Host, card_catalogue, find_card

if TYPE_CHECKING:
    from hybridtrain.trainer_config import TrainerConfig

ANY_STACK = "any"
"""As a target's stack: it holds when it holds for at least one stack that fits."""
BASELINE_STACK = "vanilla"
"""What savings, speed and quality are told against, unless a target names another stack."""


def name_faults(name: str) -> list[str]:
    """Return a fault for a name that cannot be a file's: records, baselines, tables and plots are called after it."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return []
    return [f"name: '{name}' must consist of letters, digits, '.', '_' and '-', and begin with a letter or digit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSpec:
    """A card of the catalogue by name, or one's own."""

    name: str | None = None
    custom: Card | None = None

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
    """The paired experiment that tells what a stack costs in quality."""

    proxy: ModelConfig
    """Small model of the same family, trained for real."""
    seeds: tuple[int, ...]
    num_steps: int
    batch_size: int
    seq_len: int
    lr: float
    validation_batches: int

    def __post_init__(self) -> None:
        faults = below_least(self, ("num_steps", "batch_size", "seq_len", "validation_batches"))
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
    """Which stated figure is judged, on which stacks."""

    id: str
    """Of ``targets.toml``."""
    stacks: tuple[str, ...] = (ANY_STACK,)
    baseline: str = BASELINE_STACK
    """Stack to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario file."""

    name: str
    says: str
    model: ModelSpec
    card: CardSpec
    workload: BatchWorkload
    stacks: tuple[str, ...]
    host: Host = field(default_factory=Host)
    """The machine around the card."""
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sequences per optimizer step of single stacks, where they are not the workload's."""
    accuracy: AccuracySpec | None = None
    """None: nothing is trained for this scenario."""
    accuracy_stacks: tuple[str, ...] = ()
    """Stacks whose cost in quality is found out, with what they are compared with; empty: all."""
    targets: tuple[ScenarioTarget, ...] = ()

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
        faults += [
            f"accuracy_stacks: {unknown_name('stack', stack, self.stacks)}"
            for stack in self.accuracy_stacks
            if stack not in self.stacks
        ]
        for stack, size in self.batch_sizes.items():
            if stack not in self.stacks:
                faults.append(f"batch_sizes: {unknown_name('stack', stack, self.stacks)}")
            if size < 1:
                faults.append(f"batch_sizes.{stack}: {size} must be at least 1")
        faults += self._target_faults()
        if faults:
            raise ValueError("\n".join(faults))

    def workload_of(self, stack: str) -> BatchWorkload:
        """Return the batch of one optimizer step under ``stack``."""
        return replace(self.workload, batch_size=self.batch_sizes.get(stack, self.workload.batch_size))

    def trains(self, stack: str) -> bool:
        """Return whether a proxy is trained under ``stack``."""
        return self.accuracy is not None and stack in (self.accuracy_stacks or self.stacks)

    def _target_faults(self) -> list[str]:
        faults = []
        for position, target in enumerate(self.targets):
            faults += [
                f"targets[{position}].stacks: {unknown_name('stack', stack, [ANY_STACK, *self.stacks])}"
                for stack in target.stacks
                if stack not in {ANY_STACK, *self.stacks}
            ]
            if target.baseline not in {BASELINE_STACK, *self.stacks}:
                faults.append(f"targets[{position}].baseline: {unknown_name('stack', target.baseline, self.stacks)}")
        return faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack file: a named list of optimizations."""

    name: str
    says: str
    optimizer: str = "adamw"
    """``kind`` of the optimizer that the stack is meant for, with its default settings."""
    optimizations: tuple[Optimization, ...] = ()

    def __post_init__(self) -> None:
        faults = name_faults(self.name)
        from hybridtrain.optim import OPTIMIZERS  # noqa: PLC0415  needs torch, which names and help do without

        if self.optimizer not in OPTIMIZERS:
            faults.append(f"optimizer: {unknown_name('optimizer', self.optimizer, sorted(OPTIMIZERS))}")
        if faults:
            raise ValueError("\n".join(faults))
        self.plan()

    def plan(self, grad_accum_steps: int | None = None) -> MemoryPlan:
        """Return the composed plan, with another number of micro-batches if one is given.

        Raises:
            PlanConflictError: the stack contradicts itself, or cannot accumulate so many.
        """
        return compose(with_accumulation(self.optimizations, grad_accum_steps))

    def training(self, lr: float | None = None) -> "TrainerConfig":
        """Return the optimizer with its default settings, or at another learning rate."""
        from hybridtrain.optim import OPTIMIZERS  # noqa: PLC0415  as above
        from hybridtrain.trainer_config import TrainerConfig  # noqa: PLC0415  as above

        optimizer = OPTIMIZERS[self.optimizer]
        return TrainerConfig(optimizer=optimizer() if lr is None else optimizer(lr=lr))


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedParts:
    """What a stated total of memory consists of."""

    weight: float
    """Bytes a parameter, as the next two."""
    grad: float
    optim_state: float = 0.0
    activation_gb: float = 0.0
    """Of the whole step, as stated: a figure without its sequence length cannot be derived."""

    @property
    def bytes_per_param(self) -> float:
        """Bytes of all that grows with the parameters."""
        return self.weight + self.grad + self.optim_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One stated figure."""

    id: str
    source: tuple[str, ...]
    says: str
    metric: str
    direction: Literal["max", "min", "range", "equal"]
    value: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    parts: StatedParts | None = None
    """Of totals that are derived anew from the model's shape."""

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
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"target: stated twice: {', '.join(twice)}; give each its own id")
