"""The executor against plain autograd, to the bit: losses, gradients, norms, weights, in every schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.data.batches import TokenBatch
from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.update import Update
from hybridtrain.memory.grad_store import GradStore
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.block_model import BlockModel
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import ChunkedLoss, GradAccumulation, GradientCheckpointing
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from numerics import assert_bitwise
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED, random_steps

MODELS = {"gpt2-tied-dropout": GPT2_TIED_DROPOUT, "gpt2-untied": GPT2_UNTIED, "llama-grouped": LLAMA_GROUPED}
NUM_STEPS = 5
CONFIG = TrainerConfig()
Direction = Literal["horizontal", "vertical"]


@dataclass
class History:
    """What five steps of training left behind."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each step, before clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)


def fresh_trainer(config: ModelConfig, stack: Sequence[Optimization]) -> Trainer:
    return Trainer(config, compose(stack), CONFIG, DirectTransfer(torch.device("cpu")))


@cache
def plain_history(config: ModelConfig, accum_steps: int) -> History:
    """Train as anyone would: one graph and ``backward()`` a micro-batch, torch's clipping and optimizer."""
    model = fresh_trainer(config, []).model
    named = dict(model.named_unit_parameters())
    optimizer = plain_optimizer(list(named.values()))
    history = History()
    for step, batches in enumerate(random_steps(config, NUM_STEPS, accum_steps), 1):
        losses = [plain_loss(model, batch, step, index) for index, batch in enumerate(batches)]
        for loss in losses:
            (loss / len(batches)).backward()
        history.losses.append(sum(loss.item() for loss in losses) / len(losses))
        history.grads.append({name: parameter.grad.clone() for name, parameter in named.items()})
        norm = nn.utils.clip_grad_norm_(named.values(), CONFIG.optimizer.max_grad_norm)
        history.norms.append(norm.item())
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.optimizer.lr * CONFIG.schedule.factor(step)
        optimizer.step()
        optimizer.zero_grad()
    history.weights = {name: parameter.detach() for name, parameter in named.items()}
    return history


def plain_loss(model: BlockModel, batch: TokenBatch, step: int, micro_batch: int) -> Tensor:
    """Return the loss; only a model with dropout is seeded, by the engine's rule: one key per unit."""
    hidden_BTD = torch.from_numpy(batch.token_ids_BT)
    for unit, module in enumerate([model.embedding, *model.blocks]):
        if model.config.dropout:
            torch.manual_seed(random_key(random_key(CONFIG.seed, step, 0), micro_batch, unit))
        hidden_BTD = module(hidden_BTD)
    return model.head(hidden_BTD, torch.from_numpy(batch.target_ids_BT))


def plain_optimizer(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    settings = CONFIG.optimizer
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True)


def executor_history(
    config: ModelConfig, stack: Sequence[Optimization], accum_steps: int, monkeypatch: pytest.MonkeyPatch
) -> History:
    history = History()
    clip = Update.clip

    def keep_then_clip(update: Update, grads: GradStore) -> Tensor | None:
        history.grads.append(
            {
                name: grad.clone()
                for unit in update.units
                for (name, _), grad in zip(unit.parameters, grads._grads[unit.name], strict=True)
            }
        )
        return clip(update, grads)

    monkeypatch.setattr(Update, "clip", keep_then_clip)
    trainer = fresh_trainer(config, stack)
    for batches in random_steps(config, NUM_STEPS, accum_steps):
        result = trainer.step(batches)
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.weights = {name: parameter.detach() for name, parameter in trainer.model.named_unit_parameters()}
    return history


def assert_same_history(actual: History, expected: History) -> None:
    for step in range(NUM_STEPS):
        assert_all_bitwise(actual.grads[step], expected.grads[step], f"step {step + 1} grad ")
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    assert_all_bitwise(actual.weights, expected.weights, "weight ")


def assert_all_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert_bitwise(tensor, expected[name], what + name)


def recompute(interval: int) -> list[Optimization]:
    return [GradientCheckpointing(interval=interval)] if interval else []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accum_steps", [1, 3])
@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
@pytest.mark.parametrize("interval", [0, 1, 2, 3])  # of 4 blocks: 3 leaves a shorter last segment
def test_training_equals_plain_autograd(
    name: str, accum_steps: int, schedule: Direction, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = [GradAccumulation(steps=accum_steps, schedule=schedule), *recompute(interval)]
    actual = executor_history(MODELS[name], stack, accum_steps, monkeypatch)
    assert_same_history(actual, plain_history(MODELS[name], accum_steps))


@pytest.mark.parametrize("interval", [0, 1])
def test_a_vertical_chunked_tied_loss_equals_the_horizontal_one(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The deferred gradient of the tied weight runs the slices again; plain autograd knows no slices, so the
    # schedule that does not defer is the reference.
    histories = [
        executor_history(
            GPT2_TIED_DROPOUT,
            [GradAccumulation(steps=3, schedule=schedule), ChunkedLoss(chunk_tokens=8), *recompute(interval)],
            3,
            monkeypatch,
        )
        for schedule in ("horizontal", "vertical")
    ]
    assert_same_history(*histories)


@pytest.mark.parametrize("interval", [0, 2])
def test_a_model_without_dropout_is_never_seeded(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fresh_trainer(GPT2_UNTIED, recompute(interval))
    seeds: list[int] = []
    monkeypatch.setattr(trainer._transfer, "seed", seeds.append)
    trainer.step(random_steps(GPT2_UNTIED, 1, 1)[0])
    units_of_the_update = len(trainer.model.units())  # stochastic rounding may draw there
    assert len(seeds) == units_of_the_update


def test_dropout_does_not_depend_on_the_random_state_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    first = executor_history(GPT2_TIED_DROPOUT, [], 1, monkeypatch)
    torch.manual_seed(2)
    assert_same_history(executor_history(GPT2_TIED_DROPOUT, [], 1, monkeypatch), first)


def test_dropout_differs_between_blocks_micro_batches_and_steps() -> None:
    # Guards the oracle: with one mask for all, the equality above would hold for a wrong engine too.
    trainer = fresh_trainer(GPT2_TIED_DROPOUT, [GradAccumulation(steps=2)])
    seeds: list[int] = []
    seed = trainer._transfer.seed
    trainer._transfer.seed = lambda key: (seeds.append(key), seed(key))[1]
    for batches in random_steps(GPT2_TIED_DROPOUT, 2, 2):
        trainer.step(batches)
    units_with_dropout = 5  # embedding and four blocks
    units_of_the_update = len(trainer.model.units())
    assert len(seeds) == 2 * (2 * units_with_dropout + units_of_the_update)
    assert len(set(seeds)) == len(seeds)


def test_a_step_leaves_the_random_state_outside_alone() -> None:
    trainer = fresh_trainer(GPT2_TIED_DROPOUT, recompute(1))
    before = torch.get_rng_state()
    trainer.step(random_steps(GPT2_TIED_DROPOUT, 1, 1)[0])
    assert_bitwise(torch.get_rng_state(), before, "random state")


@pytest.mark.parametrize("name", MODELS)
def test_forward_returns_the_logits_of_the_plain_model(name: str) -> None:
    trainer = fresh_trainer(MODELS[name], [])
    trainer.model.eval()
    token_ids_BT = torch.from_numpy(random_steps(MODELS[name], 1, 1)[0][0].token_ids_BT)
    expected = trainer.model.head.logits(trainer.model(token_ids_BT))
    assert_bitwise(trainer.executor.forward(token_ids_BT), expected.detach(), "logits")
