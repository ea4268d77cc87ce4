import math
import os
import pickle
import re
import resource
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridtrain.config.encode import JsonValue
from hybridtrain.data.batches import TokenBatch
from hybridtrain.errors import ConfigError, DiskSpaceError, DivergenceError
from hybridtrain.memory.state_store import ParameterState
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import GradAccumulation, GradientCheckpointing, Int8Optimizer, MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.train_state import load_train_state, previous_state, save_train_state
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
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


def saved(path: Path, num_steps: int = 1) -> Path:
    save_train_state(trained(num_steps), path)
    return path


@pytest.mark.parametrize("num_saved", [0, 1, 3])
@pytest.mark.parametrize("name", STACKS)
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, name: str, num_saved: int) -> None:
    path = tmp_path / "state.pt"
    whole = new_trainer(STACKS[name])
    results = []
    for number, step in enumerate(steps_for(whole)):
        if number == num_saved:
            save_train_state(whole, path)
        results.append(whole.step(step))
    resumed = new_trainer(STACKS[name])
    load_train_state(resumed, path)
    assert resumed.steps_done == num_saved
    assert [resumed.step(step) for step in steps_for(resumed)[num_saved:]] == results[num_saved:]
    assert_same_state(resumed, whole)


def test_the_8_bit_stack_has_both_kinds_of_moments() -> None:
    states = states_of(trained(1, STACKS["int8"]))
    assert {any(stored.dtype is torch.uint8 for stored in state.stored()) for state in states} == {True, False}


@pytest.mark.parametrize("num_saved", [0, 2])
def test_loading_undoes_what_was_trained_since(tmp_path: Path, num_saved: int) -> None:
    path = saved(tmp_path / "state.pt", num_saved)
    trainer, whole = trained(4), trained(num_saved)
    load_train_state(trainer, path)
    step = steps_for(trainer)[num_saved]
    assert trainer.step(step) == whole.step(step)
    assert_same_state(trainer, whole)


def test_loading_leaves_the_file_alone(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt")
    content = path.read_bytes()
    trainer = new_trainer()
    load_train_state(trainer, path)
    trainer.step(steps_for(trainer)[1])
    assert path.read_bytes() == content


def test_folders_are_made(tmp_path: Path) -> None:
    assert saved(tmp_path / "a" / "b" / "state.pt").is_file()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    path = saved(tmp_path / "state.pt")
    content = path.read_bytes()

    def save_half(_content: object, target: Path) -> None:
        target.write_bytes(content[: len(content) // 2])
        raise interruption

    monkeypatch.setattr(torch, "save", save_half)
    with pytest.raises(BaseException, match=r"^$|No space") as caught:
        save_train_state(trained(2), path)
    assert isinstance(caught.value, KeyboardInterrupt | OSError)
    assert path.read_bytes() == content
    assert [item.name for item in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": replace(MODEL, dropout=0.2)}, "model.dropout: 0.1 in the run that was saved, 0.2 now"),
        ({"model": replace(GPT2_UNTIED, width=64)}, "model.tied: true in the run that was saved, false now"),
        ({"stack": [MixedPrecision()]}, 'plan.compute_dtype: "float32" in the run that was saved, "bfloat16" now'),
        (
            {"stack": [Int8Optimizer()]},
            'plan.optim_state.codec: "float32" in the run that was saved, "int8_blocks" now',
        ),
        ({"config": replace(CONFIG, seed=6)}, "seed: 5 in the run that was saved, 6 now"),
        (
            {"config": replace(CONFIG, optimizer=AdamWConfig(lr=2e-2))},
            "optimizer.lr: 0.01 in the run that was saved, 0.02 now",
        ),
        (
            {"config": replace(CONFIG, schedule=LrSchedule(total_steps=1000))},
            "schedule.total_steps: 8 in the run that was saved, 1000 now",
        ),
    ],
    ids=["dropout", "model", "stack", "optimizer-state", "seed", "lr", "schedule"],
)
def test_a_state_of_another_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = saved(tmp_path / "state.pt")
    other = new_trainer(**changes)
    before = {name: tensor.clone() for name, tensor in everything(other).items()}
    with pytest.raises(ConfigError) as caught:
        load_train_state(other, path)
    assert caught.value.source == str(path)
    assert any(fault.startswith(f"{words}; resume with the saved value") for fault in caught.value.faults)
    for name, tensor in everything(other).items():
        assert_bitwise(tensor, before[name], name)


def test_a_missing_state_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no saved state to resume from; start without --resume"):
        load_train_state(new_trainer(), tmp_path / "state.pt")


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "folder"])
def test_a_damaged_state_is_refused_and_named(tmp_path: Path, damage: str) -> None:
    path = saved(tmp_path / "state.pt")
    content = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "text": b"not a state"}[damage])
    with pytest.raises(ConfigError) as caught:
        load_train_state(new_trainer(), path)
    assert caught.value.source == str(path)
    assert "not a whole saved state" in caught.value.faults[0]


@pytest.mark.parametrize(
    "content",
    [
        torch.zeros(3),
        [1, 2],
        {"schema": 1},
        {"weight": torch.zeros(3)},
    ],
    ids=["tensor", "list", "no-run", "state-dict"],
)
def test_a_file_of_torch_that_is_no_state_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "state.pt"
    torch.save(content, path)
    with pytest.raises(ConfigError) as caught:
        load_train_state(new_trainer(), path)
    assert caught.value.source == str(path)


def test_a_state_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt")
    content = torch.load(path, weights_only=True)
    del content["tensors"]["block.1/0/weight0"]
    torch.save(content, path)
    with pytest.raises(ConfigError) as caught:
        load_train_state(new_trainer(), path)
    assert caught.value.source == str(path)


def test_other_data_are_refused_by_name_and_a_renamed_corpus_is_not(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    data: dict[str, JsonValue] = {"data.digest": "aa", "data.name": "text.txt", "data.train_tokens": 100}
    save_train_state(trained(1), path, data=data)
    load_train_state(new_trainer(), path, data=data | {"data.name": "moved.txt"})
    with pytest.raises(ConfigError) as caught:
        load_train_state(new_trainer(), path, data=data | {"data.digest": "bb", "data.name": "embedded"})
    assert [fault.partition(";")[0] for fault in caught.value.faults] == [
        'data.digest: "aa" in the run that was saved, "bb" now',
        'data.name: "text.txt" in the run that was saved, "embedded" now',
    ]
    with pytest.raises(ConfigError, match=r"data.train_tokens: 100 in the run that was saved, absent now"):
        load_train_state(new_trainer(), path)


# Damage that torch accepts, a second generation, and what must not be saved


def spans(path: Path) -> dict[str, tuple[int, int]]:
    """Return where the content of each tensor lies in the file."""
    names = list(torch.load(path, weights_only=True)["tensors"])
    found = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            record = entry.filename.rpartition("/data/")[2]
            with archive.open(entry):  # the reader has skipped the entry's own header
                assert archive.fp is not None
                start = archive.fp.tell()
            if record.isdecimal():
                found[names[int(record)]] = (start, entry.file_size)
    assert found.keys() == set(names)
    return found


@pytest.mark.parametrize("damage", ["bit", "zeros"])
def test_damage_in_any_tensor_is_found_and_the_tensor_named(tmp_path: Path, damage: str) -> None:
    path = saved(tmp_path / "state.pt", 2)
    content = path.read_bytes()
    for name, (start, size) in spans(path).items():
        changed = bytearray(content)
        if damage == "bit":
            changed[start + size // 2] ^= 1
        elif any(content[start : start + size]):
            changed[start : start + size] = bytes(size)
        else:
            continue
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=re.escape(f"'{name}' is not as it was written")):
            load_train_state(new_trainer(), path)


def test_no_flipped_bit_anywhere_gives_another_state(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt", 2)
    content, whole = path.read_bytes(), trained(2)
    places = np.random.default_rng(0).integers(0, len(content), 25).tolist()
    places += np.random.default_rng(1).integers(len(content) - 9000, len(content), 25).tolist()  # the archive's names
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 16
        path.write_bytes(changed)
        trainer = new_trainer()
        with suppress(ConfigError):
            load_train_state(trainer, path)
            assert_same_state(trainer, whole)  # a bit of padding


@pytest.mark.parametrize("damage", ["bit", "cut", "missing"])
def test_the_state_before_is_used_where_the_newest_is_damaged(tmp_path: Path, damage: str) -> None:
    path, said = saved(tmp_path / "state.pt"), list[str]()
    save_train_state(trained(2), path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "bit" else content[:5000])
    if damage == "missing":  # killed between the two renames
        path.unlink()
    trainer = new_trainer()
    load_train_state(trainer, path, say=said.append)
    assert_same_state(trainer, trained(1))
    (sentence,) = said
    assert sentence.startswith(f"{path}: ")
    assert sentence.endswith("going on from state.previous.pt, saved after step 1")
    trainer.step(steps_for(trainer)[1])
    save_train_state(trainer, path)  # the good one stays the one before
    again = new_trainer()
    load_train_state(again, previous_state(path))
    assert again.steps_done == 1
    assert path.with_name("state.pt.damaged").exists() == (damage != "missing")


def test_only_two_states_are_kept(tmp_path: Path) -> None:
    for number in range(3):
        saved(tmp_path / "state.pt", number)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["state.previous.pt", "state.pt"]


def test_file_and_folder_are_on_the_disk_before_the_next_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace_path = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        calls.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name.replace(str(os.getpid()), 'PID')}")
        fsync(descriptor)

    def move(source: Path, target: Path) -> Path:
        calls.append(f"{source.name.replace(str(os.getpid()), 'PID')} to {target.name}")
        return replace_path(source, target)

    path = saved(tmp_path / "state.pt")
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", move)
    saved(path, 2)
    assert calls == [
        "sync .state.pt.PID.partial", "state.pt to state.previous.pt", ".state.pt.PID.partial to state.pt",
        f"sync {tmp_path.name}",
    ]  # fmt: skip


def test_a_state_that_is_no_number_does_not_replace_a_good_one(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.pt")
    content = path.read_bytes()
    for value in (math.nan, math.inf, -math.inf):
        trainer = trained(2)
        states_of(trainer)[3].parameter.data.view(-1)[7] = value
        with pytest.raises(DivergenceError, match=r"step 2: block.0/1/weight0 holds a value that is no finite number"):
            save_train_state(trainer, path)
    assert path.read_bytes() == content


def test_a_full_disk_is_told_before_and_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "state.pt")
    content = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DiskSpaceError, match="the one saved before is as it was"):
            saved(path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(DiskSpaceError, match="5 B are free"):
        saved(path, 2)
    assert path.read_bytes() == content
    assert [item.name for item in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps_done", math.inf), ("steps_done", "many"), ("born_after", None), ("born_after", ...),
        ("block.1/0/weight0", torch.zeros(3)), ("block.1/2/state0", torch.zeros(64, 64, dtype=torch.float64)),
        ("block.1/0/weight0", [1.0] * 64),
    ],
    ids=["infinite", "text", "none", "missing", "shape", "dtype", "list"],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, name: str, value: object) -> None:
    path = saved(tmp_path / "state.pt")
    content = torch.load(path, weights_only=True)
    part = content["tensors"] if "/" in name else content
    if value is ...:
        del part[name]
    else:
        part[name] = value
    torch.save(content, path)
    other = trained(2)
    before = {key: tensor.clone() for key, tensor in everything(other).items()}
    with pytest.raises(ConfigError):
        load_train_state(other, path)
    for key, tensor in everything(other).items():
        assert_bitwise(tensor, before[key], key)


def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    path, witness = tmp_path / "state.pt", tmp_path / "witness"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return (Path.touch, (witness,))

    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ConfigError, match="not a whole saved state"):
        load_train_state(new_trainer(), path)
    assert not witness.exists()
