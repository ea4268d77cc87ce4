from dataclasses import replace
from functools import cache

import pytest

from hybridtrain.models.model_config import Workload
from hybridtrain.optimizations import GradAccumulation, Int8Optimizer, MixedPrecision, Pipeline
from hybridtrain.plan.compose import compose
from hybridtrain.planning.dry_runs import DryRun, DryRunInputs, dry_run
from hybridtrain.planning.figures import figures_of_ranks, memory_figures, unit_names
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridtrain.virtual_gpu.cards.links import World
from hybridvalidation.records.asked import plan_figures
from tiny_models import GPT2_UNTIED

MIB = 2**20
CARD = find_card("rtx-4070-ti-super")
SMALL_CARD = replace(CARD, memory_mib=20, context_mib=0)
MOST_POINTS = 240


@cache
def run(num_steps: int = 2, *, fits: bool = True, num_blocks: int = 4) -> DryRun:
    config = replace(GPT2_UNTIED, num_blocks=num_blocks, vocab_size=500)
    workload = Workload(micro_batch_size=2, seq_len=16)
    return dry_run(config, compose([]), CARD if fits else SMALL_CARD, workload, num_steps=num_steps)


def test_the_figures_are_those_of_the_run() -> None:
    found, figures = run(), memory_figures(run())
    assert figures.fits
    assert figures.oom is None
    assert figures.num_params == found.num_params
    assert figures.peak_allocated_bytes == found.peak.allocated_bytes
    assert figures.peak_reserved_bytes == found.peak_reserved_bytes
    assert figures.device_used_bytes == found.peak_reserved_bytes + CARD.context_bytes
    assert figures.host_peak_bytes == 2 * 16 * 8
    assert figures.tokens_per_step == 2 * 16
    assert (figures.step_time_s, figures.tokens_per_s) == (found.time.seconds, found.tokens_per_s)
    assert figures.bound == found.bound
    assert [step.allocated_bytes for step in figures.steps] == [step.allocated_bytes for step in found.steps]


def test_holders_are_plain_text_and_sum_up() -> None:
    figures = memory_figures(run())
    assert list(figures.by_class) == [item.value for item in TensorClass]
    assert all(type(name) is str for name in figures.by_class)
    for holders in (figures.by_class, figures.by_unit):
        assert sum(holders.values()) == figures.peak_allocated_bytes
    for step in figures.steps:
        assert sum(step.by_class.values()) == step.allocated_bytes


def test_times_by_bound_sum_up_to_the_step() -> None:
    figures = memory_figures(run())
    # Sums of the same float64 numbers in another order.
    assert sum(figures.time_by_bound.values()) == pytest.approx(figures.step_time_s, rel=1e-9)


def test_units_are_named_by_class_and_unit_largest_first() -> None:
    names = unit_names(
        {
            (TensorClass.WEIGHT, "head"): 5,
            (TensorClass.GRAD, "block.1"): 7,
            (TensorClass.ACTIVATION, ""): 6,
            (TensorClass.GRAD, "block.0"): 7,
        }
    )
    assert list(names.items()) == [
        ("grad/block.0", 7),
        ("grad/block.1", 7),
        ("activation", 6),
        ("weight/head", 5),
    ]


def test_a_plan_is_shown_cell_by_cell() -> None:
    stack = [MixedPrecision(master="split16"), Int8Optimizer(), GradAccumulation(grad_accum_steps=2)]
    figures = plan_figures(compose(stack))
    assert figures["weight.codec"] == "bfloat16"
    assert figures["master.codec"] == "split16"
    assert figures["optim_state.codec"] == "int8_blocks"
    assert figures["weight.placement"] == "device"
    assert figures["grad_accum_steps"] == "2"
    assert plan_figures(compose([])) != figures


def test_a_refused_request_keeps_its_numbers_and_the_ten_largest_holders() -> None:
    found = run(fits=False, num_blocks=12)
    figures = memory_figures(found)
    assert not figures.fits
    assert figures.oom is not None
    assert found.oom is not None
    assert figures.oom.capacity_bytes == 20 * MIB
    assert figures.oom.requested_bytes == found.oom.requested_bytes
    assert sum(figures.oom.by_class.values()) == figures.oom.allocated_bytes
    assert len(figures.oom.by_unit) == 10
    sizes = list(figures.oom.by_unit.values())
    assert sizes == sorted(found.oom.by_unit.values(), reverse=True)[:10]
    assert figures.peak_allocated_bytes == run(num_blocks=12).peak.allocated_bytes


def test_a_timeline_is_left_out_on_request() -> None:
    assert memory_figures(run(), with_timeline=False).timeline is None


@pytest.mark.parametrize("num_blocks", [1, 4, 12])
@pytest.mark.parametrize("num_steps", [2, 3])
def test_the_timeline_keeps_the_peak_of_the_last_step(num_steps: int, num_blocks: int) -> None:
    found = run(num_steps, num_blocks=num_blocks)
    timeline = memory_figures(found).timeline
    assert timeline is not None
    moments = list(zip(*timeline.by_class.values(), strict=True))
    assert list(timeline.by_class) == [item.value for item in TensorClass]
    assert max(sum(moment) for moment in moments) == found.steps[-1].allocated_bytes
    assert tuple(found.steps[-1].by_class.values()) in moments


def test_the_timeline_is_that_of_the_last_step_only() -> None:
    timeline = memory_figures(run()).timeline
    assert timeline is not None
    # Optimizer state is there from the first moment on, which it is not in the first step.
    state_bytes = run().steps[-1].by_class[TensorClass.OPTIM_STATE]
    assert state_bytes > 0
    assert set(timeline.by_class["optim_state"]) == {state_bytes}


def test_the_timeline_is_short_and_goes_forward() -> None:
    found = run(num_blocks=12)
    timeline = memory_figures(found).timeline
    assert timeline is not None
    assert 2 < len(timeline.times_s) <= MOST_POINTS < len(found.uncapped.live_by_class)
    assert list(timeline.times_s) == sorted(timeline.times_s)
    assert timeline.times_s[0] < found.time.seconds / MOST_POINTS  # within the first slice
    assert timeline.times_s[-1] <= found.time.seconds
    assert all(len(sizes) == len(timeline.times_s) for sizes in timeline.by_class.values())


def test_of_ranks_bytes_are_of_the_fullest_and_time_of_the_slowest() -> None:
    plan = compose([Pipeline(stages=3), GradAccumulation(grad_accum_steps=3)])
    config = replace(GPT2_UNTIED, num_blocks=4, vocab_size=500)
    workload = Workload(micro_batch_size=2, seq_len=16)
    runs = DryRunInputs(model=config, plan=plan, card=CARD, workload=workload, world=World(size=3)).dry_run_ranks()
    found = figures_of_ranks(runs, with_timeline=False)
    assert found.ranks == {str(run.world.rank): run.device_used_bytes for run in runs}
    assert list(found.ranks) == ["0", "1", "2"]
    assert found.device_used_bytes == max(found.ranks.values())
    assert found.step_time_s == max(run.time.seconds for run in runs)
    assert found.tokens_per_s == min(run.tokens_per_s for run in runs)
    assert found.fits
    poor = Host(memory_gib=2.5 * min(run.host_peak_bytes for run in runs) / 2**30, reserved_gib=0.0)
    runs = DryRunInputs(
        model=config, plan=plan, card=CARD, workload=workload, world=World(size=3), host=poor
    ).dry_run_ranks()
    assert not figures_of_ranks(runs).fits_host
    assert figures_of_ranks(runs[:1], with_timeline=False) == memory_figures(runs[0], with_timeline=False)
