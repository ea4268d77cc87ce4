"""Registered protocols, their runs and records: time to loss against AdamW, and quality by model size.

A protocol is registered before its first run. A run depends only on the file, a seed and the program. A ladder is a
study of quality: it compares configurations (arms in files) on several model sizes (rungs in files).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from hybridtrain.config.decode import Unions, load_toml
from hybridtrain.config.rules import below_least, repeated
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import OPTIMIZERS, AdamWConfig
from hybridtrain.optim.muon import Muon
from hybridtrain.optim.slow_average import SlowMomentum
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.plan.placement import Codec
from hybridtrain.stacks import name_faults
from hybridtrain.trainer_config import LrSchedule
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record
from hybridvalidation.records.store import read_lines
from hybridvalidation.scenario import Target

BASELINE = "adamw"
"""The implicit baseline method of every study of time to loss."""
JUDGED = "slow_gradient"
"""The method that claims and stated figures concern."""
UNIONS: Final[Unions] = {Optimization: OPTIMIZATIONS}

Disturbance = Literal["data_shift", "nan_gradients"]
"""Half-way through a run. data_shift: bytes are permuted from then on, in validation too. nan_gradients: one step has a
NaN gradient once."""
Control = Literal["random", "average"]
"""random: jumps of equal norm in a random direction. average: AdamW, evaluated at averaged weights."""
_composed = cache(compose)
_FEWEST = 5
"""Seeds of a test of harm."""
Family = Literal["stack", "method", "control"]
"""stack: should train like the baseline. method: another training method. control: harmful, and must be judged worse
for the ladder to be informative. p-values are adjusted within a family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Record):
    """Record of one run. Executed: real arithmetic on the CPU, one thread."""

    evidence: Evidence = Evidence.EXECUTED
    validation_loss: float | None = None
    """Nats per token at the end; None if the run diverged."""
    cpu_seconds: float
    """CPU time of the training loop; for a fine-tuned run without its base, if that existed."""
    jumps: int = 0
    corpus_digest: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Protocol:
    """Common fields of every registered study."""

    name: str
    description: str
    target: str
    """The claim to judge."""
    stop_rule: str
    """The stopping rule."""
    remarks: str = ""
    """Remarks on the registration and on later events."""
    tuning_seed: int
    """Seed at which learning rates are tuned."""
    validation_batches: int
    """Number of validation batches, each of a step's rows."""
    optimizer: AdamWConfig


# --- time to loss -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyMethod:
    """One training method, compared with AdamW."""

    name: str
    description: str
    role: Literal["method", "upper bound", "control"] = "method"
    slow: SlowMomentum | None = None
    """AdEMAMix's slow average, which moves the weights in every step."""
    muon: Muon | None = None
    """Muon instead of AdamW, with AdamW's rate, weight decay, clipping and betas."""
    hybrid: HybridConfig | None = None
    control: Control | None = None
    disturbance: Disturbance | None = None
    lr_factor: float = 1.0
    """Factor on the learning rate."""
    against: str = BASELINE
    """Reference method; for a disturbed method one with the same disturbance."""
    lrs: tuple[float, ...] = ()
    """Learning rates to try at the tuning seed; empty: the baseline's."""
    seeds: tuple[int, ...] = ()
    """Seeds; empty: the study's."""

    def __post_init__(self) -> None:
        faults = name_faults(self.name)
        if len(set(self.seeds)) < len(self.seeds):
            faults.append(f"seeds: {list(self.seeds)} names a seed twice: a run would count twice")
        if self.name == BASELINE:
            faults.append(f"name: '{BASELINE}' is the baseline; choose another")
        if self.muon is not None and self.slow is not None:
            faults.append("muon, slow: both replace AdamW; give one of them")
        if self.control == "random" and (self.hybrid is None or not self.hybrid.follows_slow):
            faults.append("control: 'random' takes the size of its jumps from slow_gradient; add a table [hybrid]")
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class Betas:
    """Decays of AdamW's moments."""

    beta1: float
    beta2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """A run of a study of time to loss, to be made."""

    method: str
    lr: float
    beta1: float
    beta2: float
    seed: int
    num_steps: int

    def __str__(self) -> str:
        """Name it in progress and errors."""
        betas = f"{self.beta1:g} {self.beta2:g}"
        return f"{self.method} lr {self.lr:g} betas {betas} seed {self.seed} {self.num_steps} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPoint:
    """A validation within a run."""

    step: int
    cost: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord(RunRecord):
    """One run of a study of time to loss."""

    run: StudyRun
    test_loss: float | None = None
    final_train_loss: float | None = None
    """Mean loss of the last 50 steps."""
    curve: tuple[ValidationPoint, ...] = ()
    step_losses: tuple[float, ...] = ()
    """Losses of all true steps, for forecasters; only for full-length runs."""
    cost: float
    """Cost in forward passes, probes included: a forward pass of a step's batch is 1, a true step 3."""
    predicted_steps: float = 0.0
    rollbacks: int = 0
    planned_device_bytes: int = 0
    planned_host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a direct comparison."""

    method: str
    lr: float
    num_steps: int
    """True steps: as many as take the other side's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """A direct comparison of two methods over all seeds: the claim is that the first ends at a lower loss."""

    first: Side
    second: Side


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StudyFile(Protocol):
    """A study of time to loss: methods compared with AdamW at one model size."""

    model: ModelConfig
    seq_len: int
    batch_size: int
    """Sequences per step."""
    corpus_mib: int
    """Size of the embedded corpus; a pinned text is used whole."""
    num_steps: int
    seeds: tuple[int, ...]
    """Seeds; the tuning seed is one of them."""
    lrs: tuple[float, ...]
    """Learning rates to try for AdamW; one entry means no tuning. Betas are tried first at the optimizer's ``lr``."""
    betas: tuple[Betas, ...] = ()
    """Betas to try for AdamW, besides the optimizer's own."""
    schedule: LrSchedule
    """Schedule; ``total_steps`` is replaced by a run's horizon."""
    horizons: tuple[int, ...]
    """Lengths of AdamW's runs, including ``num_steps``, each with its own schedule. With a constant learning rate one
    long run with intermediate validations serves as all."""
    tuning_horizons: tuple[int, ...] = ()
    """Additional horizons, at the tuning seed only."""
    methods: tuple[StudyMethod, ...]
    targets: tuple[str, ...] = ()
    """Stated figures in ``targets.toml`` that this study judges."""
    corpus: Literal["embedded", "pinned"] = "embedded"
    """embedded: the sources of this machine's Python. pinned: the same text everywhere (data/pinned_corpus.py)."""
    validate_every: int = 0
    """Steps between validations within a run; 0: only at the end, plus a test set of equal size."""
    least_gain: float = 1.0
    """Compute factor that the claim states."""
    largest_harm_pct: float | None = None
    """Alternative claim: no method's loss is more than this many percent above its reference's."""
    duel: Duel | None = None
    """Alternative claim: one method beats another; nothing else is run."""

    def __post_init__(self) -> None:
        faults = _size_faults(self, ("corpus_mib", "validation_batches"), self.seeds)
        if self.duel is None and self.tuning_seed not in self.seeds:
            faults.append(f"tuning_seed: {self.tuning_seed} must be one of seeds ({list(self.seeds)})")
        faults += self._horizon_faults() if self.duel is None else self._duel_faults(self.duel)
        names = [method.name for method in self.methods]
        faults += _twice("methods", names)
        for method in self.methods:
            faults += self._method_faults(method)
        if self.largest_harm_pct is None and self.duel is None and JUDGED not in names:
            faults.append(f"methods: '{JUDGED}' is missing; the claims are about it, so add it or set largest_harm_pct")
        if faults:
            raise ValueError("\n".join(faults))

    def _duel_faults(self, duel: Duel) -> Iterator[str]:
        names = [method.name for method in self.methods]
        for side in (duel.first, duel.second):
            if side.method not in names:
                yield f"duel: {unknown_name('method', side.method, names)}"
            if side.num_steps < 1 or side.lr <= 0:
                yield f"duel: {side.method} has {side.num_steps} steps at rate {side.lr:g}; both must be above 0"
        if len(self.seeds) < _FEWEST or self.tuning_seed in self.seeds:
            yield f"seeds: {list(self.seeds)} must be {_FEWEST} or more, without tuning_seed ({self.tuning_seed})"

    def duel_run(self, side: Side, seed: int) -> StudyRun:
        """Return a side's run with one seed."""
        betas = {"beta1": self.optimizer.beta1, "beta2": self.optimizer.beta2}
        return StudyRun(method=side.method, lr=side.lr, seed=seed, num_steps=side.num_steps, **betas)

    def _horizon_faults(self) -> Iterator[str]:
        horizons, constant = list(self.horizons), "under a constant learning rate a run is judged on its way"
        if not horizons:
            yield "horizons: empty; give at least one number of steps"
        elif not self.is_constant:
            if self.num_steps not in horizons:
                yield f"horizons: {horizons} must contain num_steps ({self.num_steps})"
            if len(set(horizons)) < 2 and self.largest_harm_pct is None:
                yield f"horizons: {horizons} needs at least 2 entries for a curve"
        elif self.validate_every < 1 or self.num_steps % self.validate_every:
            yield f"validate_every: {self.validate_every} must divide num_steps ({self.num_steps}): {constant}"
        elif max(horizons) < self.num_steps:
            yield f"horizons: {horizons} must reach num_steps ({self.num_steps})"

    def _method_faults(self, method: StudyMethod) -> Iterator[str]:
        """Yield why a method cannot be compared, seed by seed and under the same circumstances."""
        where, other = f"methods: '{method.name}'", self.method(method.against)
        if other is None and method.against != BASELINE:
            yield f"{where} is compared with '{method.against}', which is not a method here"
            return
        if missing := sorted(set(self.seeds_of(method.name)) - set(self.seeds_of(method.against))):
            yield f"{where} has seeds {missing}, which '{method.against}' lacks; make their seeds equal"
        if method.role != "control" and method.disturbance != (None if other is None else other.disturbance):
            yield f"{where} has another disturbance than '{method.against}'; compare methods with the same one"

    def method(self, name: str) -> StudyMethod | None:
        """Return a method by name; None for the baseline."""
        return next((method for method in self.methods if method.name == name), None)

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Return the seeds a method is run with."""
        method = self.method(name)
        return self.seeds if method is None or not method.seeds else method.seeds

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate is constant, so that a run serves for all shorter lengths."""
        return self.schedule.kind == "constant"

    def first_rates(self) -> list[StudyRun]:
        """Return AdamW's tuning runs: all learning rates, at the tuning seed and the optimizer's betas."""
        betas = {"beta1": self.optimizer.beta1, "beta2": self.optimizer.beta2}
        return [
            StudyRun(method=BASELINE, lr=lr, seed=self.tuning_seed, num_steps=self.num_steps, **betas)
            for lr in self.lrs
        ]

    def key_parts(self, run: StudyRun) -> list[object]:
        """Return all values that affect a run, apart from the program."""
        parts: list[object] = [self.model, self.optimizer, self.schedule, run]
        parts += [self.seq_len, self.batch_size, self.corpus_mib, self.validation_batches, self.validate_every]
        if self.corpus != "embedded":
            parts.append(self.corpus)
        if (method := self.method(run.method)) is not None:
            parts.append(replace(method, description="", role="method", lrs=(), seeds=(), against=BASELINE))
        return parts


Made = Mapping[str, StudyRecord]
"""Records by key."""


def chosen(study: StudyFile, made: Made, method: str) -> StudyRun:
    """Return a method's run at the tuning seed with the best learning rate and betas tried so far."""
    best = best_run(study, made, study.first_rates())
    pairs = (Betas(beta1=best.beta1, beta2=best.beta2), *study.betas)
    best = best_run(study, made, [replace(best, beta1=pair.beta1, beta2=pair.beta2) for pair in pairs])
    found = study.method(method)
    lrs = (best.lr,) if found is None or not found.lrs else found.lrs
    return best_run(study, made, [replace(best, method=method, lr=lr) for lr in lrs])


def study_record(study: StudyFile, made: Made, method: str, seed: int, num_steps: int) -> StudyRecord | None:
    """Return a method's record at its chosen learning rate, if any; diverged runs count."""
    return made.get(run_key(study, replace(chosen(study, made, method), seed=seed, num_steps=num_steps)))


# --- quality by model size --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model size with a training length (a rung in files)."""

    name: str
    model: ModelConfig
    seq_len: int
    batch_size: int
    """Sequences per step, a multiple of every configuration's number of micro-batches."""
    num_steps: int
    warmup_steps: int
    lrs: tuple[float, ...]
    """Learning rates to try for the baseline at the tuning seed, which is not in ``seeds``; all configurations use the
    best."""
    seeds: tuple[int, ...]
    more_seeds: tuple[int, ...] = ()
    """Additional seeds of a second and last interim analysis, for inconclusive configurations of family stack and their
    references."""
    arms: tuple[str, ...] = ()
    """Configurations; empty: all."""
    analyses: tuple[int, ...] = ()
    """Numbers of seeds at which a one-sided test of harm is made, rising to all; empty: a test of equivalence."""
    deviation_nats: float = 0.0
    """Standard deviation of paired differences that a test of harm was planned with."""

    def __post_init__(self) -> None:
        faults = _size_faults(self, ("warmup_steps",), (*self.seeds, *self.more_seeds), "seeds, more_seeds")
        if self.analyses and ([*self.analyses] != sorted({*self.analyses}) or self.analyses[-1] != len(self.seeds)):
            faults.append(f"analyses: {list(self.analyses)} must rise to the number of seeds ({len(self.seeds)})")
        if bool(self.analyses) != (self.deviation_nats > 0):
            faults.append(f"deviation_nats: {self.deviation_nats} must be above 0 with analyses, and absent without")
        if self.analyses and (self.analyses[0] < _FEWEST or self.more_seeds):
            faults.append(f"analyses: {list(self.analyses)} must begin with {_FEWEST} or more, without more_seeds")
        if self.warmup_steps >= self.num_steps:
            faults.append(f"warmup_steps: {self.warmup_steps} must be below num_steps ({self.num_steps})")
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def num_tokens(self) -> int:
        """Training tokens of a run."""
        return self.num_steps * self.batch_size * self.seq_len

    @property
    def tokens_per_param(self) -> float:
        """Tokens over parameters."""
        return self.num_tokens / self.model.num_params

    @property
    def schedule(self) -> LrSchedule:
        """Linear warm-up, then cosine to zero."""
        return LrSchedule(warmup_steps=self.warmup_steps, total_steps=self.num_steps, final_fraction=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A training configuration by its arithmetic, without placements, which do not change results (an arm in files)."""

    name: str
    description: str
    family: Family = "stack"
    optimizations: tuple[Optimization, ...] = ()
    optimizer: str = "adamw"
    """Optimizer kind, with the baseline's learning rate, weight decay and clipping."""
    lrs: tuple[float, ...] = ()
    """Learning rates to try at the tuning seed, for another optimizer or fine-tuning; empty: the reference's."""
    clip: Literal["exact", "previous"] = "exact"
    """Gradient clipping of fused updates."""
    rounds_to_nearest: bool = False
    """Control: round bfloat16 weights without a master to nearest, which loses small updates."""
    fine_tunes: bool = False
    """Whether it fine-tunes the baseline's final weights of the same seed on another text."""
    against: str = ""
    """Reference configuration; empty: the baseline."""
    stacks: tuple[str, ...] = ()
    """Stacks with bit-equal arithmetic, which share its runs."""

    def __post_init__(self) -> None:
        faults = name_faults(self.name)
        if self.optimizer not in OPTIMIZERS:
            faults.append(f"optimizer: {unknown_name('optimizer', self.optimizer, sorted(OPTIMIZERS))}")
        full = self.plan().for_phase(Phase.FULL)
        codecs = (full.weight.codec, full.master.codec, full.optim_state.codec)
        if self.rounds_to_nearest and codecs != (Codec.BFLOAT16, Codec.ABSENT, Codec.FLOAT32):
            faults.append("rounds_to_nearest: needs bfloat16 weights without a master, and float32 state")
        if faults:
            raise ValueError("\n".join(faults))

    def plan(self) -> MemoryPlan:
        """Return the composed plan; raises ``PlanConflictError`` for one that contradicts itself."""
        return _composed(self.optimizations)

    @property
    def jumps(self) -> bool:
        """Whether its plan stores a predictor's history."""
        return self.plan().for_phase(Phase.FULL).history_tensors > 0

    @property
    def num_micro_batches(self) -> int:
        """Per step."""
        return self.plan().for_phase(Phase.FULL).grad_accum_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderTarget:
    """A stated figure in ``targets.toml`` that the ladder judges."""

    id: str
    stacks: tuple[str, ...]
    baseline: str = "vanilla"
    """Stack to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRun:
    """A run of a ladder, to be made."""

    rung: str
    arm: str
    seed: int
    lr: float
    base_lr: float
    """Learning rate of a fine-tuned run's base; otherwise the run's own."""

    def __str__(self) -> str:
        """Name it in progress and errors."""
        return f"{self.rung} {self.arm} lr {self.lr:g} seed {self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """First steps of a run and a small run, to be reproduced by later program versions."""

    first_losses: tuple[float, ...]
    """Losses of the run's first four true steps; for a fine-tuned run its base's."""
    losses: tuple[float, ...]
    """Losses of a small run through every phase."""
    weights_digest: str
    """SHA-256 of the exact trained weights after the small run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRecord(RunRecord):
    """One run of a ladder."""

    run: LadderRun
    validation_accuracy: float | None = None
    """Top-1 accuracy on validation tokens."""
    train_losses: tuple[float, ...] = ()
    """Mean training losses over twentieths of the run."""
    num_params: int
    num_tokens: int
    probe: Probe
    corpus: str
    processor: str = ""
    """Name, family and model of the processor, on which the order of sums depends; empty: not recorded."""
    products: str = ""
    """Unit of bfloat16 matmuls (``product_unit``); empty: float32, with torch's attention gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRecord(Record):
    """A probe recomputed by a later program version."""

    run: LadderRun
    evidence: Evidence = Evidence.EXECUTED
    is_equal: bool
    """Whether bit-equal."""
    largest_difference: float
    """Largest difference of a loss, nats per token."""
    same_machine: bool
    """Whether CPU and torch version equal the run's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LadderFile(Protocol):
    """A study of quality: configurations compared with a baseline on several model sizes."""

    margin_nats: float
    """Equivalence margin: the largest negligible mean difference of validation loss."""
    alpha: float = 0.05
    """Family-wise error rate at a model size, of false "equivalent" and of false "different" each; two interim analyses
    have half of it each."""
    hybrid: HybridConfig = field(default_factory=HybridConfig)
    """Hybrid settings of configurations with a predictor's history."""
    fine_tune_steps: int = 0
    rungs: tuple[ModelSize, ...]
    """Model sizes, in the order of running."""
    arms: tuple[Configuration, ...]
    """Configurations; the first is the baseline."""
    first: tuple[str, ...] = ()
    """Configurations to run at all seeds of a model size before the others."""
    targets: tuple[LadderTarget, ...] = ()
    closed: str = ""
    """Why no further run is made; empty: it is open."""

    def __post_init__(self) -> None:
        faults = name_faults(self.name) + below_least(self, ("validation_batches",))
        if not self.arms or not self.rungs:
            raise ValueError("arms, rungs: give at least one of each")
        names = [configuration.name for configuration in self.arms]
        stacks = [stack for configuration in self.arms for stack in configuration.stacks]
        faults += _twice("arms", names)
        faults += [f"arms: stack '{name}' is in two arms; keep it in one" for name in repeated(stacks)]
        if len({bool(size.analyses) for size in self.rungs}) > 1:
            faults.append("rungs: analyses must be in all of them, or in none")
        if not self.margin_nats > 0 or not 0 < self.alpha < 1:
            faults.append(f"margin_nats, alpha: {self.margin_nats}, {self.alpha} must be above 0, alpha below 1")
        if self.baseline.fine_tunes or self.baseline.optimizer != self.optimizer.kind:
            faults.append(f"arms: the first, '{names[0]}', is the baseline: {self.optimizer.kind}, from the start")
        for configuration in self.arms:
            faults += self._configuration_faults(configuration, names)
        for size in self.rungs:
            if self.tuning_seed in (*size.seeds, *size.more_seeds):
                faults.append(
                    f"rungs: '{size.name}' must not include the tuning seed ({self.tuning_seed}); choose another seed"
                )
            faults += [f"rungs: '{size.name}': {unknown_name('arm', n, names)}" for n in size.arms if n not in names]
        faults += [f"first: {unknown_name('arm', name, names)}" for name in self.first if name not in names]
        wanted = [name for target in self.targets for name in (*target.stacks, target.baseline)]
        faults += [f"targets: {unknown_name('stack', name, stacks)}" for name in wanted if name not in stacks]
        if faults:
            raise ValueError("\n".join(faults))

    def _configuration_faults(self, own: Configuration, names: list[str]) -> Iterator[str]:
        if own.against and (own.against not in names or self.configuration(own.against).fine_tunes != own.fine_tunes):
            yield (
                f"arms: '{own.name}' is compared with '{own.against}', which is not an arm, or starts from other "
                f"weights"
            )
            return
        if own is not self.baseline and self.reference_of(own) is None and not own.lrs:
            yield f"arms: '{own.name}' has no reference and no learning rates; give against or lrs"
        if own.fine_tunes and self.fine_tune_steps < 1:
            yield f"fine_tune_steps: {self.fine_tune_steps} must be at least 1: '{own.name}' fine-tunes"
        for size in self.rungs:
            if size.batch_size % (count := own.num_micro_batches):
                yield (
                    f"rungs: '{size.name}': batch_size {size.batch_size} must be a multiple of {count} "
                    f"micro-batches ('{own.name}')"
                )

    @property
    def baseline(self) -> Configuration:
        """The baseline configuration."""
        return self.arms[0]

    def configuration(self, name: str) -> Configuration:
        """Return a configuration by name."""
        return next(configuration for configuration in self.arms if configuration.name == name)

    def size(self, name: str) -> ModelSize:
        """Return a model size by name."""
        return next(size for size in self.rungs if size.name == name)

    def configuration_of(self, stack: str) -> Configuration | None:
        """Return the configuration whose runs a stack shares; None for stacks added after the registration."""
        return next((configuration for configuration in self.arms if stack in configuration.stacks), None)

    def configurations_at(self, size: ModelSize) -> list[Configuration]:
        """Return the configurations of a model size."""
        return [own for own in self.arms if not size.arms or own.name in size.arms]

    def pairs_at(self, size: ModelSize) -> list[tuple[Configuration, Configuration]]:
        """Return the compared configurations of a model size, with their references."""
        return [(own, ref) for own in self.configurations_at(size) if (ref := self.reference_of(own)) is not None]

    def reference_of(self, own: Configuration) -> Configuration | None:
        """Return the reference of a configuration; None if it is only a reference itself."""
        if own is self.baseline or (own.fine_tunes and not own.against):
            return None
        return self.configuration(own.against) if own.against else self.baseline

    def rates_of(self, size: ModelSize, own: Configuration) -> tuple[float, ...]:
        """Return the learning rates to try for a configuration at a model size; empty: the reference's."""
        return size.lrs if own is self.baseline else own.lrs

    def key_parts(self, run: LadderRun) -> list[object]:
        """Return all values that affect a run, apart from the program and the text."""
        size, own = self.size(run.rung), self.configuration(run.arm)
        parts: list[object] = [
            replace(size, lrs=(0.0,), seeds=(0, 1, 2), more_seeds=(), arms=(), analyses=(), deviation_nats=0.0),
            replace(own, name="any", description="", family="stack", lrs=(), against="", stacks=()),
            replace(run, arm="any"), self.optimizer, self.validation_batches,
        ]  # fmt: skip
        if own.jumps:
            parts.append(self.hybrid)
        if own.fine_tunes:
            parts.append(self.fine_tune_steps)
        return parts


LadderMade = Mapping[str, LadderRecord]
"""Records by key."""


def chosen_lr(ladder: LadderFile, made: LadderMade, size: ModelSize, own: Configuration) -> float:
    """Return the best rate tried so far; without any, the reference's."""
    tried = ladder.rates_of(size, own)
    if not tried and (reference := ladder.reference_of(own)) is not None:
        return chosen_lr(ladder, made, size, reference)
    runs = [ladder_run(ladder, made, size, own, ladder.tuning_seed, lr) for lr in tried]
    return best_run(ladder, made, runs).lr


def ladder_run(
    ladder: LadderFile, made: LadderMade, size: ModelSize, own: Configuration, seed: int, lr: float | None = None
) -> LadderRun:
    """Return a configuration's run at a seed, at its chosen or a given rate."""
    rate = chosen_lr(ladder, made, size, own) if lr is None else lr
    base_lr = chosen_lr(ladder, made, size, ladder.baseline) if own.fine_tunes else rate
    return LadderRun(rung=size.name, arm=own.name, seed=seed, lr=rate, base_lr=base_lr)


def ladder_record(
    ladder: LadderFile, made: LadderMade, size: ModelSize, own: Configuration, seed: int
) -> LadderRecord | None:
    """Return a configuration's record at its chosen rate, if any; diverged runs count."""
    return made.get(run_key(ladder, ladder_run(ladder, made, size, own, seed)))


# --- both -------------------------------------------------------------------------------------------------------------


Study: TypeAlias = StudyFile | LadderFile
R = TypeVar("R")
_METRICS = {
    StudyFile: ("accuracy_loss_pct", "time_to_loss_speedup_pct"),
    LadderFile: ("accuracy_retention_pct", "accuracy_loss_pct"),
}  # fmt: skip
"""Metrics of stated figures that a study can judge."""


@cache
def run_key(study: Study, run: Any) -> str:
    """Return the digest of all values that affect a run, apart from the program.

    Settings at their default are omitted, so that new options do not invalidate old runs.
    """
    return sha256("\n".join(map(settings_text, study.key_parts(run))).encode()).hexdigest()[:16]


_FIRST_NAMES = {"ModelSize": "Rung", "Configuration": "Arm", "description": "says"}
"""Names of classes and fields at the first runs, which keys keep."""


def settings_text(part: object) -> str:
    """Return dataclasses as text without fields at their default; other values unchanged."""
    if isinstance(part, tuple) and part and is_dataclass(part[0]):
        return f"({', '.join(map(settings_text, part))})"
    if not is_dataclass(part):
        return repr(part)
    told = []
    for item in fields(part):
        value = getattr(part, item.name)
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if value != default:
            told.append(f"{_FIRST_NAMES.get(item.name, item.name)}={settings_text(value)}")
    name = type(part).__name__
    return f"{_FIRST_NAMES.get(name, name)}({', '.join(told)})"


def best_run(study: Study, made: Mapping[str, RunRecord], runs: Iterable[R]) -> R:
    """Return the run with the lowest validation loss; missing or diverged ones come last."""

    def loss(run: R) -> float:
        record = made.get(run_key(study, run))
        return inf if record is None or record.validation_loss is None else record.validation_loss

    return min(runs, key=loss)


def check_targets(study: Study, targets: Mapping[str, Target]) -> None:
    """Raise ``ConfigError`` if a study's target is unknown or of another metric, with all faults."""
    faults, metrics = [], _METRICS[type(study)]
    for name in (stated if isinstance(stated, str) else stated.id for stated in study.targets):
        if name not in targets:
            faults.append(f"$.targets: {unknown_name('target', name, targets)}")
        elif (metric := targets[name].metric) not in metrics:
            faults.append(f"$.targets: '{name}' is about {metric}; this study judges {', '.join(metrics)}")
    if faults:
        raise ConfigError(study.name, faults)


def _size_faults(
    size: StudyFile | ModelSize, least_one: tuple[str, ...], seeds: tuple[int, ...], label: str = "seeds"
) -> list[str]:
    faults = name_faults(size.name) + below_least(size, ("seq_len", "batch_size", "num_steps", *least_one))
    if len(size.seeds) < 3 or len(set(seeds)) < len(seeds):
        faults.append(f"{label}: {list(seeds)} must be at least 3 seeds, without repeats")
    if not size.lrs:
        faults.append("lrs: empty; give at least one learning rate")
    if size.seq_len > size.model.max_seq_len:
        faults.append(f"seq_len: {size.seq_len} is above model.max_seq_len ({size.model.max_seq_len})")
    return faults


def _twice(key: str, names: list[str]) -> list[str]:
    return [f"{key}: '{name}' appears twice" for name in repeated(names)]


# --- files ------------------------------------------------------------------------------------------------------------


def read_study_file(folder: Path, name: str) -> Study:
    """Read a study by name, from ``studies`` or ``ladders``, or one of time to loss by a path ending in ``.toml``.

    Raises:
        ConfigError: the name is unknown, or the file is invalid.
    """
    if name.endswith(".toml"):
        return load_toml(StudyFile, Path(name))
    known = [path.stem for path in (*_paths(folder, "studies"), *_paths(folder, "ladders"))]
    if name not in known:
        raise ConfigError(str(folder / "studies"), [unknown_name("study", name, known)])
    if (path := folder / "ladders" / f"{name}.toml").exists():
        return load_toml(LadderFile, path, unions=UNIONS)
    return load_toml(StudyFile, folder / "studies" / f"{name}.toml")


def studies(folder: Path) -> list[StudyFile]:
    """Read every study of time to loss in a folder of scenarios."""
    return [load_toml(StudyFile, path) for path in _paths(folder, "studies")]


def ladders(folder: Path) -> list[LadderFile]:
    """Read every ladder in a folder of scenarios."""
    return [load_toml(LadderFile, path, unions=UNIONS) for path in _paths(folder, "ladders")]


def all_studies(folder: Path) -> list[Study]:
    """Read all studies and ladders in a folder of scenarios."""
    return [*studies(folder), *ladders(folder)]


def read_study(results: Path, study: Study) -> dict[str, Any]:
    """Return the records so far by key; later records replace earlier ones."""
    kind: type[RunRecord] = StudyRecord if isinstance(study, StudyFile) else LadderRecord
    return {record.key: record for record in read_lines(record_path(results, study.name), kind)}


def record_path(results: Path, name: str) -> Path:
    """Return the file of a study's records."""
    return results / "records" / "studies" / f"{name}.jsonl"


def _paths(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / kind).glob("*.toml"))
