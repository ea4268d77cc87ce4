"""Settings that cannot work are refused before anything runs, each with its name."""

import math
from collections.abc import Callable

import pytest
import torch

from hybrid_runs import fresh_hybrid, hybrid_config, remembers
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim import AdamWConfig, AdEMAMix
from hybridtrain.optim.slow_average import SlowMomentum
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from tiny_models import GPT2_UNTIED

BAD: dict[str, Callable[[], object]] = {
    "full_steps": lambda: HybridConfig(full_steps=0),
    "correct_steps": lambda: HybridConfig(correct_steps=0),
    "correct_steps: 11": lambda: HybridConfig(correct_steps=11),
    "probe_every": lambda: HybridConfig(probe_every=0),
    "predictor_budget_mib": lambda: HybridConfig(predictor_budget_mib=0),
    "warmup_steps": lambda: HybridConfig(warmup_steps=-1),
    "full_steps: 1 leaves predictor 'linear' without a": lambda: HybridConfig(predictor="linear", full_steps=1),
    "confidence_threshold": lambda: HybridConfig(confidence_threshold=1.1),
    "max_predict_steps": lambda: HybridConfig(max_predict_steps=-1.0),
    "max_predict_steps: nan": lambda: HybridConfig(max_predict_steps=math.nan),
    "correction_interval: 0": lambda: HybridConfig(correction_interval=0.0),
    "correction_interval: nan": lambda: HybridConfig(correction_interval=math.nan),
    "correction_interval: 2.0 cannot be used": lambda: HybridConfig(predictor="linear", correction_interval=2.0),
    "strength: -1": lambda: HybridConfig(strength=-1.0),
    "strength: inf": lambda: HybridConfig(strength=math.inf),
    "strength: nan": lambda: HybridConfig(strength=math.nan),
    "divergence_threshold": lambda: HybridConfig(divergence_threshold=0.5),
    "max_move": lambda: HybridConfig(max_move=-0.1),
    "beta: 0": lambda: SlowMomentum(beta=0.0),
    "beta: 1": lambda: SlowMomentum(beta=1.0),
    "beta: nan": lambda: SlowMomentum(beta=math.nan),
    "alpha: -1": lambda: SlowMomentum(alpha=-1.0),
    "alpha: inf": lambda: SlowMomentum(alpha=math.inf),
    "alpha: nan": lambda: SlowMomentum(alpha=math.nan),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_value_is_named(fault: str) -> None:
    with pytest.raises(ValueError, match=f"^{fault}"):
        BAD[fault]()


def test_every_fault_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"full_steps(.|\n)*strength(.|\n)*max_move"):
        HybridConfig(full_steps=-3, correct_steps=1, strength=-1.0, max_move=-1.0)


@pytest.mark.parametrize("predictor", ["slow_gradient", "linear"])
def test_a_stack_without_the_predictors_state_is_refused(predictor: str) -> None:
    fresh_hybrid(GPT2_UNTIED, [remembers(predictor)], hybrid_config(predictor=predictor))
    with pytest.raises(ConfigError, match=f"predictor = '{predictor}'(.|\n)*predictor_state"):
        fresh_hybrid(GPT2_UNTIED, [], hybrid_config(predictor=predictor))


def trainer_with(stack: list[Optimization], slow: SlowMomentum | None = None) -> Trainer:
    settings = TrainerConfig(optimizer=AdamWConfig() if slow is None else AdEMAMix(slow=slow))
    return Trainer(GPT2_UNTIED, compose(stack), settings, DirectTransfer(torch.device("cpu")))


@pytest.mark.parametrize(
    "config",
    [
        hybrid_config(monitor="probe"),
        hybrid_config(monitor="every_step"),
        hybrid_config(predictor="linear"),
        hybrid_config(correction="probe_gradients"),
    ],
)
def test_a_missing_probe_split_is_refused(config: HybridConfig) -> None:
    with pytest.raises(ConfigError, match="needs a probe split"):
        HybridTrainer(trainer_with([remembers(config.predictor)]), config)


@pytest.mark.parametrize("predictor", ["slow_gradient", "linear"])
def test_ademamix_and_a_predictor_do_not_share_one_tensor(predictor: str) -> None:
    trainer = trainer_with([remembers(predictor)], SlowMomentum())
    with pytest.raises(ConfigError, match=r"optimizer\.kind: AdEMAMix"):
        HybridTrainer(trainer, hybrid_config(predictor=predictor), lambda _: [])


def test_ademamix_needs_its_state() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.kind(.|\n)*predictor_state"):
        trainer_with([], SlowMomentum())
