"""The fused, rounded update: cut into the same pieces wherever state lives, and taken only where nothing is lost."""

import pytest
import torch
from torch import Tensor

from hybridkernels.adamw_int8 import adamw_int8_
from hybridtrain.memory import formats
from hybridtrain.memory.formats import (
    DynamicInt8State,
    ExactWeight,
    Float32Master,
    Int8Codes,
    Int8OfMaster,
    Int8Weight,
    PlainState,
    Split16Master,
    StateFormat,
    StochasticWeight,
    StoredWeight,
    WeightFormat,
    weight_part,
)
from hybridtrain.memory.slices import StateSlice, WeightSlice
from hybridtrain.optim import AdamWConfig
from hybridtrain.optim.optimizer import UpdateStep

STEP = UpdateStep(3, 1e-2, 0.1)
P = 3 * 512 + 100


def slices(moments: list[Tensor], count: int) -> list[StateSlice]:
    first, second = DynamicInt8State(signed=True), DynamicInt8State(signed=False)
    return [StateSlice(first, tuple(moments[:2]), count), StateSlice(second, tuple(moments[2:]), count)]


def update_rounded(codec: WeightFormat, weight: StoredWeight, grad: Tensor, moments: list[Tensor]) -> None:
    """Update without ever making the exact value."""
    piece = WeightSlice(codec, weight, None)
    AdamWConfig().update(piece, grad, slices(moments, grad.numel()), STEP)
    assert piece._value is None


def state(codec: WeightFormat, seed: int = 0) -> tuple[StoredWeight, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    values, grad = (torch.randn(P, generator=generator) for _ in range(2))
    groups = -(-P // 256)
    weight: StoredWeight
    if isinstance(codec, Int8Weight):
        weight = (torch.empty(P, dtype=torch.int8), torch.empty(groups))
    else:
        weight = (torch.empty(P, dtype=torch.bfloat16),)
    codec.create(values, weight)
    codes = [torch.zeros(256 * groups, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(groups) for _ in range(2)]
    return weight, grad.bfloat16(), [codes[0], scales[0], codes[1], scales[1]]


@pytest.mark.parametrize(
    "codec", [StochasticWeight(), Int8Weight(Int8Codes(), static_scales=False)], ids=["bf16", "int8"]
)
def test_slices_of_any_length_draw_the_same_numbers(codec: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "SLICE_ELEMENTS", 512)
    results = []
    for cuts in ([P], [1024, P], [512, 1024, 1536, P]):
        weight, grad, moments = state(codec)
        torch.manual_seed(5)
        start = 0
        for end in cuts:
            part = slice(start, end)
            pieces = [moment.part(part) for moment in slices(moments, P)]
            flat = [tensor for moment in pieces for tensor in moment.stored]
            update_rounded(codec, weight_part(weight, part), grad[part], flat)
            start = end
        results.append([*weight, *moments])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "codec", [StochasticWeight(), Int8Weight(Int8Codes(), static_scales=False)], ids=["bf16", "int8"]
)
def test_it_moves_weights_as_the_exact_update_does_on_average(codec: WeightFormat) -> None:
    weight, grad, moments = state(codec)
    exact = codec.load(weight, None).clone()
    before = exact.clone()
    m_codes, m_scale, v_codes, v_scale = (moment.clone() for moment in moments)
    adamw_int8_(
        exact, grad, (m_codes, m_scale, v_codes, v_scale), lr=STEP.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
        step=3,
    )  # fmt: skip
    mean = torch.zeros(P, dtype=torch.float64)
    num_draws = 400
    for draw in range(num_draws):
        torch.manual_seed(draw)
        copies = tuple(part.clone() for part in weight)
        update_rounded(codec, copies, grad, [moment.clone() for moment in moments])
        mean += codec.load(copies, None).double() / num_draws
    # One draw is off by up to a step of the grid (2^-7 of the value, or a scale of about 0.03); 400 average that out.
    assert (mean - exact).abs().mean() < 0.1 * (exact - before).abs().mean()
    assert (mean - exact).mean().abs() < 3e-5


@pytest.mark.parametrize(
    ("codec", "takes"),
    [
        (StochasticWeight(), True),
        (Int8Weight(Int8Codes(), static_scales=False), True),
        (Int8Weight(Int8Codes(), static_scales=True), False),
        (ExactWeight(), False),
        (Float32Master(), False),
        (Split16Master(), False),
        (Int8OfMaster(Int8Codes(), static_scales=False), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_weights_without_a_copy_and_with_new_scales_take_it(codec: WeightFormat, *, takes: bool) -> None:
    assert is_rounded_within(codec, DynamicInt8State(signed=True), STEP) is takes
    assert not is_rounded_within(codec, PlainState(), STEP)


def is_rounded_within(codec: WeightFormat, storage: StateFormat, step: UpdateStep) -> bool:
    """Return whether an update of 512 elements leaves nothing to be written."""
    weight: StoredWeight = (
        torch.zeros(512, dtype=torch.float32 if isinstance(codec, ExactWeight) else torch.bfloat16),
    )
    if codec.is_coded:
        weight = (torch.empty(512, dtype=torch.int8), torch.empty(2))
    master_weight = codec.create(torch.randn(512), weight)
    piece = WeightSlice(codec, weight, master_weight)
    formats = [storage, DynamicInt8State(signed=False) if isinstance(storage, DynamicInt8State) else storage]
    state = [
        StateSlice(f, tuple(torch.full(s.shape, s.zero, dtype=s.dtype) for s in f.specs((512,))), 512) for f in formats
    ]
    AdamWConfig().update(piece, torch.randn(512), state, step)
    return piece._value is None


@pytest.mark.parametrize("keeps_value", [False, True])
def test_a_step_after_which_the_exact_value_is_needed_does_not(*, keeps_value: bool) -> None:
    step = UpdateStep(3, 1e-2, 0.1, keeps_value)
    assert is_rounded_within(StochasticWeight(), DynamicInt8State(signed=True), step) is not keeps_value
