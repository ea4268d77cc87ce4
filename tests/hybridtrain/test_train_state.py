import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtrain.data.batches import TokenBatch
from hybridtrain.errors import ConfigError
from hybridtrain.memory.state_store import ParameterState
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import GradAccumulation, GradientCheckpointing, Int8Optimizer, MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.train_state import load_train_state, save_train_state
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
        parts = (state.parameter.data, state.companion, *state.moments)
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
    assert {state.is_int8 for state in states_of(trained(1, STACKS["int8"]))} == {True, False}


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
    "changes",
    [
        {"model": replace(MODEL, dropout=0.2)},
        {"model": replace(GPT2_UNTIED, width=64)},
        {"stack": [MixedPrecision()]},
        {"stack": [Int8Optimizer()]},
        {"config": replace(CONFIG, seed=6)},
        {"config": replace(CONFIG, optimizer=AdamWConfig(lr=2e-2))},
        {"config": replace(CONFIG, schedule=LrSchedule(total_steps=1000))},
    ],
    ids=["dropout", "model", "stack", "optimizer-state", "seed", "lr", "schedule"],
)
def test_a_state_of_another_configuration_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = saved(tmp_path / "state.pt")
    other = new_trainer(**changes)
    before = {name: tensor.clone() for name, tensor in everything(other).items()}
    with pytest.raises(ConfigError) as caught:
        load_train_state(other, path)
    assert caught.value.source == str(path)
    (fault,) = caught.value.faults
    assert "saved by a run with this model, plan, optimizer, cycle and seed" in fault
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


def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    path, witness = tmp_path / "state.pt", tmp_path / "witness"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return (Path.touch, (witness,))

    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ConfigError, match="not a whole saved state"):
        load_train_state(new_trainer(), path)
    assert not witness.exists()
