"""Optimizer state that is forgotten in PREDICT: jumps without a second moment, and moments that start anew."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints import save_checkpoint
from hybrid_runs import (
    CONFIGS,
    HybridHistory,
    assert_same_cycles,
    exact_values,
    fresh_hybrid,
    hybrid_config,
    hybrid_history,
    memory_of,
    remembers,
    run_steps,
)
from hybridtrain.checkpoint import load_checkpoint
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.optim import AdamWConfig
from hybridtrain.optim.slow_average import SlowMomentum
from hybridtrain.optimizations import (
    FusedUpdate,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    Lora,
    MixedPrecision,
    OptimizerOffload,
    PredictMemory,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from stacks import ADAFACTOR
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, random_steps
from training_history import SEQ_LEN, assert_all_bitwise, plain_loss, stored_weights

DROP = PredictMemory(**PredictMemory.PRESETS["aggressive"])  # type: ignore[arg-type]
PLACES: dict[str, list[Optimization]] = {
    "weights": [WeightStreaming()],
    "state": [OptimizerOffload()],
    "state-disk": [OptimizerOffload(tier="disk"), WeightStreaming(tier="disk")],
    "updated-on-host": [OptimizerOffload(update_on="host")],
    "fused": [FusedUpdate(), GradientCheckpointing(recompute_every=2)],
    "int8-in-predict": [Int8Weights(active_phases=(Phase.PREDICT,))],
}
STORAGES: dict[str, list[Optimization]] = {
    "fp32": [],
    "bf16-master": [MixedPrecision()],
    "int8-state": [Int8Optimizer()],
    "factored": [ADAFACTOR],
    "adapters": [Lora(rank=4), MixedPrecision()],
}


@cache
def resident(storage: str, config: str) -> HybridHistory:
    return hybrid_history(GPT2_TIED_DROPOUT, [*STORAGES[storage], DROP, memory_of(CONFIGS[config], "float32")],
                          CONFIGS[config])  # fmt: skip


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize(
    ("storage", "place", "config"),
    [
        ("fp32", "weights", "slow-fused"),
        ("fp32", "state", "slow-every-step"),
        ("fp32", "state-disk", "linear-probe"),
        ("fp32", "updated-on-host", "slow-separate"),
        ("bf16-master", "state", "slow-copy"),
        ("bf16-master", "fused", "slow-separate"),
        ("bf16-master", "updated-on-host", "slow-probe"),
        ("int8-state", "state", "slow-separate"),
        ("int8-state", "int8-in-predict", "linear-probe"),
        ("factored", "state", "slow-separate"),
        ("adapters", "state", "slow-separate"),
    ],
)
def test_state_is_forgotten_wherever_it_lives(storage: str, place: str, config: str, tmp_path: Path) -> None:
    stack = [*STORAGES[storage], DROP, *PLACES[place], memory_of(CONFIGS[config], "float32")]
    found = hybrid_history(GPT2_TIED_DROPOUT, stack, CONFIGS[config], disk_folder=tmp_path)
    assert len(found.jumps) >= 2
    assert_same_cycles(found, resident(storage, config))


@pytest.mark.parametrize("config", ["slow-separate", "linear-probe"])
def test_moments_start_anew_and_nothing_else_does(config: str) -> None:
    kept = hybrid_history(GPT2_TIED_DROPOUT, [memory_of(CONFIGS[config], "float32")], CONFIGS[config])
    dropped = resident("fp32", config)
    assert dropped.phases == kept.phases
    assert dropped.losses[:3] == kept.losses[:3]  # up to the first jump
    assert dropped.losses != kept.losses


SLOW = SlowMomentum(beta=0.99, alpha=4.0)
ADAM = AdamWConfig(lr=3e-3, max_grad_norm=0.25, eps=1e-6)


def plain_weights(num_steps: int, jump_steps: dict[int, float]) -> dict[str, Tensor]:
    """Train with plain autograd: AdamW; after a jump along averaged normalized gradients moments are zero."""
    settings = TrainerConfig(optimizer=ADAM, schedule=LrSchedule(warmup_steps=1, total_steps=20))
    model = fresh_hybrid(GPT2_UNTIED, [remembers()], None, settings=settings).trainer.model
    named = dict(model.named_unit_parameters())
    m, v, s = ({name: torch.zeros_like(p) for name, p in named.items()} for _ in range(3))
    born = 0
    for number, (batch,) in enumerate(random_steps(GPT2_UNTIED, num_steps, seq_len=SEQ_LEN), 1):
        plain_loss(model, batch, number, 0).backward()
        lr, updates = ADAM.lr * settings.schedule.factor(number), number - born
        norm = torch.sqrt(sum((p.grad.float() ** 2).sum() for p in named.values()))
        b3 = SLOW.beta_at(number, 20, ADAM.beta1)
        for name, p in named.items():
            g = p.grad * min(1.0, ADAM.max_grad_norm / (norm.item() + 1e-6))
            m[name].mul_(ADAM.beta1).add_(g, alpha=1 - ADAM.beta1)
            v[name].mul_(ADAM.beta2).add_(g * g, alpha=1 - ADAM.beta2)
            root = (v[name] / (1 - ADAM.beta2**updates)).sqrt() + ADAM.eps
            s[name].mul_(b3).add_(g / root, alpha=1 - b3)
            decay = ADAM.weight_decay if p.dim() >= 2 else 0.0
            p.data -= lr * (m[name] / (1 - ADAM.beta1**updates) / root + decay * p.data)
            if number in jump_steps:
                p.data -= lr * jump_steps[number] * s[name].clamp(-1, 1)
                m[name].zero_()
                v[name].zero_()
            p.grad = None
        born = number if number in jump_steps else born
    return {name: p.detach() for name, p in named.items()}


def test_a_jump_is_that_along_the_average_of_normalized_gradients() -> None:
    settings = TrainerConfig(optimizer=ADAM, schedule=LrSchedule(warmup_steps=1, total_steps=20))
    config = hybrid_config(full_steps=3, slow=SLOW, max_move=math.inf, max_relative_move=math.inf)
    hybrid = fresh_hybrid(GPT2_UNTIED, [DROP, remembers()], config, settings=settings)
    results = run_steps(hybrid, 8)
    jumps = {result.step: result.predicted_steps for result in results if result.is_predicted}
    assert jumps == pytest.approx({step: 3 * SLOW.alpha * step / 20 for step in (4, 7)})
    plain, found = plain_weights(8, jumps), stored_weights(hybrid.trainer)
    for name, weight in found.items():
        gap = (weight - plain[name]).abs()
        # fp32 rounding; where v is near zero, or was zero one update ago, it turns that of a gradient into a full step.
        assert gap.mean() <= 1e-4 * ADAM.lr, f"{name}: {gap.mean():.3g}"
    without = plain_weights(8, dict.fromkeys(jumps, 0.0))
    assert min((without[name] - plain[name]).abs().mean() for name in plain) > 0.02 * ADAM.lr


@pytest.mark.parametrize("rollback", ["undo", "copy"])
@pytest.mark.parametrize("predictor", ["slow_gradient", "linear"])
def test_a_jump_is_taken_back_without_its_moments(predictor: str, rollback: str) -> None:
    config = hybrid_config(predictor=predictor, rollback=rollback, guard=False)
    hybrid = fresh_hybrid(GPT2_UNTIED, [DROP, OptimizerOffload(), remembers(predictor)], config)
    steps = random_steps(GPT2_UNTIED, 20, seq_len=SEQ_LEN)
    while hybrid.phase is not Phase.PREDICT:
        hybrid.advance(lambda number: steps[number])
    before = exact_values(hybrid.trainer)
    hybrid.trainer.enter_phase(Phase.PREDICT)
    hybrid._last_lr = 1e-3
    hybrid.predictor.steps_of_jump(hybrid.trainer.steps_done, 2, 1.0)
    jump, _ = hybrid._jump(1.5, (), math.nan)
    hybrid._jumped(hybrid.controller, jump)
    moved = exact_values(hybrid.trainer)
    hybrid.undo()
    for name, value in exact_values(hybrid.trainer).items():
        assert (moved[name] != before[name]).any()
        if rollback == "copy":
            assert torch.equal(value, before[name]), name
        else:  # x - d + d: a last place of the larger one
            torch.testing.assert_close(value, before[name], rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("config", ["slow-copy", "slow-probe", "linear-probe"])
def test_state_is_away_until_the_next_update(config: str) -> None:
    ledger, steps = StorageLedger(), random_steps(GPT2_UNTIED, 20, seq_len=SEQ_LEN)
    with ledger:
        stack = [DROP, memory_of(CONFIGS[config], "float32")]
        hybrid = fresh_hybrid(GPT2_UNTIED, stack, CONFIGS[config], observer=ledger)
        while hybrid.phase is not Phase.PREDICT:
            hybrid.advance(steps.__getitem__)
        before = ledger.live_bytes
        hybrid.trainer.enter_phase(Phase.PREDICT)
        within = ledger.live_bytes
        ledger.begin_step()
        hybrid.advance(lambda _: [])
        assert before - within == 2 * 4 * GPT2_UNTIED.num_params
        assert ledger.live_bytes == within
        hybrid.advance(steps.__getitem__)
        assert ledger.live_bytes == before


def saved_after_a_jump(stack: list[Optimization], folder: Path) -> HybridTrainer:
    hybrid = fresh_hybrid(GPT2_UNTIED, stack, CONFIGS["slow-separate"])
    steps = random_steps(GPT2_UNTIED, 20, seq_len=SEQ_LEN)
    while not hybrid.statistics.jumps:
        hybrid.advance(lambda number: steps[number])
    save_checkpoint(hybrid.trainer, folder, hybrid)
    return hybrid


@pytest.mark.parametrize("place", [[], [OptimizerOffload()]], ids=["device", "host"])
def test_a_run_saved_while_its_state_is_forgotten_goes_on_to_the_bit(place: list[Optimization], tmp_path: Path) -> None:
    stack = [*place, DROP, remembers()]
    saved = saved_after_a_jump(stack, tmp_path)
    resumed = fresh_hybrid(GPT2_UNTIED, stack, CONFIGS["slow-separate"])
    load_checkpoint(resumed.trainer, tmp_path, resumed)
    ends = [(run_steps(hybrid, 6), exact_values(hybrid.trainer)) for hybrid in (saved, resumed)]
    losses = [[(result.phase, result.loss, result.predicted_steps) for result in results] for results, _ in ends]
    assert losses[0] == losses[1]
    assert_all_bitwise(ends[0][1], ends[1][1], "weight ")


@pytest.mark.parametrize("stacks", [(DROP, PredictMemory()), (PredictMemory(), DROP)], ids=["to cpu", "to drop"])
def test_an_average_of_other_gradients_is_not_taken_over(stacks: tuple[Optimization, ...], tmp_path: Path) -> None:
    saved_after_a_jump([stacks[0], remembers()], tmp_path)
    resumed = fresh_hybrid(GPT2_UNTIED, [stacks[1], remembers()], CONFIGS["slow-separate"])
    with pytest.raises(ConfigError, match=r"slow average: saved with predict_memory's optimizer_state of"):
        load_checkpoint(resumed.trainer, tmp_path, resumed)
