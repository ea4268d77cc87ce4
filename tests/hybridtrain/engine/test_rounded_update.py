"""The fused, rounded update: cut into the same pieces wherever state lives, and taken only where nothing is lost."""

import pytest
import torch
from torch import Tensor

from hybridkernels.adamw_int8 import adamw_int8_
from hybridtrain.engine import rounded_update
from hybridtrain.engine.adamw import AdamWConfig, AdamWStep
from hybridtrain.engine.rounded_update import takes_rounded_update, update_rounded
from hybridtrain.engine.slow_momentum import SlowStep
from hybridtrain.memory.master_codec import (
    ExactWeight,
    Float32Master,
    Int8OfMaster,
    Int8Weight,
    MasterCodec,
    Split16Master,
    StochasticWeight,
    StoredWeight,
)

STEP = AdamWStep(AdamWConfig(), 1e-2, 0.1, 3)
P = 3 * 512 + 100
MOMENTS = [torch.empty(0)] * 4


def state(codec: MasterCodec, seed: int = 0) -> tuple[StoredWeight, Tensor, list[Tensor]]:
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


@pytest.mark.parametrize("codec", [StochasticWeight(), Int8Weight(static_scales=False)], ids=["bf16", "int8"])
def test_slices_of_any_length_draw_the_same_numbers(codec: MasterCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_update, "_SLICE_ELEMENTS", 512)
    results = []
    for cuts in ([P], [1024, P], [512, 1024, 1536, P]):
        weight, grad, moments = state(codec)
        torch.manual_seed(5)
        start = 0
        for end in cuts:
            part, groups = slice(start, end), slice(start // 256, -(-end // 256))
            codes = slice(start, groups.stop * 256)
            piece = (weight[0][part],) if len(weight) == 1 else (weight[0][part], weight[1][groups])
            m_codes, m_scale, v_codes, v_scale = moments
            update_rounded(
                piece, grad[part], [m_codes[codes], m_scale[groups], v_codes[codes], v_scale[groups]], [], STEP
            )
            start = end
        results.append([*weight, *moments])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("codec", [StochasticWeight(), Int8Weight(static_scales=False)], ids=["bf16", "int8"])
def test_it_moves_weights_as_the_exact_update_does_on_average(codec: MasterCodec) -> None:
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
        update_rounded(copies, grad, [moment.clone() for moment in moments], [], STEP)
        mean += codec.load(copies, None).double() / num_draws
    # One draw is off by up to a step of the grid (2^-7 of the value, or a scale of about 0.03); 400 average that out.
    assert (mean - exact).abs().mean() < 0.1 * (exact - before).abs().mean()
    assert (mean - exact).mean().abs() < 3e-5


@pytest.mark.parametrize(
    ("codec", "takes"),
    [
        (StochasticWeight(), True),
        (Int8Weight(static_scales=False), True),
        (Int8Weight(static_scales=True), False),
        (ExactWeight(), False),
        (Float32Master(), False),
        (Split16Master(), False),
        (Int8OfMaster(static_scales=False), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_weights_without_a_copy_and_with_new_scales_take_it(codec: MasterCodec, *, takes: bool) -> None:
    assert takes_rounded_update(codec, MOMENTS, STEP) is takes
    assert not takes_rounded_update(codec, MOMENTS[:2], STEP)


@pytest.mark.parametrize(("predicted_steps", "takes"), [(0.0, True), (1.0, False)])
def test_a_step_along_the_slow_average_needs_the_exact_value(predicted_steps: float, *, takes: bool) -> None:
    slow = SlowStep.__new__(SlowStep)
    object.__setattr__(slow, "predicted_steps", predicted_steps)
    step = AdamWStep(AdamWConfig(), 1e-2, 0.1, 3, slow)
    assert takes_rounded_update(StochasticWeight(), MOMENTS, step) is takes
