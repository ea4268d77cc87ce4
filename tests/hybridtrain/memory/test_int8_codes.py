"""8-bit codes of weights: about zero or a middle, with a range per 256 elements or per matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridkernels.int8_quantize import GROUP_SIZE, int8_quantize
from hybridtrain.engine import update
from hybridtrain.memory import formats
from hybridtrain.memory.formats import Int8Codes, Int8Weight, weight_part
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim import OPTIMIZERS, adafactor
from hybridtrain.optimizations import Int8Weights, OptimizerOffload, WeightStreaming
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import DynamicRange
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from numerics import assert_bitwise
from tiny_models import GPT2_UNTIED, random_steps
from training_history import stored_weights

ALL = [
    Int8Codes(symmetric, shared_by)
    for symmetric in (True, False)
    for shared_by in (DynamicRange.GROUP, DynamicRange.TENSOR)
]


def empty(codes: Int8Codes, count: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in codes.specs((count,)))


def written(codes: Int8Codes, value_P: Tensor) -> tuple[Tensor, ...]:
    stored = empty(codes, value_P.numel())
    codes.encode(value_P, stored)
    return stored


def widened(codes: Int8Codes, stored: tuple[Tensor, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    out_P = torch.empty(stored[0].numel(), dtype=dtype)
    codes.widen(stored, out_P)
    return out_P


@settings(max_examples=50, deadline=None)
@given(
    codes=st.sampled_from(ALL), count=st.integers(1, 3 * GROUP_SIZE), shift=st.floats(-4, 4), seed=st.integers(0, 999)
)
def test_values_come_back_within_half_a_step_of_their_range(
    codes: Int8Codes, count: int, shift: float, seed: int
) -> None:
    value_P = torch.randn(count, generator=torch.Generator().manual_seed(seed)) + shift
    before = value_P.clone()
    stored = written(codes, value_P)
    assert_bitwise(value_P, before, "what was encoded")
    assert stored[0].abs().max() <= 127
    height = GROUP_SIZE if codes.shared_by is DynamicRange.GROUP else count
    groups, errors = (values_P.split(height) for values_P in (value_P, widened(codes, stored) - value_P))
    for group_S, error_S in zip(groups, errors, strict=True):
        reach = group_S.abs().max() if codes.is_symmetric else (group_S.max() - group_S.min()) / 2
        # Half a step, and the rounding of a middle, a difference and a sum in float32.
        assert error_S.abs().max() <= 0.5 * reach / 127 + 8 * torch.finfo(torch.float32).eps * group_S.abs().max()


def test_the_usual_codes_are_those_of_the_kernel() -> None:
    value_P = torch.randn(1000)
    wanted = empty(Int8Codes(), 1000)
    int8_quantize(value_P, *wanted, stochastic=False)
    for found, kernel in zip(written(Int8Codes(), value_P), wanted, strict=True):
        assert_bitwise(found, kernel, "codes and scales")


def test_a_matrix_shares_one_range() -> None:
    value_P = torch.cat([torch.full((GROUP_SIZE,), 0.25), torch.linspace(-3.0, 1.0, GROUP_SIZE)])
    _, scales, *_ = written(Int8Codes(shared_by=DynamicRange.TENSOR), value_P)
    assert scales.tolist() == [torch.tensor(3.0).div(127).item()] * 2
    _, scales, middles = written(Int8Codes(False, DynamicRange.TENSOR), value_P)
    assert scales.tolist() == [torch.tensor(2.0).div(127).item()] * 2
    assert middles.tolist() == [-1.0] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_its_own_range(dtype: torch.dtype) -> None:
    codes, value_FD = Int8Codes(shared_by=DynamicRange.ROW), torch.randn(3, 100) * torch.tensor([[1.0], [1e-3], [0.0]])
    stored = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in codes.specs((3, 100)))
    codes.encode(value_FD.view(-1), stored)
    assert stored[1].shape == (3, 1)
    found_FD = widened(codes, stored, dtype).view(3, 100)
    largest_F1 = value_FD.abs().amax(1, keepdim=True)
    rounding = torch.finfo(dtype).eps * largest_F1
    assert ((found_FD.float() - value_FD).abs() <= 0.5 * largest_F1 / 127 + rounding).all()
    value_FD[1, 7] = torch.nan
    codes.encode(value_FD.view(-1), stored)
    assert widened(codes, stored).view(3, 100).isnan().all(1).tolist() == [False, True, False]


def test_a_middle_halves_the_step_of_values_on_one_side_and_keeps_constants_exact() -> None:
    value_P = torch.rand(GROUP_SIZE) + 1.0
    scale = [written(Int8Codes(is_symmetric), value_P)[1].item() for is_symmetric in (True, False)]
    assert scale[1] < 0.3 * scale[0]  # (2 - 1) / 2 over 2
    same_P = torch.full((GROUP_SIZE + 3,), 0.7)
    affine = Int8Codes(is_symmetric=False)
    assert_bitwise(widened(affine, written(affine, same_P)), same_P, "a constant")


@pytest.mark.parametrize("codes", ALL, ids=lambda codes: codes.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_the_float32_value_rounded_once(codes: Int8Codes, dtype: torch.dtype) -> None:
    stored = written(codes, torch.randn(3 * GROUP_SIZE + 5) + 1)
    assert_bitwise(widened(codes, stored, dtype), widened(codes, stored).to(dtype), "widened")


@pytest.mark.parametrize("codes", ALL, ids=lambda codes: codes.name)
def test_a_range_of_what_is_stored_stands_for_the_same_values(codes: Int8Codes) -> None:
    stored = written(codes, torch.randn(3 * GROUP_SIZE + 5) + 1)
    part = slice(GROUP_SIZE, 3 * GROUP_SIZE + 5)
    assert_bitwise(widened(codes, weight_part(stored, part)), widened(codes, stored)[part], "a range")


@pytest.mark.parametrize("codes", ALL, ids=lambda codes: codes.name)
def test_static_ranges_stay_and_are_twice_what_first_values_need(codes: Int8Codes) -> None:
    first_P = torch.randn(2 * GROUP_SIZE) + 0.5
    form, stored = Int8Weight(codes, static_scales=True), empty(codes, first_P.numel())
    form.create(first_P, stored)
    ranges = [tensor.clone() for tensor in stored[1:]]
    assert_bitwise(ranges[0], written(codes, first_P)[1] * 2, "scales")
    form.store(first_P * 1.5, stored, None, nearest=True)
    for kept, before in zip(stored[1:], ranges, strict=True):
        assert_bitwise(kept, before, "ranges")
    assert (widened(codes, stored) - first_P * 1.5).abs().max() <= 1.01 * ranges[0].max()


@pytest.mark.parametrize("codes", ALL, ids=lambda codes: codes.name)
def test_a_fault_in_a_value_does_not_vanish(codes: Int8Codes) -> None:
    value_P = torch.randn(2 * GROUP_SIZE)
    value_P[3] = torch.nan
    assert widened(codes, written(codes, value_P))[:GROUP_SIZE].isnan().all()


@pytest.mark.parametrize("place", ["resident", "away", "on-host"])
@pytest.mark.parametrize("master", ["absent", "float32"])
@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon"])
def test_an_update_takes_the_range_of_a_whole_matrix(
    kind: str, master: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (formats, adafactor):
        monkeypatch.setattr(module, "SLICE_ELEMENTS", GROUP_SIZE)
    monkeypatch.setattr(update, "RESIDENT_SLICE_ELEMENTS", GROUP_SIZE)
    moves: dict[str, list[Optimization]] = {
        "resident": [], "away": [OptimizerOffload(), WeightStreaming()],
        "on-host": [OptimizerOffload(update_on="host")],
    }  # fmt: skip
    plan = compose([Int8Weights(dynamic_range=DynamicRange.TENSOR, master=master), *moves[place]])  # type: ignore[arg-type]
    trainer = Trainer(
        GPT2_UNTIED, plan, TrainerConfig(optimizer=OPTIMIZERS[kind](lr=0.01)), DirectTransfer(torch.device("cpu"))
    )
    before = stored_weights(trainer)
    trainer.step(random_steps(GPT2_UNTIED, 1)[0])
    trainer.transfer.finish()
    weights = stored_weights(trainer)
    coded = [name for name in weights if f"{name}.scales" in weights]
    assert len(coded) == 4 * GPT2_UNTIED.num_blocks
    for name in coded:
        scales = weights[f"{name}.scales"]
        assert scales.numel() >= 4  # so many slices, where each has a range of its own
        assert (scales == scales[0]).all()
        assert weights[name].abs().max() == 127
        assert not torch.equal(weights[name], before[name])
