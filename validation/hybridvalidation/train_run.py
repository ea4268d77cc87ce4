"""``hybridtrain train``: a model on the user's own text, every step logged, state saved, text sampled."""

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hybridtrain.atomic_write import replace_file
from hybridtrain.config.encode import encode, to_json
from hybridtrain.config.rules import below_least
from hybridtrain.data.batches import BatchSampler, TokenBatch
from hybridtrain.data.corpus import Corpus
from hybridtrain.engine.adamw import AdamWConfig
from hybridtrain.engine.lr_schedule import LrSchedule
from hybridtrain.errors import ConfigError
from hybridtrain.memory.cuda_transfer import open_transfer
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.profiler.storage_ledger import StorageLedger
from hybridtrain.sampling import sample_text
from hybridtrain.train_state import load_train_state, save_train_state
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.units import format_bytes
from hybridvalidation.progress import progress_bar
from hybridvalidation.run_monitor import Monitoring, RunMonitor
from hybridvalidation.scenario import BatchWorkload, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFile:
    """A training configuration file."""

    model: ModelSpec
    workload: BatchWorkload
    optimizations: tuple[Optimization, ...] = ()
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    schedule: LrSchedule = field(default_factory=LrSchedule)
    seed: int = 0
    num_steps: int = 1000
    save_every: int = 200
    """Steps between saved states; one is always written at the end."""
    sample_prompt: str = "\n"
    sample_tokens: int = 200

    def __post_init__(self) -> None:
        faults = below_least(self, ("num_steps", "save_every")) + below_least(self, ("sample_tokens", "seed"), least=0)
        steps = compose(self.optimizations).for_phase(Phase.FULL).grad_accum_steps
        if self.workload.batch_size % steps:
            faults.append(
                f"workload.batch_size: {self.workload.batch_size} must be a multiple of accumulation's steps ({steps})"
            )
        model = self.model.resolve()
        if self.workload.seq_len > model.max_seq_len:
            faults.append(
                f"workload.seq_len: {self.workload.seq_len} is above the model's max_seq_len ({model.max_seq_len})"
            )
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One line of the log."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    peak_bytes: int
    """Of the step: the allocator's on CUDA, on the CPU the ledger's count of what would be device memory."""

    def as_metrics(self) -> dict[str, float | None]:
        """Return everything but the step by its name."""
        return {
            "loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "tokens_per_s": self.tokens_per_s,
            "peak_bytes": self.peak_bytes,
        }  # fmt: skip


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
) -> StepLog:
    """Train, log each step to ``out/log.jsonl``, save to ``out/state.pt``; return the last step's line.

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
        if resume:
            with ledger:
                load_train_state(trainer, state_path)
            say(f"resumed after step {trainer.steps_done}")
        _trim_log(log_path, trainer.steps_done)
        last = _run(file, trainer, corpus, ledger, state_path, log_path, monitor, progress=progress)
        if file.sample_tokens:
            say(sample_text(trainer, file.sample_prompt, num_tokens=file.sample_tokens, seed=file.seed))
    return last


def _trim_log(path: Path, steps_done: int) -> None:
    """Drop lines of steps that were not saved and will be done again."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= steps_done]
    replace_file(path, "".join(f"{line}\n" for line in kept).encode())


def _run(
    file: TrainFile, trainer: Trainer, corpus: Corpus, ledger: StorageLedger, state_path: Path, log_path: Path,
    monitor: RunMonitor, *, progress: bool,
) -> StepLog:  # fmt: skip
    accum_steps = trainer.plan.grad_accum_steps
    sampler = BatchSampler(
        corpus.train, micro_batch_size=file.workload.batch_size // accum_steps, seq_len=file.workload.seq_len,
        seed=file.seed,
    )  # fmt: skip
    first = trainer.steps_done
    if first >= file.num_steps:
        raise ConfigError(
            str(state_path), [f"the run is done: {first} of {file.num_steps} steps; raise num_steps to go on"]
        )
    log: StepLog | None = None
    with log_path.open("a", encoding="utf-8") as log_file:
        bar = progress_bar(range(first, file.num_steps), initial=first, unit="step", shown=progress)
        for step in bar:
            log = _step(trainer, ledger, [sampler.batch(step, micro_batch) for micro_batch in range(accum_steps)])
            log_file.write(to_json(log) + "\n")
            log_file.flush()
            monitor.record_step(log.step, Phase.FULL, log.as_metrics())
            bar.set_postfix_str(
                f"loss {log.loss:.3f} lr {log.lr:.2e} {log.tokens_per_s:,.0f} tok/s {format_bytes(log.peak_bytes)}"
            )
            if (step + 1) % file.save_every == 0 or step + 1 == file.num_steps:
                save_train_state(trainer, state_path)
    assert log is not None, "at least one step was run"
    return log


def _step(trainer: Trainer, ledger: StorageLedger, batches: list[TokenBatch]) -> StepLog:
    on_cuda = trainer.model.head.weight.is_cuda
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    ledger.begin_step()
    if on_cuda:
        result = trainer.step(batches)
    else:
        with ledger:
            result = trainer.step(batches)
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if on_cuda else ledger.peak_bytes
    return StepLog(
        step=result.step, loss=result.loss, lr=result.lr, grad_norm=result.grad_norm,
        tokens_per_s=result.num_tokens / seconds, peak_bytes=peak,
    )  # fmt: skip
