"""Stages of a pipeline equal one process with the same micro-batches, to the bit: losses, norms, weights."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtrain.checkpoint import CheckpointSaver, load_checkpoint
from hybridtrain.errors import ConfigError, PlanConflictError
from hybridtrain.memory.group import Group, VirtualGroup
from hybridtrain.memory.transfer import DirectTransfer, Transfer, VirtualTransfer
from hybridtrain.models.model_config import Experts
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import (
    ActivationOffload,
    Bf16Optimizer,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    Lora,
    LowBitMatmul,
    MixedPrecision,
    OptimizerOffload,
    Pipeline,
    PredictorState,
    TiledMlp,
    WeightStreaming,
    Zero,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import DynamicRange
from hybridtrain.plan.placement import Placement
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.virtual_gpu.account.op_record import Stage
from rank_runs import MICRO_BATCHES, MODELS, VERTICAL, Case, contents, new_trainer, run, train, weights_of
from ranks import CPU, on_ranks
from tiny_models import random_steps

MODELS |= {"gpt2-4": replace(MODELS["gpt2"], num_blocks=4), "llama-5": replace(MODELS["llama"], num_blocks=5)}
EXPERTS = Experts(count=5, per_token=2, ffn_width=48, balance_coefficient=0.5)
MODELS["mixtral-5"] = replace(MODELS["llama-5"], family="mixtral", experts=EXPERTS)
CHECKPOINTED = GradientCheckpointing(recompute_every=2)
CASES = {
    "tied": Case("gpt2", 2, ()),
    "tied-4": Case("gpt2-4", 4, (VERTICAL, CHECKPOINTED)),
    "balanced": Case("mixtral-5", 2, (CHECKPOINTED, VERTICAL)),
    "balanced-4": Case("mixtral-5", 4, (MixedPrecision(),)),
    "untied": Case("llama-5", 2, (MixedPrecision(master="absent"), Bf16Optimizer())),
    "unclipped-4": Case("llama-5", 4, (), clip=0.0),
    "streamed": Case("gpt2-4", 2, (WeightStreaming(), CHECKPOINTED, Int8Optimizer(), OptimizerOffload())),
    "streamed-kept": Case("llama-5", 2, (WeightStreaming(resident_layers=1), VERTICAL, MixedPrecision())),
    "int8-weights": Case("llama-5", 2, (Int8Weights(), MixedPrecision(), Int8Optimizer())),
    "all-away": Case(
        "gpt2-4",
        2,
        (
            WeightStreaming(tier="disk"),
            GradientCheckpointing(recompute_every=1),
            VERTICAL,
            MixedPrecision(),
            OptimizerOffload(tier="disk"),
            ActivationOffload(),
        ),
    ),
    "on-host": Case("llama-5", 4, (WeightStreaming(), OptimizerOffload(update_on="host"))),
    "lora": Case("gpt2-4", 2, (Lora(), MixedPrecision())),
    "kept-attention": Case(
        "llama-5", 2, (GradientCheckpointing(recompute_every=1, keep_attention=True), ActivationOffload())
    ),
    "low-bit-full-ends": Case("llama-5", 2, (LowBitMatmul(format="int8", full_ends=1),)),
    "int8-rows-multiplied": Case(
        "llama-5", 2, (LowBitMatmul(format="int8"), Int8Weights(dynamic_range=DynamicRange.ROW), WeightStreaming())
    ),
    "tiled": Case("llama-5", 2, (CHECKPOINTED, VERTICAL, TiledMlp(mlp_tile_tokens=5))),
}


def staged(case: Case) -> Case:
    return replace(case, stack=(*case.stack, Pipeline(stages=case.world)))


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("name", CASES)
def test_stages_equal_one_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    told, values = run(case, None, tmp_path)
    assert told[0][0] != told[-1][0]
    parts = on_ranks(case.world, lambda group: run(staged(case), group, tmp_path))
    assert [found for found, _ in parts] == [told] * case.world
    assert sum(len(weights) for _, weights in parts) == len(values)
    assert {key: weight for _, weights in parts for key, weight in weights.items()} == values


@pytest.mark.parametrize("name", ["tied-4", "balanced", "streamed", "all-away"])
def test_each_stage_is_planned_as_it_is_executed(name: str, tmp_path: Path) -> None:
    case = staged(CASES[name])

    def record(group: Group, transfer: Transfer) -> tuple[object, ...]:
        batches = random_steps(MODELS[case.model], 2, MICRO_BATCHES)
        config = TrainerConfig(optimizer=AdamWConfig(max_grad_norm=case.clip))
        trace = record_steps(MODELS[case.model], compose(case.plan), batches, transfer, config, group=group)
        lanes = [
            (op.name, op.lane, op.stage, op.unit, op.event, op.bytes_moved)
            for op in trace.ops
            if op.stage is not Stage.LOAD and not op.name.startswith("aten._local_scalar_dense")
        ]
        facts = trace.events, trace.sizes, trace.classes, trace.units, [mark.event for mark in trace.steps]
        return *facts, lanes, transfer.tiers.by_class(Placement.HOST), transfer.tiers.peak_bytes(Placement.HOST)

    executed = on_ranks(case.world, lambda group: record(group, DirectTransfer(CPU, disk_folder=tmp_path)))
    for rank, found in enumerate(executed):
        planned = record(VirtualGroup(rank, case.world), VirtualTransfer())
        for ours, theirs in zip(planned, found, strict=True):
            assert ours == theirs


@pytest.mark.parametrize(
    ("world", "stack", "reason"),
    [
        (4, (Pipeline(stages=2),), "2 ranks"),
        (3, (Pipeline(stages=3),), "3 stages need at least one block each, the model has 2"),
        (2, (Pipeline(), PredictorState()), "predictor_state works on one rank"),
    ],
)
def test_what_stages_cannot_do_is_refused(world: int, stack: tuple[Optimization, ...], reason: str) -> None:
    plan = compose([*stack, GradAccumulation(grad_accum_steps=MICRO_BATCHES)])
    with pytest.raises(ConfigError, match=re.escape(reason)):
        Trainer(MODELS["gpt2"], plan, TrainerConfig(), VirtualTransfer(), group=VirtualGroup(0, world))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Zero(stage=1), "zero has nothing to shard;"),
        (FusedUpdate(), "before the others have checked"),
        (
            GradAccumulation(grad_accum_steps=4, schedule="vertical", visit_micro_batches=2),
            "stages wait for each other",
        ),
    ],
)
def test_a_plan_of_no_stages_is_refused(part: Optimization, reason: str) -> None:
    with pytest.raises(PlanConflictError, match=reason):
        compose([Pipeline(), part])


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize(
    ("name", "copies_to_host"), [("tied-4", False), ("streamed", True), ("all-away", False), ("int8-weights", True)]
)
def test_stages_save_what_one_process_saves_and_others_go_on(name: str, copies_to_host: bool, tmp_path: Path) -> None:
    case = CASES[name]

    def save(group: Group | None, folder: Path) -> None:
        trainer = new_trainer(staged(case), group, tmp_path)
        train(trainer, slice(2))
        saver = CheckpointSaver(folder, copies_to_host=copies_to_host, clock=lambda: 0.0)
        saver.require_room(trainer, 0)
        saver.save(trainer)
        saver.finish()
        trainer.transfer.close()

    def go_on(case: Case, group: Group | None) -> tuple[object, dict[str, str]]:
        trainer = new_trainer(case, group, tmp_path)
        load_checkpoint(trainer, tmp_path / "stages")
        found = train(trainer, slice(2, None)), weights_of(trainer)
        trainer.transfer.close()
        return found

    on_ranks(case.world, lambda group: save(group, tmp_path / "stages"))
    save(None, tmp_path / "alone")
    assert contents(tmp_path / "stages") == contents(tmp_path / "alone")
    told, values = run(case, None, tmp_path)
    assert go_on(case, None) == (told[2:], values)
    for world in {2, min(4, MODELS[case.model].num_blocks)}:
        other = staged(replace(case, world=world))
        parts = on_ranks(world, lambda group, other=other: go_on(other, group))  # type: ignore[misc]
        assert [found for found, _ in parts] == [told[2:]] * world
        assert {key: weight for _, weights in parts for key, weight in weights.items()} == values
