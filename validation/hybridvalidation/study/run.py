"""One run of a study, executed on the CPU: train, validate, test, write down what it cost; controls, disturbances."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridtrain.data.batches import BatchSampler, TokenBatch, validation_batches
from hybridtrain.data.byte_tokens import NUM_BYTE_TOKENS, TokenArray
from hybridtrain.data.corpus import Corpus, embedded_corpus, split_tail
from hybridtrain.data.pinned_corpus import pinned_corpus
from hybridtrain.engine.parameter_pass import ParameterSlice, PassSettings
from hybridtrain.engine.step import StepShare
from hybridtrain.engine.step_visit import BlockDone, DeviceBatch
from hybridtrain.errors import DivergenceError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.hybrid.predictors.slow_gradient import SlowGradient
from hybridtrain.hybrid.predictors.weight_predictor import Jump
from hybridtrain.hybrid.rollback_copy import RollbackCopy, visit_with
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import Workload
from hybridtrain.optim import AdamWConfig, Optimizer
from hybridtrain.optim.ademamix import AdEMAMix
from hybridtrain.optim.slow_average import LARGEST_RATIO, move
from hybridtrain.optimizations.predictor_state import PredictorState
from hybridtrain.plan.compose import compose
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.study.protocol import (
    StudyFile,
    StudyJob,
    StudyMethod,
    StudyRecord,
    StudyRun,
    ValidationPoint,
    run_key,
)

_TRUE_STEP_COST = 3.0
_TRAIN_TAIL = 50
_CARD = "rtx-4090"
"""Whose dry run tells the planned bytes; they do not depend on it."""


def make_in_child(job: StudyJob) -> StudyRecord:
    """Train once, in a process of its own."""
    return make_run(job.study, job.run)


def make_run(study: StudyFile, run: StudyRun) -> StudyRecord:
    """Train once on one thread and return the record; a run that diverges is an outcome."""
    torch.set_num_threads(1)
    corpus = corpus_of(study)
    trial = _Trial(study, run, corpus)
    started, begin, cpu_begin = datetime.now(UTC), time.perf_counter(), time.process_time()
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
    statistics = trial.hybrid.statistics
    planned = trial.planned_bytes()
    keeps_steps = run.num_steps == study.num_steps and not study.validate_every
    return StudyRecord(
        key=run_key(study, run), run=run, outcome=Outcome.DIVERGED if message else Outcome.OK, message=message,
        started_at=started.isoformat(timespec="seconds"), duration_s=round(seconds, 2), environment=read_environment(),
        program=program_digest(),
        validation_loss=validation, test_loss=test,
        final_train_loss=None if message else fmean(trial.losses[-_TRAIN_TAIL:]), curve=tuple(trial.curve),
        step_losses=tuple(round(loss, 4) for loss in trial.losses) if keeps_steps else (),
        cost=statistics.cost, cpu_seconds=round(cpu_seconds, 2), jumps=statistics.jumps,
        predicted_steps=round(statistics.predicted_steps, 2), rollbacks=statistics.rollbacks,
        planned_device_bytes=planned[0], planned_host_bytes=planned[1], corpus_digest=corpus.digest,
    )  # fmt: skip


def corpus_of(study: StudyFile) -> Corpus:
    """Return the text that a study is about."""
    return pinned_corpus() if study.corpus == "pinned" else embedded_corpus(study.corpus_mib * MIB)


class _Trial:
    """The trainer of one run, and its data."""

    def __init__(self, study: StudyFile, run: StudyRun, corpus: Corpus) -> None:
        self._study, self._run, self._corpus = study, run, corpus
        method = study.method(run.method)
        lr = run.lr * (1.0 if method is None else method.lr_factor)
        adamw = replace(study.optimizer, lr=lr, beta1=run.beta1, beta2=run.beta2)
        optimizer = _optimizer_of(method, adamw)
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
            self.hybrid.predictor = RandomDirection(hybrid, self._trainer)
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


def _optimizer_of(method: StudyMethod | None, adamw: AdamWConfig) -> Optimizer:
    if method is None or (method.slow is None and method.muon is None):
        return adamw
    if method.slow is not None:
        return AdEMAMix.beside(adamw, method.slow)
    assert method.muon is not None, "one of the two"
    common = ("lr", "weight_decay", "max_grad_norm", "clip", "beta1", "beta2")
    return replace(method.muon, **{name: getattr(adamw, name) for name in common})


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


_AVERAGE_DECAY = 0.99
_ODD, _OFFSET = 77, 13
"""Of the exchange of bytes; odd, so that no two become one."""


class RandomDirection(SlowGradient):
    """Jumps as far as slow_gradient would, slice by slice, in a direction that knows nothing. Cannot be fused."""

    def jump(self, predicted_steps: float, lr: float, rollback: RollbackCopy | None) -> Jump:
        """Move all weights by Gaussian noise of the predicted move's norm."""
        trainer = self._trainer
        optimizer = trainer.config.optimizer
        correction = optimizer.correction(trainer.steps_done - trainer.states.born_after)
        step = self._step(0.0, predicted_steps)

        def work(swept: ParameterSlice) -> None:
            assert swept.second_P is not None, "asked for"
            value_P, slow_P = swept.weight.value, swept.extra[0].load()
            moved_P = move(
                slow_P, swept.second_P, correction=correction, eps=optimizer.eps, lr_steps=lr * predicted_steps,
                largest_ratio=LARGEST_RATIO,
            )  # fmt: skip
            noise_P = _random_like(moved_P)
            step.count(value_P, noise_P)
            value_P.add_(noise_P)

        seed = trainer.border_key(trainer.steps_done)
        visit_with(rollback, trainer, work, PassSettings(reads_second_moment=True, seed=seed))
        return self._made(step, lr)


def _random_like(moved_P: Tensor) -> Tensor:
    noise_P = torch.randn_like(moved_P)
    noise_P.mul_(torch.linalg.vector_norm(moved_P) / torch.linalg.vector_norm(noise_P).clamp_min(1e-30))
    return noise_P


class WeightAverage:
    """An exponential mean of the weights of a trainer whose parameters are float32 on the device."""

    def __init__(self, trainer: Trainer) -> None:
        self._parameters = [parameter for _, parameter in trainer.model.named_unit_parameters()]
        self._means = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of a step."""
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            mean.lerp_(parameter, 1 - _AVERAGE_DECAY)

    @torch.no_grad()
    def put_in(self) -> None:
        """Make the means the weights."""
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            parameter.copy_(mean)


def shifted(batch: TokenBatch) -> TokenBatch:
    """Return a batch in which every byte stands for another one: the statistics of a text nobody has seen."""

    def swapped(token_ids_BT: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        result: npt.NDArray[np.int64] = (token_ids_BT * _ODD + _OFFSET) % NUM_BYTE_TOKENS
        return result

    return TokenBatch(token_ids_BT=swapped(batch.token_ids_BT), target_ids_BT=swapped(batch.target_ids_BT))


def poison_gradients(trainer: Trainer, step: int) -> None:
    """Make one gradient of a true step NaN the first time it is computed, as a passing fault of a machine would."""
    executor = trainer.executor
    run = executor.forward_backward
    is_done = False

    def poisoned(
        batches: Sequence[DeviceBatch], *, seed: int, share: StepShare | None = None,
        on_block_done: BlockDone | None = None, loss_scale: float = 1.0,
    ) -> list[Tensor]:  # fmt: skip
        nonlocal is_done
        losses = run(batches, seed=seed, share=share, on_block_done=on_block_done, loss_scale=loss_scale)
        if trainer.steps_done == step and not is_done:
            is_done = True
            losses[0].fill_(float("nan"))
        return losses

    executor.forward_backward = poisoned  # type: ignore[method-assign]
