"""Reserved bytes of a run that is not quite the planned one: the replay says what a longer dry run says."""

import pytest
import torch
from torch import nn

from hybridtrain.models.model_config import ModelConfig, Workload
from hybridtrain.optimizations import GradAccumulation, MixedPrecision
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.virtual_gpu import estimate_memory, find_card
from hybridtrain.virtual_gpu.allocator.replay import replay_trace
from hybridtrain.virtual_gpu.allocator.reserved_range import DRIVER, EVALUATION, LENGTHS, MORE_STEPS, reserved_range

CARD = find_card("rtx-4090")
WORKSPACE = CARD.cublas_workspace_bytes
MODEL = ModelConfig(
    family="gpt2", vocab_size=8192, max_seq_len=256, num_blocks=2, width=512, num_heads=8, num_kv_heads=8,
    ffn_width=2048,
)  # fmt: skip


STACKS: dict[str, list[Optimization]] = {
    "plain": [],
    "mixed": [MixedPrecision(master="split16")],
    "settles-late": [GradAccumulation(grad_accum_steps=2)],
}


@pytest.mark.parametrize("stack", STACKS)
def test_a_repeated_step_is_what_a_longer_dry_run_takes(stack: str) -> None:
    workload, plan = Workload(micro_batch_size=2, seq_len=256), compose(STACKS[stack])
    run = dry_run(MODEL, plan, CARD, workload)
    longer = dry_run(MODEL, plan, CARD, workload, num_steps=6)
    steps = [step.reserved_bytes for step in replay_trace(longer.trace, workspace_bytes=WORKSPACE).steps]
    assert run.peak_reserved_bytes == max(steps)
    alone = replay_trace(run.trace, workspace_bytes=WORKSPACE)
    assert (max(step.reserved_bytes for step in alone.steps) < max(steps)) is (stack == "settles-late")
    found = reserved_range(run.trace, workspace_bytes=WORKSPACE)
    assert found.by_change[MORE_STEPS] == max(steps)
    planned = reserved_range(run.trace, workspace_bytes=WORKSPACE, repeats=4)
    assert planned.planned_bytes == max(steps)
    assert set(planned.by_change) == {DRIVER, EVALUATION, LENGTHS} == set(found.by_change) - {MORE_STEPS}
    assert planned.margin_bytes == max(0, *(planned.by_change[name] - max(steps) for name in (DRIVER, EVALUATION)))


def test_shorter_steps_leave_segments_that_longer_ones_cannot_use() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))

    found = estimate_memory(build, torch.empty(4096, 1024), card="rtx-4090").reserved_range()
    assert found.by_change[LENGTHS] > found.planned_bytes
    assert found.margin_bytes < found.by_change[LENGTHS] - found.planned_bytes
    assert "steps of mixed lengths +" in found.as_text()


def test_lengths_that_would_reserve_much_more_are_tried_under_the_card() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))

    run = estimate_memory(build, torch.empty(4096, 1024), card="rtx-4090").run
    wide = reserved_range(run.trace, workspace_bytes=WORKSPACE)
    assert wide.lengths_fit is None
    for capacity, fits in ((wide.by_change[LENGTHS], True), (run.peak.allocated_bytes, False)):
        found = reserved_range(run.trace, workspace_bytes=WORKSPACE, capacity_bytes=capacity)
        assert (found.by_change, found.lengths_fit) == (wide.by_change, fits)
        assert f"steps of mixed lengths {'fit this card' if fits else 'may not fit'}" in found.as_text()
        assert "lengths +" not in found.as_text()
