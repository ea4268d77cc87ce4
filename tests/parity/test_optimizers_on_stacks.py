"""Optimizers against plain torch, to the bit, wherever weights, state and gradients live."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.engine import update
from hybridtrain.memory import formats
from hybridtrain.models.model_config import Workload
from hybridtrain.optim import OPTIMIZERS, AdamWConfig, Lion, Muon, Optimizer
from hybridtrain.optimizations import (
    Bf16Optimizer,
    FusedUpdate,
    Int8Optimizer,
    Int8Weights,
    MixedPrecision,
    OptimizerOffload,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.cards.card import find_card
from stacks import ACCUM_STEPS, BASE, GPT2, LLAMA, WithOptimizer
from tiny_models import GPT2_TIED_DROPOUT, random_steps
from training_history import (
    CONFIG,
    NUM_STEPS,
    SEQ_LEN,
    History,
    assert_all_bitwise,
    assert_same_training,
    fresh_trainer,
    plain_loss,
    trained_history,
)

Rule = Callable[[list[nn.Parameter], dict[nn.Parameter, str], dict[nn.Parameter, Tensor], float], None]


def lion_rule(
    parameters: list[nn.Parameter], _names: dict[nn.Parameter, str], state: dict[nn.Parameter, Tensor], lr: float
) -> None:
    """Lion as its paper writes it (2302.06675, algorithm 2), tensor by tensor."""
    for parameter in parameters:
        momentum = state.setdefault(parameter, torch.zeros_like(parameter))
        decay = CONFIG.optimizer.weight_decay if parameter.dim() >= 2 else 0.0
        direction = torch.lerp(momentum, parameter.grad, 1 - Lion().beta1).sign()
        parameter.data.mul_(1 - lr * decay).add_(direction, alpha=-lr)
        momentum.lerp_(parameter.grad, 1 - Lion().beta2)


class MuonRule:
    """torch.optim.Muon for the matrices of blocks, torch.optim.AdamW for the rest."""

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []

    def __call__(
        self, parameters: list[nn.Parameter], names: dict[nn.Parameter, str], _state: object, lr: float
    ) -> None:
        if not self._optimizers:
            decay = CONFIG.optimizer.weight_decay
            hidden = [p for p in parameters if names[p].startswith("block.") and p.dim() == 2]
            rest = [p for p in parameters if not any(p is matrix for matrix in hidden)]
            groups = [
                {"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay},
                {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
            ]
            self._optimizers = [
                torch.optim.Muon(hidden, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True),
            ]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()


RULES: dict[str, tuple[Optimizer, Callable[[], Rule]]] = {
    "lion": (Lion(), lambda: lion_rule),
    "muon": (Muon(), MuonRule),
}
MODELS = {"gpt2": GPT2, "llama": LLAMA, "gpt2-tied-dropout": GPT2_TIED_DROPOUT}
PLACES: dict[str, list[Optimization]] = {
    "resident": [],
    "streamed": [WeightStreaming(), OptimizerOffload()],
    "offloaded-disk": [OptimizerOffload(tier="disk", offload_grads=False)],
    "fused": [FusedUpdate(), WeightStreaming(), OptimizerOffload(offload_grads=False)],
    "on-host": [OptimizerOffload(update_on="host")],
    "on-host-streamed": [OptimizerOffload(update_on="host"), WeightStreaming(resident_layers=1)],
}


@cache
def plain(kind: str, model_name: str) -> History:
    """Train by autograd and the plain rule: one graph and ``backward()`` a micro-batch."""
    config = MODELS[model_name]
    model = fresh_trainer(config, []).model
    named = dict(model.named_unit_parameters())
    names = {parameter: name for name, parameter in named.items()}
    rule, state, history = RULES[kind][1](), {}, History()
    for step, batches in enumerate(random_steps(config, NUM_STEPS, ACCUM_STEPS, seq_len=SEQ_LEN), 1):
        losses = [plain_loss(model, batch, step, index) for index, batch in enumerate(batches)]
        for loss in losses:
            (loss / len(batches)).backward()
        history.losses.append(sum(loss.item() for loss in losses) / len(losses))
        history.norms.append(nn.utils.clip_grad_norm_(named.values(), CONFIG.optimizer.max_grad_norm).item())
        with torch.no_grad():
            rule(list(named.values()), names, state, CONFIG.optimizer.lr * CONFIG.schedule.factor(step))
        model.zero_grad()
    history.weights = {name: parameter.detach() for name, parameter in named.items()}
    return history


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_it_is_the_plain_rule_to_the_bit(kind: str, place: str, model: str, tmp_path: Path) -> None:
    stack = [*BASE, *PLACES[place], WithOptimizer(RULES[kind][0])]
    actual = trained_history(MODELS[model], stack, ACCUM_STEPS, disk_folder=tmp_path)
    assert_same_training(actual, plain(kind, model))


def test_the_rules_differ() -> None:
    # Guards the comparison: an optimizer that were ignored would be AdamW.
    losses = {kind: plain(kind, "gpt2").losses for kind in RULES}
    losses["adamw"] = trained_history(GPT2, BASE, ACCUM_STEPS).losses
    assert len({tuple(found) for found in losses.values()}) == len(losses)


STORAGE: dict[str, list[Optimization]] = {
    "bf16-master": [MixedPrecision()],
    "bf16-state-absent-master": [Bf16Optimizer(), MixedPrecision(master="absent")],
    "int8-all": [Int8Optimizer(), Int8Weights(), MixedPrecision(master="absent")],
}


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("place", ["streamed", "on-host"])
@pytest.mark.parametrize("kind", [*RULES, "adamw"])
def test_any_storage_trains_alike_here_and_below(
    kind: str, place: str, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the CPU's own; where numbers are drawn it takes these too.
    monkeypatch.setattr(formats, "SLICE_ELEMENTS", 1536)
    monkeypatch.setattr(update, "RESIDENT_SLICE_ELEMENTS", 1536)
    stack = [*BASE, *STORAGE[storage], WithOptimizer(OPTIMIZERS[kind]())]
    resident = trained_history(GPT2, stack, ACCUM_STEPS)
    below = trained_history(GPT2, [*stack, *PLACES[place]], ACCUM_STEPS, disk_folder=tmp_path)
    assert_same_training(below, resident)
    assert_all_bitwise(below.state, resident.state, "state ")
    assert resident.losses[-1] < resident.losses[0] + 0.1  # it trains, or stands still, but never breaks


def state_bytes(optimizer: Optimizer, stack: Sequence[Optimization] = ()) -> dict[str, int]:
    """Return planned bytes of optimizer state in all, on device and host."""
    found = dry_run(
        GPT2, compose(list(stack)), find_card("rtx-4090"), Workload(micro_batch_size=1, seq_len=16),
        config=TrainerConfig(optimizer=optimizer),
    )  # fmt: skip
    labelled = zip(found.trace.sizes, found.trace.classes, strict=True)
    return {
        "device": sum(size for size, tensor_class in labelled if tensor_class is TensorClass.OPTIM_STATE),
        "host": found.host_by_class.get(TensorClass.OPTIM_STATE, 0),
    }


def test_a_dry_run_counts_4_bytes_a_parameter() -> None:
    assert state_bytes(AdamWConfig())["device"] == 8 * GPT2.num_params
    assert state_bytes(Lion())["device"] == 4 * GPT2.num_params
    trainer = fresh_trainer(GPT2, [])
    hidden = sum(p.numel() for u in trainer.model.units()[1:-1] for p in u.tensors if p.dim() == 2)
    assert state_bytes(Muon())["device"] == 8 * GPT2.num_params - 4 * hidden
    below = state_bytes(Lion(), [OptimizerOffload()])
    assert below["device"] == 0
    padding = 512 * sum(len(unit.tensors) for unit in trainer.model.units()) + 4096 * len(trainer.model.units())
    assert 4 * GPT2.num_params <= below["host"] <= 4 * GPT2.num_params + padding


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_says_all_that_is_wrong_with_its_settings(kind: str) -> None:
    with pytest.raises(ValueError, match=r"lr: 0(\.0)? must be above 0") as raised:
        OPTIMIZERS[kind](lr=0, weight_decay=-1.0, max_grad_norm=-1.0)
    assert "weight_decay: -1.0 must be at least 0" in str(raised.value)
    assert "max_grad_norm: -1.0 must be at least 0" in str(raised.value)
