from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import PRESETS, ModelConfig, Workload
from hybridtrain.optimizations import (
    ChunkedLoss,
    GradAccumulation,
    GradientCheckpointing,
    Int8Optimizer,
    MixedPrecision,
)
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.planning.dry_runs import DryRun, dry_run
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridtrain.virtual_gpu.allocator.allocator_config import AllocatorConfig
from hybridtrain.virtual_gpu.cards.card import Card, find_card
from hybridtrain.virtual_gpu.cards.roofline import Bottleneck
from tiny_models import GPT2_TIED_DROPOUT, GPT2_UNTIED

MIB = 2**20
CARD = find_card("rtx-4070-ti-super")
BATCH_SIZE, SEQ_LEN = 3, 17
VANILLA: list[Optimization] = []
TIGHT = [
    GradientCheckpointing(recompute_every=1),
    MixedPrecision(master="absent"),
    Int8Optimizer(),
    GradAccumulation(grad_accum_steps=4, accumulator="bfloat16"),
    ChunkedLoss(loss_chunk_tokens=1024),
]


def run(config: ModelConfig, stack: Sequence[Optimization], card: Card = CARD, num_steps: int = 2) -> DryRun:
    workload = Workload(micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
    return dry_run(config, compose(stack), card, workload, num_steps=num_steps)


def gpt2_sizes(config: ModelConfig) -> list[int]:
    """Return the elements of every parameter of an untied GPT-2, written down from its paper."""
    width, ffn = config.width, config.ffn_width
    norm = [width, width]
    attention = [3 * width * width, 3 * width, width * width, width]
    feed_forward = [ffn * width, ffn, width * ffn, width]
    block = [*norm, *attention, *norm, *feed_forward]
    embedding = [config.vocab_size * width, config.max_seq_len * width]
    return [*embedding, *block * config.num_blocks, *norm, config.vocab_size * width]


def blocks_of(num_bytes: int) -> int:
    """Return the allocator's block for a request: whole 512 bytes."""
    return -(-num_bytes // 512) * 512


def held(sizes: Sequence[int], itemsize: int) -> int:
    return sum(blocks_of(size * itemsize) for size in sizes)


def int8_bytes(size: int) -> int:
    """Return both moments of a parameter: one byte each and a float32 scale per 256, below 4096 float32."""
    groups = -(-size // 256)
    return 2 * (blocks_of(groups * 256) + blocks_of(groups * 4) if size >= 4096 else blocks_of(size * 4))


def test_vanilla_holds_4_bytes_of_weight_and_8_of_state_per_parameter() -> None:
    later = run(GPT2_UNTIED, VANILLA).steps[1]
    sizes = gpt2_sizes(GPT2_UNTIED)
    assert sum(sizes) == GPT2_UNTIED.num_params
    assert later.by_class[TensorClass.WEIGHT] == held(sizes, 4)
    assert later.by_class[TensorClass.OPTIM_STATE] == 2 * held(sizes, 4)
    assert later.by_class[TensorClass.MASTER] == 0


@pytest.mark.parametrize(("master", "itemsize"), [("float32", 4), ("split16", 2), ("absent", 0)])
def test_mixed_precision_holds_2_bytes_of_weight_and_its_master(master: str, itemsize: int) -> None:
    later = run(GPT2_UNTIED, [MixedPrecision(master=master)]).steps[1]
    sizes = gpt2_sizes(GPT2_UNTIED)
    assert later.by_class[TensorClass.WEIGHT] == held(sizes, 2)
    assert later.by_class[TensorClass.MASTER] == held(sizes, itemsize)
    assert later.by_class[TensorClass.OPTIM_STATE] == 2 * held(sizes, 4)


def test_the_8_bit_optimizer_holds_2_bytes_per_parameter_and_its_scales() -> None:
    config = replace(GPT2_UNTIED, width=64, num_heads=4)  # matrices above and below 4096 elements
    sizes = gpt2_sizes(config)
    assert min(sizes) < 4096 <= max(sizes)
    later = run(config, [Int8Optimizer()]).steps[1]
    assert later.by_class[TensorClass.OPTIM_STATE] == sum(map(int8_bytes, sizes))


def test_a_tied_weight_is_held_once() -> None:
    untied = replace(GPT2_TIED_DROPOUT, tied=False)
    extra = (
        run(untied, VANILLA).steps[1].by_class[TensorClass.WEIGHT]
        - run(GPT2_TIED_DROPOUT, VANILLA).steps[1].by_class[TensorClass.WEIGHT]
    )
    assert extra == blocks_of(4 * untied.vocab_size * untied.width)


def test_the_first_step_reaches_its_peak_before_there_is_optimizer_state() -> None:
    config = replace(GPT2_UNTIED, vocab_size=1000)
    workload = Workload(micro_batch_size=16, seq_len=32)  # so that the peak is at the logits
    first, later = dry_run(config, compose([]), CARD, workload).steps
    assert first.by_class[TensorClass.OPTIM_STATE] == 0
    assert (first.stage, first.unit) == (later.stage, later.unit) == (Stage.BACKWARD, "head")
    # Everything but the state is the same at the same moment of both steps.
    state_bytes = 2 * held(gpt2_sizes(config), 4)
    assert later.allocated_bytes - first.allocated_bytes == state_bytes
    assert later.by_class[TensorClass.OPTIM_STATE] == state_bytes


def test_the_peak_is_that_of_the_larger_step() -> None:
    found = run(GPT2_UNTIED, VANILLA)
    assert found.peak == found.steps[1]
    assert found.by_class() == found.steps[1].by_class
    assert sum(found.by_class().values()) == found.peak.allocated_bytes
    assert found.peak_reserved_bytes == max(step.reserved_bytes for step in found.steps)


def test_the_device_holds_the_context_beside_the_allocator() -> None:
    found = run(GPT2_UNTIED, VANILLA)
    assert found.device_used_bytes == found.peak_reserved_bytes + CARD.context_bytes


@pytest.mark.parametrize(("steps", "num_tokens"), [(1, 51), (4, 204)])
def test_tokens_and_time_are_those_of_a_whole_step(steps: int, num_tokens: int) -> None:
    found = run(GPT2_UNTIED, [GradAccumulation(grad_accum_steps=steps)])
    assert found.tokens_per_step == num_tokens
    assert found.tokens_per_s == num_tokens / found.time.seconds
    assert found.bound in found.time.seconds_by_bound


def test_accumulation_repeats_the_arithmetic_but_not_the_update() -> None:
    one, four = (run(GPT2_UNTIED, [GradAccumulation(grad_accum_steps=steps)]).time for steps in (1, 4))
    assert four.flops == 4 * one.flops
    # The same ops at other starts: equal but for the rounding of a float64 sum.
    assert four.seconds_by_bound[Bottleneck.OPTIMIZER] == pytest.approx(
        one.seconds_by_bound[Bottleneck.OPTIMIZER], rel=1e-12
    )
    # Ids and targets, int64, in every micro-batch, at 80 % of 31.5 GB/s; float64 rounding again.
    assert four.upload_seconds == pytest.approx(4 * 2 * 8 * 51 / (0.8 * 31.5e9), rel=1e-12)


def test_the_host_holds_one_array_of_tokens() -> None:
    assert run(GPT2_UNTIED, [GradAccumulation(grad_accum_steps=4)]).host_peak_bytes == 8 * 51


def test_a_run_that_fits_needs_no_cap() -> None:
    found = run(GPT2_UNTIED, VANILLA)
    assert found.fits
    assert found.oom is None
    assert found.capped is found.uncapped


def test_a_run_that_does_not_fit_tells_what_it_would_take() -> None:
    card = replace(CARD, memory_mib=20, context_mib=0)
    found = run(GPT2_UNTIED, VANILLA, card)
    assert not found.fits
    assert found.oom is not None
    assert found.oom.capacity_bytes == 20 * MIB
    assert found.oom.requested_bytes > 0
    assert found.steps == run(GPT2_UNTIED, VANILLA).steps


def test_a_run_fits_a_cap_below_what_it_reserves_by_releasing_cached_segments() -> None:
    config = replace(PRESETS["gpt2-small"], num_blocks=2)
    plan = compose([GradientCheckpointing(recompute_every=2), GradAccumulation(grad_accum_steps=2), Int8Optimizer()])
    workload = Workload(micro_batch_size=2, seq_len=640)
    free = dry_run(config, plan, CARD, workload)
    card = replace(CARD, memory_mib=free.peak_reserved_bytes // MIB - 2, context_mib=0)
    found = dry_run(config, plan, card, workload)
    assert found.fits
    assert found.capped.num_alloc_retries > 0
    assert found.peak_reserved_bytes <= card.allocator_capacity_bytes < free.peak_reserved_bytes
    assert found.peak.requested_bytes == free.peak.requested_bytes


@pytest.mark.parametrize("num_steps", [1, 3])
def test_any_number_of_steps_can_be_run(num_steps: int) -> None:
    found = run(GPT2_UNTIED, VANILLA, num_steps=num_steps)
    assert [step.step for step in found.steps] == list(range(1, num_steps + 1))
    assert found.steps[1:] == tuple(replace(found.steps[-1], step=step.step) for step in found.steps[1:])


def test_expandable_segments_reserve_less_of_many_odd_sizes() -> None:
    config = replace(PRESETS["gpt2-small"], num_blocks=2)
    workload = Workload(micro_batch_size=2, seq_len=777)
    reserved = [
        dry_run(config, compose([]), CARD, workload, allocator=AllocatorConfig(expandable_segments=on))
        for on in (False, True)
    ]
    assert reserved[1].peak_reserved_bytes < reserved[0].peak_reserved_bytes


def test_history_is_kept_on_request_only() -> None:
    workload = Workload(micro_batch_size=1, seq_len=4)
    assert run(GPT2_UNTIED, VANILLA).uncapped.history == ()
    kept = dry_run(GPT2_UNTIED, compose([]), CARD, workload, record_history=True)
    assert kept.uncapped.history


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        dry_run(GPT2_UNTIED, compose([]), CARD, Workload(micro_batch_size=1, seq_len=33))
    (fault,) = caught.value.faults
    assert fault.startswith("seq_len: 33 is above the model's max_seq_len (32)")


def test_an_empty_workload_is_refused_with_every_fault() -> None:
    with pytest.raises(ValueError, match="micro_batch_size: 0 must be at least 1\nseq_len: -1 must"):
        Workload(micro_batch_size=0, seq_len=-1)


@cache
def one_billion_on_16_gb(name: str) -> DryRun:
    stacks: dict[str, list[Optimization]] = {
        "vanilla": [],
        "mixed": [MixedPrecision()],
        "conservative": [GradientCheckpointing(recompute_every=8), Int8Optimizer()],
        "tight": TIGHT,
    }
    workload = Workload(micro_batch_size=1, seq_len=1024)
    return dry_run(PRESETS["gpt2-1b"], compose(stacks[name]), CARD, workload)


# Weight, master, gradient and optimizer state in bytes per parameter, from the definition of each stack.
@pytest.mark.parametrize(("stack", "bytes_per_param"), [("vanilla", 4 + 4 + 8), ("mixed", 2 + 4 + 2 + 8)])
def test_1b_parameters_do_not_fit_16_gb_with_whole_state(stack: str, bytes_per_param: int) -> None:
    found = one_billion_on_16_gb(stack)
    assert bytes_per_param * found.num_params > CARD.allocator_capacity_bytes  # arithmetic agrees
    assert not found.fits
    assert found.peak_reserved_bytes > CARD.allocator_capacity_bytes


@pytest.mark.parametrize(("stack", "bytes_per_param"), [("conservative", 4 + 4 + 2), ("tight", 2 + 0 + 2 + 2)])
def test_1b_parameters_fit_16_gb_with_8_bit_state(stack: str, bytes_per_param: int) -> None:
    found = one_billion_on_16_gb(stack)
    assert found.fits
    assert found.peak_reserved_bytes <= CARD.allocator_capacity_bytes
    # At least all but the gradients, which are not complete at the head's peak.
    assert found.peak.allocated_bytes > (bytes_per_param - 4) * found.num_params


def test_gpt2_small_fits_16_gb_with_nothing_on() -> None:
    workload = Workload(micro_batch_size=4, seq_len=1024)
    found = dry_run(PRESETS["gpt2-small"], compose([]), CARD, workload)
    assert found.fits
    assert found.num_params == 124_439_808  # as transformers counts GPT2LMHeadModel
