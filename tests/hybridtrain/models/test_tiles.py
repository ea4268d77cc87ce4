"""Feed-forward parts in tiles: the training of whole ones but for the order of sums, and with less memory."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtrain.errors import ConfigError, PlanConflictError
from hybridtrain.models.model_config import ModelConfig, Workload
from hybridtrain.models.tiles import _Tiled, in_tiles
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
    TiledMlp,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import DryRunInputs
from hybridtrain.virtual_gpu import find_card
from hybridtrain.virtual_gpu.cards.card import Host
from hybridtrain.virtual_gpu.facade.estimate import with_unlimited_memory
from tiny_models import FAMILIES, GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED
from training_history import trained_history

TILED = TiledMlp(mlp_tile_tokens=5)
CHECKPOINTS = GradientCheckpointing(recompute_every=2)
VERTICAL = GradAccumulation(grad_accum_steps=2, schedule="vertical")
STACKS: dict[str, list[Optimization]] = {
    "plain": [],
    "recomputed": [CHECKPOINTS, VERTICAL],
    "streamed": [GradientCheckpointing(recompute_every=1, kept_blocks=1), WeightStreaming(), ActivationOffload()],
    "lora": [Lora(), CHECKPOINTS],
    "qlora": [Lora(), Nf4Weights(), CHECKPOINTS],
    "int8": [Int8Weights(), CHECKPOINTS],
    "dora": [Lora(magnitude=True), CHECKPOINTS],
    "fused": [FusedUpdate(), VERTICAL, GradientCheckpointing(recompute_every=1), WeightStreaming()],
}
MODELS = {"gpt2": GPT2_UNTIED, "llama": LLAMA_GROUPED, "gemma2": FAMILIES["gemma2"], "olmo2": FAMILIES["olmo2"]}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_of_whole_parts(model: str, stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, true = list[int](), _Tiled.backward
    monkeypatch.setattr(_Tiled, "backward", lambda ctx, grad: (tiles.append(ctx.tile_tokens), true(ctx, grad))[1])
    steps = 1 + (VERTICAL in STACKS[stack])
    whole, tiled = (trained_history(MODELS[model], [*STACKS[stack], *more], steps) for more in ((), (TILED,)))
    assert set(tiles) == {5}
    assert tiled.losses == pytest.approx(whole.losses, rel=1e-5)
    for name, weight in whole.weights.items():
        assert torch.allclose(tiled.weights[name], weight, rtol=1e-3, atol=1e-4), name


def test_recomputed_tiles_are_the_kept_ones_to_the_bit() -> None:
    kept, recomputed = (trained_history(LLAMA_GROUPED, [TILED, *more], 1) for more in ((), (CHECKPOINTS,)))
    assert kept.losses == recomputed.losses
    assert all(torch.equal(recomputed.weights[name], weight) for name, weight in kept.weights.items())


def test_gradients_are_exact() -> None:
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

    def work(hidden_ND: Tensor, *, computes_output: bool) -> Tensor:  # noqa: ARG001  nothing to leave out
        return hidden_ND + torch.tanh(hidden_ND @ weight)

    def tiled(hidden_BTD: Tensor, used: Tensor) -> Tensor:
        return in_tiles(work, hidden_BTD, [used], tile_tokens=4, computes_output=True)

    hidden_BTD = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(tiled, (hidden_BTD, weight))
    assert torch.equal(tiled(hidden_BTD, weight)[0, :4], work(hidden_BTD[0, :4], computes_output=True))


def peak(model: ModelConfig, *more: Optimization) -> int:
    stack = [MixedPrecision(), Lora(), GradientCheckpointing(recompute_every=1), ChunkedLoss(), *more]
    card = with_unlimited_memory(find_card("rtx-4090"))
    workload = Workload(micro_batch_size=1, seq_len=model.max_seq_len)
    inputs = DryRunInputs(model=model, plan=compose(stack), card=card, host=Host(), workload=workload)
    return inputs.dry_run().peak.allocated_bytes


def test_a_long_sequence_takes_the_activations_of_one_tile() -> None:
    tokens = 2**15
    model = replace(LLAMA_GROUPED, width=256, ffn_width=1024, max_seq_len=tokens)
    saved = peak(model) - peak(model, TiledMlp(mlp_tile_tokens=1024))
    assert saved > 3 * tokens * model.ffn_width * 2, "gate, up, product and their gradients, bf16, in all but one tile"


def test_what_a_tile_would_compute_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model has dropout = 0\.1, which tiles do not support"):
        trained_history(GPT2_TIED_DROPOUT, [TILED], 1)
    with pytest.raises(ConfigError, match="the model has experts, which tiles do not support"):
        trained_history(FAMILIES["mixtral"], [TILED], 1)
    with pytest.raises(PlanConflictError, match="set lora's dropout = 0"):
        compose([TILED, Lora(dropout=0.1)])
