"""The Triton kernel in the interpreter against float64, with as few roundings as torch's own float32."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridkernels.rssm_gru import triton_kernel
from hybridkernels.rssm_gru.op import WEIGHTS
from hybridkernels.rssm_gru.reference import RssmRollout, rssm_rollout_reference
from hybridkernels.rssm_gru.triton_kernel import row_block, rssm_rollout_triton
from numerics import assert_bitwise, assert_error_bound
from rssm_models import Inputs, random_inputs

PREDICTOR = {
    "hidden": 256, "categoricals": 32, "classes": 32, "actions": 4, "features": 51, "width": 64, "rows": 2,
    "members": 1,
}  # fmt: skip
SHAPES = [
    {"rows": 5, "is_seen": True},
    {"rows": 1, "members": 1, "ticks": 1},
    {"rows": 4, "actions": 1, "hidden": 32, "width": 16, "classes": 32, "ticks": 3},
    PREDICTOR,
]
FLOOR = 1e-6
"""A few roundings of values of unit size, for cases where torch happens to be exact."""


def launched(inputs: Inputs, rows: int | None = None) -> RssmRollout:
    weights, *rest = inputs.arguments
    return RssmRollout(*rssm_rollout_triton([weights[name] for name in WEIGHTS], *rest, rows=rows))


def assert_as_exact_as_torch(found: RssmRollout, inputs: Inputs) -> None:
    same_dtype = rssm_rollout_reference(*inputs.arguments)
    exact = rssm_rollout_reference(*inputs.to(torch.float64).arguments)
    assert_bitwise(found.classes_EBK, exact.classes_EBK, "classes")
    for name in ("means_SEB", "log_variances_SEB", "hidden_EBH", "logits_EBZ"):
        actual, torchs, target = (getattr(rollout, name) for rollout in (found, same_dtype, exact))
        assert_error_bound(actual, torchs, target, floor=FLOOR * max(1.0, target.abs().max().item()), name=name)


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_is_as_exact_as_torch(shape: dict[str, Any], rows: int) -> None:
    inputs = random_inputs(**shape)
    assert_as_exact_as_torch(launched(inputs, rows), inputs)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to infinity, whose inverse is the 0 wanted
def test_large_weights_give_sure_draws_and_no_nan() -> None:
    inputs = random_inputs(scale=100.0, ticks=1)
    inputs = replace(inputs, uniforms_SEBK=torch.full_like(inputs.uniforms_SEBK, 0.5))
    found = launched(inputs)
    assert all(tensor.isfinite().all() for tensor in found)
    logits_EBKC = rssm_rollout_reference(*inputs.arguments).logits_EBZ.view(2, 3, 16, 16)
    first, second = logits_EBKC.topk(2).values.unbind(-1)
    is_sure = first - second > 20  # nats, so that the half falls to the most probable class
    assert first.max() > 200
    assert is_sure.sum() > 50
    assert (found.classes_EBK == logits_EBKC.argmax(-1))[is_sure].all()


def test_strided_inputs_give_what_contiguous_ones_give() -> None:
    inputs = random_inputs(is_seen=True)
    expected = launched(inputs)

    def strided(tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous().mT

    inputs = replace(
        inputs, hidden_EBH=strided(inputs.hidden_EBH), classes_EBK=strided(inputs.classes_EBK),
        actions_SEBA=strided(inputs.actions_SEBA), uniforms_SEBK=strided(inputs.uniforms_SEBK),
        features_EBF=strided(inputs.features_EBF), weights={k: strided(v) for k, v in inputs.weights.items()},
    )  # fmt: skip
    assert not inputs.hidden_EBH.is_contiguous()
    for one, other in zip(launched(inputs), expected, strict=True):
        assert_bitwise(one, other)


def test_an_expanded_action_is_read_by_its_strides() -> None:
    planned_SA = torch.randn(2, 3)
    inputs = replace(random_inputs(), actions_SEBA=planned_SA[:, None, None].expand(2, 2, 3, 3))
    copied = replace(inputs, actions_SEBA=inputs.actions_SEBA.contiguous())
    for one, other in zip(launched(inputs, 4), launched(copied, 4), strict=True):
        assert_bitwise(one, other)


def test_the_ends_of_the_unit_interval_are_the_first_and_last_class() -> None:
    inputs = random_inputs(ticks=1)
    for number, expected in ((0.0, 0), (1 - 2**-24, 15)):
        uniforms = torch.full_like(inputs.uniforms_SEBK, number)
        assert (launched(replace(inputs, uniforms_SEBK=uniforms)).classes_EBK == expected).all()


def test_classes_out_of_range_mean_the_nearest() -> None:
    inputs = random_inputs()
    classes = torch.randint(0, 2, inputs.classes_EBK.shape)
    far = launched(replace(inputs, classes_EBK=torch.where(classes == 0, -7, 99)))
    near = launched(replace(inputs, classes_EBK=torch.where(classes == 0, 0, 15)))
    assert_bitwise(far.means_SEB, near.means_SEB)


@pytest.mark.parametrize("rows", [1, 4])
def test_nothing_is_written_outside_of_the_outputs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    guard, around, buffers = 7.25, 64, []

    def padded(numel: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffer = torch.full((numel + 2 * around,), guard).to(dtype)
        buffers.append(buffer)
        return buffer[around : around + numel].view(shape)

    def empty(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        del device
        return padded(torch.Size(shape).numel(), shape, dtype)

    monkeypatch.setattr(triton_kernel.torch, "empty", empty)
    monkeypatch.setattr(triton_kernel.torch, "empty_like", lambda t: padded(t.numel(), tuple(t.shape), t.dtype))
    inputs = random_inputs(rows=5)
    found = launched(inputs, rows)
    monkeypatch.undo()
    assert len(buffers) == 6  # five outputs and the scratch
    for buffer in buffers:
        mark = torch.tensor(guard).to(buffer.dtype)
        assert (buffer[:around] == mark).all()
        assert (buffer[-around:] == mark).all()
    assert_as_exact_as_torch(found, inputs)


def test_no_rows_need_no_launch() -> None:
    found = launched(random_inputs(rows=0))
    assert found.means_SEB.shape == (2, 2, 0)
    assert found.logits_EBZ.shape == (2, 0, 256)


def test_rows_share_a_program_once_multiprocessors_run_out() -> None:
    assert row_block(3, 8, 24) == 1
    assert row_block(3, 8, 23) == 4
