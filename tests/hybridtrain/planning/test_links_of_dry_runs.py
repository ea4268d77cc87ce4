"""A dry run of one rank takes time on the link, and its share of the machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridtrain.models.model_config import Workload
from hybridtrain.optimizations import GradAccumulation, OptimizerOffload, Pipeline, Zero
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import DryRun, DryRunInputs, dry_run
from hybridtrain.virtual_gpu.account.op_record import Lane
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridtrain.virtual_gpu.cards.links import Collective, World
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck
from stacks import LLAMA

CARD = find_card("rtx-4090")
PLAN = compose([Zero(stage=2), OptimizerOffload(), GradAccumulation(grad_accum_steps=4)])
MODEL = replace(LLAMA, num_blocks=2)


def run(world: World | None, host: Host | None = None) -> DryRun:
    return dry_run(MODEL, PLAN, CARD, Workload(micro_batch_size=1, seq_len=8), host=host, world=world)


def test_each_collective_keeps_the_link_as_long_as_its_bytes_and_steps_need() -> None:
    world = World(size=4, link="ethernet")
    timed = [op for op in run(world).time.ops if op.op.lane is Lane.LINK]
    assert timed
    for op in timed:
        need = world.seconds(Collective.ALL_TO_ALL, op.op.bytes_moved, 4, CARD)
        assert op.duration_s == pytest.approx(need)


def test_a_slow_link_binds(tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text("gbps = 0.001\nhop_seconds = 1e-3\n")
    assert run(World(size=4)).bound is not Bottleneck.LINK
    assert run(World(size=4, link=str(slow))).bound is Bottleneck.LINK


def test_one_card_has_no_link() -> None:
    alone = run(None)
    assert run(World(size=1, link="ethernet")).time == alone.time
    assert Lane.LINK not in alone.time.busy_seconds


def test_ranks_of_a_machine_share_its_memory() -> None:
    first = run(World(size=2))
    assert first.machine_host_bytes == 2 * first.host_peak_bytes
    gib = 2**30
    narrow = Host(memory_gib=1.5 * first.host_peak_bytes / gib, reserved_gib=0.0)
    assert not run(World(size=2), narrow).fits
    assert run(World(size=2, cards_per_machine=1), narrow).fits


def test_a_stage_waits_for_the_first_micro_batches_and_the_last_ones() -> None:
    plan = compose([Pipeline(stages=2), GradAccumulation(grad_accum_steps=4)])
    workload = Workload(micro_batch_size=1, seq_len=8)
    first = dry_run(MODEL, plan, CARD, workload, world=World(size=2)).time
    update = first.seconds_by_bound[Bottleneck.OPTIMIZER]
    assert first.seconds == pytest.approx(sum(first.seconds_by_bound.values()))
    assert first.seconds_by_bound[Bottleneck.LINK] >= (first.seconds - update) * (1 / 4) / (1 + 1 / 4) > 0


def test_the_stages_that_differ_are_run_and_the_fullest_comes_first() -> None:
    plan = compose([Pipeline(stages=4), GradAccumulation(grad_accum_steps=4)])
    model = replace(LLAMA, num_blocks=5, vocab_size=8)
    workload = Workload(micro_batch_size=1, seq_len=8)
    runs = DryRunInputs(model=model, plan=plan, card=CARD, workload=workload, world=World(size=4)).dry_run_ranks()
    assert sorted(run.world.rank for run in runs) == [0, 1, 3]
    assert runs[0].world.rank == 0  # two of the five blocks, and most in flight
    sizes = [run.device_used_bytes for run in runs]
    assert sizes == sorted(sizes, reverse=True)
    for run in runs:
        assert run.steps == dry_run(model, plan, CARD, workload, world=run.world).steps
    model = replace(model, vocab_size=2**16, num_blocks=4, tied=False)
    stages = DryRunInputs(model=model, plan=plan, card=CARD, workload=workload, world=World(size=4)).dry_run_ranks()
    assert stages[0].world.rank == 3  # logits


def test_of_ranks_that_share_all_work_two_are_run() -> None:
    workload = Workload(micro_batch_size=1, seq_len=8)
    alone = DryRunInputs(model=MODEL, plan=PLAN, card=CARD, workload=workload)
    assert [run.world.rank for run in replace(alone, world=World(size=4)).dry_run_ranks()] == [0, 3]
    assert [run.world.rank for run in alone.dry_run_ranks()] == [0]
