"""Three kinds of equality: to the bit, within an error bound, and a training curve that follows another."""

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Fail unless dtype, shape and every bit agree; NaNs of one payload are equal."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    differs = _bits(actual) != _bits(expected)
    if differs.any():
        gap = (actual.double() - expected.double()).abs().max().item()
        raise AssertionError(f"{name}: {int(differs.sum())} of {differs.numel()} elements differ, by up to {gap:.3g}")


def assert_error_bound(
    actual: Tensor, same_dtype: Tensor, exact: Tensor, *, floor: float, name: str = "tensor"
) -> None:
    """Fail unless the error of ``actual`` is at most twice that of torch's own result of the same dtype.

    Args:
        actual: Result under test.
        same_dtype: The plain torch formula in the dtype of ``actual``.
        exact: The plain torch formula in float64.
        floor: Added to the bound, for results where torch happens to be exact.
        name: For the message.
    """
    assert actual.dtype == same_dtype.dtype, f"{name}: {actual.dtype} is not {same_dtype.dtype}"
    assert actual.shape == exact.shape, f"{name}: {tuple(actual.shape)} is not {tuple(exact.shape)}"
    error = largest_error(actual, exact)
    allowed = 2 * largest_error(same_dtype, exact) + floor
    assert error <= allowed, f"{name}: error {error:.3g} is above {allowed:.3g}"


def largest_error(actual: Tensor, exact: Tensor) -> float:
    """Return the largest absolute difference; NaN stays NaN, which no bound accepts."""
    return (actual.double() - exact.double()).abs().max().item()


def assert_follows(losses: Sequence[float], baseline: Sequence[float], *, band: float) -> None:
    """Fail unless the baseline learns and each loss stays within ``band`` (in the losses' unit) of it."""
    assert len(losses) == len(baseline), f"{len(losses)} losses, {len(baseline)} of the baseline"
    drop = baseline[0] - baseline[-1]
    assert drop > 2 * band, f"the baseline falls by {drop:.3g} only: a band of {band:.3g} would prove nothing"
    gaps = [abs(loss - other) for loss, other in zip(losses, baseline, strict=True)]
    assert max(gaps) <= band, f"step {gaps.index(max(gaps)) + 1}: {max(gaps):.3g} away, band {band:.3g}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
