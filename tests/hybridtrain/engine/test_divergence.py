"""A step whose loss or gradient is no number is refused, leaves no trace, and training goes on."""

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridtrain.data.batches import TokenBatch
from hybridtrain.errors import DivergenceError
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import (
    ChunkedLoss,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    MixedPrecision,
    OptimizerOffload,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from numerics import assert_bitwise
from tiny_models import GPT2_UNTIED, random_steps

POISON = 7
"""A token whose embedding is NaN: batches with it diverge, batches without it do not touch it."""
ACCUM_STEPS = 2
STACKS: dict[str, list[Optimization]] = {
    "plain": [GradAccumulation(grad_accum_steps=ACCUM_STEPS)],
    "recompute-vertical": [
        GradAccumulation(grad_accum_steps=ACCUM_STEPS, schedule="vertical"),
        GradientCheckpointing(recompute_every=3),
    ],
    "tight": [
        GradAccumulation(grad_accum_steps=ACCUM_STEPS, accumulator="bfloat16"),
        GradientCheckpointing(recompute_every=1),
        MixedPrecision(master="absent"),
        Int8Optimizer(),
        ChunkedLoss(loss_chunk_tokens=8),
    ],
}


def poisoned_trainer(stack: Sequence[Optimization], observer: StorageLedger | None = None) -> Trainer:
    trainer = Trainer(GPT2_UNTIED, compose(stack), TrainerConfig(), DirectTransfer(torch.device("cpu")), observer)
    with torch.no_grad():
        trainer.model.embedding.token[POISON] = float("nan")
    return trainer


def good_steps() -> list[list[TokenBatch]]:
    steps = random_steps(GPT2_UNTIED, 3, ACCUM_STEPS)
    return [[TokenBatch(token_ids_BT=clean(b), target_ids_BT=b.target_ids_BT) for b in step] for step in steps]


def clean(batch: TokenBatch) -> np.ndarray:
    return np.where(batch.token_ids_BT == POISON, POISON + 1, batch.token_ids_BT)


def bad_step() -> list[TokenBatch]:
    """Return micro-batches of which only the last one diverges."""
    *others, last = good_steps()[0]
    token_ids_BT = last.token_ids_BT.copy()
    token_ids_BT[0, 3] = POISON
    return [*others, TokenBatch(token_ids_BT=token_ids_BT, target_ids_BT=last.target_ids_BT)]


def everything(trainer: Trainer) -> list[Tensor]:
    """Return copies of weights, master weights and moments."""
    states = [state for _, unit_states in trainer.states.items() for state in unit_states]
    tensors = [tensor for state in states for tensor in (state.parameter.data, *state.stored()) if tensor is not None]
    return [tensor.clone() for tensor in tensors]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for index, (tensor, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise(tensor, wanted, f"tensor {index}")


@pytest.mark.parametrize("stack", STACKS)
def test_a_refused_step_changes_nothing(stack: str) -> None:
    trainer = poisoned_trainer(STACKS[stack])
    trainer.step(good_steps()[0])
    before = everything(trainer)
    with pytest.raises(DivergenceError):
        trainer.step(bad_step())
    assert trainer.steps_done == 1
    assert_same(everything(trainer), before)


@pytest.mark.parametrize("stack", STACKS)
def test_training_goes_on_as_if_the_refused_step_had_never_been(stack: str) -> None:
    trainer, undisturbed = (poisoned_trainer(STACKS[stack]) for _ in range(2))
    first, second, third = good_steps()
    trainer.step(first)
    with pytest.raises(DivergenceError):
        trainer.step(bad_step())
    results = [trainer.step(second), trainer.step(third)]
    undisturbed.step(first)
    assert results == [undisturbed.step(second), undisturbed.step(third)]
    assert_same(everything(trainer), everything(undisturbed))


def test_the_very_first_step_may_be_refused() -> None:
    trainer = poisoned_trainer(STACKS["plain"])
    with pytest.raises(DivergenceError):
        trainer.step(bad_step())
    assert trainer.step(good_steps()[0]).step == 1


@pytest.mark.parametrize("stack", STACKS)
def test_a_refused_step_leaves_no_memory_behind(stack: str) -> None:
    ledger = StorageLedger()
    with ledger:
        trainer = poisoned_trainer(STACKS[stack], ledger)
        trainer.step(good_steps()[0])
        before = ledger.live_bytes
        with pytest.raises(DivergenceError):
            trainer.step(bad_step())
        assert ledger.live_bytes == before


def interrupt_after(num_calls: int, module: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a forward pass fail; 20 of 16 projections a micro-batch: something is in the stores by then."""
    forward, calls = module.forward, itertools.count()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == num_calls:
            raise RuntimeError("no memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(module, "forward", interrupted)


@pytest.mark.parametrize("stack", STACKS)
def test_an_interrupted_step_can_be_dropped(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = StorageLedger()
    with ledger:
        trainer = poisoned_trainer(STACKS[stack], ledger)
        trainer.step(good_steps()[0])
        before = ledger.live_bytes
        interrupt_after(20, type(trainer.model.blocks[2].ffn_out), monkeypatch)
        with contextlib.suppress(RuntimeError):  # pytest.raises would keep the frames, and their tensors
            trainer.step(good_steps()[1])
        assert ledger.live_bytes > before
        trainer.executor.drop()
        assert ledger.live_bytes == before


def test_the_message_says_what_is_wrong_what_is_allowed_and_what_to_do() -> None:
    trainer = poisoned_trainer(STACKS["plain"])
    trainer.step(good_steps()[0])
    with pytest.raises(DivergenceError) as raised:
        trainer.step(bad_step())
    message = str(raised.value)
    assert message.startswith("step 2: loss is nan; it must be a finite number. The update was not applied. Lower ")
    assert "optimizer.lr (0.0003)" in message


def test_gradients_that_are_no_numbers_are_refused_under_a_finite_loss() -> None:
    trainer = poisoned_trainer(STACKS["plain"])
    before = everything(trainer)
    hook = trainer.model.head.norm.bias.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(DivergenceError, match=r"^step 1: gradient norm is (inf|nan); "):
        trainer.step(good_steps()[0])
    hook.remove()
    assert_same(everything(trainer), before)
    trainer.step(good_steps()[0])


UNCLIPPED = TrainerConfig(optimizer=AdamWConfig(max_grad_norm=0.0))
PREVIOUS = TrainerConfig(optimizer=AdamWConfig(clip="previous"))
NO_CLIP_NEEDED: dict[str, list[Optimization]] = {
    "plain": [], "offloaded": [OptimizerOffload()], "fused": [FusedUpdate()]
}  # fmt: skip


@pytest.mark.parametrize(
    ("stack", "config", "is_applied"),
    [
        ("plain", UNCLIPPED, False),
        ("offloaded", UNCLIPPED, False),
        ("fused", UNCLIPPED, True),
        ("fused", PREVIOUS, True),
    ],
)
def test_gradients_that_are_no_numbers_are_refused_without_clipping_too(
    stack: str, config: TrainerConfig, is_applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is a number; before, such a step was applied, and saved."""
    trainer = Trainer(GPT2_UNTIED, compose(NO_CLIP_NEEDED[stack]), config, DirectTransfer(torch.device("cpu")))
    first, second, _ = random_steps(GPT2_UNTIED, 3, 1)
    trainer.step(first)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    accumulate = GradStore.accumulate

    def poisoned(store: GradStore, unit: str, grads: Sequence[Tensor]) -> None:
        if unit == "block.1":
            grads[2].view(-1)[3] = math.inf
        accumulate(store, unit, grads)

    monkeypatch.setattr(GradStore, "accumulate", poisoned)
    with pytest.raises(DivergenceError, match="step 2: a gradient is not finite") as caught:
        trainer.step(second)
    name, _ = trainer.model.units()[2].parameters[2]
    assert caught.value.layers == (name,)
    assert caught.value.is_applied is is_applied  # block 2 was updated before block 1 was looked at
    monkeypatch.undo()
    if not is_applied:
        assert_same(list(trainer.model.parameters()), before)
    assert trainer.step(second).step == 2


def test_the_layers_are_known_where_a_pass_before_the_update_finds_them() -> None:
    trainer = poisoned_trainer([FusedUpdate()])
    with pytest.raises(DivergenceError) as caught:
        trainer.step(bad_step()[-1:])
    names = {name for unit in trainer.model.units() for name, _ in unit.parameters}
    assert caught.value.layers
    assert set(caught.value.layers) <= names
