"""Every expected time is computed by hand from a card and curves with round figures."""

from dataclasses import replace
from math import exp
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hybridtrain.virtual_gpu.account.op_record import Lane, OpRecord, Stage
from hybridtrain.virtual_gpu.cards.card import Card, Host, card_catalogue, find_card
from hybridtrain.virtual_gpu.cards.kernels import Curves, Kernel, class_of, curves_in, curves_of
from hybridtrain.virtual_gpu.cards.roofline import WIDTH_OF_80, Bottleneck, StepTime, estimate_step, time_errors
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
CURVES = replace(
    curves_in("all"), gemm=0.75, gemm_float32=0.75, inner_half=0.0, waves_half=0.0, memory=0.8, optimizer=1.0, bus=0.8,
    launch_seconds=4e-6, kernel_seconds=2e-6, cached=2.1,
)  # fmt: skip
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


def estimate(
    *ops: OpRecord, upload_bytes: int = 0, curves: Curves = CURVES, card: Card = CARD, host: Host | None = None
) -> StepTime:
    return estimate_step(ops, card, upload_bytes=upload_bytes, curves=curves, host=host)


def assert_one(time: StepTime, seconds: float, bound: Bottleneck) -> None:
    assert [timed.bound for timed in time.ops] == [bound]
    assert time.seconds == pytest.approx(seconds, rel=ROUNDING)
    assert time.seconds_by_bound[bound] == pytest.approx(seconds, rel=ROUNDING)
    assert time.bound is bound


@pytest.mark.parametrize(("mib", "faster"), [(8, 2.1), (8 + 2**-20, 1.0)])
def test_operands_within_a_quarter_of_the_cache_are_faster(mib: float, faster: float) -> None:
    num_bytes = round(mib * 2**20)
    seconds = num_bytes / BYTES_PER_MS / 1000 / faster
    time = estimate(op(bytes_moved=num_bytes), card=replace(CARD, l2_mib=32))
    assert_one(time, seconds, Bottleneck.MEMORY)


@pytest.mark.parametrize(("shape", "waves"), [((16, 4096, 4096), 0.0064), ((4096, 15, 4096), None)])
def test_a_product_narrower_than_a_tensor_cores_rows_is_not_cut_into_tiles(
    shape: tuple[int, int, int], waves: float | None
) -> None:
    product = replace(op(10**12, bytes_moved=1), shape=shape)
    time = estimate(product, card=replace(CARD, sms=625), curves=replace(CURVES, waves_half=0.3))
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
    curves = replace(CURVES, gemm=0.8, inner_half=100, waves_half=0.5)
    card = replace(CARD, sms=64)
    large, short, narrow = (
        replace(op(10**12, 1), shape=shape)
        for shape in ((128 * 128, 128 * 64, 900), (128 * 128, 128 * 64, 100), (1024, 512, 900))
    )
    times = [estimate(one, card=card, curves=curves).seconds for one in (large, short, narrow)]
    waves = [128 / 128.5, 128 / 128.5, 0.5 / (0.5 + 0.5)]
    inner = [0.9, 0.5, 0.9]
    shares = [0.8 * one * other for one, other in zip(waves, inner, strict=True)]
    assert times == pytest.approx([0.01 / share for share in shares], rel=ROUNDING)


@pytest.mark.parametrize(("backward", "share"), [(False, 0.5), (True, 0.4)])
def test_attention_reaches_its_own_share_by_keys_and_head_size(backward: bool, share: float) -> None:
    curves = replace(CURVES, attention=0.5, backward=0.8, length_half=100.0, head_half=32.0)
    card, (heads, length, width) = replace(CARD, sms=100), (64, 600, 96)  # a multiprocessor has 1 TFLOP/s
    flops = (10 if backward else 4) * heads * length * (length // 2) * width  # of causal attention
    name = "hybridkernels.causal_attention" + "_backward" * backward
    one = replace(op(flops, 1), name=name, shape=(heads, length, width))
    seconds = flops / 100e12 / (share * (300 / 400) * (96 / 128))
    assert estimate(one, card=card, curves=curves).seconds == pytest.approx(seconds, rel=ROUNDING)


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
    alone = estimate(*copies(Lane.COPY_IN), host=slow)
    both = estimate(*copies(Lane.COPY_IN, Lane.COPY_OUT), host=slow)
    assert alone.busy_seconds[Lane.COPY_IN] == pytest.approx(1e-3, rel=ROUNDING)
    assert both.busy_seconds[Lane.COPY_OUT] == pytest.approx(1e-3 * 20 / 15, rel=ROUNDING)


def test_a_copy_takes_its_rate_from_the_cards_memory() -> None:
    time = estimate(*copies(Lane.COPY_IN), op(0, BYTES_PER_MS // 2))
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


def test_curves_scale_the_rates() -> None:
    perfect = replace(CURVES, gemm=1.0, memory=1.0, bus=1.0, launch_seconds=0.0, kernel_seconds=0.0)
    time = estimate(op(100_000_000_000, 1), op(0, 1_000_000_000), op(0, 1_000), upload_bytes=25_000_000, curves=perfect)
    assert [timed.duration_s for timed in time.ops] == pytest.approx([1e-3, 1e-3, 1e-9], rel=ROUNDING)
    assert time.upload_seconds == pytest.approx(1e-3, rel=ROUNDING)


def test_a_step_without_ops_is_its_upload() -> None:
    time = estimate(upload_bytes=BUS_BYTES_PER_MS)
    assert time.seconds == pytest.approx(1e-3, rel=ROUNDING)
    assert time.ops == ()
    assert time.bound is Bottleneck.TRANSFER


CATALOGUE = sorted(card_catalogue())
LARGE = (1 << 17, 1 << 17, 1 << 17)


def product(shape: tuple[int, int, int], dtype: str = "bfloat16") -> OpRecord:
    rows, columns, inner = shape
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    return replace(op(2 * rows * columns * inner, moved, dtype=dtype), shape=shape)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_very_large_product_takes_its_share_of_the_peak_and_a_tiny_kernel_the_shortest_time(name: str) -> None:
    card, dtype = find_card(name), "bfloat16" if find_card(name).has_bfloat16_tensor_cores else "float16"
    curves, large = curves_of(card), product(LARGE, dtype)
    share = large.flops / card.flops_per_second[dtype] / estimate_step([large], card, upload_bytes=0).seconds
    ends = 1 << 17  # what the inner dimension and the last wave of tiles leave
    assert share == pytest.approx(curves.gemm, rel=2 * curves.inner_half / ends + 0.001)
    assert estimate_step([op(0, 8)], card, upload_bytes=0).seconds == curves.kernel_seconds


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_larger_product_takes_no_less_time(place: int) -> None:
    seconds = []
    for size in range(16, 4096, 61):
        shape = [512, 512, 512]
        shape[place] = size
        seconds.append(estimate_step([product((*shape,))], find_card("a100-80gb"), upload_bytes=0).seconds)  # type: ignore[arg-type]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("name", ["aten.mul", "hybridkernels.rms_norm", "aten._log_softmax", "aten.embedding", "nf4"])
def test_a_kernel_that_moves_more_takes_no_less_time(name: str) -> None:
    card = find_card("rtx-4090")
    ops = [replace(op(0, 1 << power), name=name) for power in range(8, 34) if not 1 << power > card.l2_mib << 18]
    seconds = [estimate_step([one], card, upload_bytes=0).seconds for one in ops]
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[0]


def test_longer_attention_takes_more_time_but_less_for_each_score() -> None:
    seconds = []
    for length in (256, 1024, 4096, 16384):
        one = replace(op(2 * 32 * length**2 * 128, 1), name="hybridkernels.causal_attention", shape=(32, length, 128))
        seconds.append(estimate_step([one], find_card("h100-sxm"), upload_bytes=0).seconds / length**2)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] > seconds[0] / 16


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"flops": 1}, Kernel.GEMM), ({"flops": 1, "name": "aten._flash_attention_forward"}, Kernel.ATTENTION),
        ({"name": "hybridkernels.rms_norm_backward.default"}, Kernel.NORMALIZATION),
        ({"name": "aten.native_layer_norm.default"}, Kernel.NORMALIZATION),
        ({"name": "aten._foreach_norm.Scalar"}, Kernel.REDUCTION), ({"name": "aten._log_softmax.default"}, Kernel.LOSS),
        ({"name": "aten.nll_loss_backward.default"}, Kernel.LOSS), ({"name": "aten.index_add_"}, Kernel.GATHER),
        ({"name": "hybridkernels.dequantize_nf4"}, Kernel.QUANTIZE), ({"name": "aten.add.Tensor"}, Kernel.ELEMENTWISE),
        ({"name": "aten.add.Tensor", "stage": Stage.UPDATE}, Kernel.OPTIMIZER),
    ],
)  # fmt: skip
def test_an_ops_class_follows_from_its_arithmetic_its_stage_and_its_name(changes: dict[str, Any], kind: Kernel) -> None:
    assert class_of(replace(op(0, 1), **changes)) is kind


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_card_without_times_of_its_own_has_its_generations_shares_and_no_smaller_spread(name: str) -> None:
    card = find_card(name)
    unknown = replace(card, name=f"unknown {card.name}")
    own, other = curves_of(card), curves_of(unknown)
    assert other == curves_in("all", card.generation)
    assert all(other.spread[kind] >= own.spread[kind] for kind in Kernel)


def test_a_steps_spread_is_that_of_its_kernels_by_their_time_and_of_the_step() -> None:
    curves = replace(CURVES, spread=dict.fromkeys(Kernel, 0.0) | {Kernel.GEMM: 0.3, Kernel.ELEMENTWISE: 0.4})
    residual = time_errors()["source_out"].spread
    product, traffic = op(BF16_FLOPS_PER_MS, 1), op(0, 3 * BYTES_PER_MS)
    assert estimate(product, curves=curves).spread == pytest.approx((residual**2 + 0.3**2) ** 0.5)
    both = estimate(product, traffic, curves=curves)
    assert both.spread == pytest.approx((residual**2 + (0.3 / 4) ** 2 + (0.4 * 3 / 4) ** 2) ** 0.5)
    low, high = both.interval_s
    assert (low, high) == pytest.approx((4e-3 / exp(WIDTH_OF_80 * both.spread), 4e-3 * exp(WIDTH_OF_80 * both.spread)))


def test_a_step_that_waits_is_less_sure() -> None:
    alone = estimate(op(BF16_FLOPS_PER_MS, 1)).spread
    waiting = estimate(op(BF16_FLOPS_PER_MS, 1), upload_bytes=4 * BUS_BYTES_PER_MS).spread
    assert waiting == pytest.approx(
        (
            time_errors()["source_out"].spread ** 2
            + (0.8 * time_errors()["waiting"].spread) ** 2
            + (alone**2 - time_errors()["source_out"].spread ** 2) / 25
        )
        ** 0.5
    )


def test_the_errors_of_the_time_model_are_those_of_runs_left_out_or_never_fitted() -> None:
    errors = time_errors()
    assert errors.keys() == {"source_out", "kept_back", "waiting", "ratio"}
    assert errors["ratio"].mean_absolute < errors["source_out"].mean_absolute  # what two speeds share drops out
    assert all(max(abs(error.mean), error.mean_absolute) <= error.largest for error in errors.values())
    assert 0.7 <= errors["source_out"].covered <= 0.9  # of intervals that are to hold 80 %


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "tflops", "curve"),
    [
        ("t4", "aten.mm", "bfloat16", 8.1, "gemm"),
        ("t4", "aten.mm", "float16", 65.0, "gemm"),
        ("t4", "hybridkernels.causal_attention", "float16", 8.1, "attention"),
        ("a100-80gb", "hybridkernels.causal_attention", "float16", 312.0, "attention"),
    ],
)
def test_cards_below_8_0_multiply_bfloat16_and_attend_at_the_rate_of_fp32(
    name: str, kind: str, dtype: str, tflops: float, curve: str
) -> None:
    card = find_card(name)
    work = replace(op(tflops * 1e12, 1), name=kind, dtype=dtype)
    time = estimate_step([work], card, upload_bytes=0)
    assert time.seconds == pytest.approx(1 / getattr(curves_of(card), curve), rel=ROUNDING)


def test_shares_may_exceed_the_datasheet_but_not_vanish() -> None:
    assert replace(CURVES, gemm=1.1).gemm == 1.1
    with pytest.raises(ValueError, match=r"gemm: 0 must be above 0\nlaunch_seconds: -1 must be at least 0"):
        replace(CURVES, gemm=0, launch_seconds=-1)
