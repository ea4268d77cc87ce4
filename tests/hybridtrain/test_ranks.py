"""Ranks that train one model together equal one process, to the bit: losses, norms, weights, optimizer state."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtrain.checkpoint import CheckpointSaver, load_checkpoint
from hybridtrain.errors import ConfigError, PlanConflictError, RankError
from hybridtrain.memory.group import DirectGroup, Group, TorchGroup, VirtualGroup
from hybridtrain.memory.transfer import DirectTransfer, Transfer, VirtualTransfer
from hybridtrain.optim import Adafactor, AdamWConfig, Muon, Optimizer
from hybridtrain.optimizations import (
    ActivationOffload,
    Bf16Optimizer,
    FusedUpdate,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    Int8Weights,
    Lora,
    MixedPrecision,
    OptimizerOffload,
    PredictMemory,
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
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace
from hybridtrain.virtual_gpu.account.op_record import Lane, Stage
from hybridtrain.weights.export import export_folder
from hybridtrain.weights.hf_source import open_folder
from lazy_transfer import ComputeWatch, LazyTransfer
from rank_runs import MICRO_BATCHES, MODELS, VERTICAL, Case, contents, new_trainer, run, train, weights_of
from ranks import CPU, on_ranks
from stacks import LLAMA
from tiny_models import random_steps

STREAMED: list[Optimization] = [WeightStreaming(), GradientCheckpointing(recompute_every=2)]

KEPT_ATTENTION = GradientCheckpointing(recompute_every=1, keep_attention=True)

CASES = {
    "data-parallel": Case("gpt2", 2, ()),
    "data-parallel-4": Case("llama", 4, (MixedPrecision(master="absent"), Bf16Optimizer())),
    "data-parallel-lora": Case("llama", 2, (Lora(), MixedPrecision())),
    "zero1": Case("llama", 2, (Zero(stage=1),)),
    "zero1-by-chance": Case("gpt2", 4, (Zero(stage=1), MixedPrecision(master="absent"), Bf16Optimizer())),
    "zero1-split16-away": Case("gpt2", 2, (Zero(stage=1), MixedPrecision(master="split16"), OptimizerOffload())),
    "zero1-int8-weights": Case("llama", 4, (Zero(stage=1), Int8Weights(), MixedPrecision(), Int8Optimizer())),
    "zero2": Case("gpt2", 2, (Zero(stage=2),)),
    "zero2-unclipped": Case("llama", 4, (Zero(stage=2), MixedPrecision()), clip=0.0),
    "zero2-int8-states": Case("gpt2", 4, (Zero(stage=2), Int8Optimizer(), OptimizerOffload())),
    "zero2-streamed-disk": Case(
        "llama", 2, (Zero(stage=2), WeightStreaming(tier="disk"), OptimizerOffload(tier="disk", offload_grads=False))
    ),
    "zero2-vertical": Case("llama", 2, (Zero(stage=2), VERTICAL, MixedPrecision())),
    "zero2-fused": Case("gpt2", 2, (Zero(stage=2), VERTICAL, FusedUpdate())),
    "zero3": Case("gpt2", 2, (Zero(stage=3), *STREAMED)),
    "zero3-resident": Case("llama", 4, (Zero(stage=3), WeightStreaming(resident_layers=1), MixedPrecision())),
    "zero3-one-slot": Case("llama", 2, (Zero(stage=3), WeightStreaming(max_active_layers=1), Int8Optimizer())),
    "zero3-ahead": Case("gpt2", 2, (Zero(stage=3, prefetch=1), *STREAMED)),
    "zero3-ahead-of-many": Case(
        "llama", 4, (Zero(stage=3, prefetch=2), WeightStreaming(max_active_layers=3, prefetch_distance=2))
    ),
    "zero3-ahead-fused": Case(
        "llama", 2, (Zero(stage=3, prefetch=1), *STREAMED, VERTICAL, FusedUpdate(), Int8Weights(master="absent"))
    ),
    "zero3-fused": Case(
        "gpt2", 2, (Zero(stage=3), *STREAMED, VERTICAL, FusedUpdate(), OptimizerOffload(offload_grads=False))
    ),
    "zero2-int8-affine": Case("llama", 4, (Zero(stage=2), Int8Weights(symmetric=False, static_scales=True))),
    "zero3-int8-affine": Case("gpt2", 2, (Zero(stage=3), *STREAMED, Int8Weights(master="absent", symmetric=False))),
    "zero3-int8-weights": Case("llama", 2, (Zero(stage=3), *STREAMED, Int8Weights(master="absent"))),
    "zero3-tiled": Case("llama", 2, (Zero(stage=3), *STREAMED, TiledMlp(mlp_tile_tokens=5))),
    "zero3-kept-attention": Case("llama", 2, (Zero(stage=3), WeightStreaming(), KEPT_ATTENTION, ActivationOffload())),
    "zero3-all-away": Case(
        "gpt2",
        4,
        (
            Zero(stage=3),
            *STREAMED,
            VERTICAL,
            MixedPrecision(),
            Int8Optimizer(),
            OptimizerOffload(),
            ActivationOffload(),
        ),
    ),
}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    told, values = run(case, DirectGroup(case.world), tmp_path)
    assert told[0][0] != told[-1][0]
    for found, weights in on_ranks(case.world, lambda group: run(case, group, tmp_path)):
        assert found == told
        assert {key for key in values if values[key] != weights[key]} == set()


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize(
    "name", ["zero2-int8-states", "zero3-one-slot", "zero3-fused", "zero3-ahead", "zero3-ahead-fused"]
)
def test_ranks_on_the_latest_copies_equal_one_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]

    def late(group: Group) -> tuple[list[tuple[float, float | None]], dict[str, str]]:
        transfer = LazyTransfer(disk_folder=tmp_path)
        with ComputeWatch(transfer):
            trainer = new_trainer(case, group, transfer=transfer)
            told = train(trainer)
        assert transfer.hazards == []
        assert transfer.most_pending > 0  # otherwise nothing was late
        return told, weights_of(trainer)

    assert on_ranks(case.world, late) == [run(case, DirectGroup(case.world), tmp_path)] * case.world


def test_one_micro_batch_a_rank_equals_plain_accumulation(tmp_path: Path) -> None:
    case = Case("gpt2", 4, (Zero(stage=2),), clip=0.0)
    alone = run(case, None, tmp_path)
    assert on_ranks(4, lambda group: run(case, group, tmp_path)) == [alone] * 4


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize(
    ("stack", "copies_to_host"),
    [("zero2-int8-states", True), ("zero3-split16", False), ("zero2-int8-states", False), ("zero3-split16", True)],
)
def test_a_state_that_ranks_saved_is_the_one_that_one_process_saves(
    stack: str, tmp_path: Path, *, copies_to_host: bool
) -> None:
    stacks: dict[str, tuple[Optimization, ...]] = {
        "zero2-int8-states": (Zero(stage=2), MixedPrecision(), Int8Optimizer(), OptimizerOffload()),
        "zero3-split16": (Zero(stage=3), *STREAMED, MixedPrecision(master="split16"), Bf16Optimizer()),
    }
    case = Case("gpt2", 2, stacks[stack])

    def save(group: Group, folder: Path) -> None:
        trainer = new_trainer(case, group)
        train(trainer, slice(2))
        saver = CheckpointSaver(folder, copies_to_host=copies_to_host, clock=lambda: 0.0)
        saver.save(trainer)
        saver.finish()

    def go_on(group: Group) -> tuple[list[tuple[float, float | None]], dict[str, str]]:
        trainer = new_trainer(case, group)
        load_checkpoint(trainer, tmp_path / "ranks")
        return train(trainer, slice(2, None)), weights_of(trainer)

    on_ranks(2, lambda group: save(group, tmp_path / "ranks"))
    save(DirectGroup(2), tmp_path / "alone")
    assert contents(tmp_path / "ranks") == contents(tmp_path / "alone")
    assert on_ranks(4, go_on) == [go_on(DirectGroup(4))] * 4
    told, weights = run(case, DirectGroup(2), tmp_path)
    assert go_on(DirectGroup(2)) == (told[2:], weights)


@pytest.mark.parametrize("name", ["data-parallel", "zero1-split16-away", "zero2", "zero3", "zero3-int8-weights"])
def test_ranks_begin_with_the_weights_of_a_folder(name: str, tmp_path: Path) -> None:
    case, config = CASES[name], MODELS[CASES[name].model]
    seeded = Trainer(config, compose([]), TrainerConfig(seed=7), DirectTransfer(CPU))
    export_folder(seeded, tmp_path / "source", dtype=torch.float32)

    def begin_and_train(group: Group) -> tuple[dict[str, str], list[tuple[float, float | None]]]:
        trainer = new_trainer(case, group, source=open_folder(tmp_path / "source", config))
        return weights_of(trainer), train(trainer, slice(2))

    alone = begin_and_train(DirectGroup(case.world))
    assert on_ranks(case.world, begin_and_train) == [alone] * case.world
    assert alone[0] != weights_of(new_trainer(case, None))
    if name in {"data-parallel", "zero2", "zero3"}:  # float32: what the folder has
        assert alone[0] == weights_of(seeded)


def test_what_ranks_have_cut_is_not_exported_by_one_of_them(tmp_path: Path) -> None:
    trainer = Trainer(
        MODELS["llama"], compose(CASES["zero1"].plan), TrainerConfig(), VirtualTransfer(), group=VirtualGroup(1, 2)
    )
    with pytest.raises(ConfigError, match="weights are sharded over ranks;"):
        export_folder(trainer, tmp_path / "out", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


REFUSED: dict[str, tuple[int, tuple[Optimization, ...], Optimizer, str]] = {
    "ranks": (3, (), AdamWConfig(), "grad_accum_steps: 4 micro-batches of a step must be a multiple"),
    "muon": (2, (Zero(),), Muon(), "'muon' works on whole matrices"),
    "adafactor": (2, (Zero(stage=1),), Adafactor(), "'adafactor' works on whole matrices"),
    "history": (2, (PredictorState(),), AdamWConfig(), "predictor_state works on one rank"),
    "phases": (2, (MixedPrecision(), PredictMemory()), AdamWConfig(), "stored differently in predict than in full"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_do_is_refused_with_its_reason(name: str) -> None:
    world, stack, optimizer, reason = REFUSED[name]
    plan = compose([*stack, GradAccumulation(grad_accum_steps=MICRO_BATCHES)])
    with pytest.raises(ConfigError, match=re.escape(reason)):
        Trainer(
            MODELS["gpt2"], plan, TrainerConfig(optimizer=optimizer), VirtualTransfer(), group=VirtualGroup(0, world)
        )


@pytest.mark.parametrize(
    ("stack", "reason"),
    [
        ((Zero(stage=1), OptimizerOffload(update_on="host")), "the host need whole parameters"),
        ((Zero(stage=3),), "add weight_streaming"),
        ((Zero(), Int8Weights(dynamic_range=DynamicRange.TENSOR)), "cannot share a range;"),
        ((Zero(stage=3), WeightStreaming(), Lora()), "lora freezes;"),
        ((Zero(stage=3, prefetch=2), WeightStreaming()), "zero_prefetch: 2 needs zero's"),
        ((Zero(stage=3, prefetch=1), WeightStreaming(tier="disk")), "weights on disk cannot be gathered ahead;"),
    ],
)
def test_a_plan_that_cannot_be_cut_is_refused(stack: tuple[Optimization, ...], reason: str) -> None:
    with pytest.raises(PlanConflictError, match=reason):
        compose(stack)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize(
    "name",
    [
        "data-parallel-4",
        "zero1-int8-weights",
        "zero2-int8-states",
        "zero3-all-away",
        "zero3-fused",
        "zero3-ahead",
        "zero3-ahead-fused",
    ],
)
def test_each_rank_is_planned_as_it_is_executed(name: str, tmp_path: Path) -> None:
    case = CASES[name]

    def record(group: Group, transfer: Transfer) -> tuple[object, ...]:
        local = MICRO_BATCHES // group.world
        batches = [step[:local] for step in random_steps(MODELS[case.model], 2, MICRO_BATCHES)]
        config = TrainerConfig(optimizer=AdamWConfig(max_grad_norm=case.clip))
        trace = record_steps(MODELS[case.model], compose(case.plan), batches, transfer, config, group=group)
        facts = trace.events, trace.sizes, trace.classes, trace.units, [mark.event for mark in trace.steps]
        lanes = [
            (op.name, op.lane, op.stage, op.unit, op.event, op.bytes_moved)
            for op in trace.ops
            if op.stage is not Stage.LOAD and not op.name.startswith("aten._local_scalar_dense")
        ]
        return *facts, lanes, transfer.tiers.by_class(Placement.HOST), transfer.tiers.peak_bytes(Placement.HOST)

    executed = on_ranks(case.world, lambda group: record(group, DirectTransfer(CPU, disk_folder=tmp_path)))
    for rank, found in enumerate(executed):
        planned = record(VirtualGroup(rank, case.world), VirtualTransfer())
        for ours, theirs in zip(planned, found, strict=True):
            assert ours == theirs


def test_what_is_gathered_ahead_passes_beside_compute() -> None:
    def plan_with(prefetch: int) -> LedgerTrace:
        stack = [Zero(stage=3, prefetch=prefetch), *STREAMED, GradAccumulation(grad_accum_steps=MICRO_BATCHES)]
        config = replace(LLAMA, num_blocks=4)
        batches = [step[:2] for step in random_steps(config, 2, MICRO_BATCHES)]
        return record_steps(config, compose(stack), batches, VirtualTransfer(), group=VirtualGroup(0, 2))

    def beside(trace: LedgerTrace) -> int:
        """Return how many collectives have products of matrices between their begin and what waits for them."""
        found = 0
        for number, op in enumerate(trace.ops):
            if op.lane is Lane.LINK:
                rest = trace.ops[number + 1 :]
                waiting = next((i for i, later in enumerate(rest) if number in later.waits), len(rest))
                found += any(later.is_matmul for later in rest[:waiting])
        return found

    none, ahead = plan_with(0), plan_with(1)
    on_link = [[op.bytes_moved for op in trace.ops if op.lane is Lane.LINK] for trace in (none, ahead)]
    assert sorted(on_link[0]) == sorted(on_link[1])
    assert beside(none) == 0
    assert beside(ahead) > 2 * 3  # of each step's forward pass all blocks but the first, and of its backward pass more


@pytest.mark.parametrize("stage", [2, 3])
def test_when_a_rank_dies_the_other_ends_and_says_so(stage: int, tmp_path: Path) -> None:
    case, heard = Case("gpt2", 2, (Zero(stage=stage), *STREAMED)), tmp_path / "heard"

    def work(group: TorchGroup) -> None:
        trainer = new_trainer(case, group)
        train(trainer, slice(1))
        if group.rank == 1:
            os._exit(1)
        with pytest.raises(RankError) as met:
            train(trainer, slice(1, None))
        heard.write_text(str(met.value))
        os._exit(0)

    with pytest.raises(AssertionError, match="rank 1: ended without a word"):
        on_ranks(2, work, timeout_s=20.0)
    assert heard.read_text().startswith("rank 0 of 2: another rank ended or did not answer in time")
