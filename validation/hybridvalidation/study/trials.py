"""One run of a study, executed on the CPU: train, validate, record; and the probe for later program versions."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from tempfile import gettempdir

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from hybridtrain.atomic_write import replace_file
from hybridtrain.data.batches import BatchSampler, TokenBatch, validation_batches
from hybridtrain.data.corpus import Corpus, embedded_corpus, split_tail
from hybridtrain.data.pinned_corpus import pinned_corpus
from hybridtrain.engine.parameter_pass import ParameterSlice, PassSettings
from hybridtrain.errors import DivergenceError
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import Workload
from hybridtrain.models.weight_source import WeightSource
from hybridtrain.optim import OPTIMIZERS, AdamWConfig, Optimizer
from hybridtrain.optim.ademamix import AdEMAMix
from hybridtrain.optimizations.predictor_state import PredictorState
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.plan.placement import Codec
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.run.environment import Environment, processor_name
from hybridtrain.stacks import Stack
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.experiment import begin_header
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.study.bfloat16_products import fast_bfloat16, product_unit
from hybridvalidation.study.controls import RandomDirection, WeightAverage, nearest_rounding, poison_gradients, shifted
from hybridvalidation.study.protocol import (
    Configuration,
    LadderFile,
    LadderRecord,
    LadderRun,
    ModelSize,
    Probe,
    StudyFile,
    StudyMethod,
    StudyRecord,
    StudyRun,
    ValidationPoint,
    run_key,
)

TEXT, OTHER_TEXT = "sympy", "networkx"
"""Texts of training and of fine-tuning."""
_PROBE_STEPS, _PROBE_WARMUP, _PROBE_BLOCK = 8, 2, 2
LOSSES_BEFORE_JUMP = _PROBE_WARMUP + _PROBE_BLOCK
"""Losses before the first jump of a small run."""
_FIRST_STEPS, _FIRST_LOSSES = 4, "first losses"
_VALIDATION_SEED = 0
_NUM_MEANS, _TRAIN_TAIL = 20, 50
_CARD = "rtx-4090"
"""Card of the dry run for planned bytes, which do not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyJob:
    """Job of a time-to-loss run, for a child process."""

    study: StudyFile
    run: StudyRun


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderJob:
    """Job of a ladder's run, for a child process."""

    ladder: LadderFile
    run: LadderRun
    is_whole: bool = True
    """Whether to train to the end and validate; otherwise only the first steps."""
    bases: Path | None = None
    """Folder of baselines' final weights; None: each fine-tuned run trains its own base."""


class Trial:
    """A trainer with its data, and the losses of its true steps."""

    def __init__(
        self, trainer: Trainer, hybrid: HybridConfig | None, sampler: BatchSampler, *, num_micro_batches: int = 1,
        probes: BatchSampler | None = None,
    ) -> None:  # fmt: skip
        self.trainer = trainer
        self.hybrid = HybridTrainer(trainer, hybrid, None if probes is None else lambda use: [probes.batch(use, 0)])
        self.losses: list[float] = []
        self._sampler, self._num_micro_batches = sampler, num_micro_batches

    def train(self, num_steps: int) -> None:
        """Run up to a number of true steps, with the phases between them; raises ``DivergenceError``."""
        while self.trainer.steps_done < num_steps:
            self.before_step()
            result = self.hybrid.advance(self.batches)
            if result.num_tokens and result.loss is not None:
                self.losses.append(result.loss)
                self.after_step(result.step)

    def before_step(self) -> None:
        """Handle the start of a phase step."""

    def after_step(self, step: int) -> None:
        """Handle the end of a true step."""

    def batches(self, step: int) -> list[TokenBatch]:
        """Return the micro-batches of a step."""
        return [self._sampler.batch(step, micro_batch) for micro_batch in range(self._num_micro_batches)]


# --- time to loss -----------------------------------------------------------------------------------------------------


class StudyTrial(Trial):
    """Run of a study of time to loss, in float32 on the device."""

    def __init__(self, study: StudyFile, run: StudyRun, corpus: Corpus) -> None:
        self._study, self._run = study, run
        method = study.method(run.method) or StudyMethod(name="plain", description="")
        adamw = replace(study.optimizer, lr=run.lr * method.lr_factor, beta1=run.beta1, beta2=run.beta2)
        schedule = replace(study.schedule, total_steps=run.num_steps)
        config = TrainerConfig(optimizer=_optimizer_of(method, adamw), schedule=schedule, seed=run.seed)
        self._plan, self._disturbance = plan_of(method), method.disturbance
        trainer = Trainer(study.model, self._plan, config, DirectTransfer(torch.device("cpu")))
        hybrid, is_random = method.hybrid, method.hybrid is not None and method.control == "random"
        train = probe = corpus.train
        if hybrid is not None and hybrid.needs_probe:
            train, probe = split_tail(corpus.train, corpus.source)
        if hybrid is not None and is_random:
            hybrid = replace(hybrid, fuse=False)
        data = {"micro_batch_size": study.batch_size, "seq_len": study.seq_len}
        samplers = [BatchSampler(tokens, seed=run.seed, **data) for tokens in (train, probe)]
        super().__init__(trainer, hybrid, samplers[0], probes=samplers[1])
        if hybrid is not None and is_random:
            self.hybrid.predictor = RandomDirection(hybrid, trainer)
        self._average = WeightAverage(trainer) if method.control == "average" else None
        if self._disturbance == "nan_gradients":
            poison_gradients(trainer, run.num_steps // 2)
        held_out = list(validation_batches(corpus.validation, max_batches=2 * study.validation_batches, **data))
        self._halves = held_out[::2], held_out[1::2]  # to validate and to test on, in turn from the held-out documents
        self.curve: list[ValidationPoint] = []

    def after_step(self, step: int) -> None:
        """Add the weights to the average, and validate if due."""
        if self._average is not None:
            self._average.update()
        if (every := self._study.validate_every) and step % every == 0:
            loss = self._mean_loss(self._halves[0])
            if not math.isfinite(loss):
                raise DivergenceError(f"validation loss {loss} after step {step}")
            self.curve.append(ValidationPoint(step=step, cost=self.hybrid.statistics.cost, loss=loss))

    def batches(self, step: int) -> list[TokenBatch]:
        """Return the batch of a step, permuted after a data shift."""
        is_shifted = self._disturbance == "data_shift" and step >= self._run.num_steps // 2
        return [shifted(batch) if is_shifted else batch for batch in super().batches(step)]

    def final_losses(self) -> tuple[float, float]:
        """Return validation and test loss; raises ``DivergenceError`` if they are not finite."""
        if self._average is not None:
            self._average.put_in()
        change = shifted if self._disturbance == "data_shift" else lambda batch: batch
        validation, test = (self._mean_loss([change(batch) for batch in half]) for half in self._halves)
        if not math.isfinite(validation + test):
            raise DivergenceError(f"validation loss {validation}, test loss {test} after the last step")
        return validation, test

    def planned_bytes(self) -> tuple[int, int]:
        """Return peak device and host bytes of a dry run of the same steps."""
        workload = Workload(micro_batch_size=self._study.batch_size, seq_len=self._study.seq_len)
        planned = dry_run(self._study.model, self._plan, find_card(_CARD), workload)
        return planned.peak.allocated_bytes, planned.host_peak_bytes

    def _mean_loss(self, batches: list[TokenBatch]) -> float:
        return fmean(self.trainer.loss([batch]) for batch in batches)


def run_study_job(job: StudyJob) -> StudyRecord:
    """Train once on one thread and return the record; divergence is an outcome."""
    torch.set_num_threads(1)
    study, run, header = job.study, job.run, begin_header()
    corpus = corpus_of(study)
    trial, begin, message = StudyTrial(study, run, corpus), time.process_time(), ""
    validation = test = None
    try:
        trial.train(run.num_steps)
    except DivergenceError as error:
        message = str(error)
    cpu_seconds, statistics = time.process_time() - begin, trial.hybrid.statistics
    try:
        validation, test = (None, None) if message else trial.final_losses()
    except DivergenceError as error:
        message = str(error)
    planned = trial.planned_bytes()
    keeps_steps = run.num_steps == study.num_steps and not study.validate_every
    return StudyRecord(
        key=run_key(study, run), run=run, outcome=Outcome.DIVERGED if message else Outcome.OK, message=message,
        validation_loss=validation, test_loss=test,
        final_train_loss=None if message else fmean(trial.losses[-_TRAIN_TAIL:]), curve=tuple(trial.curve),
        step_losses=tuple(round(loss, 4) for loss in trial.losses) if keeps_steps else (),
        cost=statistics.cost, cpu_seconds=round(cpu_seconds, 2), jumps=statistics.jumps,
        predicted_steps=round(statistics.predicted_steps, 2), rollbacks=statistics.rollbacks,
        planned_device_bytes=planned[0], planned_host_bytes=planned[1], corpus_digest=corpus.digest, **header(),
    )  # fmt: skip


def corpus_of(study: StudyFile) -> Corpus:
    """Return the corpus of a study of time to loss."""
    return pinned_corpus() if study.corpus == "pinned" else embedded_corpus(study.corpus_mib * MIB)


def _optimizer_of(method: StudyMethod, adamw: AdamWConfig) -> Optimizer:
    if method.slow is not None:
        return AdEMAMix.beside(adamw, method.slow)
    if method.muon is None:
        return adamw
    common = ("lr", "weight_decay", "max_grad_norm", "clip", "beta1", "beta2")
    return replace(method.muon, **{name: getattr(adamw, name) for name in common})


def plan_of(method: StudyMethod) -> MemoryPlan:
    """Return the plan of a method: float32 on the device, with its predictor's history."""
    if method.slow is None and method.hybrid is None:
        return compose([])
    is_linear = method.hybrid is not None and method.hybrid.predictor == "linear"
    return compose([PredictorState(predictor="linear" if is_linear else "slow_gradient")])


# --- quality by model size --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Arithmetic of a configuration or a stack: storage, updates, jumps."""

    plan: MemoryPlan
    optimizer: Optimizer
    """Optimizer at the run's learning rate."""
    hybrid: HybridConfig
    rounds_to_nearest: bool = False

    @property
    def jumps(self) -> bool:
        """Whether the plan stores a predictor's history."""
        return self.plan.for_phase(Phase.FULL).history_tensors > 0

    @property
    def walks(self) -> bool:
        """Whether phases differ although there is no jump, so that they are still alternated."""
        full = self.plan.for_phase(Phase.FULL)
        return not self.jumps and any(table != full for table in self.plan.phases.values())


def recipe_of(ladder: LadderFile, own: Configuration | Stack, lr: float) -> Recipe:
    """Return the recipe of a configuration or a stack; another optimizer inherits the common settings."""
    base = replace(ladder.optimizer, lr=lr)
    common = {name: getattr(base, name) for name in ("lr", "weight_decay", "max_grad_norm")}
    optimizer: Optimizer = base if own.optimizer == base.kind else OPTIMIZERS[own.optimizer](**common)
    to_nearest = isinstance(own, Configuration) and own.rounds_to_nearest
    if isinstance(own, Configuration) and own.clip != optimizer.clip:
        optimizer = replace(optimizer, clip=own.clip)
    return Recipe(plan=own.plan(), optimizer=optimizer, hybrid=ladder.hybrid, rounds_to_nearest=to_nearest)


class LadderTrial(Trial):
    """Run of a ladder, by its recipe."""

    def __init__(
        self, size: ModelSize, recipe: Recipe, seed: int, corpus: Corpus, source: WeightSource | None = None
    ) -> None:
        self._size, self._recipe, self._corpus = size, recipe, corpus
        count = recipe.plan.for_phase(Phase.FULL).grad_accum_steps
        rows = size.batch_size // count
        sampler = BatchSampler(corpus.train, micro_batch_size=rows, seq_len=size.seq_len, seed=seed)
        config = TrainerConfig(optimizer=recipe.optimizer, schedule=size.schedule, seed=seed)
        with self._arithmetic():
            transfer = DirectTransfer(torch.device("cpu"), disk_folder=Path(gettempdir()))
            trainer = Trainer(size.model, recipe.plan, config, transfer, source=source)
        super().__init__(trainer, recipe.hybrid if recipe.jumps else None, sampler, num_micro_batches=count)

    def train(self, num_steps: int) -> None:
        """Run up to a number of true steps; raises ``DivergenceError``."""
        with self._arithmetic():
            super().train(num_steps)
            self.trainer.enter_phase(Phase.FULL)

    def before_step(self) -> None:
        """Enter the next true step's phase as a hybrid cycle would, through PREDICT."""
        if not self._recipe.walks:
            return
        done = self.trainer.steps_done - self._size.warmup_steps
        phases = [Phase.WARMUP if done < 0 else Phase.FULL]
        if done >= 0 and done % self._recipe.hybrid.full_steps == 0:
            phases = [Phase.PREDICT, Phase.CORRECT]
        for phase in phases:
            self.trainer.enter_phase(phase)

    def validate(self, num_batches: int) -> tuple[float, float]:
        """Return mean loss in nats per token, and top-1 accuracy.

        Windows are drawn from all held-out documents, the same ones for every run of a model size.
        """
        size, losses, hits = self._size, list[float](), list[float]()
        windows = BatchSampler(
            self._corpus.validation, micro_batch_size=size.batch_size, seq_len=size.seq_len, seed=_VALIDATION_SEED
        )
        self.trainer.model.eval()
        with self._arithmetic():
            for batch in (windows.batch(number, 0) for number in range(num_batches)):
                logits_MV = self.trainer.executor.forward(torch.from_numpy(batch.token_ids_BT)).flatten(0, 1).float()
                targets_M = torch.from_numpy(batch.target_ids_BT).flatten()
                losses.append(float(torch.nn.functional.cross_entropy(logits_MV, targets_M)))
                hits.append(float((logits_MV.argmax(-1) == targets_M).float().mean()))
        self.trainer.model.train()
        if not (loss := fmean(losses)) < float("inf"):
            raise DivergenceError(f"validation loss {loss} after the last step")
        return loss, fmean(hits)

    def weights_digest(self) -> str:
        """Return the SHA-256 of all trained weights' exact values, in any placement and format."""
        found: dict[tuple[str, int, int], bytes] = {}

        def note(swept: ParameterSlice) -> None:
            found[swept.unit, swept.index, swept.part.start] = swept.weight.value.float().cpu().numpy().tobytes()

        self.trainer.parameters.visit(note, PassSettings(uses_extra=False, writes_weights=False))
        total = sha256()
        for place in sorted(found):
            total.update(f"{place}".encode() + found[place])
        return total.hexdigest()

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Apply the recipe's arithmetic, with fast bfloat16 on CPUs without it."""
        with ExitStack() as stack:
            if any(table.compute_dtype is Codec.BFLOAT16 for table in self._recipe.plan.phases.values()):
                stack.enter_context(fast_bfloat16())
            if self._recipe.rounds_to_nearest:
                stack.enter_context(nearest_rounding())
            yield


def run_ladder_job(job: LadderJob) -> LadderRecord:
    """Train once on one thread and return the record; divergence is an outcome."""
    torch.set_num_threads(1)
    ladder, run, header, begin = job.ladder, job.run, begin_header(), time.process_time()
    own, size, corpus = ladder.configuration(run.arm), ladder.size(run.rung), pinned_corpus(TEXT)
    recipe = recipe_of(ladder, own, run.lr)
    probe, source = run_probe(size, recipe, run.seed, corpus), None
    place = _base_path(job, header()["environment"], corpus) if job.is_whole and job.bases is not None else None
    if own.fine_tunes:
        source = None if place is None else read_weights(place)
        if source is None:
            base = LadderTrial(size, recipe_of(ladder, ladder.baseline, run.base_lr), run.seed, corpus)
            base.train(size.num_steps if job.is_whole else _FIRST_STEPS)
            source = FinalWeights.of(base)
            source.write(place)
        corpus, steps = pinned_corpus(OTHER_TEXT), ladder.fine_tune_steps
        size = replace(size, num_steps=steps, warmup_steps=max(1, steps // 10))
    trial = LadderTrial(size, recipe, run.seed, corpus, source)
    message, loss, accuracy = "", None, None
    try:
        trial.train(size.num_steps if job.is_whole else _FIRST_STEPS)
        loss, accuracy = trial.validate(ladder.validation_batches) if job.is_whole else (None, None)
    except DivergenceError as error:
        message = str(error)
    if own is ladder.baseline and not message:
        FinalWeights.of(trial).write(place)
    count = max(1, size.num_steps // _NUM_MEANS)
    means = (fmean(trial.losses[at : at + count]) for at in range(0, len(trial.losses), count))
    first = source.first_losses if source is not None else tuple(trial.losses[:_FIRST_STEPS])
    return LadderRecord(
        key=run_key(ladder, run), run=run, outcome=Outcome.DIVERGED if message else Outcome.OK, message=message,
        validation_loss=loss, validation_accuracy=accuracy, train_losses=tuple(round(mean, 4) for mean in means),
        num_params=size.model.num_params, num_tokens=size.num_tokens, jumps=trial.hybrid.statistics.jumps,
        cpu_seconds=round(time.process_time() - begin, 2), probe=replace(probe, first_losses=first),
        corpus=corpus.name, corpus_digest=corpus.digest, products=product_unit(), processor=processor_name(),
        **header(),
    )  # fmt: skip


def run_probe(size: ModelSize, recipe: Recipe, seed: int, corpus: Corpus) -> Probe:
    """Train a few steps through every phase; return all losses and a digest of all weights.

    Recipes with equal probes have equal arithmetic; so stacks find the configuration whose runs they share.
    """
    short = replace(size, num_steps=_PROBE_STEPS, warmup_steps=_PROBE_WARMUP)
    trial = LadderTrial(short, replace(recipe, hybrid=replace(recipe.hybrid, full_steps=_PROBE_BLOCK)), seed, corpus)
    trial.train(_PROBE_STEPS)
    return Probe(first_losses=(), losses=tuple(trial.losses), weights_digest=trial.weights_digest())


@dataclass(frozen=True, slots=True)
class FinalWeights:
    """Final weights of a float32 run on the device, to initialize another run."""

    values: Mapping[str, Tensor]
    """Flat values by parameter."""
    first_losses: tuple[float, ...]

    @classmethod
    def of(cls, trial: LadderTrial) -> "FinalWeights":
        """Return the current weights of a trial."""
        named = trial.trainer.model.named_unit_parameters()
        values = {name: value.detach().flatten().clone() for name, value in named}
        return cls(values, tuple(trial.losses[:_FIRST_STEPS]))

    def read(self, name: str, part: slice) -> Tensor:
        """Return elements of a parameter."""
        return self.values[name][part]

    def write(self, path: Path | None) -> None:
        """Write the weights to a file atomically; nothing without a path."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            first = torch.tensor(self.first_losses, dtype=torch.float64)
            replace_file(path, safetensors.torch.save({**self.values, _FIRST_LOSSES: first}))


def read_weights(path: Path) -> FinalWeights | None:
    """Read the weights of ``FinalWeights.write``, bit-exactly; None without the file."""
    if not path.exists():
        return None
    values = safetensors.torch.load(path.read_bytes())
    return FinalWeights(values, tuple(values.pop(_FIRST_LOSSES).tolist()))


def _base_path(job: LadderJob, environment: Environment, corpus: Corpus) -> Path | None:
    """Return the path of the baseline's final weights for a run, by all values that decide them; None: nowhere.

    A program that no commit names may be any.
    """
    ladder, run = job.ladder, job.run
    is_needed = any(own.fine_tunes for own in ladder.configurations_at(ladder.size(run.rung)))
    if job.bases is None or not is_needed or environment.dirty or not environment.commit:
        return None
    base = replace(run, arm=ladder.baseline.name, lr=run.base_lr)
    place = (environment.commit, environment.python, environment.torch, np.__version__, environment.cpu, product_unit())
    parts = (run_key(ladder, base), corpus.digest, *place)
    return job.bases / f"{sha256(' '.join(parts).encode()).hexdigest()[:16]}.safetensors"
