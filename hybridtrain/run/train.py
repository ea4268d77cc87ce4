"""``hybridtrain train``: train a model on the user's text, with log, checkpoints and a sample."""

import fcntl
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from hybridtrain.atomic_write import remove_partials
from hybridtrain.checkpoint import CheckpointSaver, load_checkpoint
from hybridtrain.checkpoint.generations import generations, newest_generation
from hybridtrain.checkpoint.identity import settings_of
from hybridtrain.checkpoint.parts import state_bytes
from hybridtrain.config.encode import JsonMapping, encode, flat_settings, to_json
from hybridtrain.data.corpus import Corpus
from hybridtrain.engine.ranks import require_agreement
from hybridtrain.errors import ConfigError, DivergenceError, RankError
from hybridtrain.hybrid.cycle import Batches, HybridStatistics, HybridTrainer
from hybridtrain.memory.cuda_transfer import open_transfer
from hybridtrain.memory.group import TIMEOUT_S, DirectGroup, Group, TorchGroup
from hybridtrain.memory.transfer import Transfer
from hybridtrain.models.adapter import adapter_coverage
from hybridtrain.models.weight_source import WeightSource
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import compose
from hybridtrain.planning.plan_changes import plan_changes
from hybridtrain.planning.savings import arithmetic_line, arithmetic_savings
from hybridtrain.progress import progress_bar
from hybridtrain.run.precision import CastCounts, device_capability, overflow_advice, precision_advice
from hybridtrain.run.program import program_digest
from hybridtrain.run.run_folder import (
    CHECKPOINTS,
    FAULTS,
    LOG,
    note_environment,
    open_source,
    require_places,
    sampled_digest,
    trains_adapters,
    versions_of,
    write_run_files,
)
from hybridtrain.run.train_data import RunData, ValidationLog, open_run_data
from hybridtrain.run.train_guard import RunGuard
from hybridtrain.run.train_log import (
    HybridStepLog,
    Monitoring,
    RunMonitor,
    RunStatistics,
    Say,
    StepLog,
    TrafficLedger,
    hybrid_summary,
    trim_log,
)  # fmt: skip
from hybridtrain.sampling import sample_text
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import GuardConfig, LrSchedule, TrainerConfig
from hybridtrain.training_file import TrainFile
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.account.observer import MemoryObserver

_LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Environment variables of a rank."""
_PLACES = {"adapter_from", "data.path", "data.validation", "data.tokenizer"}
"""Path settings, which may differ between ranks; contents are compared by digest."""
_STOPPED = 75
"""Exit code of a run that a signal ended, after it was saved."""
_GRACE_S = 0.5
"""Wait for the folder's lock: a killed run's child process may hold it for milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of a training run."""

    steps_done: int
    corpus: str
    last: StepLog | None
    """Log line of this call's last true step; None: the run was complete already."""
    statistics: HybridStatistics | None
    """Statistics of a hybrid run, from its first step on."""
    validation: ValidationLog | None
    """The last evaluation of this call; None: there was none."""
    performance: RunStatistics | None
    """Speed and memory of this call's steps; None: there were none."""
    casts: CastCounts
    savings: tuple[tuple[str, str, float | None], ...]
    """Kind, settings and device bytes saved by each optimization (arithmetic); None: another one requires it."""
    stopped_by: signal.Signals | None
    """Signal that ended it early, after saving; None: it completed."""

    @property
    def exit_code(self) -> int:
        """0, or 75 (EX_TEMPFAIL) if a signal ended it and it can be resumed."""
        return 0 if self.stopped_by is None else _STOPPED

    def as_mapping(self) -> dict[str, object]:
        """Return plain values for JSON."""
        optional = {
            "validation": self.validation and encode(self.validation),
            "hybrid": self.statistics and self.statistics.state_dict(),
            "casts": self.casts.as_mapping(),
            "performance": self.performance and self.performance.as_mapping(),
            "stopped_by": self.stopped_by and self.stopped_by.name,
        }
        savings = [
            {"kind": kind, "settings": settings, "device_bytes_saved": saved, "evidence": "arithmetic"}
            for kind, settings, saved in self.savings
        ]
        return {
            "last_step": None if self.last is None else encode(self.last), "optimizations": savings,
            **{name: value for name, value in optional.items() if value},
        }  # fmt: skip

    def as_text(self, out: Path) -> str:
        """Return the last line of output."""
        loss = "" if self.last is None or self.last.loss is None else f", loss {self.last.loss:.3f}"
        ending = f"{self.steps_done} steps{loss}; log and checkpoints in {out}"
        return f"stopped by {self.stopped_by.name}: {ending}; continue with --resume" if self.stopped_by else ending


@dataclass(frozen=True, slots=True)
class _Run:
    file: TrainFile
    hybrid: HybridTrainer
    data: RunData
    ledger: TrafficLedger
    monitor: RunMonitor
    saver: CheckpointSaver
    guard: RunGuard
    say: Say
    savings: tuple[tuple[str, str, float | None], ...]

    def save(self) -> None:
        extra = self.guard.state() | self.data.state(self.next_batches)
        self.saver.save(self.trainer, self.cycle, self.data.settings, extra)

    def load(self, allowed: Sequence[str] = ()) -> None:
        """Restore the latest checkpoint."""
        self.saver.forget_fault()
        self.agreed(0.0)  # all ranks are here
        folder, data = self.saver.folder, self.data.settings
        with self.ledger:
            loaded = load_checkpoint(self.trainer, folder, self.cycle, data, self.say, allowed)
            now = settings_of(self.trainer, self.cycle, data)
            self.guard.load(loaded.extra)
            if now["workload.batch_size"] != loaded.settings["workload.batch_size"]:
                self.guard.forget_ahead(self.trainer.steps_done)
            self.data.load(loaded.extra, loaded.settings, now, self.next_batches, self.say)

    @property
    def next_batches(self) -> tuple[int, int]:
        """Numbers of the next training batch and the next probe batch."""
        return self.guard.batch_of(self.trainer.steps_done), self.hybrid.num_probes

    def load_batches(self, step: int) -> Batches:
        return self.data.load_batches(self.guard.batch_of(step))

    def agreed(self, value: float) -> float:
        """Return the first rank's value on all ranks, as clocks and signals differ between them."""
        return self.trainer.group.gather_numbers([value])[0]

    def is_stopped(self, stop: "_Interruption") -> bool:
        """Return whether any rank received a stop signal."""
        number = max(self.trainer.group.gather_numbers([stop.number or 0]))
        if number:
            stop.number = stop.number or signal.Signals(int(number))
        return number > 0

    def poll_saver(self) -> None:
        """Raise the first rank's error of a save on every rank."""
        fault: BaseException | None = None
        try:
            self.saver.poll()
        except Exception as error:  # noqa: BLE001  raised below, once the others know
            fault = error
        kind = self.agreed(0.0 if fault is None else 1.0 + isinstance(fault, DivergenceError))
        if fault is not None:
            raise fault
        if kind == 2.0:
            raise DivergenceError(
                "rank 0: a value to be saved is not finite", is_applied=True, step=self.saver.saved_step
            )
        if kind:
            raise RankError(
                "rank 0: the checkpoint could not be saved; see the error of rank 0, fix it, then --resume."
            )

    def result(
        self,
        last: StepLog | None = None,
        validation: ValidationLog | None = None,
        performance: RunStatistics | None = None,
        stopped_by: signal.Signals | None = None,
    ) -> TrainResult:
        return TrainResult(
            steps_done=self.trainer.steps_done, corpus=self.data.name, last=last, validation=validation,
            stopped_by=stopped_by, performance=performance, savings=self.savings, casts=self.ledger.casts,
            statistics=None if self.file.hybrid is None else self.hybrid.statistics,
        )  # fmt: skip

    @property
    def trainer(self) -> Trainer:
        return self.hybrid.trainer

    @property
    def cycle(self) -> HybridTrainer | None:
        return None if self.file.hybrid is None else self.hybrid

    @property
    def on_cuda(self) -> bool:
        return self.trainer.model.head.weight.is_cuda

    @property
    def counting(self) -> AbstractContextManager[object]:
        """Context in which the ledger counts memory; on a card its allocator does."""
        return nullcontext() if self.on_cuda else self.ledger


def train(
    file: TrainFile,
    corpus: Corpus | None,
    out: Path,
    *,
    resume: bool,
    say: Say,
    progress: bool,
    monitoring: Monitoring | None = None,
    disk_folder: Path | None = None,
    host_limit_bytes: int | None = None,
    allowed: Sequence[str] = (),
    rank_timeout_s: float = TIMEOUT_S,
    group: Group | None = None,
) -> TrainResult:
    """Train; log each step to ``out/log.jsonl``, save to ``out/checkpoints``, and write the files of run_folder.py.

    SIGINT or SIGTERM saves and ends the run after the current step; a second one ends it at once.

    Under torchrun every rank calls this with the same arguments; only the first one writes. ``group``: an open group of
    ranks; None: from torchrun's environment variables.

    Without ``corpus`` the file must have a [data] table. ``disk_folder`` is for the disk tier's temporary files.
    ``host_limit_bytes`` limits offloaded tensors (None: available memory). ``allowed``: settings that may change on
    resume, by name or prefix.

    Raises:
        DivergenceError: loss or gradients are not finite; the latest checkpoint stays.
        RankError: another rank ended, did not start, or timed out.
        ConfigError: ``out`` contains another run without ``resume``, is in use, or a monitor cannot be opened.
        HostMemoryError, DiskSpaceError, DiskTierError: too little space for offloaded tensors, or a disk error.
    """
    states = out / CHECKPOINTS
    require_places(out)
    _require_states(out, resume=resume, say=say)
    device = _device()
    with ExitStack() as held:
        group = group or held.enter_context(closing(open_group(device, rank_timeout_s)))
        if group.world > 1:
            require_agreement(group, device, _settings_of_all(file, resume=resume, allowed=allowed))
        _require_ranks(file, group)
        tokens = out / "tokens"
        if group.rank:  # what it writes beside the run is of no use
            out = Path(held.enter_context(tempfile.TemporaryDirectory()))
            say, progress, monitoring = lambda _line: None, False, None
        out.mkdir(parents=True, exist_ok=True)
        held.enter_context(_held(out))
        transfer = open_transfer(device, disk_folder=disk_folder, host_limit_bytes=host_limit_bytes)
        held.enter_context(closing(transfer))
        monitor = held.enter_context(RunMonitor(monitoring or Monitoring(), out, {"train": encode(file)}, say))
        for folder in (out, *([] if group.rank else [states])):
            remove_partials(folder)
        data = _open_data(file, corpus, tokens, say, group)
        ledger, saver = TrafficLedger(), CheckpointSaver(states, keep_last=file.keep_last, keep_hourly=file.keep_hourly)
        trainer = _first_trainer(file, data, transfer, ledger, say, group, resume=resume)
        write_run_files(out, file, data)
        saver.require_room(trainer, len(generations(states)))
        workload = file.workload.micro_batch(compose(file.optimizations))
        savings = tuple(arithmetic_savings(file.optimizations, trainer.model.config, workload, file.optimizer))
        cycle, guard = HybridTrainer(trainer, file.hybrid, data.load_probe), RunGuard(file.guard, out / FAULTS, say)
        for change in plan_changes(
            file.optimizations, trainer.model.config, workload, file.optimizer, world=group.world,
            phases=(Phase.FULL,) if file.hybrid is None else tuple(Phase),
        ):  # fmt: skip
            say(f"not as asked: {change}")
        for line in (*(arithmetic_line(*saving) for saving in savings), *_remarks(file, trainer, cycle)):
            say(line)
        run = _Run(file, cycle, data, ledger, monitor, saver, guard, say, savings)
        if resume:
            run.load(allowed)
            if run.trainer.steps_done >= file.num_steps:
                say(
                    f"the run is complete: {run.trainer.steps_done} of {file.num_steps} steps; raise num_steps to "
                    f"continue"
                )
                return run.result()
            say(f"resumed after step {run.trainer.steps_done}")
        note_environment(out, run.trainer.steps_done)
        trim_log(out / LOG, run.trainer.steps_done, run.hybrid.phase, say)
        stop = _Interruption()
        result = _run(run, out / LOG, stop, progress=progress)
        _finish(run, result, stop)
    return result


def _finish(run: _Run, result: TrainResult, stop: "_Interruption") -> None:
    """Print the summary of a run, and a sample of its model."""
    file = run.file
    if casts := result.casts.as_text():
        run.say(casts)
    for line in overflow_advice(run.trainer.loss_scale, device_capability()):
        run.say(line)
    if result.performance is not None:
        run.say(result.performance.as_text())
    if file.hybrid is not None:
        run.say(hybrid_summary(run.hybrid))
    if result.validation is not None:
        run.say(result.validation.as_text())
    # Asked on every rank: the others wait here until the first one has saved.
    if not run.is_stopped(stop) and file.sample_tokens:
        run.say(f"sample of {file.sample_tokens} tokens (sample_tokens):")
        run.say(
            sample_text(
                run.trainer, file.sample_prompt, num_tokens=file.sample_tokens, seed=file.seed,
                tokenizer=run.data.tokenizer,
            )
        )  # fmt: skip


def _open_data(file: TrainFile, corpus: Corpus | None, tokens: Path, say: Say, group: Group) -> RunData:
    """Open the data of the run; the first rank encodes text, the others wait and read it."""
    accum_steps = compose(file.optimizations).for_phase(Phase.FULL).grad_accum_steps
    if group.rank:
        group.gather_numbers([0.0])
    data = open_run_data(file, corpus, accum_steps, tokens, say)
    if not group.rank:
        group.gather_numbers([0.0])
    return data


def _first_trainer(
    file: TrainFile, data: RunData, transfer: Transfer, ledger: TrafficLedger, say: Say, group: Group, *, resume: bool
) -> Trainer:
    """Return the trainer before its first step; the settings of ``data`` get those of the folder of weights."""
    source, settings = open_source(file, reads_values=not resume or trains_adapters(file), say=say)
    data.settings.update(settings)
    if group.world > 1:
        require_agreement(group, transfer.device, _read_by_all(file, data))
    with ledger:
        trainer = open_trainer(file, transfer, ledger, source, group)
        if file.adapter_from is not None and not resume:
            from hybridtrain.weights.adapters import load_adapter  # noqa: PLC0415  other runs do not list it

            load_adapter(trainer, file.adapter_from)
    return trainer


def _remarks(file: TrainFile, trainer: Trainer, cycle: HybridTrainer) -> Iterator[str]:
    """Yield the size of checkpoints, the cover of adapters, settings that are allowed and seldom meant, advice."""
    size = format_bytes(state_bytes(trainer))
    yield (
        f"a checkpoint takes {size}; {file.keep_last} are kept, plus up to {file.keep_hourly} hourly ones while disk "
        f"space allows, plus the one being written"
    )
    if trains_adapters(file):
        covered, others = adapter_coverage(trainer.model)
        yield f"adapters on {', '.join(covered)} of every block; without adapters: {', '.join(others) or 'none'}"
        if file.model.resolve().experts is not None:
            yield (
                "warning: experts and their router have no adapters and are frozen; PEFT 0.21 with transformers 5 "
                "trains them with all-linear"
            )
    if trains_adapters(file) and file.model.init_from is None and file.adapter_from is None:
        yield (
            "warning: the base weights are random, so the adapters are useless elsewhere; set [model] init_from to a "
            "Hugging Face folder"
        )
    total = file.schedule.total_steps
    if file.num_steps > total and file.schedule.kind != "constant":
        yield (
            f"warning: schedule.total_steps is {total}, num_steps {file.num_steps}: steps after {total} use "
            f"{file.schedule.factor(total):g} of the learning rate"
        )
    if file.schedule.kind == "constant" and file.schedule.final_fraction != LrSchedule().final_fraction:
        yield (
            f"not as asked: schedule.final_fraction: {file.schedule.final_fraction:g} asked, none used; a constant "
            "learning rate stays"
        )
    leaves_out = {file.guard.on_nan, file.guard.on_spike} & {"skip", "roll_back"}
    if file.guard.max_faults != GuardConfig().max_faults and not leaves_out:
        yield (
            f"not as asked: guard.max_faults: {file.guard.max_faults} asked, none used; on_nan = "
            f"'{file.guard.on_nan}' and on_spike = '{file.guard.on_spike}' skip no batch"
        )
    if file.num_steps <= file.schedule.warmup_steps:
        yield (
            f"warning: schedule.warmup_steps is {file.schedule.warmup_steps}, num_steps {file.num_steps}: the final "
            f"learning rate is {file.schedule.factor(file.num_steps):g} of its peak"
        )
    forecaster = None if file.hybrid is None else cycle.watch.forecaster
    if forecaster is not None and file.num_steps < forecaster.steps_before_training:
        yield (
            f"warning: forecaster '{forecaster.kind}' trains from step {forecaster.steps_before_training} on, but "
            f"num_steps is {file.num_steps}: it will forecast like its baseline, an exponential average"
        )
    yield from precision_advice(trainer.memory_plan, device_capability())


def _settings_of_all(file: TrainFile, *, resume: bool, allowed: Sequence[str]) -> JsonMapping:
    """Return the settings that must be equal on every rank; paths may differ, their content may not."""
    named = flat_settings({"": file})
    return {
        **{name: value for name, value in named.items() if name not in _PLACES and not name.startswith("model.")},
        **flat_settings({"model": file.model.resolve()}),
        "--resume": resume, "--change": [*sorted(allowed)], "source of the program": program_digest(),
        **{f"version of {name}": version for name, version in versions_of().items()},
    }  # fmt: skip


def _read_by_all(file: TrainFile, data: RunData) -> JsonMapping:
    folders = {"model.init_from": file.model.init_from, "adapter_from": file.adapter_from}
    weights: JsonMapping = {
        f"weights of {name}": sampled_digest(folder) for name, folder in folders.items() if folder is not None
    }
    return {name: value for name, value in data.settings.items() if name != "data.name"} | weights


def _require_ranks(file: TrainFile, group: Group) -> None:
    if group.world > 1 and file.hybrid is not None:
        raise ConfigError(
            "[hybrid]",
            [f"{group.world} ranks were started, hybrid training supports one; remove the table, or start one rank"],
        )
    cuts = any(part.kind == "zero" for part in file.optimizations)
    if group.world > 1 and cuts and file.adapter_from is not None:
        faults = ["adapter_from cannot load adapters sharded by zero; drop zero, or start one rank"]
        raise ConfigError("adapter_from", faults)


def open_trainer(
    file: TrainFile, transfer: Transfer, observer: MemoryObserver | None = None, source: WeightSource | None = None,
    group: Group | None = None,
) -> Trainer:  # fmt: skip
    """Return the trainer that a training file describes, before its first step."""
    config = TrainerConfig(optimizer=file.optimizer, schedule=file.schedule, seed=file.seed)
    return Trainer(
        file.model.resolve(), compose(file.optimizations), config, transfer, observer, source=source, group=group
    )


def open_group(device: torch.device, timeout_s: float) -> Group:
    """Open the group of ranks in torchrun's environment variables, or of this process alone."""
    return TorchGroup.open(device, timeout_s=timeout_s) if os.environ.keys() >= _LAUNCHED else DirectGroup()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda")


def _require_states(out: Path, *, resume: bool, say: Say) -> None:
    """Raise ``ConfigError`` where there is nothing to resume, or something that is not to be; nothing is made."""
    states = out / CHECKPOINTS
    if bool(generations(states)) == resume:
        return
    if out.is_dir():  # a run at work there, which may have saved nothing yet, is what to tell first
        with _held(out, shared=True):
            pass
    if resume:
        newest_generation(states, say)
    raise ConfigError(str(out), ["contains a saved run; continue it with --resume, or choose another --out"])


@contextmanager
def _held(out: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock a folder, or raise ``ConfigError``; the system lets go when the process ends, or soon after it was killed.

    ``shared`` locks are those of the ranks of one run, which look for checkpoints at once.
    """
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        give_up = time.monotonic() + _GRACE_S
        while not _is_locked(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            if time.monotonic() > give_up:
                raise ConfigError(
                    str(out), ["another run is using this folder; wait for its end, or choose another --out"]
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, how: int) -> bool:
    """Lock what is open if nobody else has it; true on a file system without locks too."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class _Interruption:
    """Notes SIGINT or SIGTERM, for the run to end after the step at work; the next one acts as before."""

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


def _run(run: _Run, log_path: Path, stop: _Interruption, *, progress: bool) -> TrainResult:
    """Do the true steps that are left, and the jumps between them; none after the last."""
    file, trainer = run.file, run.trainer
    log: StepLog | None = None
    validation: ValidationLog | None = None
    performance = RunStatistics()
    saved_s = time.monotonic()
    with closing(_LogFile(log_path)) as log_file, stop, run.saver:
        if run.data.log is not None and not trainer.steps_done:
            log_file.write(run.data.log)
        if run.guard.rolls_back and run.saver.is_empty:
            run.save()
        first = trainer.steps_done

        with progress_bar(range(first, file.num_steps), initial=first, unit="step", shown=progress) as bar:
            while trainer.steps_done < file.num_steps and not run.is_stopped(stop):
                done = _guarded_step(run, log_file, performance)
                if done is None:
                    continue
                assert done.loss is not None, "of a true step"
                log = done
                bar.update(trainer.steps_done - bar.n)
                bar.set_postfix_str(
                    f"loss {done.loss:.3f} lr {log.lr:.2e} {log.tokens_per_s:,.0f} tok/s {format_bytes(log.peak_bytes)}"
                )
                if run.data.validation is not None and _is_due(run, file.eval_every):
                    with run.counting:
                        validation = run.data.evaluate(trainer)
                    run.monitor.record_validation(validation.step, validation.as_metrics())
                    log_file.write(validation)
                is_late = file.save_minutes > 0 and time.monotonic() - saved_s >= 60 * file.save_minutes
                if _is_due(run, file.save_every) or run.agreed(is_late) or run.is_stopped(stop):
                    log_file.sync()
                    run.save()
                    saved_s = time.monotonic()
    is_done = trainer.steps_done == file.num_steps
    return run.result(log, validation, performance, None if is_done else stop.number)


def _is_due(run: _Run, every: int) -> bool:
    """Return whether something is to be done after this step: the last one, or one of ``every``; 0: the last alone."""
    done = run.trainer.steps_done
    return done == run.file.num_steps or (every > 0 and done % every == 0)


def _guarded_step(run: _Run, log_file: "_LogFile", performance: RunStatistics) -> StepLog | None:
    """Do the next true step, and a jump before it; None: it met a fault, and the guard has seen to that."""
    step = run.trainer.steps_done

    def advance() -> StepLog:
        before = run.ledger.moved.copy()
        log = _advance(run)
        performance.add(log, run.ledger.moved - before)
        log_file.write(log)
        return log

    try:
        run.poll_saver()
        if run.hybrid.phase is Phase.PREDICT:
            advance()
        log = advance()
    except DivergenceError as error:
        cause = run.saver.fault if isinstance(run.saver.fault, DivergenceError) else error
        action = run.guard.decide(cause, step, run.load_batches)
        if action == "stop":
            raise cause from None
        if action == "roll_back":
            run.load()
            log_file.trim(run)
        return None
    assert log.loss is not None, "of a true step"
    run.guard.note(log.step, log.loss)
    return log


class _LogFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry: object) -> None:
        self._file.write(to_json(entry) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush all lines to disk, before a checkpoint refers to them."""
        os.fsync(self._file.fileno())

    def trim(self, run: _Run) -> None:
        self._file.close()
        trim_log(self.path, run.trainer.steps_done, run.hybrid.phase, run.say)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


def _advance(run: _Run) -> StepLog:
    """Do the next phase step; its peak does not count what leaves the device for PREDICT."""
    trainer, phase, on_cuda = run.trainer, run.hybrid.phase, run.on_cuda
    batches: Batches = []
    if phase is not Phase.PREDICT:  # of the step, which is the same however many ranks there are, this rank's share
        batches, group = run.load_batches(trainer.steps_done), trainer.data_group
        count = len(batches) // group.world
        batches = batches[group.rank * count : (group.rank + 1) * count]
    run.ledger.phase = phase
    with run.counting:
        if phase is Phase.PREDICT:
            trainer.enter_phase(phase)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        run.ledger.begin_step()
        result = run.hybrid.advance(lambda _: batches, run.guard.limits())
    peak_bytes = torch.cuda.max_memory_allocated() if on_cuda else run.ledger.peak_bytes
    kind = StepLog if run.file.hybrid is None else HybridStepLog
    log = kind.of(result, peak_bytes, run.file.workload.batch_size)
    run.monitor.record_step(log.step, result.phase, log.as_metrics())
    return log
