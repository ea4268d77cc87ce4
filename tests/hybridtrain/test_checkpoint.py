import json
import math
import os
import re
import resource
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from checkpoints import save_checkpoint
from hybridtrain.checkpoint import CheckpointSaver, load_checkpoint
from hybridtrain.checkpoint.generations import generations
from hybridtrain.checkpoint.manifest import _text, read_generation, verify
from hybridtrain.checkpoint.parts import state_bytes
from hybridtrain.config.encode import JsonValue
from hybridtrain.data.batches import TokenBatch
from hybridtrain.errors import ConfigError, DiskSpaceError, DivergenceError, StateError
from hybridtrain.memory import tier
from hybridtrain.memory.state_store import ParameterState
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import (
    Bf16Optimizer,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import DynamicRange
from hybridtrain.tensor_file import TensorFileWriter
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.weights.exact_values import exact_values
from numerics import assert_bitwise
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, random_steps

MODEL = replace(GPT2_TIED_DROPOUT, width=64, num_blocks=2)  # wide enough for matrices of 4096 elements
CONFIG = TrainerConfig(optimizer=AdamWConfig(lr=1e-2), schedule=LrSchedule(warmup_steps=2, total_steps=8), seed=5)
STACKS: dict[str, list[Optimization]] = {
    "fp32": [],
    "master": [MixedPrecision()],
    "split16": [MixedPrecision(master="split16"), GradAccumulation(grad_accum_steps=2)],
    "absent": [MixedPrecision(master="absent")],
    "int8": [Int8Optimizer(), GradientCheckpointing(recompute_every=1)],
    "absent-int8": [MixedPrecision(master="absent"), Int8Optimizer()],
    "int8-rows": [MixedPrecision(), Int8Weights(dynamic_range=DynamicRange.ROW)],
}
NUM_STEPS = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads gain nothing on tiny tensors and wait for each other on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_trainer(
    stack: Sequence[Optimization] = (), model: ModelConfig = MODEL, config: TrainerConfig = CONFIG
) -> Trainer:
    return Trainer(model, compose(stack), config, DirectTransfer(torch.device("cpu")))


def steps_for(trainer: Trainer) -> list[list[TokenBatch]]:
    return random_steps(MODEL, NUM_STEPS, trainer.plan.grad_accum_steps)


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Return all that the next step reads."""
    tensors: dict[str, Tensor] = {}
    for index, state in enumerate(states_of(trainer)):
        parts = (state.parameter.data, *state.stored())
        named = ((f"parameter {index} part {number}", part) for number, part in enumerate(parts))
        tensors |= {name: part for name, part in named if part is not None}
    return tensors


def states_of(trainer: Trainer) -> list[ParameterState]:
    return [state for _, states in trainer.states.items() for state in states]


def assert_same_state(actual: Trainer, expected: Trainer) -> None:
    own, other = everything(actual), everything(expected)
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert_bitwise(tensor, other[name], name)
    assert actual.steps_done == expected.steps_done


def trained(num_steps: int, stack: Sequence[Optimization] = ()) -> Trainer:
    trainer = new_trainer(stack)
    for step in steps_for(trainer)[:num_steps]:
        trainer.step(step)
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saved(path: Path, num_steps: int = 1) -> Path:
    save_checkpoint(trained(num_steps), path)
    return path


@pytest.mark.parametrize("name", STACKS)
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    whole = new_trainer(STACKS[name])
    results = []
    for number, step in enumerate(steps_for(whole)):
        if number in {0, 1, 3}:
            save_checkpoint(whole, tmp_path / str(number))
        results.append(whole.step(step))
    for number in (0, 1, 3):
        resumed = new_trainer(STACKS[name])
        load_checkpoint(resumed, tmp_path / str(number))
        assert resumed.steps_done == number
        assert [resumed.step(step) for step in steps_for(resumed)[number:]] == results[number:]
        assert_same_state(resumed, whole)


def test_the_8_bit_stack_has_both_kinds_of_moments() -> None:
    states = states_of(trained(1, STACKS["int8"]))
    assert {any(stored.dtype is torch.uint8 for stored in state.stored()) for state in states} == {True, False}


@pytest.mark.parametrize("num_saved", [0, 2])
def test_loading_undoes_what_was_trained_since(tmp_path: Path, num_saved: int) -> None:
    path = saved(tmp_path, num_saved)
    trainer, whole = trained(4), trained(num_saved)
    load_checkpoint(trainer, path)
    step = steps_for(trainer)[num_saved]
    assert trainer.step(step) == whole.step(step)
    assert_same_state(trainer, whole)


def test_loading_leaves_the_files_alone(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = contents(path)
    trainer = new_trainer()
    load_checkpoint(trainer, path)
    trainer.step(steps_for(trainer)[1])
    assert contents(path) == content


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_interrupted_write_leaves_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    path = saved(tmp_path)
    content = contents(path)
    writes = iter(range(100))
    write = TensorFileWriter.write

    def write_some(*arguments: Any) -> None:
        if next(writes) == 5:
            raise interruption
        write(*arguments)

    monkeypatch.setattr(TensorFileWriter, "write", write_some)
    with pytest.raises((KeyboardInterrupt, StateError)):
        save_checkpoint(trained(2), path)
    assert contents(path) == content


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": replace(MODEL, dropout=0.2)}, "model.dropout: 0.1 in the checkpoint, 0.2 in this run"),
        ({"model": replace(GPT2_UNTIED, width=64)}, "model.tied: true in the checkpoint, false in this run"),
        ({"config": replace(CONFIG, seed=6)}, "seed: 5 in the checkpoint, 6 in this run"),
        (
            {"config": replace(CONFIG, optimizer=AdamWConfig(lr=2e-2))},
            "optimizer.lr: 0.01 in the checkpoint, 0.02 in this run",
        ),
        (
            {"config": replace(CONFIG, schedule=LrSchedule(total_steps=1000))},
            "schedule.total_steps: 8 in the checkpoint, 1000 in this run",
        ),
    ],
    ids=["dropout", "model", "seed", "lr", "schedule"],
)
def test_a_state_of_another_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = saved(tmp_path)
    other = new_trainer(**changes)
    before = {name: tensor.clone() for name, tensor in everything(other).items()}
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(other, path)
    assert caught.value.source == str(path / "step-00000001")
    assert any(fault.startswith(f"{words}; resume with the saved value") for fault in caught.value.faults)
    for name, tensor in everything(other).items():
        assert_bitwise(tensor, before[name], name)


def test_a_missing_state_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no checkpoint to resume from; start without --resume"):
        load_checkpoint(new_trainer(), tmp_path)


def test_a_state_of_an_earlier_version_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(b"PK")
    with pytest.raises(ConfigError, match="finish the run with the earlier version,") as caught:
        load_checkpoint(new_trainer(), tmp_path / "checkpoints")
    assert str(tmp_path / "state.pt") in str(caught.value)


@pytest.mark.parametrize(
    "manifest", [b"", b"{}", b"not JSON", b'{"content": []}', b"[" * 100_000, b"9" * 5000, b"\xff", b'{"content": {}}'],
    ids=["empty", "object", "text", "list", "deep", "digits", "byte", "nothing"],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, manifest: bytes) -> None:
    path = saved(tmp_path)
    (path / "step-00000001" / "manifest.json").write_bytes(manifest)
    with pytest.raises(ConfigError, match="step-00000001: the checkpoint is damaged") as caught:
        load_checkpoint(new_trainer(), path)
    assert caught.value.source == str(path)


def test_other_data_are_refused_by_name_and_a_renamed_corpus_is_not(tmp_path: Path) -> None:
    path = tmp_path
    data: dict[str, JsonValue] = {"data.digest": "aa", "data.name": "text.txt", "data.train_tokens": 100}
    save_checkpoint(trained(1), path, data=data)
    load_checkpoint(new_trainer(), path, data=data | {"data.name": "moved.txt"})
    load_checkpoint(new_trainer(), path, data={}, allowed=["data"])
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(new_trainer(), path, data=data | {"data.digest": "bb", "data.name": "embedded"})
    assert [fault.partition(";")[0] for fault in caught.value.faults] == [
        'data.digest: "aa" in the checkpoint, "bb" in this run',
        'data.name: "text.txt" in the checkpoint, "embedded" in this run',
    ]
    with pytest.raises(ConfigError, match=r"data.train_tokens: 100 in the checkpoint, absent in this run"):
        load_checkpoint(new_trainer(), path)


# Damage, older generations, and what must not be saved


def flipped(path: Path, place: int, bit: int = 0) -> None:
    """Flip a bit of a file where it is."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_flipped_bit_in_any_tensor_is_found_and_the_tensor_named(tmp_path: Path) -> None:
    generation = read_generation(saved(tmp_path, 2) / "step-00000002")
    for name, tensor in generation.tensors().items():
        for _ in range(2):  # there and back
            place = tensor.offset + tensor.num_bytes // 2
            flipped(tensor.path, place)
            if _:
                verify(generation)
                continue
            with pytest.raises(ValueError, match=re.escape(f"'{name}' has changed since it was written")):
                verify(generation)


def test_every_flipped_bit_and_zeroed_page_anywhere_is_noticed(tmp_path: Path) -> None:
    folder = saved(tmp_path, 2) / "step-00000002"
    draw = np.random.default_rng(0)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        places = [*range(0, 400, 19), *draw.integers(0, len(content), 20).tolist()]
        for place in places:
            flipped(path, place, place % 8)
            with pytest.raises((ConfigError, ValueError)):
                verify(read_generation(folder))
            path.write_bytes(content)
        start = len(content) // 8192 * 4096
        path.write_bytes(content[:start] + bytes(4096) + content[start + 4096 :])
        with pytest.raises((ConfigError, ValueError)):
            verify(read_generation(folder))
        path.write_bytes(content)
    verify(read_generation(folder))


@pytest.mark.parametrize("damage", ["bit", "cut", "missing", "manifest"])
def test_the_state_before_is_used_where_the_newest_is_damaged(tmp_path: Path, damage: str) -> None:
    path, said = saved(tmp_path), list[str]()
    save_checkpoint(trained(2), path)
    newest = path / "step-00000002"
    file = newest / ("manifest.json" if damage == "manifest" else "tensors-00000.safetensors")
    if damage in {"bit", "manifest"}:
        flipped(file, file.stat().st_size // 2)
    elif damage == "cut":
        os.truncate(file, 5000)
    else:
        file.unlink()
    trainer = new_trainer()
    load_checkpoint(trainer, path, say=said.append)
    assert_same_state(trainer, trained(1))
    assert said[0].startswith(f"{newest}: the checkpoint is damaged (")
    assert said[1] == "resuming from step-00000001, the newest intact checkpoint"
    trainer.step(steps_for(trainer)[1])
    save_checkpoint(trainer, path)
    again = new_trainer()
    load_checkpoint(again, path)
    assert_same_state(again, trained(2))
    assert names(path) == ["damaged-step-00000002", "step-00000001", "step-00000002"]


def test_the_last_ones_and_one_an_hour_are_kept(tmp_path: Path) -> None:
    now = [0.0]
    saver = CheckpointSaver(tmp_path, keep_last=2, keep_hourly=2, clock=lambda: now[0])
    trainer = new_trainer()
    for number in range(9):
        trainer.steps_done, now[0] = number, 1500.0 * number  # three in most hours
        saver.save(trainer)
    saver.finish()
    # of the hours since 0: (0 1 2) (3 4) (5 6 7) (8); the newest two hours before the last two states
    assert names(tmp_path) == ["step-00000003", "step-00000005", "step-00000007", "step-00000008"]


def test_hourly_ones_make_room_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    saver = CheckpointSaver(tmp_path, keep_last=1, keep_hourly=9, clock=lambda: now[0])
    trainer = new_trainer()
    for number in range(4):
        trainer.steps_done, now[0] = number, 4000.0 * number
        saver.save(trainer)
        saver.finish()
        if number == 2:
            assert len(names(tmp_path)) == 3
            # Weights alone are saved here, a third of it: room for the next state, and not for two.
            usage = shutil._ntuple_diskusage(10, 5, state_bytes(trainer) // 2)
            monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
    assert names(tmp_path) == ["step-00000003"]


def test_a_state_saved_again_replaces_itself(tmp_path: Path) -> None:
    path = saved(saved(tmp_path))
    assert names(path) == ["step-00000001"]
    load_checkpoint(new_trainer(), path)


def test_all_is_on_the_disk_before_the_name_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace_path = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        calls.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def move(source: Path, target: Path) -> Path:
        calls.append(f"move to {target.name}")
        return replace_path(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", move)
    saved(tmp_path / "run" / "states")
    partial = f"sync .step-00000001.{os.getpid()}.partial"
    assert sorted(calls[:2]) == sorted([f"sync {tmp_path.name}", "sync run"])  # names of new folders
    assert sorted(calls[2:4]) == ["sync manifest.json", "sync tensors-00000.safetensors"]
    assert calls[4:] == [partial, "move to step-00000001", "sync states"]


@pytest.mark.parametrize("copies_to_host", [True, False])
def test_a_state_that_is_no_number_does_not_replace_a_good_one(tmp_path: Path, copies_to_host: bool) -> None:
    path = saved(tmp_path)
    content = contents(path)
    for value in (math.nan, math.inf, -math.inf):
        trainer = trained(2)
        states_of(trainer)[3].parameter.data.view(-1)[7] = value
        saver = CheckpointSaver(path, copies_to_host=copies_to_host)

        def save(saver: CheckpointSaver = saver, trainer: Trainer = trainer) -> None:
            saver.save(trainer)
            saver.finish()

        with pytest.raises(DivergenceError, match=r"step 2: block.0.\S* holds NaN or infinity; all saved values"):
            save()
    assert contents(path) == content


def test_a_full_disk_is_told_before_the_first_step_before_and_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    content = contents(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DiskSpaceError, match="earlier checkpoints are unchanged"):
            saved(path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(DiskSpaceError, match=r"\(5 bytes\) are free"):
        saved(path, 2)
    with pytest.raises(DiskSpaceError, match=f"3 checkpoints.* need .*{3 * state_bytes(trained(0))} bytes"):
        CheckpointSaver(path).require_room(trained(0), 0)
    assert contents(path) == content


def test_the_bytes_of_a_state_are_known_before_the_first_step(tmp_path: Path) -> None:
    for name, stack in STACKS.items():
        expected = state_bytes(new_trainer(stack))
        save_checkpoint(trained(1, stack), tmp_path / name)
        held = sum(t.num_bytes for t in read_generation(tmp_path / name / "step-00000001").tensors().values())
        assert held == expected, name


@pytest.mark.parametrize("copies_to_host", [True, False])
def test_what_is_saved_is_what_was_when_the_call_returned(tmp_path: Path, copies_to_host: bool) -> None:
    trainer = trained(2)
    saver = CheckpointSaver(tmp_path, copies_to_host=copies_to_host)
    for step in steps_for(trainer)[2:]:
        saver.save(trainer)
        trainer.step(step)
    saver.finish()
    loaded = new_trainer()
    load_checkpoint(loaded, tmp_path)
    assert_same_state(loaded, trained(NUM_STEPS - 1))


def test_where_no_thread_finds_memory_a_state_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: threading.Thread) -> None:
        raise AssertionError("Thread.start waits forever for a thread that got no memory")

    monkeypatch.setattr(tier, "_THREAD_BYTES", 1 << 60)
    monkeypatch.setattr(threading.Thread, "start", never)
    trainer = trained(1)
    saver = CheckpointSaver(tmp_path)
    saver.save(trainer)
    assert len(generations(tmp_path)) == 1
    saver.finish()
    again = trained(0)
    load_checkpoint(again, tmp_path)
    assert_same_state(again, trainer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps_done", math.inf), ("steps_done", "many"), ("steps_done", -1), ("born_after", None), ("born_after", 9),
        ("parameters", {}), ("saved_at", "now"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, name: str, value: object) -> None:
    path = saved(tmp_path)
    rewrite_manifest(path / "step-00000001", lambda state: state.__setitem__(name, value))
    other = trained(2)
    before = {key: tensor.clone() for key, tensor in everything(other).items()}
    with pytest.raises(ConfigError):
        load_checkpoint(other, path)
    for key, tensor in everything(other).items():
        assert_bitwise(tensor, before[key], key)


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)

    def swap(state: dict[str, Any]) -> None:
        first, *_, last = sorted(state["parameters"].values(), key=lambda entry: math.prod(entry["shape"]))
        assert first["shape"] != last["shape"]
        first["tensors"], last["tensors"] = last["tensors"], first["tensors"]

    rewrite_manifest(path / "step-00000001", swap)
    with pytest.raises(ConfigError, match="does not fit this model and optimizer"):
        load_checkpoint(new_trainer(), path)


def rewrite_manifest(folder: Path, change: Any) -> None:
    """Change what a manifest says of the state, checksum and all."""
    content = json.loads((folder / "manifest.json").read_text())["content"]
    change(content["state"])
    (folder / "manifest.json").write_bytes(_text(content))


def test_nothing_but_numbers_and_text_is_read(tmp_path: Path) -> None:
    saved(tmp_path)
    assert {path.suffix for path in (tmp_path / "step-00000001").iterdir()} == {".json", ".safetensors"}
    held = load_file(tmp_path / "step-00000001" / "tensors-00000.safetensors")  # by the format's own library
    for unit in trained(1).model.units():
        for name, parameter in unit.parameters:
            assert torch.equal(held[name], parameter.data)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoint_reads_a_generation(tmp_path: Path) -> None:
    """For a job on many cards, whatever their number: its reader knows the format."""
    trainer = trained(1)
    save_checkpoint(trainer, tmp_path)
    wanted = {
        name: torch.zeros_like(parameter.data) for unit in trainer.model.units() for name, parameter in unit.parameters
    }
    reader = HuggingFaceStorageReader(str(tmp_path / "step-00000001"))
    torch.distributed.checkpoint.load(wanted, storage_reader=reader, no_dist=True)
    for unit in trainer.model.units():
        for name, parameter in unit.parameters:
            assert torch.equal(wanted[name], parameter.data), name


# Another stack

RESIDENT: list[Optimization] = [MixedPrecision()]
OTHERS: dict[str, tuple[list[Optimization], bool]] = {
    "fp32": ([], True),
    "split16": ([MixedPrecision(master="split16")], True),
    "streamed": ([MixedPrecision(), WeightStreaming(), OptimizerOffload()], True),
    "disk": ([MixedPrecision(), WeightStreaming(tier="disk"), OptimizerOffload(tier="disk")], True),
    "on-host": ([MixedPrecision(), OptimizerOffload(update_on="host")], True),
    "int8-weights": ([MixedPrecision(), Int8Weights()], True),
    "int8-rows": ([MixedPrecision(), Int8Weights(dynamic_range=DynamicRange.ROW)], True),
    "int8-states": ([MixedPrecision(), Int8Optimizer()], False),
    "bf16-states": ([MixedPrecision(), Bf16Optimizer()], False),
    "no-master": ([MixedPrecision(master="absent")], False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_goes_on_under_another_stack(tmp_path: Path, name: str) -> None:
    stack, is_exact = OTHERS[name]
    saved_run = trained(3, RESIDENT)
    save_checkpoint(saved_run, tmp_path / "a")
    transfer = DirectTransfer(torch.device("cpu"), disk_folder=tmp_path / "disk")
    other, said = Trainer(MODEL, compose(stack), CONFIG, transfer), list[str]()
    load_checkpoint(other, tmp_path / "a", say=said.append)
    told = [line for line in said if line.startswith("converted: ")]
    assert all("all values exact" in line for line in told) is is_exact, told
    assert [line for line in said if line.startswith("changed: plan.")] or name in {"int8-weights", "int8-rows"}
    before = {name: value.clone() for name, value in exact(saved_run).items()}
    for key, value in exact(other).items():
        if is_exact or name.endswith("states"):
            assert_bitwise(value, before[key], key)
        else:
            assert torch.equal(value, before[key].bfloat16().float())
    loss, expected = (t.step(steps_for(t)[3]).loss for t in (other, saved_run))
    assert loss == pytest.approx(expected, rel=2e-2)  # bfloat16 keeps 8 bits, of which a sum loses few
    save_checkpoint(other, tmp_path / "b")  # and back
    back = new_trainer(RESIDENT)
    load_checkpoint(back, tmp_path / "b")
    values = exact(other)
    for key, value in exact(back).items():
        assert_bitwise(value, values[key], key)
    transfer.close()


def exact(trainer: Trainer) -> dict[str, Tensor]:
    """Return what updates start from, whatever is stored."""
    return {f"{name}[{part.start}]": value.clone() for name, part, value in exact_values(trainer)}
