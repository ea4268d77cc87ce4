"""One run of a study: train, validate, test, write down what it cost. Everything is executed on the CPU."""

import math
import time
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from hashlib import sha256
from statistics import fmean

import torch

from hybridtrain.data.batches import BatchSampler, TokenBatch, validation_batches
from hybridtrain.data.byte_tokens import TokenArray
from hybridtrain.data.corpus import Corpus, embedded_corpus, split_tail
from hybridtrain.dry_run import Workload, dry_run
from hybridtrain.errors import DivergenceError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim.ademamix import AdEMAMix
from hybridtrain.optimizations.predictor_state import PredictorState
from hybridtrain.plan.compose import compose
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.card import find_card
from hybridvalidation.records.environment import read_environment
from hybridvalidation.study.controls import RandomDirection, WeightAverage, poison_gradients, shifted
from hybridvalidation.study.protocol import BASELINE, StudyFile, StudyMethod, StudyRecord, StudyRun, ValidationPoint

_TRUE_STEP_COST = 3.0
_TRAIN_TAIL = 50
_CARD = "rtx-4090"
"""Whose dry run tells the planned bytes; they do not depend on it."""


def run_key(study: StudyFile, run: StudyRun) -> str:
    """Return the digest of all that decides how a run goes, apart from the program.

    Settings at their default are left out: a new option with a default does not make old runs unknown.
    """
    method = study.method(run.method)
    parts: list[object] = [study.model, study.optimizer, study.schedule, run]
    parts += [study.seq_len, study.batch_size, study.corpus_mib, study.validation_batches, study.validate_every]
    if method is not None:
        parts.append(replace(method, says="", role="method", lrs=(), seeds=(), against=BASELINE))
    return sha256("\n".join(map(_settings, parts)).encode()).hexdigest()[:16]


def _settings(part: object) -> str:
    """Return a dataclass as text without what is at its default; anything else as it is."""
    if not is_dataclass(part):
        return repr(part)
    told = []
    for item in fields(part):
        value = getattr(part, item.name)
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if value != default:
            told.append(f"{item.name}={_settings(value)}")
    return f"{type(part).__name__}({', '.join(told)})"


def make_run(study: StudyFile, run: StudyRun, num_threads: int = 1) -> StudyRecord:
    """Train once and return the record; a run that diverges is an outcome."""
    torch.set_num_threads(num_threads)
    corpus = embedded_corpus(study.corpus_mib * MIB)
    trial = _Trial(study, run, corpus)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    message = ""
    try:
        trial.train()
    except DivergenceError as error:
        message = str(error)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    validation = test = None
    if not message:
        validation, test = trial.final_losses()
        if not math.isfinite(validation + test):
            message, validation, test = (
                f"validation loss {validation}, test loss {test} after the last step",
                None,
                None,
            )
    environment = read_environment()
    statistics = trial.hybrid.statistics
    planned = trial.planned_bytes()
    keeps_steps = run.num_steps == study.num_steps and not study.validate_every
    return StudyRecord(
        key=run_key(study, run), run=run, outcome="diverged" if message else "ok", message=message,
        validation_loss=validation, test_loss=test,
        final_train_loss=None if message else fmean(trial.losses[-_TRAIN_TAIL:]), curve=tuple(trial.curve),
        step_losses=tuple(round(loss, 4) for loss in trial.losses) if keeps_steps else (),
        cost=statistics.cost, seconds=round(seconds, 2), cpu_seconds=round(cpu_seconds, 2), jumps=statistics.jumps,
        predicted_steps=round(statistics.predicted_steps, 2), rollbacks=statistics.rollbacks,
        planned_device_bytes=planned[0], planned_host_bytes=planned[1], commit=environment.commit,
        source_digest=environment.source_digest, cpu=environment.cpu, torch=environment.torch,
        corpus_digest=corpus.digest,
    )  # fmt: skip


class _Trial:
    """The trainer of one run, and its data."""

    def __init__(self, study: StudyFile, run: StudyRun, corpus: Corpus) -> None:
        self._study, self._run, self._corpus = study, run, corpus
        method = study.method(run.method)
        lr = run.lr * (1.0 if method is None else method.lr_factor)
        adamw = replace(study.optimizer, lr=lr, beta1=run.beta1, beta2=run.beta2)
        slow = None if method is None else method.slow
        optimizer = adamw if slow is None else AdEMAMix.beside(adamw, slow)
        schedule = replace(study.schedule, total_steps=run.num_steps)
        config = TrainerConfig(optimizer=optimizer, schedule=schedule, seed=run.seed)
        self._plan = plan_of(method)
        self._trainer = Trainer(study.model, self._plan, config, DirectTransfer(torch.device("cpu")))
        hybrid = None if method is None else method.hybrid
        control = None if method is None else method.control
        train, probe = corpus.train, corpus.train
        if hybrid is not None and hybrid.needs_probe:
            train, probe = split_tail(corpus.train, corpus.source)
        self._sampler = self._new_sampler(train)
        self._probe_sampler = self._new_sampler(probe)
        if hybrid is not None and control == "random":
            hybrid = replace(hybrid, fuse=False)
        self.hybrid = HybridTrainer(self._trainer, hybrid, lambda use: [self._probe_sampler.batch(use, 0)])
        if hybrid is not None and control == "random":
            self.hybrid.predictor = RandomDirection(
                self._trainer, hybrid.slow, hybrid.max_move, hybrid.max_relative_move
            )
        self._average = WeightAverage(self._trainer) if control == "average" else None
        self._disturbance = None if method is None else method.disturbance
        if self._disturbance == "nan_gradients":
            poison_gradients(self._trainer, run.num_steps // 2)
        self.losses: list[float] = []
        self.curve: list[ValidationPoint] = []

    def _new_sampler(self, tokens: TokenArray) -> BatchSampler:
        study = self._study
        return BatchSampler(tokens, micro_batch_size=study.batch_size, seq_len=study.seq_len, seed=self._run.seed)

    def train(self) -> None:
        """Run all steps."""
        every = self._study.validate_every
        while self._trainer.steps_done < self._run.num_steps:
            result = self.hybrid.advance(self._batches)
            if result.num_tokens and result.loss is not None:
                self.losses.append(result.loss)
                if self._average is not None:
                    self._average.update()
                if every and result.step % every == 0:
                    loss = self._mean_loss(_halves(self._study, self._corpus)[0])
                    if not math.isfinite(loss):
                        raise DivergenceError(f"validation loss {loss} after step {result.step}")
                    self.curve.append(ValidationPoint(step=result.step, cost=self.hybrid.statistics.cost, loss=loss))

    def _batches(self, step: int) -> list[TokenBatch]:
        batch = self._sampler.batch(step, 0)
        shifts = self._disturbance == "data_shift" and step >= self._run.num_steps // 2
        return [shifted(batch) if shifts else batch]

    def final_losses(self) -> tuple[float, float]:
        """Return validation and test loss."""
        if self._average is not None:
            self._average.put_in()
        validation, test = _halves(self._study, self._corpus)
        if self._disturbance == "data_shift":
            validation, test = [shifted(batch) for batch in validation], [shifted(batch) for batch in test]
        return self._mean_loss(validation), self._mean_loss(test)

    def planned_bytes(self) -> tuple[int, int]:
        """Return peak device and host bytes of a dry run of the same steps."""
        workload = Workload(micro_batch_size=self._study.batch_size, seq_len=self._study.seq_len)
        planned = dry_run(self._study.model, self._plan, find_card(_CARD), workload)
        return planned.peak.allocated_bytes, planned.host_peak_bytes

    def _mean_loss(self, batches: list[TokenBatch]) -> float:
        return fmean(self._trainer.loss([batch]) for batch in batches)


def plan_of(method: StudyMethod | None) -> MemoryPlan:
    """Return the plan of a method: everything in float32 on the device, with what its predictor remembers."""
    if method is None or (method.slow is None and method.hybrid is None):
        return compose([])
    is_linear = method.hybrid is not None and method.hybrid.predictor == "linear"
    return compose([PredictorState(predictor="linear" if is_linear else "slow_gradient")])


def _halves(study: StudyFile, corpus: Corpus) -> tuple[list[TokenBatch], list[TokenBatch]]:
    """Return the batches to validate and those to test on, in turn from the held-out documents."""
    batches = list(_batches(study, corpus))
    return batches[::2], batches[1::2]


def _batches(study: StudyFile, corpus: Corpus) -> Iterator[TokenBatch]:
    return validation_batches(
        corpus.validation, micro_batch_size=study.batch_size, seq_len=study.seq_len,
        max_batches=2 * study.validation_batches,
    )  # fmt: skip
