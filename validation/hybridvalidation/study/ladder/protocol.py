"""What a ladder's file says; which runs it needs next; the record of one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

from hybridtrain.config.decode import Unions, load_toml
from hybridtrain.config.rules import below_least
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import OPTIMIZERS, AdamWConfig
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.plan.placement import Codec
from hybridtrain.stacks import name_faults
from hybridtrain.trainer_config import LrSchedule
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.study.protocol import settings_text

UNIONS: Final[Unions] = {Optimization: OPTIMIZATIONS}
Family = Literal["stack", "method", "control"]
"""stack: meant to train as the baseline does. method: another way to train. control: known to do harm; must be told
worse, or the ladder tells nothing. Odds are corrected within a family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One size of model at one length of training."""

    name: str
    model: ModelConfig
    seq_len: int
    batch_size: int
    """Sequences per step, a multiple of every arm's micro-batches."""
    num_steps: int
    warmup_steps: int
    lrs: tuple[float, ...]
    """Tried for the baseline at the tuning seed, which is not among ``seeds``; the best is every arm's."""
    seeds: tuple[int, ...]
    more_seeds: tuple[int, ...] = ()
    """For arms of family stack that the first ones leave inconclusive, and for what these are compared with: a second
    and last look."""
    arms: tuple[str, ...] = ()
    """Empty: all."""

    def __post_init__(self) -> None:
        faults = name_faults(self.name) + below_least(self, ("seq_len", "batch_size", "num_steps", "warmup_steps"))
        every = (*self.seeds, *self.more_seeds)
        if len(self.seeds) < 3 or len(set(every)) < len(every):
            faults.append(f"seeds, more_seeds: {list(every)} must name at least 3 seeds, none of them twice")
        if not self.lrs:
            faults.append("lrs: empty; name at least one learning rate")
        if self.seq_len > self.model.max_seq_len:
            faults.append(f"seq_len: {self.seq_len} is above model.max_seq_len ({self.model.max_seq_len})")
        if self.warmup_steps >= self.num_steps:
            faults.append(f"warmup_steps: {self.warmup_steps} must be below num_steps ({self.num_steps})")
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def num_tokens(self) -> int:
        """Trained on in a run."""
        return self.num_steps * self.batch_size * self.seq_len

    @property
    def tokens_per_param(self) -> float:
        """Tokens over parameters."""
        return self.num_tokens / self.model.num_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train, by what it computes: where things live is left out, it changes no bit."""

    name: str
    says: str
    family: Family = "stack"
    optimizations: tuple[Optimization, ...] = ()
    optimizer: str = "adamw"
    """``kind``; learning rate, weight decay and clipping are those of the baseline."""
    lrs: tuple[float, ...] = ()
    """Tried at the tuning seed where another optimizer or fine-tuning asks for it; empty: the rate of what it is
    compared with."""
    rounds_to_nearest: bool = False
    """Control: bfloat16 weights without a master lose what is below half of their last bit."""
    fine_tunes: bool = False
    """Starts from the baseline's end of the same seed and goes on with another text."""
    against: str = ""
    """Arm that it is compared with; empty: the baseline."""
    stacks: tuple[str, ...] = ()
    """That compute the same to the bit, and share its runs."""

    def __post_init__(self) -> None:
        faults = name_faults(self.name)
        if self.optimizer not in OPTIMIZERS:
            faults.append(f"optimizer: {unknown_name('optimizer', self.optimizer, sorted(OPTIMIZERS))}")
        full = self.plan().for_phase(Phase.FULL)
        codecs = (full.weight.codec, full.master.codec, full.optim_state.codec)
        if self.rounds_to_nearest and codecs != (Codec.BFLOAT16, Codec.ABSENT, Codec.FLOAT32):
            faults.append("rounds_to_nearest: wants bfloat16 weights without a master, and float32 state")
        if faults:
            raise ValueError("\n".join(faults))

    def plan(self) -> MemoryPlan:
        """Return the composed plan; raises ``PlanConflictError`` for one that contradicts itself."""
        return _composed(self.optimizations)

    @property
    def jumps(self) -> bool:
        """Whether its plan keeps what a predictor remembers."""
        return self.plan().for_phase(Phase.FULL).history_tensors > 0

    @property
    def num_micro_batches(self) -> int:
        """Per step."""
        return self.plan().for_phase(Phase.FULL).grad_accum_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderTarget:
    """A stated figure of ``targets.toml`` that the ladder judges."""

    id: str
    stacks: tuple[str, ...]
    baseline: str = "vanilla"
    """Stack to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LadderFile:
    """One ladder. Every run is a function of this file, a seed and the program."""

    name: str
    says: str
    target: str
    """The claim that is judged."""
    stop_rule: str
    remarks: str = ""
    """What a reader must know of the registration, and of what came after it."""
    margin_nats: float
    """A mean difference of validation loss within plus and minus this is none that matters."""
    alpha: float = 0.05
    """Odds of a wrong "equivalent" over a family of arms of a rung, and of a wrong "different"; of two looks each has
    half of them."""
    tuning_seed: int
    validation_batches: int
    """Of as many rows as a step has."""
    optimizer: AdamWConfig
    hybrid: HybridConfig = field(default_factory=HybridConfig)
    """Of every arm that keeps what a predictor remembers."""
    fine_tune_steps: int = 0
    rungs: tuple[Rung, ...]
    """In the order in which they are run."""
    arms: tuple[Arm, ...]
    """The first is the baseline."""
    first: tuple[str, ...] = ()
    """Arms that are run at every seed of a rung before others are begun: figures wait for them."""
    targets: tuple[LadderTarget, ...] = ()

    def __post_init__(self) -> None:
        faults = name_faults(self.name) + below_least(self, ("validation_batches",))
        if not self.arms or not self.rungs:
            raise ValueError("arms, rungs: name at least one of each")
        names = [arm.name for arm in self.arms]
        stacks = [stack for arm in self.arms for stack in arm.stacks]
        faults += [f"arms: '{name}' stands twice" for name in sorted({n for n in names if names.count(n) > 1})]
        faults += [f"arms: stack '{name}' has two" for name in sorted({n for n in stacks if stacks.count(n) > 1})]
        if not self.margin_nats > 0 or not 0 < self.alpha < 1:
            faults.append(f"margin_nats, alpha: {self.margin_nats}, {self.alpha} must be above 0, alpha below 1")
        if self.baseline.fine_tunes or self.baseline.optimizer != self.optimizer.kind:
            faults.append(f"arms: the first, '{names[0]}', is the baseline: {self.optimizer.kind}, from the start")
        for arm in self.arms:
            faults += self._arm_faults(arm, names)
        for rung in self.rungs:
            if self.tuning_seed in (*rung.seeds, *rung.more_seeds):
                faults.append(f"rungs: '{rung.name}' is judged at the tuning seed ({self.tuning_seed}); take another")
            faults += [f"rungs: '{rung.name}': {unknown_name('arm', n, names)}" for n in rung.arms if n not in names]
        faults += [f"first: {unknown_name('arm', name, names)}" for name in self.first if name not in names]
        for target in self.targets:
            wanted = (*target.stacks, target.baseline)
            faults += [f"targets: {unknown_name('stack', n, stacks)}" for n in wanted if n not in stacks]
        if faults:
            raise ValueError("\n".join(faults))

    def _arm_faults(self, arm: Arm, names: list[str]) -> Iterator[str]:
        if arm.against and (arm.against not in names or self.arm(arm.against).fine_tunes != arm.fine_tunes):
            yield f"arms: '{arm.name}' is compared with '{arm.against}', which is none, or starts elsewhere"
            return
        if arm is not self.baseline and self.other_of(arm) is None and not arm.lrs:
            yield f"arms: '{arm.name}' is compared with none and tries no rate; give it against or lrs"
        if arm.fine_tunes and self.fine_tune_steps < 1:
            yield f"fine_tune_steps: {self.fine_tune_steps} must be at least 1: '{arm.name}' fine-tunes"
        for rung in self.rungs:
            if rung.batch_size % arm.num_micro_batches:
                count = arm.num_micro_batches
                yield f"rungs: '{rung.name}': batch_size {rung.batch_size} is no multiple of {count} ('{arm.name}')"

    @property
    def baseline(self) -> Arm:
        """What arms are compared with."""
        return self.arms[0]

    def arm(self, name: str) -> Arm:
        """Return an arm by name."""
        return next(arm for arm in self.arms if arm.name == name)

    def rung(self, name: str) -> Rung:
        """Return a rung by name."""
        return next(rung for rung in self.rungs if rung.name == name)

    def arm_of(self, stack: str) -> Arm | None:
        """Return the arm whose runs a stack shares; None for a stack that came after the registration."""
        return next((arm for arm in self.arms if stack in arm.stacks), None)

    def arms_of(self, rung: Rung) -> list[Arm]:
        """Return the arms of a rung."""
        return [arm for arm in self.arms if not rung.arms or arm.name in rung.arms]

    def other_of(self, arm: Arm) -> Arm | None:
        """Return what an arm is compared with; None for what others are compared with alone."""
        if arm is self.baseline or (arm.fine_tunes and not arm.against):
            return None
        return self.arm(arm.against) if arm.against else self.baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRun:
    """One run, before it is made."""

    rung: str
    arm: str
    seed: int
    lr: float
    base_lr: float
    """Of the run that a fine-tuned one goes on from; else its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderJob:
    """A run with all that it needs to know, for a process of its own."""

    ladder: LadderFile
    run: LadderRun
    bases: Path | None = None
    """Folder of weights that baselines ended with; None: what fine-tuned runs go on from is trained for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The first steps of a run and a run in little: what a later program must compute again."""

    first_losses: tuple[float, ...]
    """Of the run itself, its first four true steps; of a fine-tuned one those of its base."""
    losses: tuple[float, ...]
    """Of the run in little, through every phase."""
    weights_digest: str
    """SHA-256 of the exact values of all trained weights after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRecord(Record):
    """One run of a ladder, as it went. Executed: real arithmetic on the CPU."""

    run: LadderRun
    evidence: Evidence = Evidence.EXECUTED
    validation_loss: float | None = None
    """Nats per token at the end."""
    validation_accuracy: float | None = None
    """Share of tokens that were the likeliest."""
    train_losses: tuple[float, ...] = ()
    """Means of twentieths of the run."""
    num_params: int
    num_tokens: int
    jumps: int = 0
    cpu_seconds: float
    """Processor time of the training loop, one thread; of a fine-tuned run without its base, where that was there."""
    probe: Probe
    corpus: str
    corpus_digest: str
    products: str = ""
    """What multiplied bfloat16 matrices (``product_unit``); empty: float32, in attention's gradients torch's loops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRecord(Record):
    """A probe computed again, by a later program."""

    run: LadderRun
    evidence: Evidence = Evidence.EXECUTED
    is_equal: bool
    """To the bit."""
    largest_difference: float
    """Of a loss, nats per token."""
    same_machine: bool
    """Processor and torch are those of the run."""


@cache
def _composed(optimizations: tuple[Optimization, ...]) -> MemoryPlan:
    return compose(optimizations)


def ladder_names(folder: Path) -> list[str]:
    """Return the names of all ladders of a folder of scenarios."""
    return sorted(path.stem for path in (folder / "ladders").glob("*.toml"))


def read_ladder_file(folder: Path, name: str) -> LadderFile:
    """Read a ladder by name; raises ``ConfigError`` with every fault at once."""
    if name not in ladder_names(folder):
        raise ConfigError(str(folder / "ladders"), [unknown_name("ladder", name, ladder_names(folder))])
    return load_toml(LadderFile, folder / "ladders" / f"{name}.toml", unions=UNIONS)


@cache
def run_key(ladder: LadderFile, run: LadderRun) -> str:
    """Return the digest of all that decides how a run goes, apart from the program and the text.

    Settings at their default are left out: a new option with a default does not make old runs unknown.
    """
    rung, arm = ladder.rung(run.rung), ladder.arm(run.arm)
    parts: list[object] = [
        replace(rung, lrs=(0.0,), seeds=(0, 1, 2), more_seeds=(), arms=()),
        replace(arm, name="any", says="", family="stack", lrs=(), against="", stacks=()), replace(run, arm="any"),
        ladder.optimizer, ladder.validation_batches,
    ]  # fmt: skip
    if arm.jumps:
        parts.append(ladder.hybrid)
    if arm.fine_tunes:
        parts.append(ladder.fine_tune_steps)
    return sha256("\n".join(map(settings_text, parts)).encode()).hexdigest()[:16]


def schedule_of(rung: Rung) -> LrSchedule:
    """Return linear warm-up and a cosine that ends at zero."""
    return LrSchedule(warmup_steps=rung.warmup_steps, total_steps=rung.num_steps, final_fraction=0.0)


Made = Mapping[str, LadderRecord]
"""Records by key."""


def chosen_lr(ladder: LadderFile, made: Made, rung: Rung, arm: Arm) -> float:
    """Return the best of the rates tried, as far as they were; an arm that tries none has that of the other one."""
    tried = rung.lrs if arm is ladder.baseline else arm.lrs
    if not tried and (other := ladder.other_of(arm)) is not None:
        return chosen_lr(ladder, made, rung, other)

    def loss(lr: float) -> float:
        record = made.get(run_key(ladder, run_of(ladder, made, rung, arm, ladder.tuning_seed, lr)))
        return float("inf") if record is None or record.validation_loss is None else record.validation_loss

    return min(tried, key=loss)


def record_of(ladder: LadderFile, made: Made, rung: Rung, arm: Arm, seed: int) -> LadderRecord | None:
    """Return an arm's run at its chosen rate, if it was made; a run that diverged is one."""
    return made.get(run_key(ladder, run_of(ladder, made, rung, arm, seed)))


def run_of(ladder: LadderFile, made: Made, rung: Rung, arm: Arm, seed: int, lr: float | None = None) -> LadderRun:
    """Return an arm's run at a seed, at its chosen rate or at another one."""
    rate = chosen_lr(ladder, made, rung, arm) if lr is None else lr
    base_lr = chosen_lr(ladder, made, rung, ladder.baseline) if arm.fine_tunes else rate
    return LadderRun(rung=rung.name, arm=arm.name, seed=seed, lr=rate, base_lr=base_lr)
