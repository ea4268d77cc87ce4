from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridtrain.data.batches import TokenBatch
from hybridtrain.data.byte_tokens import NUM_BYTE_TOKENS
from hybridtrain.errors import DivergenceError
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridvalidation.study.controls import RandomDirection, WeightAverage, poison_gradients, shifted
from hybridvalidation.study.protocol import StudyMethod
from hybridvalidation.study.trials import plan_of
from tiny_models import GPT2_UNTIED, random_batch

STEPS, LR = 5.0, 1e-2
CONFIG = HybridConfig(warmup_steps=1, full_steps=4, fuse=False)
ROUNDING = 1e-4  # relative, of float32 weights moved by a hundredth of themselves and back


def steps_of(count: int) -> list[TokenBatch]:
    rng = np.random.default_rng(0)
    return [random_batch(GPT2_UNTIED, rng) for _ in range(count)]


def trained(count: int = 5) -> Trainer:
    """Return a trainer with moments and a slow average."""
    method = StudyMethod(name="m", description="-", hybrid=CONFIG)
    trainer = Trainer(GPT2_UNTIED, plan_of(method), TrainerConfig(), DirectTransfer(torch.device("cpu")))
    hybrid = HybridTrainer(trainer, CONFIG)
    batches = steps_of(count)
    while trainer.steps_done < count:
        hybrid.advance(lambda step: [batches[step]])
    return trainer


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for _, parameter in trainer.model.named_unit_parameters()]


def moves(trainer: Trainer, kind: str) -> tuple[list[Tensor], float]:
    """Return by how much every parameter moves, and what the jump says."""
    hybrid = HybridTrainer(trainer, CONFIG)
    predictor = hybrid.predictor
    if kind == "random":
        predictor = RandomDirection(CONFIG, trainer)
    before = weights(trainer)
    jump = predictor.jump(STEPS, LR, None)
    return [after - old for after, old in zip(weights(trainer), before, strict=True)], jump.rms


def test_a_random_jump_is_as_long_as_a_predicted_one_in_another_direction() -> None:
    predicted, told = moves(trained(), "slow_gradient")
    random, random_told = moves(trained(), "random")
    assert random_told == pytest.approx(told, rel=ROUNDING)
    compared = 0
    for move, noise in zip(predicted, random, strict=True):
        assert noise.norm().item() == pytest.approx(move.norm().item(), rel=ROUNDING)
        if move.numel() >= 1000:
            compared += 1
            cosine = torch.dot(move.flatten(), noise.flatten()) / (move.norm() * noise.norm())
            assert abs(cosine.item()) < 5 / move.numel() ** 0.5, "no more than chance"
    assert compared > 4
    total = torch.cat([move.flatten() for move in random])
    assert total.norm().item() / (LR * total.numel() ** 0.5) == pytest.approx(told, rel=ROUNDING)


def test_a_random_jump_repeats_whatever_was_drawn_before() -> None:
    first, _ = moves(trained(), "random")
    torch.manual_seed(99)
    again, _ = moves(trained(), "random")
    later, _ = moves(trained(6), "random")
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(first, later, strict=True))


def test_a_shift_exchanges_bytes_one_for_one() -> None:
    every = np.arange(NUM_BYTE_TOKENS, dtype=np.int64)
    batch = TokenBatch(token_ids_BT=every[None, :-1], target_ids_BT=every[None, 1:])
    moved = shifted(batch)
    assert len({*moved.token_ids_BT[0], *moved.target_ids_BT[0]}) == NUM_BYTE_TOKENS
    assert moved.token_ids_BT.min() >= 0
    assert moved.target_ids_BT.max() < NUM_BYTE_TOKENS
    assert np.array_equal(moved.token_ids_BT[0, 1:], moved.target_ids_BT[0, :-1]), "targets are the next tokens still"
    assert not (moved.token_ids_BT == batch.token_ids_BT).any(), "no byte stays what it was"
    assert moved.token_ids_BT.dtype == np.int64


def test_the_mean_of_weights_is_exponential_and_leaves_training_alone() -> None:
    trainer = trained(1)
    average = WeightAverage(trainer)
    expected = weights(trainer)
    batches = steps_of(4)
    plain = trained(1)
    for batch in batches:
        trainer.step([batch])
        plain.step([batch])
        average.update()
        expected = [0.99 * old + 0.01 * new for old, new in zip(expected, weights(trainer), strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(weights(trainer), weights(plain), strict=True))
    average.put_in()
    for own, right in zip(weights(trainer), expected, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-8)


def test_poison_strikes_once_at_its_step() -> None:
    trainer = trained(2)
    poison_gradients(trainer, 3)
    batches: Sequence[TokenBatch] = steps_of(5)
    trainer.step([batches[2]])
    before = weights(trainer)
    with pytest.raises(DivergenceError):
        trainer.step([batches[3]])
    assert all(torch.equal(one, other) for one, other in zip(weights(trainer), before, strict=True))
    done = trainer.step([batches[3]])  # a passing fault
    assert done.step == 4
    assert np.isfinite(done.loss)
