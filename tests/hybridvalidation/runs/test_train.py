"""``hybridtrain train``: what a resumed run may not change, how a run is stopped, what damage it survives."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridtrain.data.token_file import TokenFormat, write_token_file
from hybridtrain.trainer import Trainer
from hybridvalidation.cli.main import main

TRAIN = """\
num_steps = 4
save_every = 2
sample_tokens = 0
[model.shape]
family = "gpt2"
vocab_size = 256
max_seq_len = 16
num_blocks = 1
width = 32
num_heads = 2
num_kv_heads = 2
ffn_width = 64
tied = true
[workload]
batch_size = 2
seq_len = 8
"""
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
ASCII_STREAM = "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='ascii')\n"
COMMAND = "from hybridvalidation.cli.main import main; sys.exit(main(sys.argv[1:]))\n"
ARGUMENTS = ["train", "train.toml", "--data", "text.txt"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same runs with a card and without
    Path("text.txt").write_text(TEXT)
    Path("train.toml").write_text(TRAIN)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def change(old: str, new: str) -> None:
    text = Path("train.toml").read_text()
    assert old in text
    Path("train.toml").write_text(text.replace(old, new))


def losses(out: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"]) for entry in lines]


def half_done(out: str = "run") -> None:
    change("num_steps = 4", "num_steps = 2")
    assert main([*ARGUMENTS, "--out", out]) == 0
    change("num_steps = 2", "num_steps = 4")


@pytest.mark.parametrize(
    ("arguments", "old", "new", "words"),
    [
        (["train", "train.toml"], "", "", ["data.digest: ", 'data.name: "text.txt" in the run that was saved, "emb']),
        (["train", "train.toml", "--data", "other.txt"], "", "", ["data.digest: ", "data.train_tokens: 1585 in"]),
        (ARGUMENTS, "batch_size = 2", "batch_size = 4", ["workload.batch_size: 2 in the run that was saved, 4 now"]),
        (ARGUMENTS, "seq_len = 8", "seq_len = 16", ["workload.seq_len: 8 in the run that was saved, 16 now"]),
    ],
    ids=["forgotten", "other", "batch", "sequence"],
)  # fmt: skip
def test_a_run_is_not_resumed_on_other_data(
    capsys: pytest.CaptureFixture[str], arguments: list[str], old: str, new: str, words: list[str]
) -> None:
    Path("other.txt").write_text(TEXT[:-44])
    half_done()
    log = Path("run/log.jsonl").read_bytes()
    change(old, new)
    assert main([*arguments, "--resume"]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in words)
    assert "resume with the saved value" in told
    assert Path("run/log.jsonl").read_bytes() == log


def test_a_corpus_may_be_renamed() -> None:
    write_token_file(Path("a.bin"), np.arange(1000) % 256, TokenFormat.RAW_UINT16)
    change("num_steps = 4", "num_steps = 2")
    assert main(["train", "train.toml", "--data", "a.bin"]) == 0
    change("num_steps = 2", "num_steps = 4")
    Path("a.bin").rename("b.bin")
    assert main(["train", "train.toml", "--data", "b.bin", "--resume"]) == 0


def test_a_damaged_state_costs_the_steps_since_the_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--out", "whole"]) == 0
    assert main(ARGUMENTS) == 0
    content = bytearray(Path("run/state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    Path("run/state.pt").write_bytes(content)
    assert main([*ARGUMENTS, "--resume"]) == 0
    assert "going on from state.previous.pt, saved after step 2\nresumed after step 2\n" in capsys.readouterr().out
    assert losses("run") == losses("whole")


def started(*more: str) -> "subprocess.Popen[str]":
    """Start a run that waits at its third step until it gets a signal, and then ends that step."""
    wait = """
import signal, time
from hybridvalidation.runs import train
advance, steps = train._advance, iter(range(1, 100))
def slow(run):
    if next(steps) == 3:
        print("waiting", flush=True)
        while signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            time.sleep(0.01)
    return advance(run)
train._advance = slow
"""
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys\n{wait}{COMMAND}", *ARGUMENTS, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509  no threads here
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_and_saves(number: signal.Signals) -> None:
    change("save_every = 2", "save_every = 100")
    assert main([*ARGUMENTS, "--out", "whole"]) == 0
    process = started()
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "stopping after this step, which is then saved" in err
    assert "Traceback" not in err
    assert out.splitlines()[-1].startswith(f"stopped by {number.name}: 3 steps, loss ")
    assert losses("run") == losses("whole")[:3]
    assert main([*ARGUMENTS, "--resume"]) == 0
    assert losses("run") == losses("whole")


def test_a_second_run_in_the_same_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    process = started()
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    Path("run/.state.pt.1.partial").write_bytes(b"being written")
    for arguments in (["--resume"], []):
        assert main([*ARGUMENTS, *arguments]) == 2
    told = capsys.readouterr().err
    assert "run: 1 fault\n  another run is at work here; wait for its end, or choose another --out" in told
    assert Path("run/.state.pt.1.partial").exists()
    process.kill()
    process.communicate()
    assert main([*ARGUMENTS, "--resume"]) == 0  # the system dropped the lock
    assert [step for step, _ in losses("run")] == [1, 2, 3, 4]
    assert sorted(path.name for path in Path("run").iterdir()) == ["log.jsonl", "state.previous.pt", "state.pt"]


@pytest.mark.parametrize(
    "damage", [b"{}", b"\0" * 30, b"[1]", b'{"step":"1"}', b'{"step":1,"loss":2.\xff}', b"[" * 100_000, b"7"],
    ids=["empty", "nuls", "list", "step", "byte", "deep", "number"],
)  # fmt: skip
def test_a_damaged_log_line_is_dropped_with_a_word(capsys: pytest.CaptureFixture[str], damage: bytes) -> None:
    half_done()
    log = Path("run/log.jsonl")
    first, second = log.read_bytes().splitlines()
    log.write_bytes(b"\n".join([first, damage, second]) + b"\n")
    assert main([*ARGUMENTS, "--resume"]) == 0
    assert "run/log.jsonl: 1 damaged line dropped" in capsys.readouterr().out
    assert [step for step, _ in losses("run")] == [1, 2, 3, 4]


def test_a_stream_that_cannot_show_the_sample_does_not_end_the_run() -> None:
    change("sample_tokens = 0", 'sample_tokens = 3\nsample_prompt = "\u00e9"')
    done = subprocess.run(
        [sys.executable, "-c", f"{ASCII_STREAM}{COMMAND}", *ARGUMENTS],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\\xe9" in done.stdout


def test_weights_that_are_no_number_are_not_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done()
    state = Path("run/state.pt").read_bytes()
    step = Trainer.step

    def poisoned(trainer: Trainer, *arguments: Any, **settings: Any) -> Any:
        result = step(trainer, *arguments, **settings)
        trainer.states.of("embedding")[0].parameter.data[0, 0] = float("nan")
        return result

    monkeypatch.setattr(Trainer, "step", poisoned)
    change("num_steps = 4\nsave_every = 2", "num_steps = 4\nsave_every = 1")
    assert main([*ARGUMENTS, "--resume"]) == 1
    told = capsys.readouterr().err
    assert "step 3: " in told
    assert "holds a value that is no finite number" in told
    assert Path("run/state.pt").read_bytes() == state
