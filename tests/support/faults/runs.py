"""Tiny runs of every kind for fault injection: plain, streamed, on disk, hybrid. Each takes a fraction of a second."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NoReturn

import torch

from hybridtrain.checkpoint.generations import generations, newest_generation
from hybridtrain.cli.main import main
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_toml
from hybridtrain.data.corpus import Corpus, corpus_of_documents
from hybridtrain.errors import HybridTrainError
from hybridtrain.memory.group import DirectGroup
from hybridtrain.run.run_folder import CHECKPOINTS
from hybridtrain.run.train import train
from hybridtrain.training_file import _UNIONS, TrainFile

NUM_STEPS: Final = 6
SAVE_EVERY: Final = 2
_DISK: Final = {"kind": "optimizer_offload", "tier": "disk", "offload_grads": False}
_STREAM: Final = [{"kind": "weight_streaming"}, {"kind": "gradient_checkpointing", "recompute_every": 1}]
_HYBRID: Final = {"full_steps": 2, "slow": {"beta": 0.9, "alpha": 1.0}, "warmup_steps": 1}
KINDS: Final[Mapping[str, Mapping[str, object]]] = {
    "plain": {},
    "streamed": {"optimizations": [{"kind": "mixed_precision"}, *_STREAM]},
    "disk": {"optimizations": [{"kind": "mixed_precision"}, _DISK]},
    "hybrid": {
        "hybrid": _HYBRID,
        "optimizations": [{"kind": "predictor_state", "predictor": "slow_gradient", "codec": "float32"}],
    },
}
"""Additions of each kind to the training file."""
NUM_MICRO_BATCHES: Final = 4
_ACCUMULATED: Final = {"kind": "grad_accumulation", "grad_accum_steps": NUM_MICRO_BATCHES}
_RANKS: Final = {"workload": {"batch_size": NUM_MICRO_BATCHES, "seq_len": 8}, "keep_last": NUM_STEPS // SAVE_EVERY}
RANK_KINDS: Final[Mapping[str, Mapping[str, object]]] = {
    "data parallel": {**_RANKS, "optimizations": [_ACCUMULATED]},
    "zero 2": {**_RANKS, "optimizations": [_ACCUMULATED, {"kind": "mixed_precision"}, {"kind": "zero", "stage": 2}]},
    "zero 3": {
        **_RANKS,
        "optimizations": [
            _ACCUMULATED,
            {"kind": "mixed_precision"},
            *_STREAM,
            {"kind": "zero", "stage": 3, "prefetch": 1},
        ],
    },
}
"""Additions for several ranks; every checkpoint is kept."""
_SHAPE: Final = {
    "family": "gpt2", "vocab_size": 256, "max_seq_len": 16, "num_blocks": 2, "num_heads": 2, "num_kv_heads": 2,
    "tied": True,
}  # fmt: skip
_PLAIN: Final = {
    "num_steps": NUM_STEPS, "save_every": SAVE_EVERY, "sample_tokens": 0,
    "workload": {"batch_size": 2, "seq_len": 8},
    "optimizer": {"lr": 1e-2, "beta2": 0.99},
    "schedule": {"warmup_steps": 2, "total_steps": NUM_STEPS},
}  # fmt: skip
_TEXT: Final = 200 * b"The quick brown fox jumps over the lazy dog.\n"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a kind in a folder."""

    kind: str
    folder: Path
    width: int = 32

    @property
    def states(self) -> Path:
        """Folder of its checkpoints."""
        return self.folder / CHECKPOINTS

    def go(self, say: Callable[[str], None] = lambda _: None, shares: int = 1) -> None:
        """Train to the end, from the latest checkpoint if there is one; ``shares``: as this many ranks would."""
        train(
            training_file(self.kind, self.width), corpus(), self.folder, resume=bool(generations(self.states)),
            say=say, progress=False, disk_folder=self.folder.with_name("disk"), group=DirectGroup(shares),
        )  # fmt: skip

    def asked(self) -> list[str]:
        """Write the command's input files; return its arguments."""
        file, text = self.folder.with_name("training.toml"), self.folder.with_name("fox.txt")
        file.write_text(to_toml(training_file(self.kind, self.width)))
        text.write_bytes(_TEXT)
        paths = {"--data": text, "--out": self.folder, "--disk": self.folder.with_name("disk")}
        given = ["train", file, *(part for pair in paths.items() for part in pair)]
        return [*map(str, given), *(["--resume"] if generations(self.states) else [])]

    def command(
        self, begin: Callable[[], None] = lambda: None, arguments: Sequence[str] | None = None, said: Path | None = None
    ) -> None:
        """Train by the user's command, whose exit code ends this process; ``begin`` runs just before."""
        command([*self.asked(), "--json"] if arguments is None else arguments, begin=begin, said=said or self.said)

    @property
    def said(self) -> Path:
        """Standard error of the last command."""
        return self.folder.with_name("said.txt")

    def steps_saved(self) -> int:
        """Return the step of its latest complete checkpoint; 0: there is none."""
        return newest_generation(self.states, lambda _: None).manifest.steps_done if generations(self.states) else 0

    def steps_logged(self) -> int:
        """Return the last step with a complete line in its log."""
        log = self.folder / "log.jsonl"
        lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def outcome(self) -> tuple[object, ...]:
        """Return the bits that equal runs share: every tensor of the last checkpoint, and every loss."""
        generation = newest_generation(self.states, lambda _: None)
        sums = {name: entry.crc32 for name, entry in generation.manifest.tensors.items()}
        lines = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        return generation.manifest.steps_done, sums, [(line["step"], line.get("loss")) for line in lines]

    def leftovers(self) -> list[str]:
        """Return the files that a run should have removed."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.partial"))


@cache
def training_file(kind: str, width: int) -> TrainFile:
    """Return the training file of a kind of run."""
    shape = {**_SHAPE, "width": width, "ffn_width": 2 * width}
    return decode(
        TrainFile, {**_PLAIN, **{**KINDS, **RANK_KINDS}[kind], "model": {"shape": shape}}, source=kind, unions=_UNIONS
    )


@cache
def corpus() -> Corpus:
    """Return the corpus of every run."""
    return corpus_of_documents({"a.txt": _TEXT}, name="fox", source="fox")


def command(
    arguments: Sequence[str], *, begin: Callable[[], None] = lambda: None, out: Path = Path(os.devnull), said: Path
) -> NoReturn:
    """Run the user's command in this process, a forked one, and end it with its exit code.

    Args:
        arguments: Of the command.
        begin: Runs just before it.
        out: Takes standard output.
        said: Takes standard error.
    """
    for number, path in ((1, out), (2, said)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    begin()
    try:
        code = main(arguments)
    except SystemExit as end:  # as the interpreter ends by it
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_IN_FILES: Final = (
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
    "os.scandir",
)
"""Audit events of saving, loading and clearing up."""


TOLD: Final = 3
"""Exit code of a child that ended with a sentence for its user."""


def telling(work: Callable[[], None]) -> Callable[[], None]:
    """Return work whose user-facing errors end its process with ``TOLD``."""

    def told() -> None:
        try:
            work()
        except (HybridTrainError, OSError):
            os._exit(TOLD)

    return told


@cache
def _warm() -> None:
    """Import the modules of runs once in the parent: a child then takes a sixth of the time."""
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="hybridtrain-faults-warm-") as folder:
        for kind in KINDS:
            Run(kind, Path(folder, kind, "run")).go()


def fork(work: Callable[[], None]) -> int:
    """Run work in a forked child, which has everything imported already that runs need; return its process id."""
    _warm()
    return fork_now(work)


def fork_now(work: Callable[[], None]) -> int:
    """Run work in a forked child, which has what this process imported; return its process id.

    Its exit code is 0, or 1 after an exception, which it prints on the standard error of this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    torch.set_num_threads(1)  # else the child waits for threads that a fork leaves behind
    process = os.fork()
    if process:
        return process
    try:
        work()
    except BaseException as error:  # noqa: BLE001  nothing of the parent's may run in the child
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


@contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    """Run work in a forked child while the block runs; yield its process id, and kill it at the end if it goes on."""
    process = fork_now(work)
    try:
        yield process
    finally:
        if is_running(process):
            os.kill(process, signal.SIGKILL)
            ended(process)


def is_running(process: int) -> bool:
    """Return whether a child goes on; one that has ended is reaped, and its exit code lost."""
    try:
        return os.waitpid(process, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def go_unbroken(run: Run, work: Callable[[], None] | None = None) -> None:
    """Run a new run, or ``work`` around it, to its end in a child: the reference of broken ones."""
    run.folder.parent.mkdir(parents=True)
    if ended(fork(work or run.go)):
        raise AssertionError(f"the unbroken run '{run.kind}' failed")


def number_of(run: Run, work: Callable[[], int]) -> int:
    """Run a new run to its end in a child, by ``work``; return the number that ``work`` returns."""
    source, target = os.pipe()
    code = ended(fork(lambda: _write(target, work())))
    os.close(target)
    told = os.read(source, 20)
    os.close(source)
    if code or not told:
        raise AssertionError(f"the unbroken run '{run.kind}' failed")
    return int(told)


def on_touch(states: Path, note: Callable[[], object]) -> None:
    """Call ``note``, as long as this process lives, before every access to checkpoints."""
    place = str(states)

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        if event in _IN_FILES and arguments and place in str(arguments[0]):
            note()

    sys.addaudithook(heard)


def touches(run: Run) -> int:
    """Run a new run to its end in a child; return its number of accesses to checkpoints."""

    def counted() -> int:
        count = 0

        def note() -> None:
            nonlocal count
            count += 1

        on_touch(run.states, note)
        run.go()
        return count

    return number_of(run, counted)


def _write(target: int, number: int) -> None:
    os.write(target, str(number).encode())


def ended(process: int) -> int:
    """Wait for a child; return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
