"""``hybridtrain train``: a model on the user's own text, every step logged, state saved, text sampled."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridtrain.config.encode import encode, to_json
from hybridtrain.data.batches import BatchSampler, TokenBatch
from hybridtrain.data.byte_tokens import TokenArray
from hybridtrain.data.corpus import Corpus
from hybridtrain.engine.random_key import random_key
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.cycle import HybridStatistics, HybridTrainer, LoadBatches
from hybridtrain.memory.cuda_transfer import open_transfer
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.sampling import sample_text
from hybridtrain.train_state import load_train_state, save_train_state
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.ledger import StorageLedger
from hybridvalidation.progress import progress_bar
from hybridvalidation.runs.run_monitor import Monitoring, RunMonitor
from hybridvalidation.runs.train_file import TrainFile
from hybridvalidation.runs.train_log import HybridStepLog, StepLog, hybrid_summary, trim_log

_PROBE_STREAM = 1
_PROBE_PERCENT = 2
_LEARNED_PROBE_PERCENT = 10
"""Where CORRECT learns from the probe split: at K of 10 its tokens are then seen as often as all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    last: StepLog | HybridStepLog
    """Line of the last true step."""
    loss: float
    """Of that step."""
    statistics: HybridStatistics | None
    """Of a hybrid run, from its first step on."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What a step needs."""

    file: TrainFile
    hybrid: HybridTrainer
    load_batches: LoadBatches
    ledger: StorageLedger
    monitor: RunMonitor

    @property
    def trainer(self) -> Trainer:
        return self.hybrid.trainer


def train(
    file: TrainFile,
    corpus: Corpus,
    out: Path,
    *,
    resume: bool,
    say: Callable[[str], None],
    progress: bool,
    monitoring: Monitoring | None = None,
    disk_folder: Path | None = None,
    host_limit_bytes: int | None = None,
) -> TrainResult:
    """Train, log each step to ``out/log.jsonl``, save to ``out/state.pt``.

    Args:
        file: What to train.
        corpus: On what.
        out: Folder of log and saved state.
        resume: Continue the run saved there.
        say: Receives what a user should read.
        progress: Show a bar.
        monitoring: What to watch; None: nothing.
        disk_folder: Where a disk tier may make its files; they are removed at the end, however that comes.
        host_limit_bytes: Host memory that offloaded tensors may take; None: what the machine has available.

    Raises:
        DivergenceError: the loss is no number any more; the last saved state stays.
        ConfigError: ``out`` holds another run and ``resume`` was not asked for; or what is to be monitored cannot be.
        HostMemoryError, DiskSpaceError, DiskTierError: offloaded tensors find no place, or lose it.
    """
    state_path, log_path = out / "state.pt", out / "log.jsonl"
    if state_path.exists() and not resume:
        raise ConfigError(str(out), ["holds a saved run; continue it with --resume or choose another --out"])
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ledger = StorageLedger(record=False)
    transfer = open_transfer(device, disk_folder=disk_folder, host_limit_bytes=host_limit_bytes)
    with closing(transfer), RunMonitor(monitoring or Monitoring(), out, {"train": encode(file)}, say) as monitor:
        with ledger:
            config = TrainerConfig(optimizer=file.optimizer, schedule=file.schedule, seed=file.seed)
            trainer = Trainer(file.model.resolve(), compose(file.optimizations), config, transfer, ledger)
        load_batches, load_probe = _data(file, corpus, trainer.plan.grad_accum_steps, say)
        hybrid = HybridTrainer(trainer, file.hybrid, load_probe)
        if resume:
            with ledger:
                load_train_state(trainer, state_path, None if file.hybrid is None else hybrid)
            say(f"resumed after step {trainer.steps_done}")
        trim_log(log_path, trainer.steps_done, hybrid.phase)
        result = _run(_Run(file, hybrid, load_batches, ledger, monitor), state_path, log_path, progress=progress)
        if file.hybrid is not None:
            say(hybrid_summary(hybrid))
        if file.sample_tokens:
            say(sample_text(trainer, file.sample_prompt, num_tokens=file.sample_tokens, seed=file.seed))
    return result


def _data(
    file: TrainFile, corpus: Corpus, accum_steps: int, say: Callable[[str], None]
) -> tuple[LoadBatches, LoadBatches | None]:
    """Return how the batches of a step are loaded, and those of the probe split if there has to be one."""

    def loader(tokens: TokenArray, seed: int) -> LoadBatches:
        sampler = BatchSampler(
            tokens, micro_batch_size=file.workload.batch_size // accum_steps, seq_len=file.workload.seq_len, seed=seed
        )

        def load(step: int) -> list[TokenBatch]:
            return [sampler.batch(step, micro_batch) for micro_batch in range(accum_steps)]

        return load

    if file.hybrid is None or not file.hybrid.needs_probe:
        return loader(corpus.train, file.seed), None
    percent = _LEARNED_PROBE_PERCENT if file.hybrid.correction == "probe_gradients" else _PROBE_PERCENT
    num_probe = max(corpus.train.size * percent // 100, file.workload.seq_len + 1)
    say(f"{num_probe:,} of {corpus.train.size:,} training tokens are the probe split")
    seed = random_key(file.seed, _PROBE_STREAM)
    return loader(corpus.train[:-num_probe], file.seed), loader(corpus.train[-num_probe:], seed)


def _run(run: _Run, state_path: Path, log_path: Path, *, progress: bool) -> TrainResult:
    """Do the true steps that are left, and the jumps between them; none after the last."""
    file, trainer = run.file, run.trainer
    first = trainer.steps_done
    if first >= file.num_steps:
        raise ConfigError(
            str(state_path), [f"the run is done: {first} of {file.num_steps} steps; raise num_steps to go on"]
        )
    result: TrainResult | None = None
    with log_path.open("a", encoding="utf-8") as log_file:
        bar = progress_bar(range(first, file.num_steps), initial=first, unit="step", shown=progress)
        for step in bar:
            if run.hybrid.phase is Phase.PREDICT:
                log_file.write(to_json(_advance(run)) + "\n")
            log = _advance(run)
            log_file.write(to_json(log) + "\n")
            log_file.flush()
            assert log.loss is not None, "of a true step"
            bar.set_postfix_str(
                f"loss {log.loss:.3f} lr {log.lr:.2e} {log.tokens_per_s:,.0f} tok/s {format_bytes(log.peak_bytes)}"
            )
            if (step + 1) % file.save_every == 0 or step + 1 == file.num_steps:
                save_train_state(trainer, state_path, None if file.hybrid is None else run.hybrid)
            statistics = None if file.hybrid is None else run.hybrid.statistics
            result = TrainResult(last=log, loss=log.loss, statistics=statistics)
    assert result is not None, "at least one step was run"
    return result


def _advance(run: _Run) -> StepLog | HybridStepLog:
    """Do the next phase step; its peak does not count what leaves the device for PREDICT."""
    trainer, phase = run.trainer, run.hybrid.phase
    on_cuda = trainer.model.head.weight.is_cuda
    counting: AbstractContextManager[object] = nullcontext() if on_cuda else run.ledger
    batches = [] if phase is Phase.PREDICT else run.load_batches(trainer.steps_done)
    with counting:
        if phase is Phase.PREDICT:
            trainer.enter_phase(phase)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        run.ledger.begin_step()
        result = run.hybrid.advance(lambda _: batches)
    peak_bytes = torch.cuda.max_memory_allocated() if on_cuda else run.ledger.peak_bytes
    log = (StepLog if run.file.hybrid is None else HybridStepLog).of(result, peak_bytes)
    run.monitor.record_step(log.step, result.phase, log.as_metrics())
    return log
