"""Losses, norms and weights of a few steps of training: by plain autograd, and by the trainer under any stack."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridkernels.flash_attention import causal_attention
from hybridtrain.data.batches import TokenBatch
from hybridtrain.engine.random_key import random_key
from hybridtrain.memory.tier import TierBuffer
from hybridtrain.memory.tier_tensor import Stored, TierTensor
from hybridtrain.memory.transfer import DirectTransfer, Transfer
from hybridtrain.models.block_model import BlockModel
from hybridtrain.models.layers import AttentionFunction
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optim import AdamWConfig
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.observer import MemoryObserver
from lazy_transfer import LazyTransfer
from numerics import assert_bitwise
from stacks import ACCUM_STEPS, BASE, STORAGE, settings_of
from tiny_models import random_steps

NUM_STEPS = 3
"""The first one finds no moments, the second what the first has left on its way, the third what all others do."""
SEQ_LEN = 9
"""No multiple of anything; bfloat16 is slow on processors without it, and more tokens show nothing else."""
CONFIG = TrainerConfig(optimizer=AdamWConfig(max_grad_norm=0.25))
"""Clips every step of the tiny models."""


@dataclass
class History:
    """What a few steps of training left behind."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each step, before clipping; only where someone asked for them."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    """Master and moments; only of the trainer."""


def fresh_trainer(
    config: ModelConfig,
    stack: Sequence[Optimization],
    transfer: Transfer | None = None,
    observer: MemoryObserver | None = None,
    settings: TrainerConfig = CONFIG,
) -> Trainer:
    """Return a trainer on the CPU."""
    settings = settings_of(stack, settings)
    return Trainer(config, compose(stack), settings, transfer or DirectTransfer(torch.device("cpu")), observer)


@cache
def plain_history(
    config: ModelConfig, accum_steps: int, num_steps: int = NUM_STEPS, attention: AttentionFunction = causal_attention
) -> History:
    """Train as anyone would: one graph and ``backward()`` a micro-batch, torch's clipping and optimizer."""
    model = fresh_trainer(config, []).model
    model.compute_attention(attention)
    named = dict(model.named_unit_parameters())
    optimizer = plain_optimizer(list(named.values()))
    history = History()
    for step, batches in enumerate(random_steps(config, num_steps, accum_steps, seq_len=SEQ_LEN), 1):
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
    """Return torch's fused AdamW with decay on matrices only."""
    settings = CONFIG.optimizer
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True)


def trained_history(
    config: ModelConfig,
    stack: Sequence[Optimization],
    accum_steps: int,
    *,
    transfer: Transfer | None = None,
    observer: MemoryObserver | None = None,
    disk_folder: Path | None = None,
    num_steps: int = NUM_STEPS,
) -> History:
    """Train under ``stack``; weights and state are read from where they live."""
    way = transfer or DirectTransfer(torch.device("cpu"), disk_folder=disk_folder)
    trainer = fresh_trainer(config, stack, way, observer)
    history = History()
    for batches in random_steps(config, num_steps, accum_steps, seq_len=SEQ_LEN):
        result = trainer.step(batches)
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    if isinstance(way, LazyTransfer):
        way.finish()
    history.weights, history.state = stored_weights(trainer), stored_state(trainer)
    way.close()
    return history


@cache
def resident_history(config: ModelConfig, storage: str) -> History:
    """Train with everything on the device."""
    return trained_history(config, [*BASE, *STORAGE[storage]], ACCUM_STEPS)


def stored_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of what is stored of each parameter; int8 ones have their scales beside them."""
    found = {}
    for unit in trainer.model.units():
        stored = trainer.weights.stored_tensors(unit.name, unit.tensors)
        for (name, parameter), parts in zip(unit.parameters, stored, strict=True):
            for index, part in enumerate(parts):
                value = read_stored(part)
                found[f"{name}{('', '.scales', '.middles')[index]}"] = (
                    value.view(parameter.shape) if value.numel() == parameter.numel() else value
                )
    return found


def stored_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of master weights and moments, flat."""
    found = {}
    for unit in trainer.model.units():
        for (name, _), state in zip(unit.parameters, trainer.states.of(unit.name), strict=True):
            if state.master_weight is not None:
                found[f"{name}.master_weight"] = read_stored(state.master_weight).flatten()
            for index, moment in enumerate(tensor for slot in state.slots for tensor in slot.tensors):
                found[f"{name}.moment{index}"] = read_stored(moment).flatten()
    return found


def read_stored(stored: Stored) -> Tensor:
    """Return a copy of a tensor wherever it lives; copies under way must be over."""
    if not isinstance(stored, TierTensor):
        return stored.clone()
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    buffer: TierBuffer = stored.buffer
    assert buffer.content is not None
    buffer.content.read(stored.offset, tensor)
    return tensor


def assert_same_training(actual: History, expected: History) -> None:
    """Fail unless losses, norms and weights are equal to the bit."""
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    assert_all_bitwise(actual.weights, expected.weights, "weight ")


def assert_all_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Fail unless both have the same names and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert_bitwise(tensor, expected[name], what + name)
