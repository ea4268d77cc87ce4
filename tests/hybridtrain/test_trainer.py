import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtrain.data.batches import TokenBatch
from hybridtrain.errors import DivergenceError
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.state_store import ParameterState
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.model_config import Experts, ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import GradAccumulation, Int8Optimizer, MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from numerics import assert_bitwise
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED, random_steps

NO_WARMUP = LrSchedule(kind="constant", warmup_steps=0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads gain nothing on tiny tensors and wait for each other on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_trainer(
    model: ModelConfig = GPT2_UNTIED,
    stack: Sequence[Optimization] = (),
    config: TrainerConfig | None = None,
) -> Trainer:
    chosen = config or TrainerConfig(optimizer=AdamWConfig(lr=1e-2), schedule=NO_WARMUP)
    return Trainer(model, compose(stack), chosen, DirectTransfer(torch.device("cpu")))


def batches(num_steps: int, accum_steps: int = 1, batch_size: int = 2) -> list[list[TokenBatch]]:
    return random_steps(GPT2_UNTIED, num_steps, accum_steps, batch_size)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_unit_parameters()}


def master_weights(trainer: Trainer) -> list[Tensor]:
    """Return the exact fp32 value of every parameter."""
    master = trainer.states.formats.values
    values = []
    for state in states_of(trainer):
        assert state.master_weight is None or isinstance(state.master_weight, Tensor)
        master_weight = None if state.master_weight is None else state.master_weight.view(-1)
        values.append(master.load((state.parameter.data.view(-1),), master_weight))
    return values


def states_of(trainer: Trainer) -> list[ParameterState]:
    return [state for _, states in trainer.states.items() for state in states]


def assert_same_weights(actual: Trainer, expected: dict[str, Tensor]) -> None:
    for name, value in weights(actual).items():
        assert_bitwise(value, expected[name], name)


def test_a_step_reports_what_it_did() -> None:
    config = TrainerConfig(optimizer=AdamWConfig(lr=0.5), schedule=LrSchedule(warmup_steps=4, total_steps=10))
    trainer = new_trainer(config=config, stack=[GradAccumulation(grad_accum_steps=2)])
    first, second = (trainer.step(step) for step in batches(2, accum_steps=2))
    assert (first.step, second.step) == (1, 2)
    assert trainer.steps_done == 2
    assert (first.lr, second.lr) == (0.5 / 5, 0.5 * 2 / 5)
    assert first.num_tokens == 2 * 2 * 17
    assert first.grad_norm is not None
    assert first.grad_norm > 0
    # Untrained logits are near zero: the loss is close to that of a uniform guess among 101 tokens.
    assert first.loss == pytest.approx(math.log(101), abs=0.1)


def test_without_clipping_no_norm_is_reported() -> None:
    config = TrainerConfig(optimizer=AdamWConfig(max_grad_norm=0))
    assert new_trainer(config=config).step(batches(1)[0]).grad_norm is None


@pytest.mark.parametrize("model", [GPT2_UNTIED, LLAMA_GROUPED], ids=["gpt2", "llama"])
def test_a_model_learns_a_batch_by_heart(model: ModelConfig) -> None:
    trainer = new_trainer(model)
    (batch,) = batches(1)
    losses = [trainer.step(batch).loss for _ in range(40)]
    assert losses[-1] < losses[0] / 4


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    trainers = [new_trainer(GPT2_TIED_DROPOUT, config=TrainerConfig(seed=seed)) for seed in (3, 3, 4)]
    losses = [[trainer.step(step).loss for step in batches(3)] for trainer in trainers]
    assert losses[0] == losses[1]
    assert_same_weights(trainers[0], weights(trainers[1]))
    assert losses[0][0] != losses[2][0]


def test_the_callers_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    new_trainer(GPT2_TIED_DROPOUT, [MixedPrecision(master="absent")]).step(batches(1)[0])
    assert_bitwise(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "stack",
    [
        [MixedPrecision()],
        [MixedPrecision(master="split16")],
        [Int8Optimizer()],
        [GradAccumulation(grad_accum_steps=2)],
    ],
    ids=["master", "split16", "int8", "accumulation"],
)
def test_every_stack_starts_from_the_same_model(stack: Sequence[Optimization]) -> None:
    for own, plain in zip(master_weights(new_trainer(stack=stack)), master_weights(new_trainer()), strict=True):
        assert_bitwise(own, plain)


def test_weights_are_the_rounded_master() -> None:
    trainer = new_trainer(stack=[MixedPrecision()])
    for step in batches(2):
        trainer.step(step)
    for state in states_of(trainer):
        assert state.master_weight is not None
        assert_bitwise(state.parameter.data, state.master_weight.bfloat16())


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    (both,) = batches(1, accum_steps=2)
    apart = [new_trainer().step([batch]).loss for batch in both]
    assert new_trainer(stack=[GradAccumulation(grad_accum_steps=2)]).step(both).loss == sum(apart) / 2


def test_a_wrong_number_of_micro_batches_is_refused() -> None:
    with pytest.raises(AssertionError, match="one batch per accumulation step"):
        new_trainer(stack=[GradAccumulation(grad_accum_steps=2)]).step(batches(1)[0])


def test_the_gradient_norm_is_the_one_before_clipping() -> None:
    (batch,) = batches(1)
    norms = [
        new_trainer(config=TrainerConfig(optimizer=AdamWConfig(max_grad_norm=limit))).step(batch).grad_norm
        for limit in (1e-3, 1e3)
    ]
    assert norms[0] == norms[1]


def test_a_loss_that_is_no_number_is_refused_and_nothing_changes() -> None:
    trainer = new_trainer(stack=[MixedPrecision()])
    good, bad, after = batches(3)
    trainer.step(good)
    norm = trainer.model.head.norm.weight
    healthy = norm.detach().clone()
    norm.data[0] = math.nan
    before = weights(trainer)
    moments = [[tensor.clone() for slot in state.slots for tensor in slot.tensors] for state in states_of(trainer)]
    with pytest.raises(DivergenceError, match="step 2: loss is nan") as caught:
        trainer.step(bad)
    assert "optimizer.lr (0.01)" in str(caught.value)
    assert trainer.steps_done == 1
    assert_same_weights(trainer, before)
    now = [[tensor for slot in state.slots for tensor in slot.tensors] for state in states_of(trainer)]
    for own, old in zip(now, moments, strict=True):
        for moment, copy in zip(own, old, strict=True):
            assert_bitwise(moment, copy)
    # And the trainer is good for another step, with no gradient left from the refused one.
    norm.data.copy_(healthy)
    assert trainer.step(after) == trainer_after_one_step(good).step(after)


def trainer_after_one_step(batch: Sequence[TokenBatch]) -> Trainer:
    trainer = new_trainer(stack=[MixedPrecision()])
    trainer.step(batch)
    return trainer


def test_a_gradient_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer()
    before = weights(trainer)
    monkeypatch.setattr(GradStore, "norm", lambda _: torch.tensor(math.inf))
    with pytest.raises(DivergenceError, match="step 1: gradient norm is inf"):
        trainer.step(batches(1)[0])
    assert_same_weights(trainer, before)
    assert trainer.steps_done == 0


def test_accumulated_gradients_are_a_mean_or_a_sum_and_the_rate_may_follow() -> None:
    (step,) = batches(1, 2)
    accumulates = GradAccumulation(grad_accum_steps=2)
    mean, total, scaled = (
        new_trainer(stack=[stack]).step(step)
        for stack in (accumulates, replace(accumulates, normalize_gradients=False), replace(accumulates, scale_lr=True))
    )
    assert mean.grad_norm is not None
    assert total.grad_norm == pytest.approx(2 * mean.grad_norm)
    assert (scaled.lr, scaled.grad_norm, total.loss) == (2 * mean.lr, mean.grad_norm, mean.loss)


def test_the_balancing_loss_of_experts_is_a_mean_over_micro_batches_too() -> None:
    experts = Experts(count=4, per_token=2, ffn_width=24, balance_coefficient=1.0)
    model = replace(LLAMA_GROUPED, family="mixtral", experts=experts)
    (step,) = random_steps(model, 1)
    once = new_trainer(model).step(step)
    twice = new_trainer(model, [GradAccumulation(grad_accum_steps=2)]).step(step * 2)
    without = replace(model, experts=replace(experts, balance_coefficient=0.0))
    assert once.grad_norm is not None
    assert twice.grad_norm == pytest.approx(once.grad_norm, rel=1e-5)
    assert new_trainer(without).step(step).grad_norm != pytest.approx(once.grad_norm, rel=1e-3)
