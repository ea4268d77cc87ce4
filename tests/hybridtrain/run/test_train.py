"""``hybridtrain train``: what a resumed run may not change, how a run is stopped, what damage it survives."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faults.runs import command, ended, forked, is_running
from hybridtrain.cli.main import main
from hybridtrain.data.token_file import TokenFormat, write_token_file
from hybridtrain.errors import ConfigError
from hybridtrain.models.layers import Head
from hybridtrain.run import train, train_data
from hybridtrain.trainer import Trainer
from tiny_files import training_file

TRAIN = training_file()
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
TENSORS = Path("run/checkpoints/step-00000004/tensors-00000.safetensors")
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
        (["train", "train.toml"], "", "", ["data.digest: ", 'data.name: "text.txt" in the checkpoint, "emb']),
        (["train", "train.toml", "--data", "other.txt"], "", "", ["data.digest: ", "data.train_tokens: 1585 in"]),
        (ARGUMENTS, "batch_size = 2", "batch_size = 4", ["workload.batch_size: 2 in the checkpoint, 4 in this run"]),
        (ARGUMENTS, "seq_len = 8", "seq_len = 16", ["workload.seq_len: 8 in the checkpoint, 16 in this run"]),
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


def test_where_nothing_was_saved_nothing_is_made_to_resume_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--resume"]) == 2
    assert "start without --resume" in capsys.readouterr().err
    assert not Path("run").exists()


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
    content = bytearray(TENSORS.read_bytes())
    content[len(content) // 2] ^= 1
    TENSORS.write_bytes(content)
    assert main([*ARGUMENTS, "--resume"]) == 0
    assert (
        "resuming from step-00000002, the newest intact checkpoint\nresumed after step 2\n" in capsys.readouterr().out
    )
    assert losses("run") == losses("whole")


WAITS, OUT, ERR = (Path(name) for name in ("waits", "out.txt", "err.txt"))


def until_a_signal() -> None:
    """Wait for a signal that ends the run after its step."""
    WAITS.touch()
    given_up = time.monotonic() + 30
    while "_Interruption" in repr(signal.getsignal(signal.SIGTERM)) and time.monotonic() < given_up:
        time.sleep(0.01)


@contextmanager
def started(step: int = 3, wait: Callable[[], None] = until_a_signal) -> Iterator[int]:
    """Have a run, in a forked process, that waits at a step; yield its id once it waits. It ends with the test."""

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
        advance, steps = train._advance, iter(range(1, 100))

        def slow(run: Any) -> Any:
            if next(steps) == step:
                wait()
            return advance(run)

        train._advance = slow  # of this process, which ends with the command

    with forked(lambda: command(ARGUMENTS, begin=begin, out=OUT, said=ERR)) as process:
        while not WAITS.exists():
            assert is_running(process), ERR.read_text()
            time.sleep(0.01)
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_and_saves(number: signal.Signals) -> None:
    change("save_every = 2", "save_every = 100")
    assert main([*ARGUMENTS, "--out", "whole"]) == 0
    with started() as process:
        os.kill(process, number)
        assert ended(process) == 75  # documented in the help: it may go on
    assert "stopping after this step, which is then saved" in ERR.read_text()
    assert "Traceback" not in ERR.read_text()
    assert OUT.read_text().splitlines()[-1].startswith(f"stopped by {number.name}: 3 steps, loss ")
    assert losses("run") == losses("whole")[:3]
    assert main([*ARGUMENTS, "--resume"]) == 0
    assert losses("run") == losses("whole")


@pytest.mark.parametrize("arguments", [["--resume"], []], ids=["resume", "anew"])
@pytest.mark.parametrize("has_states", [True, False], ids=["saved", "unsaved"])
def test_where_a_run_is_at_work_that_is_what_is_told(
    capsys: pytest.CaptureFixture[str], arguments: list[str], *, has_states: bool
) -> None:
    Path("run/checkpoints/step-00000002" if has_states else "run").mkdir(parents=True)
    with train._held(Path("run")):
        assert main([*ARGUMENTS, *arguments]) == 2
    assert capsys.readouterr().err == (
        "hybridtrain: run: 1 fault\n  another run is using this folder; wait for its end, or choose another --out\n"
    )


def test_a_lock_that_a_killed_run_left_to_its_child_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run").mkdir()
    child = "import fcntl, os, sys; fcntl.flock(os.open('run', os.O_RDONLY), fcntl.LOCK_EX); print(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-uc", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.read(1) == b"\n"
        with pytest.raises(ConfigError, match="another run is using this folder;"), train._held(Path("run")):
            pass
        monkeypatch.setattr(train, "_GRACE_S", 60.0)
        threading.Timer(0.1, other.stdin.close).start()
        with train._held(Path("run")):
            pass


def test_a_second_run_in_the_same_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with started() as process:
        partial = Path("run/checkpoints/.step-00000003.1.partial")
        partial.mkdir(parents=True)
        for arguments in (["--resume"], []):
            assert main([*ARGUMENTS, *arguments]) == 2
        assert capsys.readouterr().err.count("another run is using this folder;") == 2
        assert partial.exists()
        while not Path("run/checkpoints/step-00000002").exists():  # written beside the training
            assert is_running(process)
            time.sleep(0.01)
    assert main([*ARGUMENTS, "--resume"]) == 0  # the system dropped the lock
    assert [step for step, _ in losses("run")] == [1, 2, 3, 4]
    assert sorted(path.name for path in Path("run").iterdir()) == [
        "checkpoints", "data.json", "environment.jsonl", "log.jsonl", "tokenizer", "training.toml",
    ]  # fmt: skip
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


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


def test_a_stream_that_cannot_show_the_sample_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    change("sample_tokens = 0", 'sample_tokens = 3\nsample_prompt = "\u00e9"')
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert main(ARGUMENTS) == 0
    assert b"\\xe9" in written.getvalue()


def test_weights_that_are_no_number_are_not_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done()
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
    assert "holds NaN or infinity; all saved values" in told
    assert json.loads(Path("run/faults.jsonl").read_text())["layers"] == ["embedding.token"]
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000002"]


def poisoned(monkeypatch: pytest.MonkeyPatch, batches: set[int], value: float = float("nan")) -> None:
    """Let the loss of some batches, known by their first token ids, be something else."""
    loader = train_data._loader

    def marked(*arguments: Any) -> Any:
        load = loader(*arguments)

        def loading(step: int) -> Any:
            poison.update(step=step)
            return load(step)

        return loading

    poison = {"step": -1}
    forward = Head.forward

    def bad(*arguments: Any, **settings: Any) -> Any:
        loss = forward(*arguments, **settings)
        return loss * value if poison["step"] in batches else loss

    monkeypatch.setattr(train_data, "_loader", marked)
    monkeypatch.setattr(Head, "forward", bad)


@pytest.mark.parametrize("action", ["skip", "roll_back"])
def test_a_batch_that_is_no_number_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    change("num_steps = 4", "num_steps = 7")
    Path("train.toml").write_text(Path("train.toml").read_text() + f'[guard]\non_nan = "{action}"\n')
    poisoned(monkeypatch, {3, 4})
    assert main([*ARGUMENTS, "--out", "whole"]) == 0
    assert "Batch 3 is skipped" in capsys.readouterr().out
    faults = [json.loads(line) for line in Path("whole/faults.jsonl").read_text().splitlines()]
    assert [(fault["step"], fault["batch"], fault["action"]) for fault in faults] == [(4, 3, action), (4, 4, action)]
    assert all("head.norm.weight" in fault["layers"] for fault in faults)
    assert [step for step, _ in losses("whole")] == [1, 2, 3, 4, 5, 6, 7]
    change("num_steps = 7", "num_steps = 5")  # what was left out stays so over a resume
    assert main(ARGUMENTS) == 0
    change("num_steps = 5", "num_steps = 7")
    assert main([*ARGUMENTS, "--resume"]) == 0
    assert losses("run") == losses("whole")


def test_as_many_faults_as_are_allowed_end_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.toml").write_text(Path("train.toml").read_text() + '[guard]\non_nan = "skip"\nmax_faults = 2\n')
    poisoned(monkeypatch, set(range(2, 100)))
    assert main(ARGUMENTS) == 1
    told = capsys.readouterr()
    assert "2 batches were skipped already, the limit of guard.max_faults; fix the data, or raise it" in told.out
    assert "step 3: loss is nan" in told.err
    assert [json.loads(line)["action"] for line in Path("run/faults.jsonl").read_text().splitlines()] == [
        "skip", "skip", "stop",
    ]  # fmt: skip


@pytest.mark.parametrize("action", ["say", "skip", "stop"])
def test_a_spike_is_told_and_not_applied_where_that_is_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    change("num_steps = 4", "num_steps = 12")
    Path("train.toml").write_text(Path("train.toml").read_text() + f'[guard]\non_spike = "{action}"\n')
    poisoned(monkeypatch, {9}, 30.0)
    assert main(ARGUMENTS) == (1 if action == "stop" else 0)
    told = capsys.readouterr()
    found = max(loss for _, loss in losses("run"))
    if action == "say":
        assert "step 10: loss 1" in told.out
        assert "is a spike; the median of earlier steps is 5." in told.out
        assert found > 100
    else:
        assert found < 10
        assert ("Batch 9 is skipped (skip)" in told.out) is (action == "skip")


def test_other_data_a_new_rate_and_a_longer_schedule_are_taken_when_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("other.txt").write_text(TEXT[:-44])
    Path("train.toml").write_text(Path("train.toml").read_text() + "[schedule]\nwarmup_steps = 0\ntotal_steps = 4\n")
    half_done()
    change("total_steps = 4", "total_steps = 8")
    Path("train.toml").write_text(Path("train.toml").read_text() + "[optimizer]\nlr = 1e-4\n")
    other = ["train", "train.toml", "--data", "other.txt", "--resume"]
    assert main(other) == 2
    told = capsys.readouterr().err
    assert "optimizer.lr: 0.0003 in the checkpoint, 0.0001 in this run" in told
    assert "allow the change with --change optimizer.lr" in told
    assert "allow the change with --allow-data-change" in told
    assert main([*other, "--change", "optimizer.lr,shedule", "--allow-data-change"]) == 2
    assert "'shedule' is unknown; did you mean 'schedule'?" in capsys.readouterr().err
    assert main([*other, "--change", "optimizer.lr,schedule", "--allow-data-change"]) == 0
    told = capsys.readouterr().out
    assert "changed: schedule.total_steps: 4 in the checkpoint, 8 in this run" in told
    assert "changed: data.digest: " in told
    assert main([*other, "--change", "model"]) == 0  # nothing left to change


def test_a_run_goes_on_under_another_stack(capsys: pytest.CaptureFixture[str]) -> None:
    half_done()
    stack = '[[optimizations]]\nkind = "weight_streaming"\n[[optimizations]]\nkind = "int8_optimizer"\n'
    Path("train.toml").write_text(Path("train.toml").read_text() + stack)
    assert main([*ARGUMENTS, "--resume"]) == 0
    told = capsys.readouterr().out
    assert 'changed: plan.weight.placement: "device" in the checkpoint, "host" in this run' in told
    assert (
        "converted: optimizer state of 1 tensors from float32 to int8_signed, rounded; the largest error is 0." in told
    )
    assert [step for step, _ in losses("run")] == [1, 2, 3, 4]


def test_states_are_saved_by_minutes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    change("num_steps = 4\nsave_every = 2", "num_steps = 6\nsave_every = 100\nkeep_last = 9\nsave_minutes = 1.5")
    seconds = iter(range(0, 10_000, 40))
    monkeypatch.setattr(train.time, "monotonic", lambda: next(seconds))
    assert main(ARGUMENTS) == 0
    steps = sorted(int(path.name.removeprefix("step-")) for path in Path("run/checkpoints").iterdir())
    assert steps == [3, 6]  # 40 s a step


def test_the_folder_says_where_and_by_what_it_was_made() -> None:
    half_done()
    assert main([*ARGUMENTS, "--resume"]) == 0
    first, second = map(json.loads, Path("run/environment.jsonl").read_text().splitlines())
    assert (first["steps_done"], second["steps_done"]) == (0, 2)
    assert first["environment"]["torch"] == torch.__version__
    assert set(first) == {"started_at", "steps_done", "environment", "versions"}
    assert json.loads(Path("run/data.json").read_text())["data.digest"]


def test_a_second_signal_ends_the_run_at_once() -> None:
    def without_end() -> None:
        given_up = time.monotonic() + 120
        while not Path("run/checkpoints/step-00000002").exists() and time.monotonic() < given_up:
            time.sleep(0.01)  # a state is written beside the steps after it
        WAITS.touch()
        time.sleep(30)

    with started(4, without_end) as process:
        os.kill(process, signal.SIGTERM)
        while "once more stops at once" not in ERR.read_text():
            assert is_running(process)
            time.sleep(0.01)
        os.kill(process, signal.SIGTERM)
        assert ended(process) == 143
    assert "Traceback" not in ERR.read_text()
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000002"]
    assert main([*ARGUMENTS, "--resume"]) == 0


def test_the_disk_has_the_log_of_a_step_before_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = list[str](), os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    assert main(ARGUMENTS) == 0
    logs = [place for place, name in enumerate(synced) if name == "log.jsonl"]
    manifests = [place for place, name in enumerate(synced) if name == "manifest.json"]
    assert len(logs) == len(manifests) == 2
    assert all(log < manifest for log, manifest in zip(logs, manifests, strict=True))


def test_a_warm_up_longer_than_the_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 0
    told = "schedule.warmup_steps is 100, num_steps 4: the final learning rate is 0.039604 of its peak"
    assert told in "".join(capsys.readouterr())


PLACES = ("log.jsonl", "faults.jsonl", "environment.jsonl", "training.toml", "data.json", "checkpoints", "tokenizer")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kind", ["a pipe or a device", "a link to nowhere, which does not exist", "other"])
@pytest.mark.parametrize("name", PLACES)
def test_what_stands_where_a_run_writes_is_told_before_it_trains(
    capsys: pytest.CaptureFixture[str], name: str, kind: str, *, resume: bool
) -> None:
    path = Path("run", name)
    path.parent.mkdir()
    if kind.startswith("a pipe"):
        os.mkfifo(path)
    elif kind.startswith("a link"):
        path.symlink_to("nowhere")
    elif "." in name:
        path.mkdir()
    else:
        path.write_text("")
    before = sorted(Path().rglob("*"))
    assert main([*ARGUMENTS, *(["--resume"] if resume else [])]) == 2
    told = kind if kind != "other" else "a folder" if "." in name else "a file"
    assert f"run: 1 fault\n  {name}: must be a " in (said := capsys.readouterr().err)
    assert f"or absent, but is {told}; " in said
    assert sorted(Path().rglob("*")) == before


def test_links_to_what_is_there_are_followed() -> None:
    Path("run").mkdir()
    Path("elsewhere").mkdir()
    Path("elsewhere/log").write_text("")
    Path("run/checkpoints").symlink_to(Path("elsewhere").absolute())
    Path("run/log.jsonl").symlink_to(Path("elsewhere/log").absolute())
    assert main(ARGUMENTS) == 0
    assert list(Path("elsewhere").glob("step-*"))
    assert len(losses("run")) == 4
