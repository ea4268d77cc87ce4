"""One call for anyone's model: bytes by hand arithmetic, cards, batches, a module that exists already."""

import pytest
import torch
from torch import nn

from hybridtrain import estimate_memory
from hybridtrain.errors import ConfigError
from hybridtrain.virtual_gpu.cards.card import MARGIN_TOLD, FitVerdict

WIDTH = 1024
PARAMS = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def test_classes_and_modules_are_those_of_the_model() -> None:
    found = estimate_memory(build, torch.empty(8, WIDTH), card="rtx-4090")
    held = found.by_class()
    assert held["weight"] == held["grad"] == PARAMS
    assert held["optim_state"] == 2 * PARAMS
    modules = found.by_module()
    assert modules["0"] == modules["2"] == 2 * PARAMS  # weights, gradients, two moments
    assert found.fits_card
    assert found.peak_bytes >= 4 * PARAMS
    assert found.placeholders() == ()


def test_a_module_that_exists_is_not_changed_and_counts_the_same() -> None:
    model = build()
    model.append(nn.Linear(WIDTH, WIDTH))
    model[3].weight = model[2].weight  # type: ignore[union-attr]
    before = [parameter.clone() for parameter in model.parameters()]
    found = estimate_memory(model, torch.empty(8, WIDTH), card="rtx-4090", optimizer="SGD", clip_grad_norm=1.0)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert found.by_class()["weight"] == PARAMS + 4 * WIDTH  # the shared matrix once
    assert found.by_class()["optim_state"] == 0


def test_the_largest_batch_leaves_the_margin_free_and_the_next_fits_barely() -> None:
    found = estimate_memory(build, torch.empty(8, WIDTH), card="rtx-4060-ti-16gb", optimizer="SGD")
    largest = found.largest_batch()
    assert largest > 8
    fits, next_one = (
        estimate_memory(build, torch.empty(size, WIDTH, device="meta"), card="rtx-4060-ti-16gb", optimizer="SGD")
        for size in (largest, largest + 1)
    )
    assert (fits.verdict, next_one.verdict) == (FitVerdict.FITS, FitVerdict.BARELY)
    assert (fits.fits("rtx-4060-ti-16gb"), next_one.fits("rtx-4060-ti-16gb"), next_one.fits_card) == (True, False, True)
    assert MARGIN_TOLD in next_one.summary()
    assert next_one.fits("rtx-4090")
    beyond = torch.empty(2 * largest, WIDTH, device="meta")
    too_large = estimate_memory(build, beyond, card="rtx-4060-ti-16gb", optimizer="SGD")
    assert (too_large.fits_card, too_large.verdict) == (False, FitVerdict.NO)
    assert "CUDA out of memory" in too_large.summary()
    assert too_large.peak_bytes > next_one.peak_bytes  # what it would take


def test_settings_reach_the_step() -> None:
    plain = estimate_memory(build, {"input": torch.empty(4096, WIDTH)}, card="rtx-4090", optimizer="SGD")
    half = estimate_memory(
        build, (torch.empty(4096, WIDTH),), card="rtx-4090", optimizer=lambda p: torch.optim.SGD(p, momentum=0.9),
        autocast=torch.bfloat16, micro_batches=2, loss=lambda model, batch: model(*batch).float().square().sum(),
    )  # fmt: skip
    assert half.by_class()["optim_state"] == PARAMS
    assert {op.dtype for op in plain.run.trace.ops if op.is_matmul} == {"float32"}
    assert {op.dtype for op in half.run.trace.ops if op.is_matmul} == {"bfloat16"}
    assert sum(op.is_matmul for op in half.run.trace.ops) == 2 * sum(op.is_matmul for op in plain.run.trace.ops)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match="optimizer 'AdamWW' is unknown; did you mean 'AdamW'"):
        estimate_memory(build, torch.empty(8, WIDTH), card="rtx-4090", optimizer="AdamWW")
    with pytest.raises(ConfigError, match="batch: contains no tensor"):
        estimate_memory(build, {"size": 3}, card="rtx-4090")
    with pytest.raises(ConfigError, match="list cards"):
        estimate_memory(build, torch.empty(8, WIDTH), card="rtx-4091")


def test_an_estimate_of_code_for_an_unknown_compiler_says_that_it_is_an_upper_bound() -> None:
    def build() -> nn.Module:
        model = nn.Linear(64, 64)
        model.compile(backend="aot_eager")
        return model

    batch = torch.empty(2, 64)
    assert "UPPER BOUND: torch.compile at " in estimate_memory(build, batch, card="rtx-4090").summary()
    assert "BOUND" not in estimate_memory(lambda: nn.Linear(64, 64), batch, card="rtx-4090").summary()
