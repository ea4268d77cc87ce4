"""What a study file says, written down before the first run; which runs it needs next; the record of one."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from hashlib import sha256
from typing import Literal

from hybridtrain.config.rules import below_least
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.optim.muon import Muon
from hybridtrain.optim.slow_average import SlowMomentum
from hybridtrain.stacks import name_faults
from hybridtrain.trainer_config import LrSchedule
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.records.record import Record

BASELINE = "adamw"
"""The method that every study has, without being named."""
JUDGED = "slow_gradient"
"""The method that claims and stated figures are about."""

Disturbance = Literal["data_shift", "nan_gradients"]
"""Half-way through a run. data_shift: from there on every byte stands for another one, in validation too.
nan_gradients: one step computes no number, once."""
Control = Literal["random", "average"]
"""random: jumps of the same norm in a random direction. average: AdamW, judged at the mean of its last weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyMethod:
    """One way to train, told apart from AdamW."""

    name: str
    says: str
    role: Literal["method", "upper bound", "control"] = "method"
    slow: SlowMomentum | None = None
    """AdEMAMix: the slow average moves the weights in every step."""
    muon: Muon | None = None
    """In AdamW's place; rate, weight decay, clipping and betas are those that AdamW would have."""
    hybrid: HybridConfig | None = None
    control: Control | None = None
    disturbance: Disturbance | None = None
    lr_factor: float = 1.0
    """Of the learning rate that would be used."""
    against: str = BASELINE
    """What it is compared with; of a disturbed method another one with the same disturbance."""
    lrs: tuple[float, ...] = ()
    """Learning rates tried at the tuning seed; the best is used; empty: the baseline's."""
    seeds: tuple[int, ...] = ()
    """Empty: the study's."""

    def __post_init__(self) -> None:
        faults = name_faults(self.name)
        if len(set(self.seeds)) < len(self.seeds):
            faults.append(f"seeds: {list(self.seeds)} names a seed twice: a run would count twice")
        if self.name == BASELINE:
            faults.append(f"name: '{BASELINE}' is the baseline; choose another")
        if self.muon is not None and self.slow is not None:
            faults.append("muon, slow: both take AdamW's place; give one of them")
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
class StudyFile:
    """One study. Every run is a function of this file, a seed and the program."""

    name: str
    says: str
    target: str
    """The claim that is judged, registered before the first run."""
    stop_rule: str
    """When no more runs are made."""
    remarks: str = ""
    """What a reader must know of what came after the registration."""
    model: ModelConfig
    seq_len: int
    batch_size: int
    """Sequences per step."""
    corpus_mib: int
    """Of the Python standard library's sources, as byte tokens; a pinned text is taken whole."""
    validation_batches: int
    """At most; as many more are kept for the test at the end."""
    num_steps: int
    seeds: tuple[int, ...]
    tuning_seed: int
    """Learning rates and betas are chosen at this one."""
    optimizer: AdamWConfig
    """Of AdamW and of all methods; ``lr`` is where betas are tried first."""
    lrs: tuple[float, ...]
    """Tried for AdamW; with one entry nothing is tuned."""
    betas: tuple[Betas, ...] = ()
    """Tried for AdamW beside the optimizer's own."""
    schedule: LrSchedule
    """``total_steps`` is replaced by the horizon of a run."""
    horizons: tuple[int, ...]
    """Steps of AdamW's runs, each with its own schedule; ``num_steps`` belongs to them. Under a constant learning rate
    one long run is all of them, validated on its way."""
    tuning_horizons: tuple[int, ...] = ()
    """More of them, at the tuning seed only."""
    methods: tuple[StudyMethod, ...]
    targets: tuple[str, ...] = ()
    """Stated figures of ``targets.toml`` that are judged by this study."""
    corpus: Literal["embedded", "pinned"] = "embedded"
    """embedded: this machine's Python. pinned: the same text everywhere (data/pinned_corpus.py)."""
    validate_every: int = 0
    """Steps between validations within a run; 0: only at its end."""
    least_gain: float = 1.0
    """Compute factor of the claim."""
    largest_harm_pct: float | None = None
    """The claim is instead that no method ends with a loss that many percent above what it is compared with."""

    def __post_init__(self) -> None:
        faults = name_faults(self.name) + below_least(
            self, ("seq_len", "batch_size", "corpus_mib", "validation_batches", "num_steps")
        )
        if len(set(self.seeds)) < max(3, len(self.seeds)):
            faults.append(f"seeds: {list(self.seeds)} must name at least 3 seeds, none of them twice")
        if self.tuning_seed not in self.seeds:
            faults.append(f"tuning_seed: {self.tuning_seed} must be one of seeds ({list(self.seeds)})")
        if not self.lrs:
            faults.append("lrs: empty; name at least one learning rate")
        faults += self._horizon_faults()
        names = [method.name for method in self.methods]
        faults += [f"methods: '{name}' stands twice" for name in sorted({n for n in names if names.count(n) > 1})]
        for method in self.methods:
            faults += self._method_faults(method)
        if self.largest_harm_pct is None and JUDGED not in names:
            faults.append(f"methods: without '{JUDGED}' nothing is judged; add it, or set largest_harm_pct")
        if self.seq_len > self.model.max_seq_len:
            faults.append(f"seq_len: {self.seq_len} is above model.max_seq_len ({self.model.max_seq_len})")
        if faults:
            raise ValueError("\n".join(faults))

    def _horizon_faults(self) -> list[str]:
        if not self.horizons:
            return ["horizons: empty; name at least one number of steps"]
        if not self.is_constant:
            faults = []
            if self.num_steps not in self.horizons:
                faults.append(f"horizons: {list(self.horizons)} must contain num_steps ({self.num_steps})")
            if len(set(self.horizons)) < 2 and self.largest_harm_pct is None:
                faults.append(f"horizons: {list(self.horizons)} is no curve; name at least 2")
            return faults
        if self.validate_every < 1 or self.num_steps % self.validate_every:
            found = f"validate_every: {self.validate_every} must divide num_steps ({self.num_steps})"
            return [f"{found}: under a constant learning rate a run is judged on its way"]
        if max(self.horizons) < self.num_steps:
            return [f"horizons: {list(self.horizons)} must reach num_steps ({self.num_steps})"]
        return []

    def _method_faults(self, method: StudyMethod) -> list[str]:
        """Return why a method cannot be compared, seed by seed and under the same circumstances."""
        where = f"methods: '{method.name}'"
        other = self.method(method.against)
        if other is None and method.against != BASELINE:
            return [f"{where} is compared with '{method.against}', which is none of them"]
        faults = []
        missing = sorted(set(self.seeds_of(method.name)) - set(self.seeds_of(method.against)))
        if missing:
            faults.append(f"{where} has seeds {missing}, '{method.against}' has not: they would be left out")
        disturbance = None if other is None else other.disturbance
        if method.role != "control" and method.disturbance != disturbance:
            faults.append(f"{where} has another disturbance than '{method.against}'; compare it with one that has it")
        return faults

    def method(self, name: str) -> StudyMethod | None:
        """Return a method by name; None for the baseline."""
        return next((method for method in self.methods if method.name == name), None)

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Return the seeds a method is run with."""
        method = self.method(name)
        return self.seeds if method is None or not method.seeds else method.seeds

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate never decays, so that every step of a run could be its last."""
        return self.schedule.kind == "constant"

    @property
    def tokens_per_param(self) -> float:
        """Tokens seen in ``num_steps`` over parameters."""
        return self.num_steps * self.batch_size * self.seq_len / self.model.num_params


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One run of a study, before it is made."""

    method: str
    lr: float
    beta1: float
    beta2: float
    seed: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyJob:
    """A run with all that it needs to know, for a process of its own."""

    study: StudyFile
    run: StudyRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPoint:
    """One validation within a run."""

    step: int
    cost: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord(Record):
    """One run of a study, as it went. Executed: real arithmetic on the CPU."""

    run: StudyRun
    evidence: Evidence = Evidence.EXECUTED
    validation_loss: float | None = None
    """Nats per token at the end."""
    test_loss: float | None = None
    final_train_loss: float | None = None
    """Mean of the last 50 steps."""
    curve: tuple[ValidationPoint, ...] = ()
    step_losses: tuple[float, ...] = ()
    """Of every true step, for the forecasters; kept at the study's own length only."""
    cost: float
    """Forward passes' worth of work, probes included: a forward pass of a step's batch is 1, a true step 3."""
    cpu_seconds: float
    """Processor time of the training loop, one pinned thread; its duration is wall clock, other work may have shared
    the machine."""
    jumps: int = 0
    predicted_steps: float = 0.0
    rollbacks: int = 0
    planned_device_bytes: int = 0
    planned_host_bytes: int = 0
    corpus_digest: str


def run_key(study: StudyFile, run: StudyRun) -> str:
    """Return the digest of all that decides how a run goes, apart from the program.

    Settings at their default are left out: a new option with a default does not make old runs unknown.
    """
    method = study.method(run.method)
    parts: list[object] = [study.model, study.optimizer, study.schedule, run]
    parts += [study.seq_len, study.batch_size, study.corpus_mib, study.validation_batches, study.validate_every]
    if study.corpus != "embedded":
        parts.append(study.corpus)
    if method is not None:
        parts.append(replace(method, says="", role="method", lrs=(), seeds=(), against=BASELINE))
    return sha256("\n".join(map(settings_text, parts)).encode()).hexdigest()[:16]


def settings_text(part: object) -> str:
    """Return a dataclass, or a tuple of some, as text without what is at its default; anything else as it is."""
    if isinstance(part, tuple) and part and is_dataclass(part[0]):
        return f"({', '.join(map(settings_text, part))})"
    if not is_dataclass(part):
        return repr(part)
    told = []
    for item in fields(part):
        value = getattr(part, item.name)
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if value != default:
            told.append(f"{item.name}={settings_text(value)}")
    return f"{type(part).__name__}({', '.join(told)})"


Made = Mapping[str, StudyRecord]
"""Records by key."""


def next_runs(study: StudyFile, made: Made) -> list[StudyRun]:
    """Return the runs of the first stage that is not finished; empty when the study is complete."""
    for stage in (learning_rates, betas, comparisons):
        missing = [run for run in stage(study, made) if run_key(study, run) not in made]
        if missing:
            return list(dict.fromkeys(missing))
    return []


def learning_rates(study: StudyFile, made: Made) -> Iterator[StudyRun]:
    """Yield AdamW's learning rates at the tuning seed."""
    del made  # the first stage needs none
    base = study.optimizer
    for lr in study.lrs:
        yield _run(BASELINE, lr, Betas(beta1=base.beta1, beta2=base.beta2), study.tuning_seed, study.num_steps)


def betas(study: StudyFile, made: Made) -> Iterator[StudyRun]:
    """Yield AdamW's other betas at its best learning rate."""
    lr = _best_lr(study, made, BASELINE, Betas(beta1=study.optimizer.beta1, beta2=study.optimizer.beta2), study.lrs)
    for pair in study.betas:
        yield _run(BASELINE, lr, pair, study.tuning_seed, study.num_steps)


def comparisons(study: StudyFile, made: Made) -> Iterator[StudyRun]:
    """Yield every method's learning rates at the tuning seed, then all seeds and horizons at the best ones."""
    lr, pair = chosen(study, made, BASELINE)
    for method in study.methods:
        for tried in method.lrs:
            yield _run(method.name, tried, pair, study.tuning_seed, study.num_steps)
    for horizon in sorted(study.horizons, key=lambda steps: steps != study.num_steps):
        for seed in study.seeds:
            yield _run(BASELINE, lr, pair, seed, horizon)
    for horizon in study.tuning_horizons:
        yield _run(BASELINE, lr, pair, study.tuning_seed, horizon)
    for method in study.methods:
        trials = [_run(method.name, one, pair, study.tuning_seed, study.num_steps) for one in method.lrs]
        if all(run_key(study, run) in made for run in trials):
            best, _ = chosen(study, made, method.name)
            for seed in study.seeds_of(method.name):
                yield _run(method.name, best, pair, seed, study.num_steps)


def chosen(study: StudyFile, made: Made, method: str) -> tuple[float, Betas]:
    """Return learning rate and betas of a method, as far as its tuning runs were made."""
    own = Betas(beta1=study.optimizer.beta1, beta2=study.optimizer.beta2)
    lr = _best_lr(study, made, BASELINE, own, study.lrs)
    pairs = {own, *study.betas}
    pair = min(pairs, key=lambda p: _loss(study, made, _run_at(study, BASELINE, lr, p)))
    found = study.method(method)
    if found is not None and found.lrs:
        lr = _best_lr(study, made, method, pair, found.lrs)
    return lr, pair


def _best_lr(study: StudyFile, made: Made, method: str, pair: Betas, lrs: tuple[float, ...]) -> float:
    return min(lrs, key=lambda lr: _loss(study, made, _run_at(study, method, lr, pair)))


def _loss(study: StudyFile, made: Made, run: StudyRun) -> float:
    record = made.get(run_key(study, run))
    return float("inf") if record is None or record.validation_loss is None else record.validation_loss


def _run_at(study: StudyFile, method: str, lr: float, pair: Betas) -> StudyRun:
    return _run(method, lr, pair, study.tuning_seed, study.num_steps)


def _run(method: str, lr: float, pair: Betas, seed: int, num_steps: int) -> StudyRun:
    return StudyRun(method=method, lr=lr, beta1=pair.beta1, beta2=pair.beta2, seed=seed, num_steps=num_steps)
