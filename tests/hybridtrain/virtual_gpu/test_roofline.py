"""Every expected time is computed by hand from a card with round figures and the assumed efficiencies."""

import pytest

from hybridtrain.virtual_gpu.card import Card, find_card
from hybridtrain.virtual_gpu.ledger import OpRecord
from hybridtrain.virtual_gpu.observer import Stage
from hybridtrain.virtual_gpu.roofline import (
    DEFAULT_EFFICIENCY,
    Bound,
    Efficiency,
    StepTime,
    efficiency_of,
    estimate_step,
)

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


def assert_one(time: StepTime, seconds: float, bound: Bound) -> None:
    assert [timed.bound for timed in time.ops] == [bound]
    assert time.seconds == pytest.approx(seconds, rel=ROUNDING)
    assert time.seconds_by_bound[bound] == pytest.approx(seconds, rel=ROUNDING)
    assert time.bound is bound


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
    assert_one(estimate(op(flops, BYTES_PER_MS, dtype=dtype)), 2e-3, Bound.COMPUTE)


def test_a_thin_matmul_takes_as_long_as_its_traffic() -> None:
    assert_one(estimate(op(BF16_FLOPS_PER_MS, 2 * BYTES_PER_MS)), 2e-3, Bound.MEMORY)


def test_an_elementwise_op_takes_as_long_as_its_traffic() -> None:
    assert_one(estimate(op(0, 3 * BYTES_PER_MS)), 3e-3, Bound.MEMORY)


def test_a_tiny_op_takes_a_launch() -> None:
    assert_one(estimate(op(10, 64)), LAUNCH_S, Bound.MEMORY)


def test_an_op_without_traffic_takes_no_time() -> None:
    time = estimate(op(0, 0), op(0, BYTES_PER_MS), op(0, 0))
    assert len(time.ops) == 1
    assert time.seconds == pytest.approx(1e-3, rel=ROUNDING)


@pytest.mark.parametrize("flops", [0, 5 * BF16_FLOPS_PER_MS])
def test_the_update_is_counted_apart(flops: int) -> None:
    seconds = 5e-3 if flops else 1e-3
    assert_one(estimate(op(flops, BYTES_PER_MS, stage=Stage.UPDATE)), seconds, Bound.OPTIMIZER)


def test_the_upload_comes_first_and_is_not_hidden() -> None:
    time = estimate(op(0, BYTES_PER_MS), upload_bytes=3 * BUS_BYTES_PER_MS)
    assert time.upload_seconds == pytest.approx(3e-3, rel=ROUNDING)
    assert time.ops[0].start_s == pytest.approx(3e-3, rel=ROUNDING)
    assert time.seconds == pytest.approx(4e-3, rel=ROUNDING)
    assert time.seconds_by_bound[Bound.TRANSFER] == pytest.approx(3e-3, rel=ROUNDING)
    assert time.bound is Bound.TRANSFER


def test_ops_follow_each_other_and_their_shares_sum_up_to_the_step() -> None:
    ops = [
        op(4 * BF16_FLOPS_PER_MS, BYTES_PER_MS),
        op(0, 2 * BYTES_PER_MS, stage=Stage.BACKWARD),
        op(0, 1),
        op(0, 3 * BYTES_PER_MS, stage=Stage.UPDATE),
    ]
    time = estimate(*ops, upload_bytes=BUS_BYTES_PER_MS)
    starts = [1e-3, 5e-3, 7e-3, 7e-3 + LAUNCH_S]
    assert [timed.start_s for timed in time.ops] == pytest.approx(starts, rel=ROUNDING)
    assert time.seconds == pytest.approx(10e-3 + LAUNCH_S, rel=ROUNDING)
    assert sum(time.seconds_by_bound.values()) == pytest.approx(time.seconds, rel=ROUNDING)
    assert time.seconds_by_bound[Bound.MEMORY] == pytest.approx(2e-3 + LAUNCH_S, rel=ROUNDING)
    assert time.bound is Bound.COMPUTE
    assert time.flops == 4 * BF16_FLOPS_PER_MS
    assert time.bytes_moved == 6 * BYTES_PER_MS + 1


def test_efficiencies_scale_the_rates() -> None:
    perfect = Efficiency(matmul=1.0, memory=1.0, bus=1.0, launch_seconds=0.0)
    time = estimate(
        op(100_000_000_000, 1),
        op(0, 1_000_000_000),
        op(0, 1_000),
        upload_bytes=25_000_000,
        efficiency=perfect,
    )
    assert [timed.duration_s for timed in time.ops] == pytest.approx([1e-3, 1e-3, 1e-9], rel=ROUNDING)
    assert time.upload_seconds == pytest.approx(1e-3, rel=ROUNDING)


def test_a_step_without_ops_is_its_upload() -> None:
    time = estimate(upload_bytes=BUS_BYTES_PER_MS)
    assert time.seconds == pytest.approx(1e-3, rel=ROUNDING)
    assert time.ops == ()
    assert time.bound is Bound.TRANSFER


def test_a_card_reaches_what_its_family_reaches() -> None:
    geforce, data_center = efficiency_of(find_card("rtx-3090")), efficiency_of(find_card("a100-80gb"))
    assert all(efficiency_of(find_card(name)) == geforce for name in ("rtx-4070-ti-super", "rtx-4090", "rtx-5090"))
    assert all(efficiency_of(find_card(name)) == data_center for name in ("h100-sxm", "h200"))
    assert geforce.matmul > data_center.matmul  # a data-center card's rate is cut by its power limit
    assert (geforce.memory, geforce.bus, geforce.launch_seconds) == (0.80, 0.80, LAUNCH_S)


@pytest.mark.parametrize("name", ["rtx-a5000", "rtx-a6000", "l4"])
def test_a_card_of_no_family_keeps_the_assumed_shares(name: str) -> None:
    assert efficiency_of(find_card(name)) == DEFAULT_EFFICIENCY
    assert efficiency_of(CARD).matmul == 0.75


def test_a_step_is_timed_at_its_cards_shares() -> None:
    card = find_card("rtx-4090")
    time = estimate_step([op(card.tflops_bf16 * 1e12, 1)], card, upload_bytes=0)
    assert time.seconds == pytest.approx(1 / efficiency_of(card).matmul, rel=ROUNDING)


def test_shares_may_exceed_the_datasheet_but_not_vanish() -> None:
    assert Efficiency(matmul=1.1).matmul == 1.1
    with pytest.raises(ValueError, match=r"matmul: 0 must be above 0\nlaunch_seconds: -1 must be at least 0"):
        Efficiency(matmul=0, launch_seconds=-1)
