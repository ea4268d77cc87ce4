"""Synchronization without a card: training on copies that come as late as they may, or at any moment before."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from checkpoints import save_checkpoint
from hybridtrain.checkpoint import load_checkpoint
from hybridtrain.errors import DivergenceError
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.tier import Ticket
from hybridtrain.trainer import Trainer
from lazy_transfer import ComputeWatch, LazyTransfer, RaceError
from stacks import ACCUM_STEPS, BASE, GPT2, MODELS, PLACES, STORAGE, STREAMING_STACKS, build
from tiny_models import GPT2_TIED_DROPOUT, random_steps
from training_history import (
    assert_all_bitwise,
    assert_same_training,
    fresh_trainer,
    plain_history,
    resident_history,
    stored_state,
    stored_weights,
    trained_history,
)

NOTHING_TO_COPY = {"weights-2-ahead-1-resident-4-host", "fused", "fused-recompute"}
LATE_STACKS = [name for name in STREAMING_STACKS if name not in NOTHING_TO_COPY]
ROUNDED = [(storage, place) for storage in STORAGE for place in ("updated-on-host-weights", "fused-all", "all")]
WHOLE_STACKS = [name for name in STREAMING_STACKS if "everything" in name]


def assert_trains_like_plain_autograd(model: str, stack: str, accum_steps: int, transfer: LazyTransfer) -> None:
    with ComputeWatch(transfer):
        history = trained_history(MODELS[model], build(stack, accum_steps), accum_steps, transfer=transfer)
    assert transfer.hazards == []
    assert transfer.most_pending > 0  # otherwise nothing was late
    assert_same_training(history, plain_history(MODELS[model], accum_steps))


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("stack", LATE_STACKS)
def test_training_on_the_latest_copies_equals_plain_autograd(stack: str, tmp_path: Path) -> None:
    assert_trains_like_plain_autograd("gpt2-tied-dropout", stack, 2, LazyTransfer(disk_folder=tmp_path))


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("stack", WHOLE_STACKS)
@pytest.mark.parametrize(("model", "accum_steps"), [("gpt2-untied", 1), ("llama-grouped", 3)])
def test_other_models_do_not_care_either(accum_steps: int, model: str, stack: str, tmp_path: Path) -> None:
    assert_trains_like_plain_autograd(model, stack, accum_steps, LazyTransfer(disk_folder=tmp_path))


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("stack", WHOLE_STACKS)
def test_training_on_copies_at_any_moment_equals_plain_autograd(stack: str, seed: int, tmp_path: Path) -> None:
    transfer = LazyTransfer(disk_folder=tmp_path, seed=seed)
    assert_trains_like_plain_autograd("gpt2-tied-dropout", stack, 2, transfer)


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize(("storage", "place"), ROUNDED)
def test_rounded_storage_on_the_latest_copies_equals_the_device(storage: str, place: str, tmp_path: Path) -> None:
    # Copies at once equal the device as well: test_streaming_equals_resident.
    stack = [*BASE, *STORAGE[storage], *PLACES[place]]
    transfer = LazyTransfer(disk_folder=tmp_path)
    with ComputeWatch(transfer):
        late = trained_history(GPT2, stack, ACCUM_STEPS, transfer=transfer)
    assert transfer.hazards == []
    resident = resident_history(GPT2, storage)
    assert_same_training(late, resident)
    assert_all_bitwise(late.state, resident.state, "state ")


SAVED_STACKS = ["everything-vertical", "everything-disk", "state-updated-on-host-weights-streamed", "fused-streamed"]


@pytest.mark.parametrize("stack", SAVED_STACKS)
def test_a_state_saved_and_loaded_between_late_copies_continues_to_the_bit(stack: str, tmp_path: Path) -> None:
    steps = random_steps(GPT2_TIED_DROPOUT, 4, 3)
    whole = fresh_trainer(GPT2_TIED_DROPOUT, build(stack, 3), LazyTransfer(disk_folder=tmp_path / "whole"))
    resumed = fresh_trainer(GPT2_TIED_DROPOUT, build(stack, 3), LazyTransfer(disk_folder=tmp_path / "resumed"))
    for step in steps[:2]:
        whole.step(step)
    save_checkpoint(whole, tmp_path / "state.pt")
    load_checkpoint(resumed, tmp_path / "state.pt")
    assert [resumed.step(step) for step in steps[2:]] == [whole.step(step) for step in steps[2:]]
    for trainer in (whole, resumed):
        assert isinstance(trainer.transfer, LazyTransfer)
        trainer.transfer.finish()
    assert_all_bitwise(stored_weights(resumed), stored_weights(whole), "weight ")
    assert_all_bitwise(stored_state(resumed), stored_state(whole), "state ")
    for trainer in (whole, resumed):
        trainer.transfer.close()


def forgets_to_wait(_engine: CopyEngine, _ticket: Ticket) -> None:
    pass


def fetches_at_once(engine: CopyEngine, target: Tensor, source: object, offset: int = 0, after: object = ()) -> Ticket:  # noqa: ARG001
    source.last_store, kept = None, source.last_store
    ticket = FETCH(engine, target, source, offset, [])
    source.last_store = kept
    return ticket


def fetches_over_compute(
    engine: CopyEngine, target: Tensor, source: object, offset: int = 0, after: object = ()
) -> Ticket:
    return FETCH(engine, target, source, offset, list(after)[1:])


FETCH = CopyEngine.fetch
MUTANTS: dict[str, tuple[str, Callable[..., object], str]] = {
    "no wait": ("wait", forgets_to_wait, "everything-vertical"),
    "fetch at once": ("fetch", fetches_at_once, "weights-2-ahead-1-resident-0-host"),
    "fetch over compute": ("fetch", fetches_over_compute, "weights-2-ahead-1-resident-0-host"),
    "fetch boundaries at once": ("fetch", fetches_at_once, "boundaries-host-vertical-recompute-1"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_copy_engine_that_forgets_something_is_found_out(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, method, stack = MUTANTS[mutant]
    monkeypatch.setattr(CopyEngine, name, method)
    transfer = LazyTransfer()
    trainer = fresh_trainer(GPT2_TIED_DROPOUT, build(stack, 3), transfer)
    with ComputeWatch(transfer), pytest.raises(RaceError):
        run_steps(trainer, 2)


def run_steps(trainer: Trainer, num_steps: int) -> None:
    for step in random_steps(GPT2_TIED_DROPOUT, num_steps, 3):
        trainer.step(step)


@pytest.mark.parametrize("stack", ["everything-vertical", "weights-2-ahead-1-resident-0-host"])
def test_without_waiting_training_reads_garbage(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same fault without the watch: values alone give it away.
    monkeypatch.setattr(CopyEngine, "wait", forgets_to_wait)
    trainer = fresh_trainer(GPT2_TIED_DROPOUT, build(stack, 3), LazyTransfer())
    with pytest.raises((RaceError, DivergenceError)):
        run_steps(trainer, 2)
