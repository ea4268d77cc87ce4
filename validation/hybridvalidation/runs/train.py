"""``hybridtrain train``: a model on the user's own text, every step logged, state saved, text sampled."""

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from hybridtrain.atomic_write import remove_partials
from hybridtrain.config.encode import JsonMapping, encode, to_json
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
from hybridtrain.train_state import load_train_state, previous_state, save_train_state
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.training_file import TrainFile
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.ledger import StorageLedger
from hybridvalidation.progress import progress_bar
from hybridvalidation.runs.train_log import (
    HybridStepLog,
    Monitoring,
    RunMonitor,
    Say,
    StepLog,
    hybrid_summary,
    trim_log,
)  # fmt: skip

_PROBE_STREAM = 1
_PROBE_PERCENT = 2
_LEARNED_PROBE_PERCENT = 10
"""Where CORRECT learns from the probe split: at K of 10 its tokens are then seen as often as all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    steps_done: int
    last: StepLog | HybridStepLog | None
    """Line of the last true step of this call; None: the run was done already."""
    statistics: HybridStatistics | None
    """Of a hybrid run, from its first step on."""
    stopped_by: signal.Signals | None
    """Who ended it early, after saving; None: it came to its end."""

    @property
    def exit_code(self) -> int:
        """0, or what a shell makes of the signal."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by

    def as_mapping(self) -> dict[str, object]:
        """Return plain values for JSON."""
        found: dict[str, object] = {"last_step": None if self.last is None else encode(self.last)}
        if self.statistics is not None:
            found["hybrid"] = self.statistics.state_dict()
        if self.stopped_by is not None:
            found["stopped_by"] = self.stopped_by.name
        return found

    def as_text(self, out: Path) -> str:
        """Return the last line for a reader."""
        loss = "" if self.last is None or self.last.loss is None else f", loss {self.last.loss:.3f}"
        ending = f"{self.steps_done} steps{loss}; log and state in {out}"
        return (
            ending if self.stopped_by is None else f"stopped by {self.stopped_by.name}: {ending}; go on with --resume"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """What a step needs."""

    file: TrainFile
    hybrid: HybridTrainer
    data: "_Data"
    ledger: StorageLedger
    monitor: RunMonitor
    state_path: Path

    @property
    def trainer(self) -> Trainer:
        return self.hybrid.trainer

    @property
    def cycle(self) -> HybridTrainer | None:
        """What is saved beside the trainer."""
        return None if self.file.hybrid is None else self.hybrid


def train(
    file: TrainFile,
    corpus: Corpus,
    out: Path,
    *,
    resume: bool,
    say: Say,
    progress: bool,
    monitoring: Monitoring | None = None,
    disk_folder: Path | None = None,
    host_limit_bytes: int | None = None,
) -> TrainResult:
    """Train, log each step to ``out/log.jsonl``, save to ``out/state.pt``, where the state before is kept too.

    SIGINT and SIGTERM end the run after the step at work, saved; a second one ends it at once.

    Args:
        file: What to train.
        corpus: On what.
        out: Folder of log and saved state; one run at a time works in it.
        resume: Continue the run saved there, which must have had the same settings and data.
        say: Receives what a user should read.
        progress: Show a bar.
        monitoring: What to watch; None: nothing.
        disk_folder: Where a disk tier may make its files; they have no names, and go with the process.
        host_limit_bytes: Host memory that offloaded tensors may take; None: what the machine has available.

    Raises:
        DivergenceError: the loss is no number any more; the last saved state stays.
        ConfigError: ``out`` holds another run and ``resume`` was not asked for, or one is at work in it; or what is to
            be monitored cannot be.
        HostMemoryError, DiskSpaceError, DiskTierError: offloaded tensors find no place, or lose it.
    """
    state_path, log_path = out / "state.pt", out / "log.jsonl"
    if not resume and (state_path.exists() or previous_state(state_path).exists()):
        raise ConfigError(str(out), ["holds a saved run; continue it with --resume or choose another --out"])
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ledger = StorageLedger(record=False)
    transfer = open_transfer(device, disk_folder=disk_folder, host_limit_bytes=host_limit_bytes)
    with (
        _held(out),
        closing(transfer),
        RunMonitor(monitoring or Monitoring(), out, {"train": encode(file)}, say) as monitor,
    ):
        remove_partials(state_path)
        with ledger:
            config = TrainerConfig(optimizer=file.optimizer, schedule=file.schedule, seed=file.seed)
            trainer = Trainer(file.model.resolve(), compose(file.optimizations), config, transfer, ledger)
        data = _split(file, corpus, trainer.plan.grad_accum_steps, say)
        run = _Run(file, HybridTrainer(trainer, file.hybrid, data.load_probe), data, ledger, monitor, state_path)
        if resume:
            with ledger:
                load_train_state(trainer, state_path, run.cycle, data.settings, say)
            if trainer.steps_done >= file.num_steps:
                say(f"the run is done: {trainer.steps_done} of {file.num_steps} steps; raise num_steps to go on")
                return _result(run, None, None)
            say(f"resumed after step {trainer.steps_done}")
        trim_log(log_path, trainer.steps_done, run.hybrid.phase, say)
        result = _run(run, log_path, progress=progress)
        if file.hybrid is not None:
            say(hybrid_summary(run.hybrid))
        if file.sample_tokens and result.stopped_by is None:
            say(sample_text(trainer, file.sample_prompt, num_tokens=file.sample_tokens, seed=file.seed))
    return result


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Keep other runs out of a folder; the system lets go when the process ends, however that comes."""
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                str(out), ["another run is at work here; wait for its end, or choose another --out"]
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


class _StopRequest:
    """Notes SIGINT or SIGTERM, for the run to end after the step at work; the next one does what it always did."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._before: dict[signal.Signals, Callable[..., object] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, _frame: object) -> None:
        self.__exit__()
        self.number = signal.Signals(number)
        # A handler may interrupt a write to the buffered stream, which then refuses another one.
        os.write(2, b"\nhybridtrain: stopping after this step, which is then saved; once more stops at once\n")


@dataclass(frozen=True, slots=True)
class _Data:
    """How batches are loaded, and what tells them from others."""

    load_batches: LoadBatches
    load_probe: LoadBatches | None
    settings: JsonMapping


def _split(file: TrainFile, corpus: Corpus, accum_steps: int, say: Say) -> _Data:
    """Return how the batches of a step are loaded, and those of the probe split if there has to be one."""
    batch_size, seq_len = file.workload.batch_size, file.workload.seq_len

    def loader(tokens: TokenArray, seed: int) -> LoadBatches:
        sampler = BatchSampler(tokens, micro_batch_size=batch_size // accum_steps, seq_len=seq_len, seed=seed)

        def load(step: int) -> list[TokenBatch]:
            return [sampler.batch(step, micro_batch) for micro_batch in range(accum_steps)]

        return load

    settings: JsonMapping = {
        "data.digest": corpus.digest, "data.name": corpus.name, "data.train_tokens": int(corpus.train.size),
        "data.probe_tokens": 0, "workload.batch_size": batch_size, "workload.seq_len": seq_len,
    }  # fmt: skip
    if file.hybrid is None or not file.hybrid.needs_probe:
        return _Data(loader(corpus.train, file.seed), None, settings)
    percent = _LEARNED_PROBE_PERCENT if file.hybrid.correction == "probe_gradients" else _PROBE_PERCENT
    num_probe = max(corpus.train.size * percent // 100, seq_len + 1)
    say(f"{num_probe:,} of {corpus.train.size:,} training tokens are the probe split")
    seed = random_key(file.seed, _PROBE_STREAM)
    settings["data.probe_tokens"] = int(num_probe)
    return _Data(loader(corpus.train[:-num_probe], file.seed), loader(corpus.train[-num_probe:], seed), settings)


def _run(run: _Run, log_path: Path, *, progress: bool) -> TrainResult:
    """Do the true steps that are left, and the jumps between them; none after the last."""
    file, trainer = run.file, run.trainer
    first = trainer.steps_done
    with log_path.open("a", encoding="utf-8") as log_file, _StopRequest() as stop:
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
            is_last = step + 1 == file.num_steps
            if (step + 1) % file.save_every == 0 or is_last or stop.number is not None:
                save_train_state(trainer, run.state_path, run.cycle, run.data.settings)
            if stop.number is not None:
                break
    return _result(run, log, None if is_last else stop.number)


def _result(run: _Run, last: StepLog | HybridStepLog | None, stopped_by: signal.Signals | None) -> TrainResult:
    return TrainResult(
        steps_done=run.trainer.steps_done, last=last, stopped_by=stopped_by,
        statistics=None if run.file.hybrid is None else run.hybrid.statistics,
    )  # fmt: skip


def _advance(run: _Run) -> StepLog | HybridStepLog:
    """Do the next phase step; its peak does not count what leaves the device for PREDICT."""
    trainer, phase = run.trainer, run.hybrid.phase
    on_cuda = trainer.model.head.weight.is_cuda
    counting: AbstractContextManager[object] = nullcontext() if on_cuda else run.ledger
    batches = [] if phase is Phase.PREDICT else run.data.load_batches(trainer.steps_done)
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
