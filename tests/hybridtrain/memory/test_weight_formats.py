"""Weight formats: exact where they promise it, unbiased where they round. P elements."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtrain.memory.formats import (
    ExactWeight,
    Float32Master,
    Int8OfMaster,
    Int8Weight,
    Split16Master,
    StochasticWeight,
    WeightFormat,
    WeightFormats,
    round_stochastically,
    weight_formats,
)
from hybridtrain.plan.memory_plan import Cell
from hybridtrain.plan.placement import Codec
from memory_parts import plan_of
from numerics import assert_bitwise

ALLOWED: dict[tuple[Codec, Codec], type[WeightFormat]] = {
    (Codec.FLOAT32, Codec.ABSENT): ExactWeight,
    (Codec.BFLOAT16, Codec.FLOAT32): Float32Master,
    (Codec.BFLOAT16, Codec.SPLIT16): Split16Master,
    (Codec.BFLOAT16, Codec.ABSENT): StochasticWeight,
    (Codec.FLOAT16, Codec.FLOAT32): Float32Master,
}
BFLOAT16_STEP = 2.0**-7
"""Distance of neighbours in [1, 2)."""


def from_bits(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def hard_values() -> Tensor:
    """Return values of both signs: random over all exponents, denormal, and around the ties of rounding."""
    random_bits = torch.randint(-(2**31), 2**31, (20000,)).to(torch.int32).view(torch.float32)
    patterns = [
        (upper << 16) | lower
        for upper in (0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3FFF, 0x7F7E)
        for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    ]
    special = from_bits(patterns + [pattern | 1 << 31 for pattern in patterns])
    return torch.cat([random_bits[random_bits.isfinite()], special])


def updated(codec: WeightFormat, initial: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and decoded value after storing ``value`` over ``initial``."""
    weight = torch.empty_like(initial, dtype=torch.bfloat16)
    master_weight = codec.create(initial.clone(), (weight,))
    loaded = codec.load((weight,), master_weight)
    loaded.copy_(value)
    codec.store(loaded, (weight,), master_weight)
    return weight, codec.load((weight,), master_weight)


@pytest.mark.parametrize("codec", [Float32Master(), Split16Master()], ids=["float32", "split16"])
def test_a_master_returns_every_value_to_the_bit(codec: WeightFormat) -> None:
    values = hard_values()
    weight = torch.empty_like(values, dtype=torch.bfloat16)
    master_weight = codec.create(values.clone(), (weight,))
    assert_bitwise(codec.load((weight,), master_weight), values, "created")
    other = values.flip(0)
    assert_bitwise(updated(codec, values, other)[1], other, "updated")


def test_a_split_master_costs_two_bytes() -> None:
    weight = torch.empty(5, dtype=torch.bfloat16)
    master_weight = Split16Master().create(torch.randn(5), (weight,))
    assert master_weight is not None
    assert (master_weight.dtype, master_weight.shape) == (torch.int16, (5,))


def test_a_split_weight_is_the_nearest_bfloat16_and_ties_go_away_from_zero() -> None:
    # The lower half holds -32768 to 32767: a tie rounded to even would need +32768 every other time.
    values = hard_values()
    values = values[values.abs() < torch.finfo(torch.bfloat16).max]
    weight, _ = updated(Split16Master(), torch.zeros_like(values), values)
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert ties.sum() >= 10
    assert_bitwise(weight[~ties], values[~ties].bfloat16(), "nearest")
    away = ((values[ties].view(torch.int32) >> 16) + 1).to(torch.int16).view(torch.bfloat16)
    assert_bitwise(weight[ties], away, "ties")


def test_a_float32_master_rounds_the_weight_to_nearest_even() -> None:
    values = hard_values()
    weight, _ = updated(Float32Master(), torch.zeros_like(values), values)
    assert_bitwise(weight, values.bfloat16(), "weight")


def test_a_float32_master_keeps_the_initial_tensor_itself() -> None:
    initial = torch.randn(5)
    assert Float32Master().create(initial, (torch.empty(5, dtype=torch.bfloat16),)) is initial


def test_an_exact_weight_is_updated_in_place() -> None:
    weight = torch.empty(5)
    initial = torch.randn(5)
    assert ExactWeight().create(initial, (weight,)) is None
    assert ExactWeight().load((weight,), None) is weight
    assert_bitwise(weight, initial, "weight")


def test_stochastic_rounding_has_the_mean_of_the_value() -> None:
    # 1 + f/8 of a step up, both signs; the mean of n draws has a standard error of step * sqrt(p (1 - p) / n).
    num_draws = 20000
    for eighths in range(1, 8):
        chance = eighths / 8
        value = 1 + chance * BFLOAT16_STEP
        for sign in (1.0, -1.0):
            weight, _ = updated(StochasticWeight(), torch.zeros(num_draws), torch.full((num_draws,), sign * value))
            assert set(weight.float().tolist()) == {sign, sign * (1 + BFLOAT16_STEP)}
            standard_error = BFLOAT16_STEP * math.sqrt(chance * (1 - chance) / num_draws)
            assert abs(weight.double().mean().item() - sign * value) < 5 * standard_error


def test_stochastic_rounding_keeps_what_bfloat16_can_hold() -> None:
    values = torch.randn(1000).bfloat16().float()
    weight, _ = updated(StochasticWeight(), torch.zeros(1000), values)
    assert_bitwise(weight.float(), values, "weight")


def test_stochastic_rounding_never_goes_further_than_a_neighbour() -> None:
    values = torch.randn(20000)
    weight, _ = updated(StochasticWeight(), torch.zeros_like(values), values)
    cut = values.view(torch.int32) & ~0xFFFF
    steps = (weight.float().view(torch.int32) - cut) >> 16
    assert set(steps.tolist()) == {0, 1}


def test_updates_too_small_for_bfloat16_add_up_under_stochastic_rounding() -> None:
    # 100 updates of 1/100 of a step: nearest rounding would lose each, 4096 weights end up one step higher on
    # average, with a standard error of sqrt(100 * 0.01 * 0.99 / 4096) steps.
    weight = torch.ones(4096, dtype=torch.bfloat16)
    codec = StochasticWeight()
    for _ in range(100):
        value = codec.load((weight,), None)
        value.add_(0.01 * BFLOAT16_STEP)
        codec.store(value, (weight,), None)
    steps = (weight.double().mean().item() - 1) / BFLOAT16_STEP
    assert abs(steps - 1) < 5 * math.sqrt(100 * 0.01 * 0.99 / 4096)


def formats_of(weight: Codec, master: Codec, compute: Codec) -> WeightFormats:
    plan = replace(plan_of([]), weight=Cell(codec=weight), compute_dtype=compute, master=Cell(codec=master))
    return weight_formats(plan)


@pytest.mark.parametrize("weight", [Codec.FLOAT32, Codec.BFLOAT16, Codec.FLOAT16])
@pytest.mark.parametrize("master", [Codec.FLOAT32, Codec.SPLIT16, Codec.ABSENT])
def test_only_pairs_that_lose_no_update_are_allowed(weight: Codec, master: Codec) -> None:
    if (weight, master) in ALLOWED:
        codecs = formats_of(weight, master, weight)
        assert codecs.values is codecs.codes
        assert type(codecs.values) is ALLOWED[weight, master]
        return
    with pytest.raises(ValueError, match=f"^master.codec: {master} cannot accompany {weight} weights; allowed: "):
        formats_of(weight, master, weight)


@pytest.mark.parametrize("compute", [Codec.FLOAT32, Codec.BFLOAT16])
@pytest.mark.parametrize(("master", "codes_are"), [(Codec.FLOAT32, Int8OfMaster), (Codec.ABSENT, Int8Weight)])
def test_int8_weights_are_a_rounded_master_or_trained_themselves(
    compute: Codec, master: Codec, codes_are: type[WeightFormat]
) -> None:
    codecs = formats_of(Codec.INT8_BLOCKS, master, compute)
    assert type(codecs.codes) is codes_are
    assert type(codecs.values) is (ExactWeight if compute is Codec.FLOAT32 else ALLOWED[compute, master])
    values, codes = (torch.empty(2),), (torch.empty(2, dtype=torch.int8), torch.empty(1))
    assert codecs.of(values) is codecs.values
    assert codecs.of(codes) is codecs.codes


@pytest.mark.parametrize(
    ("weight", "master", "reads"),
    [
        (Codec.FLOAT32, Codec.ABSENT, True),
        (Codec.BFLOAT16, Codec.FLOAT32, False),
        (Codec.BFLOAT16, Codec.SPLIT16, True),
        (Codec.BFLOAT16, Codec.ABSENT, True),
    ],
)
def test_only_a_separate_copy_spares_reading_the_weight(weight: Codec, master: Codec, *, reads: bool) -> None:
    codecs = formats_of(weight, master, weight)
    assert codecs.reads_weight is reads
    if not reads:  # and it means it: values stay what they are over garbage
        garbage = torch.full((3,), math.nan, dtype=torch.bfloat16)
        master_weight = torch.randn(3)
        assert codecs.values.load((garbage,), master_weight) is master_weight
        codecs.values.store(master_weight, (garbage,), master_weight)
        assert_bitwise(garbage, master_weight.bfloat16(), "weight")


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000])
def test_rounding_by_chance_keeps_faults(bits: int) -> None:
    values = from_bits([bits] * 500)
    rounded = torch.empty(500, dtype=torch.bfloat16)
    round_stochastically(values.clone(), rounded)
    assert not rounded.isfinite().any()
    if bits & 0x400000:  # a quiet NaN, as arithmetic makes them
        assert rounded.isnan().all()


@pytest.mark.parametrize("count", [1000, 999, 1])
def test_stochastic_rounding_goes_up_exactly_when_the_noise_reaches_over(count: int) -> None:
    # The same stream drawn by hand: value + noise below the kept bits, then cut.
    values = torch.randn(count)
    rounded = torch.empty(count, dtype=torch.bfloat16)
    torch.manual_seed(7)
    round_stochastically(values, rounded)
    torch.manual_seed(7)
    pairs = torch.empty((count + 1) // 2, dtype=torch.int64).random_(-(1 << 63), None)
    noise = pairs.view(torch.int32)[:count] & 0xFFFF
    lower = values.view(torch.int32) & 0xFFFF
    goes_up = lower + noise >= 1 << 16
    steps = (rounded.float().view(torch.int32) - (values.view(torch.int32) - lower)) >> 16
    assert steps.bool().tolist() == goes_up.tolist()


def test_stochastic_rounding_goes_up_as_often_as_the_cut_bits_say() -> None:
    torch.manual_seed(0)
    count = 1 << 16
    for cut in (1 << 4, 1 << 15, 0xC000):  # of 2^16; each bit of the noise decides somewhere
        rounded = torch.empty(count, dtype=torch.bfloat16)
        round_stochastically(from_bits([0x3F800000 + cut] * count), rounded)
        share = cut / (1 << 16)
        deviation = (share * (1 - share) / count) ** 0.5
        assert (rounded > 1).float().mean().item() == pytest.approx(share, abs=5 * deviation)
