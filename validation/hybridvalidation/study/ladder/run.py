"""One run of a ladder, executed on the CPU: train, validate, write down; and the probe that a later program repeats."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from statistics import fmean
from tempfile import gettempdir
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridtrain.atomic_write import replace_file
from hybridtrain.data.batches import BatchSampler, TokenBatch
from hybridtrain.data.corpus import Corpus
from hybridtrain.data.pinned_corpus import pinned_corpus
from hybridtrain.engine.parameter_pass import ParameterSlice, PassSettings
from hybridtrain.errors import DivergenceError
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory import formats
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.weight_source import WeightSource
from hybridtrain.optim import OPTIMIZERS, Optimizer
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.plan.placement import Codec
from hybridtrain.run.environment import Environment, read_environment
from hybridtrain.run.program import program_digest
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.study.bfloat16_products import fast_bfloat16, product_unit
from hybridvalidation.study.ladder.protocol import (
    LadderFile,
    LadderJob,
    LadderRecord,
    LadderRun,
    Probe,
    Rung,
    run_key,
    schedule_of,
)

TEXT, OTHER_TEXT = "sympy", "networkx"
"""Of training, of fine-tuning."""
_PROBE_STEPS, _PROBE_WARMUP, _PROBE_BLOCK = 8, 2, 2
LOSSES_BEFORE_JUMP = _PROBE_WARMUP + _PROBE_BLOCK
"""Of a run in little: its first jump follows them."""
_FIRST_STEPS = 4
_VALIDATION_SEED = 0
_NUM_MEANS = 20
_FIRST_LOSSES = "first losses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a run computes with, of an arm or of a stack: how it stores, how it updates, whether it jumps."""

    plan: MemoryPlan
    optimizer: Optimizer
    """At the run's learning rate."""
    hybrid: HybridConfig
    rounds_to_nearest: bool = False

    @property
    def jumps(self) -> bool:
        """Whether the plan keeps what a predictor remembers."""
        return self.plan.for_phase(Phase.FULL).history_tensors > 0

    @property
    def walks(self) -> bool:
        """Whether phases differ without a jump: they are passed through all the same."""
        full = self.plan.for_phase(Phase.FULL)
        return not self.jumps and any(table != full for table in self.plan.phases.values())


def recipe_of(ladder: LadderFile, plan: MemoryPlan, optimizer: str, lr: float, *, to_nearest: bool = False) -> Recipe:
    """Return the recipe of a plan; another optimizer takes over what every optimizer has."""
    base = replace(ladder.optimizer, lr=lr)
    common = {name: getattr(base, name) for name in ("lr", "weight_decay", "max_grad_norm")}
    found: Optimizer = base if optimizer == base.kind else OPTIMIZERS[optimizer](**common)
    return Recipe(plan=plan, optimizer=found, hybrid=ladder.hybrid, rounds_to_nearest=to_nearest)


def make_in_child(job: LadderJob) -> LadderRecord:
    """Train once, in a process of its own."""
    return make_run(job.ladder, job.run, bases=job.bases)


def probe_in_child(job: LadderJob) -> LadderRecord:
    """Repeat what a run began with, in a process of its own; nothing is validated."""
    return make_run(job.ladder, job.run, is_whole=False)


def make_run(ladder: LadderFile, run: LadderRun, *, is_whole: bool = True, bases: Path | None = None) -> LadderRecord:
    """Train once on one thread and return the record; a run that diverges is an outcome.

    Args:
        ladder: Of the run.
        run: What is made.
        is_whole: Whether to train to the end and validate; else the first steps alone.
        bases: Folder for the final weights of the baseline, which fine-tuned runs of its seed go on from.
    """
    torch.set_num_threads(1)
    arm, rung = ladder.arm(run.arm), ladder.rung(run.rung)
    started, begin, cpu_begin = datetime.now(UTC), time.perf_counter(), time.process_time()
    corpus, environment = pinned_corpus(TEXT), read_environment()  # now: later another commit may stand there
    recipe = recipe_of(ladder, arm.plan(), arm.optimizer, run.lr, to_nearest=arm.rounds_to_nearest)
    probe = run_probe(rung, recipe, run.seed, corpus)
    source: FinalWeights | None = None
    message, loss, accuracy = "", None, None
    first: tuple[float, ...] = ()
    base_path = _base_path(ladder, run, environment, corpus, bases) if is_whole else None
    if arm.fine_tunes:
        source = None if base_path is None else read_weights(base_path)
        if source is None:
            recipe_of_base = recipe_of(ladder, ladder.baseline.plan(), ladder.optimizer.kind, run.base_lr)
            base = Trial(rung, recipe_of_base, run.seed, corpus)
            base.train(rung.num_steps if is_whole else _FIRST_STEPS)
            source = FinalWeights.of(base)
            _keep(source, base_path)
        first = source.first_losses
        corpus, rung = pinned_corpus(OTHER_TEXT), _shortened(rung, ladder.fine_tune_steps)
    trial = Trial(rung, recipe, run.seed, corpus, source)
    try:
        trial.train(rung.num_steps if is_whole else _FIRST_STEPS)
        if is_whole:
            loss, accuracy = trial.validate(ladder.validation_batches)
    except DivergenceError as error:
        message = str(error)
    if arm is ladder.baseline and not message:
        _keep(FinalWeights.of(trial), base_path)
    size = max(1, rung.num_steps // _NUM_MEANS)
    return LadderRecord(
        key=run_key(ladder, run), run=run, outcome=Outcome.DIVERGED if message else Outcome.OK, message=message,
        started_at=started.isoformat(timespec="seconds"), duration_s=round(time.perf_counter() - begin, 2),
        environment=environment, program=program_digest(),
        validation_loss=loss, validation_accuracy=accuracy,
        train_losses=tuple(
            round(fmean(trial.losses[at : at + size]), 4) for at in range(0, len(trial.losses), size)
        ),
        num_params=rung.model.num_params, num_tokens=rung.num_tokens, jumps=trial.jumps,
        cpu_seconds=round(time.process_time() - cpu_begin, 2),
        probe=replace(probe, first_losses=first or tuple(trial.losses[:_FIRST_STEPS])),
        corpus=corpus.name, corpus_digest=corpus.digest, products=product_unit(),
    )  # fmt: skip


def run_probe(rung: Rung, recipe: Recipe, seed: int, corpus: Corpus) -> Probe:
    """Train a few steps, every phase among them, and return all losses and a digest of all weights.

    Two recipes with equal probes compute the same: this is how stacks find the arm whose runs they share.
    """
    short = replace(rung, num_steps=_PROBE_STEPS, warmup_steps=_PROBE_WARMUP)
    trial = Trial(short, replace(recipe, hybrid=replace(recipe.hybrid, full_steps=_PROBE_BLOCK)), seed, corpus)
    trial.train(_PROBE_STEPS)
    return Probe(first_losses=(), losses=tuple(trial.losses), weights_digest=trial.weights_digest())


def _shortened(rung: Rung, num_steps: int) -> Rung:
    """Return a rung for fine-tuning: a tenth of its steps are warm-up."""
    return replace(rung, num_steps=num_steps, warmup_steps=max(1, num_steps // 10))


class Trial:
    """The trainer of one run, its data, and the losses of its true steps."""

    def __init__(
        self, rung: Rung, recipe: Recipe, seed: int, corpus: Corpus, source: WeightSource | None = None
    ) -> None:
        self._rung, self._recipe, self._corpus = rung, recipe, corpus
        self._micro_batches = recipe.plan.for_phase(Phase.FULL).grad_accum_steps
        size = rung.batch_size // self._micro_batches
        self._sampler = BatchSampler(corpus.train, micro_batch_size=size, seq_len=rung.seq_len, seed=seed)
        config = TrainerConfig(optimizer=recipe.optimizer, schedule=schedule_of(rung), seed=seed)
        with self._arithmetic():
            transfer = DirectTransfer(torch.device("cpu"), disk_folder=Path(gettempdir()))
            self.trainer = Trainer(rung.model, recipe.plan, config, transfer, source=source)
        self._hybrid = HybridTrainer(self.trainer, recipe.hybrid if recipe.jumps else None)
        self.losses: list[float] = []

    @property
    def jumps(self) -> int:
        """Made so far."""
        return self._hybrid.statistics.jumps

    def train(self, num_steps: int) -> None:
        """Run true steps until so many are done, with what lies between them."""
        with self._arithmetic():
            while self.trainer.steps_done < num_steps:
                if self._recipe.walks:
                    self._walk()
                result = self._hybrid.advance(self._batches)
                if result.num_tokens:
                    assert result.loss is not None, "of a true step"
                    self.losses.append(result.loss)
            self.trainer.enter_phase(Phase.FULL)

    def _walk(self) -> None:
        """Enter the next true step's phase as the cycle of a predictor would, by way of PREDICT."""
        done = self.trainer.steps_done - self._rung.warmup_steps
        if done < 0:
            self.trainer.enter_phase(Phase.WARMUP)
        elif done % self._recipe.hybrid.full_steps == 0:
            self.trainer.enter_phase(Phase.PREDICT)
            self.trainer.enter_phase(Phase.CORRECT)
        else:
            self.trainer.enter_phase(Phase.FULL)

    def _batches(self, step: int) -> list[TokenBatch]:
        return [self._sampler.batch(step, micro_batch) for micro_batch in range(self._micro_batches)]

    def validate(self, num_batches: int) -> tuple[float, float]:
        """Return mean loss in nats per token, and the share of tokens that were the likeliest.

        Windows are drawn from all held-out documents, the same ones for every run of a rung.
        """
        rung, losses, hits = self._rung, list[float](), list[float]()
        windows = BatchSampler(
            self._corpus.validation, micro_batch_size=rung.batch_size, seq_len=rung.seq_len, seed=_VALIDATION_SEED
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
        """Return the SHA-256 of all trained weights' exact values, wherever and however they are stored."""
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
        """Compute as the recipe says; bfloat16 in a time that a processor without it can spare."""
        with ExitStack() as stack:
            if any(table.compute_dtype is Codec.BFLOAT16 for table in self._recipe.plan.phases.values()):
                stack.enter_context(fast_bfloat16())
            if self._recipe.rounds_to_nearest:
                stack.enter_context(nearest_rounding())
            yield


@dataclass(frozen=True, slots=True)
class FinalWeights:
    """What a run in float32 on the device ended with, for another one to begin with."""

    values: Mapping[str, Tensor]
    """Flat, by parameter."""
    first_losses: tuple[float, ...]

    @classmethod
    def of(cls, trial: Trial) -> "FinalWeights":
        """Return those of a trial as it is."""
        named = trial.trainer.model.named_unit_parameters()
        return cls({name: value.detach().flatten() for name, value in named}, tuple(trial.losses[:_FIRST_STEPS]))

    def read(self, name: str, part: slice) -> Tensor:
        """Return elements of a parameter."""
        return self.values[name][part]

    def write(self, path: Path) -> None:
        """Write them to a file, whole or not at all."""
        content = BytesIO()
        arrays: dict[str, Any] = {name: value.numpy() for name, value in self.values.items()}
        arrays[_FIRST_LOSSES] = np.array(self.first_losses)
        np.savez(content, **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.getvalue())


def read_weights(path: Path) -> FinalWeights | None:
    """Return what ``FinalWeights.write`` wrote, to the bit; None where there is no such file."""
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        values = {name: torch.from_numpy(file[name]) for name in file.files if name != _FIRST_LOSSES}
        return FinalWeights(values, tuple(file[_FIRST_LOSSES].tolist()))


def _base_path(
    ladder: LadderFile, run: LadderRun, environment: Environment, corpus: Corpus, folder: Path | None
) -> Path | None:
    """Return where the baseline's final weights for a run are kept, by all that decides them; None: nowhere.

    A program that no commit names may be any.
    """
    is_needed = any(arm.fine_tunes for arm in ladder.arms_of(ladder.rung(run.rung)))
    if folder is None or not is_needed or environment.dirty or not environment.commit:
        return None
    base = replace(run, arm=ladder.baseline.name, lr=run.base_lr)
    place = (environment.commit, environment.python, environment.torch, np.__version__, environment.cpu, product_unit())
    parts = (run_key(ladder, base), corpus.digest, *place)
    return folder / f"{sha256(' '.join(parts).encode()).hexdigest()[:16]}.npz"


def _keep(weights: FinalWeights, path: Path | None) -> None:
    if path is not None:
        weights.write(path)


@contextmanager
def nearest_rounding() -> Iterator[None]:
    """Let weights without a master be rounded to nearest: the control. No plan says so, for it loses small updates."""
    kept = formats.round_stochastically
    formats.round_stochastically = _round_to_nearest
    try:
        yield
    finally:
        formats.round_stochastically = kept


def _round_to_nearest(value_P: Tensor, target_P: Tensor) -> None:
    target_P.copy_(value_P)
