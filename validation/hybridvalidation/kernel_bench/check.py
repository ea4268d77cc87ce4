"""Is a provider right? Its error against the definition is at most twice that of plain torch in the same dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridvalidation.kernel_bench.case import Case, Inputs, Run, Tensors


@dataclass(frozen=True, slots=True)
class Bound:
    """Truth and tolerance of one output."""

    exact: Tensor
    largest: float
    """Largest magnitude of the truth."""
    allowed: float
    """Largest absolute error."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The output nearest to its bound, or furthest beyond it; errors over the largest value of the truth."""

    error: float
    allowed: float
    is_right: bool
    message: str = ""


def make_bounds(case: Case, inputs: Inputs) -> tuple[Bound, ...]:
    """Return truth and tolerance of every output of a case.

    Raises:
        RuntimeError: the definition itself gives numbers that are not finite.
    """
    exact = call(case, case.exact(inputs))
    plain = call(case, case.same_dtype(inputs))
    return tuple(_bound(truth, same, case.floor) for truth, same in zip(exact, plain, strict=True))


def call(case: Case, run: Run) -> Tensors:
    """Return what is judged of the outputs of the last of the calls after which a case is checked."""
    for _ in range(case.checked_calls - 1):
        run()
    return case.seen(run())


def judge(outputs: Sequence[Tensor], bounds: Sequence[Bound]) -> Verdict:
    """Return whether all outputs are within their bounds."""
    if len(outputs) != len(bounds):
        return Verdict(0.0, 0.0, is_right=False, message=f"{len(outputs)} outputs, {len(bounds)} expected")
    worst: tuple[float, Verdict] | None = None
    for place, (output, bound) in enumerate(zip(outputs, bounds, strict=True)):
        if output.shape != bound.exact.shape:
            shapes = f"{tuple(output.shape)}, expected {tuple(bound.exact.shape)}"
            return Verdict(0.0, 0.0, is_right=False, message=f"output {place} has shape {shapes}")
        error = largest_difference(output, bound.exact)
        if not error < float("inf"):
            return Verdict(0.0, 0.0, is_right=False, message=f"output {place} is not finite")
        scale = bound.largest or 1.0
        found = Verdict(
            error / scale, bound.allowed / scale, error <= bound.allowed,
            "" if error <= bound.allowed else f"output {place}: error {error:.3g} is above {bound.allowed:.3g}",
        )  # fmt: skip
        share = error / bound.allowed if bound.allowed else float(error > 0)
        if worst is None or share > worst[0]:
            worst = (share, found)
    assert worst is not None, "a case has an output"
    return worst[1]


def largest_difference(actual: Tensor, exact: Tensor) -> float:
    """Return the largest absolute difference; NaN stays NaN."""
    if not actual.numel():
        return 0.0
    wide = torch.promote_types(exact.dtype, torch.float32)
    return float((actual.detach().to(exact.device, wide) - exact.to(wide)).abs_().max())


def _bound(truth: Tensor, same: Tensor, floor: float | None) -> Bound:
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    error = largest_difference(same, truth)
    if not (largest < float("inf") and error < float("inf")):
        raise RuntimeError("the definition gives numbers that are not finite")
    if floor is None:  # one rounding of the largest value: plain torch may happen to be exact, or to round just once
        floor = torch.finfo(same.dtype).eps / 2 if same.is_floating_point() else 0.0
    return Bound(truth.detach(), largest, 2 * error + floor * largest)
