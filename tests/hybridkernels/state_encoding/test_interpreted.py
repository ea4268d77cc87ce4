"""The Triton kernels in the interpreter: sums of every kind of storage, features, one launch after another."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridkernels.state_encoding import triton_kernel
from hybridkernels.state_encoding.moments import MomentCodes, Moments, aligned, moment_table
from hybridkernels.state_encoding.reference import encode_state_reference, moments_of_sums
from hybridkernels.state_encoding.triton_kernel import (
    CHUNK,
    encode_state_triton,
    encode_training_state_triton,
    moment_statistics_triton,
)
from numerics import assert_bitwise, assert_error_bound
from state_encodings import KINDS, assert_sums, exact_sums, random_moments, random_states

LENGTHS = (1, 255, 513, CHUNK, CHUNK + 1, 9 * CHUNK + 700)


@pytest.mark.parametrize("slow", [None, *KINDS])
@pytest.mark.parametrize("kinds", list(product(KINDS, KINDS)), ids=str)
def test_every_kind_of_storage_is_summed(kinds: tuple[str, str], slow: str | None) -> None:
    moments = [random_moments(numel, *kinds, slow) for numel in (CHUNK + 300, 7)]
    assert_sums(moment_statistics_triton(moments), moments)


def test_tensors_of_all_sizes_are_summed_together() -> None:
    moments = [random_moments(numel, slow="fp32" if numel % 2 else None) for numel in LENGTHS]
    moments += [random_moments(0), random_moments(300, "codes", "codes"), random_moments(40, "bf16", "bf16", "codes")]
    assert_sums(moment_statistics_triton(moments), moments)


@pytest.mark.parametrize("multiprocessors", [1, 3, 50])
def test_any_number_of_programs_reads_every_chunk_once(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "multiprocessors", lambda _device: multiprocessors)
    moments = [random_moments(numel, slow="bf16") for numel in LENGTHS]
    assert_sums(moment_statistics_triton(moments), moments)


def test_nothing_but_empty_tensors_is_zero() -> None:
    assert moment_statistics_triton([random_moments(0), random_moments(0)]).tolist() == [0.0] * 8


def test_equal_calls_are_bit_equal() -> None:
    moments = [random_moments(5 * CHUNK + 3, slow="fp32")]
    first = moment_statistics_triton(moments)
    for _ in range(2):
        assert_bitwise(moment_statistics_triton(moments), first)


def test_a_table_is_made_once_and_reads_what_lies_there_now() -> None:
    moments = [random_moments(600)]
    before = moment_statistics_triton(moments)
    assert moment_table(moments, CHUNK).rows is moment_table(list(moments), CHUNK).rows
    assert isinstance(moments[0].m, Tensor)
    moments[0].m.mul_(2)
    after = moment_statistics_triton(moments)
    assert after[2] == pytest.approx(4 * before[2].item())
    assert moment_table([random_moments(600)], CHUNK).rows is not moment_table(moments, CHUNK).rows


def test_slices_that_begin_anywhere_are_taken() -> None:
    m, v = torch.randn(1003), torch.rand(1003)
    moments = [Moments(m[3:], v[1:1001], m[2:1002].bfloat16()[0:])]
    assert_sums(moment_statistics_triton(moments), moments)
    coded = random_moments(512, "codes", "codes").m
    assert isinstance(coded, MomentCodes)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), coded.codes])[1:]
    moments = [Moments(MomentCodes(shifted, coded.scale), torch.rand(512))]
    assert_sums(moment_statistics_triton(moments), moments)


def test_only_what_begins_between_16_bytes_is_copied() -> None:
    whole = torch.randn(1003)
    codes = torch.zeros(1025, dtype=torch.uint8)
    piece = Moments(whole[4:1004], MomentCodes(codes[1:], torch.ones(4)), whole[3:])
    (found,) = aligned([piece])
    assert found.m is piece.m
    assert isinstance(found.v, MomentCodes)
    assert isinstance(found.slow, Tensor)
    assert found.slow.data_ptr() % 16 == found.v.codes.data_ptr() % 16 == 0
    assert_bitwise(found.slow, whole[3:])


def test_small_terms_beside_large_ones_are_not_lost() -> None:
    chunks = 41
    m = torch.full((chunks * CHUNK,), 2.0 / CHUNK)
    m[:CHUNK] = 2.0**31 / CHUNK  # beside whose sum one float32 would lose every 2 of the others
    found = moment_statistics_triton([Moments(m, torch.zeros_like(m))])
    assert found[1].item() == 2.0**31 + 2 * (chunks - 1)


def test_chunks_are_dealt_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, partials = torch.empty, []

    def kept(*shape: int, **options: Any) -> Tensor:
        partials.append(empty(*shape, **options))
        return partials[-1]

    monkeypatch.setattr(triton_kernel, "multiprocessors", lambda _device: 2)
    monkeypatch.setattr(triton_kernel.torch, "empty", kept)
    # Four tensors of one and a half chunks: 8 chunks for 8 programs.
    moment_statistics_triton([random_moments(CHUNK + CHUNK // 2) for _ in range(4)])
    monkeypatch.undo()
    (of_programs,) = (tensor for tensor in partials if tensor.shape == (8, 16))
    assert (of_programs[:, 2] > 0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinity less infinity, within the exact sum
def test_numbers_that_are_none_pass_through() -> None:
    m, v = torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([1.0, 2.0, torch.inf])
    found = moment_statistics_triton([Moments(m, v)])
    assert found.isnan().tolist() == [False, True, True, False, False, False, True, False]
    assert found[3:5].tolist() == [torch.inf, torch.inf]


@pytest.mark.parametrize("num_states", [0, 1, 5])
def test_features_are_as_exact_as_torchs(num_states: int) -> None:
    states = random_states(num_states)
    found = encode_state_triton(*states)
    assert found.shape == (num_states, 51)
    if num_states:
        # Float32 products over 256 terms, as between the reference's own batches.
        torch.testing.assert_close(found, encode_state_reference(*states), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0, 1e30])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero", "ignore:overflow encountered")
def test_bad_numbers_give_the_references_features(place: int, value: float) -> None:
    states = random_states(2)
    states[place][0, -1] = value
    states[place][1, 0] = value
    found = encode_state_triton(*states)
    assert found.abs().max() <= 8
    torch.testing.assert_close(found, encode_state_reference(*states), rtol=1e-5, atol=1e-4)


def test_states_of_any_layout_and_float_are_taken() -> None:
    states = random_states(3)
    strided = [state.t().contiguous().t() for state in states]
    assert_bitwise(encode_state_triton(*strided), encode_state_triton(*states))
    halves = [state.half() for state in states]
    assert_bitwise(encode_state_triton(*halves), encode_state_triton(*(half.float() for half in halves)))


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize(("num_states", "slow"), [(3, "fp32"), (1, None), (1, "fp32"), (3, None)])
def test_one_launch_gives_sums_and_features(num_states: int, slow: str | None) -> None:
    moments = [random_moments(numel, slow=slow) for numel in LENGTHS]
    losses, norms, _, scalars, phases = random_states(num_states)
    features, sums = encode_training_state_triton(moments, losses, norms, scalars, phases)
    assert_sums(sums, moments)
    assert_bitwise(sums, moment_statistics_triton(moments))
    statistics = moments_of_sums(exact_sums(moments)).float().expand(num_states, -1)
    expected = encode_state_reference(losses, norms, statistics, scalars, phases)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-4)


def test_nothing_is_written_outside_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, around, buffers = 7.25, 64, []

    def empty(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        del device
        numel = torch.Size(shape).numel()
        buffers.append(torch.full((numel + 2 * around,), guard, dtype=dtype))
        return buffers[-1][around : around + numel].view(shape)

    monkeypatch.setattr(triton_kernel.torch, "empty", empty)
    losses, norms, statistics, scalars, phases = random_states(2)
    features, sums = encode_training_state_triton([random_moments(3 * CHUNK)], losses, norms, scalars, phases)
    alone = encode_state_triton(losses, norms, statistics, scalars, phases)
    monkeypatch.undo()
    assert len(buffers) == 4  # features twice, sums and partials
    for buffer in buffers:
        assert (buffer[:around] == guard).all()
        assert (buffer[-around:] == guard).all()
    for output in (features, sums, alone):
        assert not (output == guard).any()


def test_rounding_is_no_worse_than_torchs() -> None:
    moments = [random_moments(40 * CHUNK, slow="fp32")]
    (piece,) = moments
    assert isinstance(piece.m, Tensor)
    assert isinstance(piece.v, Tensor)
    exact, found = exact_sums(moments), moment_statistics_triton(moments)
    torchs = torch.stack([piece.m.sum(), piece.m @ piece.m, piece.v.sum(), piece.v @ piece.v])
    for index, name in enumerate(("m", "m^2", "v", "v^2")):
        target = exact[index + 1]
        floor = 1e-7 * (exact[0] * exact[2]).sqrt().item() if name == "m" else 2e-7 * target.item()  # some roundings
        assert_error_bound(found[index + 1].float(), torchs[index], target, floor=floor, name=name)
