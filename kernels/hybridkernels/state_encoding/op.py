"""State encoding as ops: features of states, sums over moments, and both in one. Legend: reference.py.

An op takes moments as a flat list: the six ``tensors`` of every piece, one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridkernels.define_op import define_op, triton_or_fallback
from hybridkernels.state_encoding.moments import Moments, require_moments
from hybridkernels.state_encoding.reference import (
    GRAD_NORM_STEPS,
    LOSS_STEPS,
    NUM_FEATURES,
    NUM_MOMENT_STATISTICS,
    NUM_PHASES,
    NUM_SCALARS,
    encode_state_reference,
    moment_statistics_reference,
    moments_of_sums,
)

_PARTS = 6
"""Tensors of one piece of moments in an op's flat list."""
_HISTORIES = "Tensor loss_history_NS, Tensor grad_norm_history_NS"


def _flat(moments: Sequence[Moments]) -> list[Tensor | None]:
    """Return the tensors of all moments, as an op takes them."""
    return [tensor for piece in moments for tensor in piece.tensors]


def _of_pieces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a flat list and other arguments from one of moments and these."""

    def of_list(flat: Sequence[Tensor | None], *states: Tensor) -> Any:
        pieces = [Moments.of(flat[start : start + _PARTS]) for start in range(0, len(flat), _PARTS)]
        return function(pieces, *states)

    return of_list


def _both_in_torch(moments: Sequence[Moments], losses: Tensor, norms: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
    sums = moment_statistics_reference(moments)
    moments_NM = moments_of_sums(sums).float().expand(losses.shape[0], -1)
    return encode_state_reference(losses, norms, moments_NM, *states), sums


def _features_like(losses: Tensor, *_: Tensor) -> Tensor:
    return losses.new_empty(losses.shape[0], NUM_FEATURES, dtype=torch.float32)


_state_cuda = triton_or_fallback(encode_state_reference, "state_encoding.encode_state_triton")
_sums_cuda = triton_or_fallback(moment_statistics_reference, "state_encoding.moment_statistics_triton")
_both_cuda = triton_or_fallback(_both_in_torch, "state_encoding.encode_training_state_triton", key="moment_statistics")
_encode_state = define_op("encode_state", encode_state_reference, cuda=_state_cuda, fake=_features_like)
_moment_statistics = define_op(
    "moment_statistics", _of_pieces(moment_statistics_reference), cuda=_of_pieces(_sums_cuda),
    fake=_of_pieces(lambda pieces: pieces[0].sums_like()), schema="(Tensor?[] moments) -> Tensor",
)  # fmt: skip
_encode_training_state = define_op(
    "encode_training_state", _of_pieces(_both_in_torch), cuda=_of_pieces(_both_cuda),
    fake=_of_pieces(lambda pieces, *states: (_features_like(*states), pieces[0].sums_like())),
    schema=f"(Tensor?[] moments, {_HISTORIES}, Tensor scalars_NC, Tensor phases_NH) -> (Tensor, Tensor)",
)  # fmt: skip


def encode_state(
    loss_history_NS: Tensor, grad_norm_history_NS: Tensor, moments_NM: Tensor, scalars_NC: Tensor, phases_NH: Tensor
) -> Tensor:
    """Return the features of N states.

    Args:
        loss_history_NS: (N, 256), nats per token, oldest first; what is not yet known repeats the oldest. As the
            others of any floating-point dtype, on one device.
        grad_norm_history_NS: (N, 64), likewise.
        moments_NM: (N, 6), see ``NUM_MOMENT_STATISTICS``.
        scalars_NC: (N, 4), see ``NUM_SCALARS``.
        phases_NH: (N, 4), one-hot.

    Returns:
        (N, F), float32, each in [-8, 8].

    Raises:
        ValueError: a shape or device is another.
    """
    inputs = (loss_history_NS, grad_norm_history_NS, moments_NM, scalars_NC, phases_NH)
    _require_states(inputs, (LOSS_STEPS, GRAD_NORM_STEPS, NUM_MOMENT_STATISTICS, NUM_SCALARS, NUM_PHASES))
    features_NF: Tensor = _encode_state(*inputs)
    return features_NF


def moment_statistics(moments: Sequence[Moments]) -> Tensor:
    """Return sums over the optimizer moments of at least one tensor, on one device; every one is read once.

    They are (8,) float64 on that device: number of elements, sum m, sum m^2, sum v, sum v^2, sum slow^2, sum m slow,
    and how many had a slow average.

    Raises:
        ValueError: there are none, or sizes, dtypes, devices or memory layouts do not fit.
    """
    require_moments(moments)
    sums: Tensor = _moment_statistics(_flat(moments))
    return sums


def encode_training_state(
    moments: Sequence[Moments], loss_history_NS: Tensor, grad_norm_history_NS: Tensor, scalars_NC: Tensor,
    phases_NH: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the features (N, F) of N states of one set of moments, and the sums over these (8,): one launch on a card.

    Arguments and errors are those of ``encode_state`` and ``moment_statistics``.
    """
    require_moments(moments)
    states = (loss_history_NS, grad_norm_history_NS, scalars_NC, phases_NH)
    _require_states(states, (LOSS_STEPS, GRAD_NORM_STEPS, NUM_SCALARS, NUM_PHASES), moments[0].device)
    features_NF, sums = _encode_training_state(_flat(moments), *states)
    return features_NF, sums


def _require_states(inputs: Sequence[Tensor], widths: tuple[int, ...], device: torch.device | None = None) -> None:
    num_states, device = inputs[0].shape[0], device or inputs[0].device
    shapes = [tuple(tensor.shape) for tensor in inputs]
    if shapes != [(num_states, width) for width in widths]:
        raise ValueError(f"shapes: {shapes} must be (N, width) with widths {widths}; pad histories with their oldest")
    devices = [str(tensor.device) for tensor in inputs]
    if any(tensor.device != device for tensor in inputs):
        raise ValueError(f"devices: {devices} must all be {device}; move the states there")
