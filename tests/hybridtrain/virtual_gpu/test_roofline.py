"""Every expected time is computed by hand from a card with round figures and the assumed efficiencies."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hybridtrain.virtual_gpu.account.ledger import OpRecord
from hybridtrain.virtual_gpu.account.observer import Lane, Stage
from hybridtrain.virtual_gpu.cards.card import Card, Host, find_card
from hybridtrain.virtual_gpu.cards.roofline import (
    DEFAULT_EFFICIENCY,
    Bottleneck,
    Efficiency,
    StepTime,
    efficiency_of,
    estimate_step,
    time_errors,
)
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger

CARD = Card(
    name="round figures",
    memory_mib=1000,
    compute_capability="8.9",
    tflops_bf16=100.0,
    tflops_fp32=50.0,
    memory_gbps=1000.0,
    pcie_gbps=25.0,
)
BF16_FLOPS_PER_MS = 75_000_000_000  # 100 TFLOP/s at 75 %
FP32_FLOPS_PER_MS = 37_500_000_000  # 50 TFLOP/s at 75 %
BYTES_PER_MS = 800_000_000  # 1000 GB/s at 80 %
BUS_BYTES_PER_MS = 20_000_000  # 25 GB/s at 80 %
LAUNCH_S = 4e-6
KERNEL_S = 2e-6
ROUNDING = 1e-12  # relative, of a few float64 operations


def op(flops: int = 0, bytes_moved: int = 0, stage: Stage = Stage.FORWARD, dtype: str = "bfloat16") -> OpRecord:
    return OpRecord(
        name="op", event=0, stage=stage, unit="", is_matmul=flops > 0, flops=flops, bytes_moved=bytes_moved,
        dtype=dtype,
    )  # fmt: skip


def estimate(*ops: OpRecord, upload_bytes: int = 0, efficiency: Efficiency | None = None) -> StepTime:
    if efficiency is None:
        return estimate_step(ops, CARD, upload_bytes=upload_bytes)
    return estimate_step(ops, CARD, upload_bytes=upload_bytes, efficiency=efficiency)


def assert_one(time: StepTime, seconds: float, bound: Bottleneck) -> None:
    assert [timed.bound for timed in time.ops] == [bound]
    assert time.seconds == pytest.approx(seconds, rel=ROUNDING)
    assert time.seconds_by_bound[bound] == pytest.approx(seconds, rel=ROUNDING)
    assert time.bound is bound


@pytest.mark.parametrize(("mib", "faster"), [(8, 2.1), (8 + 2**-20, 1.0)])
def test_operands_within_a_quarter_of_the_cache_are_faster(mib: float, faster: float) -> None:
    num_bytes = round(mib * 2**20)
    seconds = num_bytes / BYTES_PER_MS / 1000 / faster
    time = estimate_step([op(bytes_moved=num_bytes)], replace(CARD, l2_mib=32), upload_bytes=0)
    assert_one(time, seconds, Bottleneck.MEMORY)


@pytest.mark.parametrize(("shape", "waves"), [((16, 4096, 4096), 0.0064), ((4096, 15, 4096), None)])
def test_a_product_narrower_than_a_tensor_cores_rows_is_not_cut_into_tiles(
    shape: tuple[int, int, int], waves: float | None
) -> None:
    product = replace(op(10**12, bytes_moved=1), shape=shape)
    efficiency = replace(DEFAULT_EFFICIENCY, waves_half=0.3)
    time = estimate_step([product], replace(CARD, sms=625), upload_bytes=0, efficiency=efficiency)
    share = 0.75 if waves is None else 0.75 * waves / (waves + 0.3)
    assert_one(time, 0.01 / share, Bottleneck.COMPUTE)


@pytest.mark.parametrize(
    ("dtype", "flops"),
    [
        ("bfloat16", 2 * BF16_FLOPS_PER_MS),
        ("float16", 2 * BF16_FLOPS_PER_MS),
        ("float32", 2 * FP32_FLOPS_PER_MS),
        ("", 2 * FP32_FLOPS_PER_MS),
        ("float64", 2 * FP32_FLOPS_PER_MS),
    ],
)
def test_a_large_matmul_takes_as_long_as_its_arithmetic(dtype: str, flops: int) -> None:
    assert_one(estimate(op(flops, BYTES_PER_MS, dtype=dtype)), 2e-3, Bottleneck.COMPUTE)


def test_a_thin_matmul_takes_as_long_as_its_traffic() -> None:
    assert_one(estimate(op(BF16_FLOPS_PER_MS, 2 * BYTES_PER_MS)), 2e-3, Bottleneck.MEMORY)


def test_an_elementwise_op_takes_as_long_as_its_traffic() -> None:
    assert_one(estimate(op(0, 3 * BYTES_PER_MS)), 3e-3, Bottleneck.MEMORY)


def test_a_tiny_op_takes_as_long_as_a_kernel() -> None:
    assert_one(estimate(op(10, 64)), KERNEL_S, Bottleneck.MEMORY)


def test_tiny_ops_wait_until_they_are_issued() -> None:
    time = estimate(*[op(10, 64)] * 5)
    assert [timed.start_s for timed in time.ops] == pytest.approx([i * LAUNCH_S for i in range(5)], rel=ROUNDING)
    assert time.seconds == pytest.approx(4 * LAUNCH_S + KERNEL_S, rel=ROUNDING)
    assert time.seconds_by_bound == {
        Bottleneck.TRANSFER: 0.0,
        Bottleneck.MEMORY: pytest.approx(time.seconds, rel=ROUNDING),
    }


def test_a_long_op_hides_the_issue_of_those_behind_it() -> None:
    time = estimate(op(0, BYTES_PER_MS), *[op(10, 64)] * 5)
    assert time.seconds == pytest.approx(1e-3 + 5 * KERNEL_S, rel=ROUNDING)


def test_small_products_reach_less() -> None:
    efficiency = Efficiency(matmul=0.8, inner_half=100, waves_half=0.5)
    card = replace(CARD, sms=64)
    large, short, narrow = (
        replace(op(10**12, 1), shape=shape)
        for shape in ((128 * 128, 128 * 64, 900), (128 * 128, 128 * 64, 100), (1024, 512, 900))
    )
    times = [
        estimate_step([one], card, upload_bytes=0, efficiency=efficiency).seconds for one in (large, short, narrow)
    ]
    waves = [128 / 128.5, 128 / 128.5, 0.5 / (0.5 + 0.5)]
    inner = [0.9, 0.5, 0.9]
    shares = [0.8 * one * other for one, other in zip(waves, inner, strict=True)]
    assert times == pytest.approx([0.01 / share for share in shares], rel=ROUNDING)


def test_attention_reaches_its_own_share() -> None:
    efficiency = Efficiency(matmul=0.8, attention=0.5)
    one = replace(op(10**12, 1), name="hybridkernels.causal_attention.default")
    assert estimate(one, efficiency=efficiency).seconds == pytest.approx(0.01 / 0.4, rel=ROUNDING)


def test_a_product_with_a_4_bit_weight_counts_as_any_other() -> None:
    gemm = type("Op", (), {"_schema": SimpleNamespace(name="bitsandbytes::gemm_4bit")})()
    left, packed = torch.empty(3, 5, 64, device="meta"), torch.empty(16 * 64 // 2, 1, device="meta")
    flops = VirtualLedger._flops(
        cast("Any", None), cast("Any", gemm), (left, packed, [16, 64], packed, 64, "nf4"), {}, None
    )
    assert flops == 2 * (3 * 5) * 16 * 64


def copies(*lanes: Lane) -> list[OpRecord]:
    return [replace(op(0, BUS_BYTES_PER_MS), lane=lane) for lane in lanes]


def test_copies_that_run_together_share_host_memory() -> None:
    slow = Host(memory_gbps=30.0)  # one copy takes 20 of it, two get 15 each
    alone = estimate_step(copies(Lane.COPY_IN), CARD, upload_bytes=0, host=slow)
    both = estimate_step(copies(Lane.COPY_IN, Lane.COPY_OUT), CARD, upload_bytes=0, host=slow)
    assert alone.busy_seconds[Lane.COPY_IN] == pytest.approx(1e-3, rel=ROUNDING)
    assert both.busy_seconds[Lane.COPY_OUT] == pytest.approx(1e-3 * 20 / 15, rel=ROUNDING)


def test_a_copy_takes_its_rate_from_the_cards_memory() -> None:
    time = estimate_step([*copies(Lane.COPY_IN), op(0, BYTES_PER_MS // 2)], CARD, upload_bytes=0)
    assert time.ops[1].duration_s == pytest.approx(0.5e-3 * 800 / 780, rel=ROUNDING)


def test_an_op_without_traffic_takes_no_time() -> None:
    time = estimate(op(0, 0), op(0, BYTES_PER_MS), op(0, 0))
    assert len(time.ops) == 1
    assert time.seconds == pytest.approx(1e-3, rel=ROUNDING)


@pytest.mark.parametrize("flops", [0, 5 * BF16_FLOPS_PER_MS])
def test_the_update_is_counted_apart(flops: int) -> None:
    seconds = 5e-3 if flops else 1e-3
    assert_one(estimate(op(flops, BYTES_PER_MS, stage=Stage.UPDATE)), seconds, Bottleneck.OPTIMIZER)


def test_the_upload_comes_first_and_is_not_hidden() -> None:
    time = estimate(op(0, BYTES_PER_MS), upload_bytes=3 * BUS_BYTES_PER_MS)
    assert time.upload_seconds == pytest.approx(3e-3, rel=ROUNDING)
    assert time.ops[0].start_s == pytest.approx(3e-3, rel=ROUNDING)
    assert time.seconds == pytest.approx(4e-3, rel=ROUNDING)
    assert time.seconds_by_bound[Bottleneck.TRANSFER] == pytest.approx(3e-3, rel=ROUNDING)
    assert time.bound is Bottleneck.TRANSFER


def test_ops_follow_each_other_and_their_shares_sum_up_to_the_step() -> None:
    ops = [
        op(4 * BF16_FLOPS_PER_MS, BYTES_PER_MS),
        op(0, 2 * BYTES_PER_MS, stage=Stage.BACKWARD),
        op(0, 1),
        op(0, 3 * BYTES_PER_MS, stage=Stage.UPDATE),
    ]
    time = estimate(*ops, upload_bytes=BUS_BYTES_PER_MS)
    starts = [1e-3, 5e-3, 7e-3, 7e-3 + KERNEL_S]
    assert [timed.start_s for timed in time.ops] == pytest.approx(starts, rel=ROUNDING)
    assert time.seconds == pytest.approx(10e-3 + KERNEL_S, rel=ROUNDING)
    assert sum(time.seconds_by_bound.values()) == pytest.approx(time.seconds, rel=ROUNDING)
    assert time.seconds_by_bound[Bottleneck.MEMORY] == pytest.approx(2e-3 + KERNEL_S, rel=ROUNDING)
    assert time.bound is Bottleneck.COMPUTE
    assert time.flops == 4 * BF16_FLOPS_PER_MS
    assert time.bytes_moved == 6 * BYTES_PER_MS + 1


def test_efficiencies_scale_the_rates() -> None:
    perfect = Efficiency(matmul=1.0, memory=1.0, bus=1.0, launch_seconds=0.0, kernel_seconds=0.0)
    time = estimate(
        op(100_000_000_000, 1), op(0, 1_000_000_000), op(0, 1_000), upload_bytes=25_000_000, efficiency=perfect
    )
    assert [timed.duration_s for timed in time.ops] == pytest.approx([1e-3, 1e-3, 1e-9], rel=ROUNDING)
    assert time.upload_seconds == pytest.approx(1e-3, rel=ROUNDING)


def test_a_step_without_ops_is_its_upload() -> None:
    time = estimate(upload_bytes=BUS_BYTES_PER_MS)
    assert time.seconds == pytest.approx(1e-3, rel=ROUNDING)
    assert time.ops == ()
    assert time.bound is Bottleneck.TRANSFER


def test_a_card_reaches_what_was_fitted_on_it_or_its_family() -> None:
    shares = {
        name: efficiency_of(find_card(name)) for name in ("rtx-4090", "rtx-4070-ti-super", "rtx-4080", "h100-sxm")
    }
    assert shares["rtx-4070-ti-super"] == shares["rtx-4080"] != shares["rtx-4090"]
    assert shares["rtx-4080"].matmul > shares["h100-sxm"].matmul  # a data-center card's rate is cut by its power limit


def test_the_errors_of_the_time_model_are_those_of_runs_left_out_or_never_fitted() -> None:
    errors = time_errors()
    assert errors.keys() == {"leave_one_card_out", "leave_one_size_out", "waiting"}
    assert all(abs(error.mean) <= error.mean_absolute <= abs(error.largest) for error in errors.values())


@pytest.mark.parametrize("name", ["rtx-a5000", "rtx-a6000", "l4"])
def test_a_card_of_no_family_keeps_the_assumed_shares(name: str) -> None:
    assert efficiency_of(find_card(name)) == DEFAULT_EFFICIENCY
    assert efficiency_of(CARD).matmul == 0.75


def test_a_step_is_timed_at_its_cards_shares() -> None:
    card = find_card("rtx-4090")
    time = estimate_step([op(card.tflops_bf16 * 1e12, 1)], card, upload_bytes=0)
    assert time.seconds == pytest.approx(1 / efficiency_of(card).matmul, rel=ROUNDING)


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "tflops"),
    [
        ("t4", "aten.mm", "bfloat16", 8.1),
        ("t4", "aten.mm", "float16", 65.0),
        ("t4", "hybridkernels.causal_attention", "float16", 8.1 * 0.7),
        ("a100-80gb", "hybridkernels.causal_attention", "float16", 312.0 * 0.7),
    ],
)
def test_cards_below_8_0_multiply_bfloat16_and_attend_at_the_rate_of_fp32(
    name: str, kind: str, dtype: str, tflops: float
) -> None:
    card = find_card(name)
    work = replace(op(tflops * 1e12, 1), name=kind, dtype=dtype)
    time = estimate_step([work], card, upload_bytes=0)
    assert time.seconds == pytest.approx(1 / efficiency_of(card).matmul, rel=ROUNDING)


def test_shares_may_exceed_the_datasheet_but_not_vanish() -> None:
    assert Efficiency(matmul=1.1).matmul == 1.1
    with pytest.raises(ValueError, match=r"matmul: 0 must be above 0\nlaunch_seconds: -1 must be at least 0"):
        Efficiency(matmul=0, launch_seconds=-1)
