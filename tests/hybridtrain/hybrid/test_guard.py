"""A step that diverges right after a jump takes it back and is run again; what cannot be run again is not."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from torch import Tensor

from hybrid_runs import everything, exact_values, fresh_hybrid, hybrid_config, remembers
from hybridtrain.data.batches import TokenBatch
from hybridtrain.errors import DivergenceError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import FusedUpdate, OptimizerOffload, PredictMemory, WeightStreaming
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from tiny_models import GPT2_UNTIED, random_steps
from training_history import assert_all_bitwise

STEPS = random_steps(GPT2_UNTIED, 60)
STACKS: dict[str, list[Optimization]] = {
    "resident": [],
    "away": [OptimizerOffload(), WeightStreaming()],
    "host": [OptimizerOffload(update_on="host")],
    "fused": [FusedUpdate(), WeightStreaming()],
    "predict-cpu": [PredictMemory()],
}


def load(number: int) -> list[TokenBatch]:
    return STEPS[number]


def after_a_jump(stack: Sequence[Optimization], **changes: object) -> HybridTrainer:
    """Return a trainer whose next call is the step after a jump."""
    settings = changes.pop("settings", None)
    more = {} if settings is None else {"settings": settings}
    hybrid = fresh_hybrid(GPT2_UNTIED, [*stack, remembers()], hybrid_config(**changes), **more)
    while hybrid.statistics.jumps == 0:
        hybrid.advance(load)
    assert hybrid._pending is not None
    return hybrid


def poisons(
    hybrid: HybridTrainer, monkeypatch: pytest.MonkeyPatch, *, times: float, value: float = math.nan
) -> list[int]:
    """Let the loss of the next ``times`` forward and backward passes be ``value``; return what counts them."""
    passes: list[int] = []
    real: Callable[..., list[Tensor]] = hybrid.trainer.executor.forward_backward

    def poisoned(*args: object, **kwargs: object) -> list[Tensor]:
        losses = real(*args, **kwargs)
        passes.append(hybrid.trainer.steps_done)
        return [loss * 0 + value for loss in losses] if len(passes) <= times else losses

    monkeypatch.setattr(hybrid.trainer.executor, "forward_backward", poisoned)
    return passes


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("rollback", ["undo", "copy"])
@pytest.mark.parametrize("stack", STACKS)
def test_a_diverging_step_after_a_jump_is_run_again_without_it(
    stack: str, rollback: str, monkeypatch: pytest.MonkeyPatch, *, fuse: bool
) -> None:
    hybrid = after_a_jump(STACKS[stack], rollback=rollback, fuse=fuse)
    twin = after_a_jump(STACKS[stack], rollback=rollback, fuse=fuse)
    poisons(hybrid, monkeypatch, times=1)
    result = hybrid.advance(load)
    assert result.is_rolled_back
    assert result.cost == 6
    assert (hybrid.statistics.rollbacks, hybrid.statistics.divergences) == (1, 1)
    assert hybrid.controller.scale_at(hybrid.trainer.steps_done) == 0.5
    twin.undo()
    expected = twin.advance(load)
    assert (result.loss, result.grad_norm, result.step) == (expected.loss, expected.grad_norm, expected.step)
    for one, other in zip(everything(hybrid.trainer), everything(twin.trainer), strict=True):
        assert_all_bitwise(one, other, "tensor ")


@pytest.mark.parametrize("rollback", ["undo", "copy"])
def test_when_it_diverges_again_weights_are_those_before_the_jump(
    rollback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = after_a_jump([], rollback=rollback, fuse=False)
    twin = after_a_jump([], rollback=rollback, fuse=False)
    twin.undo()
    passes = poisons(hybrid, monkeypatch, times=2)
    with pytest.raises(DivergenceError, match="loss is nan"):
        hybrid.advance(load)
    assert len(passes) == 2
    assert_all_bitwise(exact_values(hybrid.trainer), exact_values(twin.trainer), "value ")
    assert_all_bitwise(everything(hybrid.trainer)[1], everything(twin.trainer)[1], "state ")
    # And it can go on from there.
    assert hybrid.advance(load).loss == twin.advance(load).loss


def test_without_a_jump_before_it_a_divergence_is_the_callers() -> None:
    hybrid = after_a_jump([])
    hybrid.advance(load)
    before = everything(hybrid.trainer)
    with pytest.MonkeyPatch.context() as patch:
        passes = poisons(hybrid, patch, times=1)
        with pytest.raises(DivergenceError):
            hybrid.advance(load)
        assert len(passes) == 1
    for one, other in zip(everything(hybrid.trainer), before, strict=True):
        assert_all_bitwise(one, other, "tensor ")
    assert hybrid.statistics.rollbacks == 0


def test_without_the_guard_a_divergence_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = after_a_jump([], guard=False)
    passes = poisons(hybrid, monkeypatch, times=1)
    with pytest.raises(DivergenceError):
        hybrid.advance(load)
    assert len(passes) == 1


@pytest.mark.parametrize("optimizer", [AdamWConfig(clip="previous"), AdamWConfig(max_grad_norm=0.0)])
def test_a_step_that_was_applied_in_part_is_not_run_again(
    optimizer: AdamWConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks are updated before the loss is known: taking the jump back would start from neither state.
    settings = TrainerConfig(optimizer=optimizer, schedule=LrSchedule(warmup_steps=1, total_steps=20))
    hybrid = after_a_jump([FusedUpdate()], settings=settings)
    passes = poisons(hybrid, monkeypatch, times=1)
    with pytest.raises(DivergenceError, match="already updated"):
        hybrid.advance(load)
    assert len(passes) == 1


def test_a_spike_after_a_jump_is_refused_and_one_without_a_jump_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = fresh_hybrid(GPT2_UNTIED, [remembers()], hybrid_config(warmup_steps=24, full_steps=3))
    while hybrid.statistics.jumps == 0:
        hybrid.advance(load)
    poisons(hybrid, monkeypatch, times=1, value=99.0)
    assert hybrid.advance(load).is_rolled_back
    monkeypatch.undo()
    poisons(hybrid, monkeypatch, times=1, value=99.0)
    result = hybrid.advance(load)
    assert (result.loss, result.is_rolled_back) == (99.0, False)


def test_a_jump_that_makes_the_probe_loss_no_number_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = fresh_hybrid(GPT2_UNTIED, [remembers()], hybrid_config(monitor="probe", probe_every=1))
    while hybrid.phase is not Phase.PREDICT:
        hybrid.advance(load)
    before = exact_values(hybrid.trainer)
    answers = iter([4.6, math.nan])
    monkeypatch.setattr(Trainer, "loss", lambda *_: next(answers))
    result = hybrid.advance(load)
    assert result.is_rolled_back
    assert hybrid.phase is Phase.FULL  # nothing to correct
    for name, value in exact_values(hybrid.trainer).items():
        assert np.allclose(value, before[name], rtol=1e-6, atol=1e-8)


def test_no_jump_is_never_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # With no second moment yet a jump may be of no steps.
    hybrid = fresh_hybrid(GPT2_UNTIED, [remembers()], hybrid_config(monitor="probe", probe_every=1, max_move=0.0))
    while hybrid.phase is not Phase.PREDICT:
        hybrid.advance(load)
    answers = iter([4.6, math.nan])
    monkeypatch.setattr(Trainer, "loss", lambda *_: next(answers))
    assert not hybrid.advance(load).is_rolled_back
