"""Moments are read once for the forecasters: as an independent computation, and without a trace."""

from math import sqrt

import pytest
import torch

from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.hybrid.watch import read_moments
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optimizations import Int8Optimizer, OptimizerOffload, PredictorState
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from tiny_models import GPT2_UNTIED, random_steps


def stepped(stack: list[Optimization], count: int = 2) -> tuple[HybridTrainer, list[float]]:
    trainer = Trainer(GPT2_UNTIED, compose(stack), TrainerConfig(), DirectTransfer(torch.device("cpu")))
    hybrid = HybridTrainer(trainer, HybridConfig(warmup_steps=0, full_steps=1, forecaster="mlp"))
    steps = random_steps(GPT2_UNTIED, count + 1)
    losses = [hybrid.advance(lambda step: steps[step]).loss for _ in range(count)]
    return hybrid, [loss for loss in losses if loss is not None]


def test_statistics_are_those_of_all_moments_together() -> None:
    trainer = stepped([PredictorState()])[0].trainer
    found = read_moments(trainer, trainer.step(random_steps(GPT2_UNTIED, 1)[0]))
    assert found is not None
    states = [state for _, states in trainer.states.items() for state in states]
    m, v = (torch.cat([state.slots[index].tensors[0].flatten() for state in states]).double() for index in (0, 1))
    slow = torch.cat([state.extra[0].tensors[0].flatten() for state in states]).double()
    _, m_rms, v_mean, _, slow_rms, slow_cosine = found
    assert m_rms == pytest.approx(sqrt(float(m.square().mean())), rel=1e-5)
    assert v_mean == pytest.approx(float(v.mean()), rel=1e-5)
    assert slow_rms == pytest.approx(sqrt(float(slow.square().mean())), rel=1e-5)
    assert slow_cosine == pytest.approx(float(m @ slow / (m.norm() * slow.norm())), rel=1e-4)


def test_moments_elsewhere_are_left_alone() -> None:
    trainer = stepped([PredictorState(), OptimizerOffload()])[0].trainer
    assert read_moments(trainer, trainer.step(random_steps(GPT2_UNTIED, 1)[0])) is None


def test_small_vectors_of_an_8_bit_state_still_tell() -> None:
    trainer = stepped([PredictorState(), Int8Optimizer()])[0].trainer
    assert read_moments(trainer, trainer.step(random_steps(GPT2_UNTIED, 1)[0])) is not None


def test_reading_them_changes_no_step() -> None:
    plain = HybridTrainer(
        Trainer(GPT2_UNTIED, compose([PredictorState()]), TrainerConfig(), DirectTransfer(torch.device("cpu"))),
        HybridConfig(warmup_steps=0, full_steps=1, forecaster="ema"),
    )
    steps = random_steps(GPT2_UNTIED, 3)
    assert [plain.advance(lambda step: steps[step]).loss for _ in range(2)] == stepped([PredictorState()])[1]
