"""Adapters beside frozen weights: the executor against plain autograd to the bit, and each rule against its formula.

R rank, D and F input and output features, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.errors import ConfigError
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.adapter import Adapter, adapter_coverage, is_adapter
from hybridtrain.models.linear import Linear
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import (
    ActivationOffload,
    ChunkedLoss,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Weights,
    Lora,
    MixedPrecision,
    Nf4Weights,
    OptimizerOffload,
    PredictMemory,
    WeightStreaming,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import WidenBy
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from numerics import assert_bitwise
from tiny_models import FAMILIES, GPT2_TIED_DROPOUT, LLAMA_GROUPED, random_steps
from training_history import CONFIG, NUM_STEPS, SEQ_LEN, fresh_trainer, plain_loss, plain_optimizer, trained_history

LORA = Lora(rank=3, alpha=5.0, dropout=0.0)
KINDS = {
    "lora": (LLAMA_GROUPED, LORA),
    "rslora-attention": (LLAMA_GROUPED, Lora(rank=4, scaling="rslora", targets=("attention",))),
    "dora": (LLAMA_GROUPED, Lora(rank=3, magnitude=True)),
    "lora-dropout-tied": (GPT2_TIED_DROPOUT, Lora(rank=3, dropout=0.2)),
    "dora-dropout-tied": (GPT2_TIED_DROPOUT, Lora(rank=3, dropout=0.2, magnitude=True)),
}
VERTICAL = GradAccumulation(grad_accum_steps=2, schedule="vertical")
WAYS: dict[str, list[Optimization]] = {
    "resident": [GradAccumulation(grad_accum_steps=2)],
    "recomputed": [VERTICAL, GradientCheckpointing(recompute_every=2)],
    "streamed": [VERTICAL, WeightStreaming(), ActivationOffload(), GradientCheckpointing(recompute_every=1)],
    "disk-state-away": [VERTICAL, WeightStreaming(max_active_layers=1, tier="disk"), OptimizerOffload()],
    "updated-on-host": [VERTICAL, WeightStreaming(), OptimizerOffload(update_on="host")],
    "fused": [VERTICAL, FusedUpdate()],
}


@cache
def plain(kind: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train by one graph a micro-batch and torch's AdamW; return losses, adapters, frozen weights."""
    config, lora = KINDS[kind]
    model = fresh_trainer(config, [lora]).model
    named = dict(model.named_unit_parameters())
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    optimizer, losses = plain_optimizer(list(trained.values())), []
    for step, batches in enumerate(random_steps(config, NUM_STEPS, 2, seq_len=SEQ_LEN), 1):
        found = [plain_loss(model, batch, step, index) for index, batch in enumerate(batches)]
        for loss in found:
            (loss / len(batches)).backward()
        losses.append(sum(loss.item() for loss in found) / len(found))
        nn.utils.clip_grad_norm_(trained.values(), CONFIG.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.optimizer.lr * CONFIG.schedule.factor(step)
        optimizer.step()
        optimizer.zero_grad()
    frozen = {name: parameter.detach() for name, parameter in named.items() if name not in trained}
    return losses, {name: parameter.detach() for name, parameter in trained.items()}, frozen


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_plain_autograd(kind: str, way: str, tmp_path: Path) -> None:
    config, lora = KINDS[kind]
    losses, adapters, _ = plain(kind)
    actual = trained_history(config, [lora, *WAYS[way]], 2, disk_folder=tmp_path)
    assert actual.losses == losses
    assert actual.weights.keys() == adapters.keys()
    for name, weight in adapters.items():
        assert_bitwise(actual.weights[name], weight, name)


def test_only_adapters_are_trained_and_begin_as_the_identity() -> None:
    plainly, adapted = (fresh_trainer(LLAMA_GROUPED, stack) for stack in ([], [LORA]))
    before = {name: parameter.detach().clone() for name, parameter in plainly.model.named_parameters()}
    (batch,) = random_steps(LLAMA_GROUPED, 1)[0]
    assert adapted.loss([batch]) == plainly.loss([batch])
    adapted.step([batch])
    adapted.step([batch])
    moved = {name for name, p in adapted.model.named_parameters() if is_adapter(name)}
    for name, parameter in adapted.model.named_parameters():
        if name not in moved:
            assert_bitwise(parameter, before[name], name)
    assert {name.rpartition(".")[2] for name in moved} == {"lora_a", "lora_b"}
    assert any(parameter.any() for name, parameter in adapted.model.named_parameters() if name.endswith("lora_b"))


def test_frozen_weights_have_neither_gradients_nor_state_nor_a_master() -> None:
    ledger = StorageLedger()
    with ledger:
        trainer = fresh_trainer(LLAMA_GROUPED, [LORA, MixedPrecision()], observer=ledger)
        for batches in random_steps(LLAMA_GROUPED, 2):
            ledger.begin_step()
            trainer.step(batches)
    count = sum(p.numel() for unit in trainer.model.units() for p in unit.tensors)
    trace = ledger.trace()
    largest = dict.fromkeys(TensorClass, 0)
    live = dict.fromkeys(TensorClass, 0)
    for event in trace.events:
        index, sign = (event, 1) if event >= 0 else (~event, -1)
        live[trace.classes[index]] += sign * trace.sizes[index]
        largest = {found: max(largest[found], live[found]) for found in largest}
    assert largest[TensorClass.OPTIM_STATE] == 8 * count
    assert largest[TensorClass.MASTER] == 4 * count
    assert largest[TensorClass.GRAD] == 2 * count


@pytest.mark.parametrize("codes", [Int8Weights(widen_by=WidenBy.MATRIX), Nf4Weights()], ids=["int8", "nf4"])
@pytest.mark.parametrize("way", ["recomputed", "streamed", "disk-state-away"])
def test_coded_weights_train_the_same_wherever_they_are(
    codes: Int8Weights | Nf4Weights, way: str, tmp_path: Path
) -> None:
    stack = [LORA, codes, MixedPrecision()]
    by_block = replace(codes, widen_by=WidenBy.BLOCK)
    resident = trained_history(LLAMA_GROUPED, [LORA, by_block, MixedPrecision(), VERTICAL], 2)
    elsewhere = trained_history(LLAMA_GROUPED, [*stack, *WAYS[way]], 2, disk_folder=tmp_path)
    assert elsewhere.losses == resident.losses
    for name, weight in resident.weights.items():
        assert_bitwise(elsewhere.weights[name], weight, name)
    assert resident.losses != trained_history(LLAMA_GROUPED, [LORA, MixedPrecision(), VERTICAL], 2).losses


def test_chunked_loss_is_that_of_a_frozen_head() -> None:
    whole, chunked = (
        trained_history(LLAMA_GROUPED, [LORA, VERTICAL, *extra], 2)
        for extra in ([], [ChunkedLoss(loss_chunk_tokens=8)])
    )
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize("magnitude", [False, True], ids=["lora", "dora"])
def test_output_and_gradients_are_the_formulas(*, magnitude: bool) -> None:
    torch.manual_seed(0)
    linear = Linear(7, 5, bias=True, dtype=torch.float64)
    adapter = Adapter(linear, rank=2, scale=0.7, probability=0.0, learns_magnitude=magnitude, dtype=torch.float64)
    linear.adapter = adapter
    for parameter in linear.parameters():
        nn.init.normal_(parameter)
    linear.weight.requires_grad_(False)
    x_TD = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    trained = [x_TD, *adapter.parameters()]
    weight_FD = linear.weight + 0.7 * adapter.lora_b @ adapter.lora_a
    if magnitude:
        assert adapter.magnitude is not None
        lengths_F = (linear.weight + 0.7 * adapter.lora_b @ adapter.lora_a).norm(dim=1).detach()
        weight_FD = (adapter.magnitude / lengths_F)[:, None] * weight_FD
    expected = x_TD @ weight_FD.T + linear.bias
    grad = torch.randn_like(expected)
    for computes_output in (True, False):
        out = linear(x_TD, computes_output=computes_output)
        if computes_output:
            torch.testing.assert_close(out, expected)
        actual = torch.autograd.grad(out, trained, grad)
        for found, wanted in zip(actual, torch.autograd.grad(expected, trained, grad, retain_graph=True), strict=True):
            torch.testing.assert_close(found, wanted)
    merged = adapter.merged(linear.weight)
    torch.testing.assert_close(x_TD @ merged.T + linear.bias, expected)


def refused(config: ModelConfig, stack: Sequence[Optimization]) -> str:
    with pytest.raises(ConfigError, match="targets") as caught:
        fresh_trainer(config, stack, DirectTransfer(torch.device("cpu")))
    return str(caught.value)


def test_what_cannot_be_is_said_in_one_sentence() -> None:
    assert "did you mean 'query'" in refused(LLAMA_GROUPED, [Lora(targets=("querry",))])
    with pytest.raises(ValueError, match="nf4 weights cannot be trained; add an optimization of kind 'lora'"):
        compose([Nf4Weights()])
    with pytest.raises(ValueError, match="frozen weights are not converted:"):
        compose([LORA, MixedPrecision(), PredictMemory(), Int8Weights(active_phases=(Phase.PREDICT,))])
    compose([LORA, MixedPrecision(), PredictMemory(), Int8Weights()])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["all-linear", "attention"])
def test_every_matrix_of_a_block_is_named_with_or_without_an_adapter(family: str, targets: str) -> None:
    trainer = fresh_trainer(FAMILIES[family], [Lora(rank=2, targets=(targets,))])
    adapted, others = adapter_coverage(trainer.model)
    block = trainer.model.blocks[0]
    trained = {name.partition(".")[0] for name, parameter in block.named_parameters() if parameter.requires_grad}
    shapes = {name.partition(".")[0]: parameter.ndim for name, parameter in block.named_parameters()}
    assert set(adapted) == trained
    assert set(others) == {name for name, ndim in shapes.items() if ndim > 1} - trained
    assert ("experts_up" in others) == (family in {"mixtral", "qwen3-moe"})
