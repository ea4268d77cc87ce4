"""Attention kept in recomputed blocks: trained as computed twice, to the bit, and computed once."""

import pytest

from hybridtrain.errors import PlanConflictError
from hybridtrain.models.model_config import Workload
from hybridtrain.optimizations import (
    ActivationOffload,
    FlashAttention,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    TiledMlp,
    WeightStreaming,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.cards.card import find_card
from tiny_models import FAMILIES, GPT2_TIED_DROPOUT, LLAMA_GROUPED
from training_history import assert_same_training, trained_history

RECOMPUTED = GradientCheckpointing(recompute_every=1)
KEPT = GradientCheckpointing(recompute_every=1, keep_attention=True)
VERTICAL = GradAccumulation(grad_accum_steps=2, schedule="vertical")
STACKS: dict[str, list[Optimization]] = {
    "plain": [],
    "mixed-tiled": [MixedPrecision(), TiledMlp(mlp_tile_tokens=5)],
    "away": [ActivationOffload(), GradAccumulation(grad_accum_steps=2)],
    "away-disk-vertical": [ActivationOffload(tier="disk"), VERTICAL, WeightStreaming()],
    "lora": [Lora(), ActivationOffload()],
    "fused": [VERTICAL, FusedUpdate(), WeightStreaming(), ActivationOffload()],
}
MODELS = {
    "gpt2-dropout": GPT2_TIED_DROPOUT,
    "llama": LLAMA_GROUPED,
    "gemma2": FAMILIES["gemma2"],  # windows and a soft cap
    "mixtral": FAMILIES["mixtral"],
}


NOT_TILED = {"gpt2-dropout", "mixtral"}
"""Dropout and experts do not go in tiles."""
CASES = [(model, stack) for model in MODELS for stack in STACKS if stack != "mixed-tiled" or model not in NOT_TILED]


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize(("model", "stack"), CASES)
def test_training_is_that_of_attention_computed_again(
    model: str, stack: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    accum_steps = next((o.grad_accum_steps for o in STACKS[stack] if isinstance(o, GradAccumulation)), 1)
    again, kept = (
        trained_history(
            MODELS[model], [checkpoints, *STACKS[stack]], accum_steps, disk_folder=tmp_path_factory.mktemp("disk")
        )
        for checkpoints in (RECOMPUTED, KEPT)
    )
    assert_same_training(kept, again)


def attention_passes(checkpoints: GradientCheckpointing) -> list[Stage]:
    """Return where attention was computed forward, in one planned step."""
    run = dry_run(
        LLAMA_GROUPED, compose([checkpoints]), find_card("rtx-4090"), Workload(micro_batch_size=1, seq_len=16)
    )
    return [op.stage for op in run.trace.ops if "causal_attention" in op.name and "backward" not in op.name]


def test_attention_is_computed_once() -> None:
    blocks = LLAMA_GROUPED.num_blocks
    steps = len(attention_passes(GradientCheckpointing(recompute_every=1, kept_blocks=blocks))) // blocks
    assert attention_passes(KEPT) == [Stage.FORWARD] * blocks * steps
    assert len(attention_passes(RECOMPUTED)) == 2 * blocks * steps


def test_what_leaves_nothing_to_keep_is_refused() -> None:
    with pytest.raises(PlanConflictError, match=r"keep_attention: needs .* recompute_every = 1, not 2"):
        compose([GradientCheckpointing(recompute_every=2, keep_attention=True)])
    with pytest.raises(PlanConflictError, match="keep_attention: unfused attention leaves nothing to keep"):
        compose([KEPT, FlashAttention(attention="unfused")])
