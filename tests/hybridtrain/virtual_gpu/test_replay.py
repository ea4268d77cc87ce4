from collections.abc import Sequence
from functools import cache

import pytest

from hybridtrain.memory.transfer import VirtualTransfer
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import (
    ChunkedLoss,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    MixedPrecision,
)
from hybridtrain.phase import Phase
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import record_steps
from hybridtrain.virtual_gpu.account.ledger import LedgerTrace, StepMark
from hybridtrain.virtual_gpu.account.op_record import OpRecord, Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.allocator.replay import Replay, replay_trace
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED, LLAMA_GROUPED, random_steps

MIB = 2**20
ADA_WORKSPACE, HOPPER_WORKSPACE = 8_519_680, 33_554_432
STACKS: dict[str, list[Optimization]] = {
    "vanilla": [],
    "mixed": [MixedPrecision()],
    "vertical": [
        GradientCheckpointing(recompute_every=2),
        GradAccumulation(grad_accum_steps=2, schedule="vertical"),
        Int8Optimizer(),
    ],
    "tight": [
        GradientCheckpointing(recompute_every=1),
        MixedPrecision(master="absent"),
        Int8Optimizer(),
        GradAccumulation(grad_accum_steps=2, accumulator="bfloat16"),
        ChunkedLoss(loss_chunk_tokens=16),
    ],
}
MODELS = {"gpt2": GPT2_UNTIED, "gpt2-dropout": GPT2_TIED_DROPOUT, "llama": LLAMA_GROUPED}
WEIGHT, ACTIVATION, WORKSPACE = TensorClass.WEIGHT, TensorClass.ACTIVATION, TensorClass.WORKSPACE


def op(event: int, stage: Stage, unit: str = "", *, is_matmul: bool = False) -> OpRecord:
    return OpRecord(
        name=f"op at {event}", event=event, stage=stage, unit=unit, is_matmul=is_matmul, flops=0,
        bytes_moved=1, dtype="float32",
    )  # fmt: skip


def trace_of(
    sizes: Sequence[int], events: Sequence[int], ops: Sequence[OpRecord] = (), steps: Sequence[int] = (0,)
) -> LedgerTrace:
    """Return a trace whose first storage is a weight of block 0 and whose others are activations of block 1."""
    others = len(sizes) - 1
    return LedgerTrace(
        sizes=tuple(sizes),
        classes=(WEIGHT, *[ACTIVATION] * others),
        units=("block.0", *["block.1"] * others),
        events=tuple(events),
        ops=tuple(ops),
        steps=tuple(StepMark(event, 0) for event in steps),
    )


@cache
def record_two_steps(config: ModelConfig, name: str) -> LedgerTrace:
    plan = compose(STACKS[name])
    accum_steps = plan.for_phase(Phase.FULL).grad_accum_steps
    return record_steps(config, plan, random_steps(config, 2, accum_steps), VirtualTransfer())


def replay(trace: LedgerTrace, capacity_bytes: int | None = None, workspace_bytes: int = 512) -> Replay:
    return replay_trace(trace, workspace_bytes=workspace_bytes, capacity_bytes=capacity_bytes)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", MODELS)
def test_holders_sum_up_to_the_allocated_bytes(model: str, stack: str) -> None:
    trace = record_two_steps(MODELS[model], stack)
    steps = replay(trace, workspace_bytes=ADA_WORKSPACE).steps
    assert len(steps) == 2
    for step in steps:
        assert sum(step.by_class.values()) == step.allocated_bytes
        assert sum(step.by_unit.values()) == step.allocated_bytes
        assert list(step.by_class) == list(TensorClass)


@pytest.mark.parametrize("workspace_bytes", [ADA_WORKSPACE, HOPPER_WORKSPACE])
@pytest.mark.parametrize("stack", STACKS)
def test_each_thread_takes_one_workspace_for_the_whole_run(stack: str, workspace_bytes: int) -> None:
    trace = record_two_steps(GPT2_UNTIED, stack)
    found = replay(trace, workspace_bytes=workspace_bytes)
    for step in found.steps:
        # One of the forward thread, one of the backward thread; both sizes are whole multiples of 512 bytes.
        assert step.by_unit[WORKSPACE, "cublas"] == 2 * workspace_bytes
    ledger_peak = max(list(trace.live_bytes())[position] for position in trace.step_range(1))
    assert found.steps[1].requested_bytes == ledger_peak + 2 * workspace_bytes


def test_workspaces_are_taken_at_the_first_matmul_of_each_direction() -> None:
    ops = [
        op(1, Stage.FORWARD),
        op(2, Stage.FORWARD, is_matmul=True),
        op(3, Stage.FORWARD, is_matmul=True),
        op(4, Stage.BACKWARD, is_matmul=True),
        op(5, Stage.UPDATE, is_matmul=True),
    ]
    trace = trace_of([512] * 6, range(6), ops, steps=[1, 3, 4, 5])
    found = replay(trace, workspace_bytes=1024)
    assert [step.by_class[WORKSPACE] for step in found.steps] == [1024, 1024, 2048, 2048]


def test_no_matmul_takes_no_workspace() -> None:
    found = replay(trace_of([512] * 2, range(2), [op(1, Stage.FORWARD)]))
    assert found.steps[0].by_class[WORKSPACE] == 0
    assert found.steps[0].allocated_bytes == 1024


def test_each_step_has_its_own_peak() -> None:
    ops = [
        op(0, Stage.BUILD, "embedding"),
        op(1, Stage.FORWARD, "block.0"),
        op(3, Stage.BACKWARD, "block.1"),
        op(5, Stage.UPDATE, "head"),
    ]
    trace = trace_of([1024, 4096, 2048, 512], [0, 1, ~1, 2, ~2, 3], ops, steps=[1, 3, 5])
    steps = replay(trace).steps
    assert [step.step for step in steps] == [1, 2, 3]
    assert [step.allocated_bytes for step in steps] == [5120, 3072, 1536]
    assert [step.by_class[ACTIVATION] for step in steps] == [4096, 2048, 512]
    assert [(step.stage, step.unit) for step in steps] == [
        (Stage.FORWARD, "block.0"),
        (Stage.BACKWARD, "block.1"),
        (Stage.UPDATE, "head"),
    ]
    assert [step.by_unit for step in steps] == [
        {(WEIGHT, "block.0"): 1024, (ACTIVATION, "block.1"): size} for size in (4096, 2048, 512)
    ]


def test_of_equal_moments_the_first_is_the_peak() -> None:
    ops = [op(0, Stage.FORWARD, "block.0"), op(2, Stage.BACKWARD, "block.1")]
    (step,) = replay(trace_of([512, 2048, 2048], [0, 1, ~1, 2], ops)).steps
    assert (step.allocated_bytes, step.stage, step.unit) == (2560, Stage.FORWARD, "block.0")


def test_what_the_build_took_and_gave_back_is_no_steps_peak() -> None:
    trace = trace_of([512, 4096, 1024], [0, 1, ~1, 2], steps=[3])
    assert [step.allocated_bytes for step in replay(trace).steps] == [1536]


def test_a_step_that_only_frees_peaks_at_its_start() -> None:
    trace = trace_of([512, 4096], [0, 1, ~1], steps=[2])
    (step,) = replay(trace).steps
    assert (step.allocated_bytes, step.by_class[ACTIVATION]) == (4608, 4096)


def test_requested_allocated_and_reserved_bytes_differ_by_rounding_and_segments() -> None:
    (step,) = replay(trace_of([1000, MIB + 1], [0, 1])).steps
    assert step.requested_bytes == MIB + 1001
    assert step.allocated_bytes == 1024 + MIB + 512
    assert step.active_bytes == step.allocated_bytes
    assert step.reserved_bytes == 2 * MIB + 20 * MIB


def test_a_refusal_reports_the_request_and_who_holds_what() -> None:
    ops = [op(1, Stage.FORWARD, "block.1"), op(3, Stage.BACKWARD, "head")]
    trace = trace_of([20 * MIB, 12 * MIB, 10 * MIB, 30 * MIB], [0, 1, 2, 3], ops, steps=[1, 3])
    found = replay(trace, capacity_bytes=50 * MIB)
    oom = found.oom
    assert oom is not None
    assert (oom.step, oom.stage, oom.unit) == (2, Stage.BACKWARD, "head")
    assert oom.requested_bytes == 30 * MIB
    assert oom.allocated_bytes == 42 * MIB
    assert oom.reserved_bytes == 42 * MIB
    assert oom.capacity_bytes == 50 * MIB
    assert oom.by_class == dict.fromkeys(TensorClass, 0) | {WEIGHT: 20 * MIB, ACTIVATION: 22 * MIB}
    assert oom.by_unit == {(WEIGHT, "block.0"): 20 * MIB, (ACTIVATION, "block.1"): 22 * MIB}
    assert [step.allocated_bytes for step in found.steps] == [42 * MIB]
    assert found.num_alloc_retries == 1


def test_a_refusal_while_the_model_is_built_is_in_step_0() -> None:
    trace = trace_of([20 * MIB, 40 * MIB, 512], [0, 1, 2], [op(0, Stage.BUILD)], steps=[2])
    oom = replay(trace, capacity_bytes=50 * MIB).oom
    assert oom is not None
    assert (oom.step, oom.stage, oom.requested_bytes) == (0, Stage.BUILD, 40 * MIB)


def test_a_refused_workspace_is_reported_like_any_request() -> None:
    trace = trace_of([30 * MIB, 512], [0, 1], [op(1, Stage.FORWARD, "block.1", is_matmul=True)], steps=[1])
    oom = replay(trace, 40 * MIB, HOPPER_WORKSPACE).oom
    assert oom is not None
    assert (oom.requested_bytes, oom.unit) == (HOPPER_WORKSPACE, "block.1")
    assert oom.by_class[WEIGHT] == oom.allocated_bytes == 30 * MIB


def test_a_refusal_right_after_a_workspace_counts_the_workspace() -> None:
    trace = trace_of([MIB, 30 * MIB], [0, 1], [op(1, Stage.FORWARD, is_matmul=True)], steps=[1])
    oom = replay(trace, 24 * MIB, ADA_WORKSPACE).oom
    assert oom is not None
    assert oom.allocated_bytes == MIB + ADA_WORKSPACE
    assert oom.by_class[WORKSPACE] == ADA_WORKSPACE
    assert sum(oom.by_unit.values()) == oom.allocated_bytes


@pytest.mark.parametrize("stack", ["vanilla", "tight"])
def test_every_cap_either_fits_or_reports_a_whole_refusal(stack: str) -> None:
    trace = record_two_steps(GPT2_UNTIED, stack)
    reserved_bytes = replay(trace, workspace_bytes=ADA_WORKSPACE).steps[-1].reserved_bytes
    for capacity in range(0, reserved_bytes, 2 * MIB):
        oom = replay(trace, capacity, ADA_WORKSPACE).oom
        assert oom is not None, f"{capacity} bytes hold what took {reserved_bytes}"
        assert sum(oom.by_class.values()) == oom.allocated_bytes == sum(oom.by_unit.values())
        assert oom.allocated_bytes <= oom.reserved_bytes <= oom.capacity_bytes == capacity
    assert replay(trace, reserved_bytes, ADA_WORKSPACE).oom is None


def test_cached_segments_are_released_and_the_request_tried_again() -> None:
    trace = trace_of([10 * MIB, 30 * MIB, 40 * MIB], [0, 1, ~1, 2], steps=[1])
    assert replay(trace).steps[0].reserved_bytes == 80 * MIB
    capped = replay(trace, capacity_bytes=60 * MIB)
    assert capped.oom is None
    assert capped.num_alloc_retries == 1
    assert capped.steps[0].reserved_bytes == 50 * MIB
    assert capped.steps[0].allocated_bytes == 50 * MIB


def test_the_settings_of_the_allocator_are_used() -> None:
    trace = trace_of([512, 20 * MIB, 40 * MIB], [0, 1, ~1, 2])
    expandable = AllocatorConfig(expandable_segments=True)
    (plain,) = replay(trace).steps
    (grown,) = replay_trace(trace, workspace_bytes=512, config=expandable).steps
    assert grown.allocated_bytes == plain.allocated_bytes == 512 + 40 * MIB
    assert plain.reserved_bytes == 2 * MIB + 20 * MIB + 40 * MIB
    assert grown.reserved_bytes == 2 * MIB + 40 * MIB


@pytest.mark.parametrize("num_steps", [1, 2])
def test_the_last_steps_timeline_reaches_its_peak(num_steps: int) -> None:
    batches = random_steps(GPT2_UNTIED, num_steps)
    trace = record_steps(GPT2_UNTIED, compose([]), batches, VirtualTransfer())
    found = replay(trace, workspace_bytes=ADA_WORKSPACE)
    events = [event for event, _ in found.live_by_class]
    assert events == list(trace.step_range(num_steps - 1))
    at_peak = max((by_class for _, by_class in found.live_by_class), key=lambda item: sum(item.values()))
    assert at_peak == found.steps[-1].by_class


def test_a_refused_run_has_no_timeline() -> None:
    assert replay(trace_of([30 * MIB], [0]), capacity_bytes=MIB).live_by_class == ()


def test_history_names_the_storage_of_every_allocation() -> None:
    ops = [op(1, Stage.FORWARD, is_matmul=True)]
    trace = trace_of([1000, 2000, 3000], [0, 1, ~1, 2], ops)
    found = replay_trace(trace, workspace_bytes=512, record_history=True)
    allocations = [event for event in found.history if event.action == "alloc"]
    assert [event.size for event in allocations] == [1000, 512, 2000, 3000]
    assert [found.owners.get(event.ordinal) for event in allocations] == [0, None, 1, 2]
    assert sum(segment.total_size for segment in found.segments) == found.steps[-1].reserved_bytes


def test_without_history_nothing_is_kept() -> None:
    found = replay(trace_of([1000], [0]))
    assert (found.history, found.owners, found.segments) == ((), {}, ())
