"""State encoding as ops: features of states, sums over moments, and both in one. Legend: reference.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkernels.provider import chosen_provider
from hybridkernels.state_encoding.moments import Coded, Moments, Stored, require_moments
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
from hybridkernels.triton_launch import cuda_backend

_PARTS = 6
"""Tensors of one piece of moments in an op's flat list: m, v, slow, and the scales of each where it is in codes."""


def _flat(moments: Sequence[Moments]) -> list[Tensor | None]:
    """Return the tensors of all moments, as an op takes them."""
    flat: list[Tensor | None] = []
    for piece in moments:
        parts = (piece.m, piece.v, piece.slow)
        flat += [part.codes if isinstance(part, Coded) else part for part in parts]
        flat += [part.scale if isinstance(part, Coded) else None for part in parts]
    return flat


def _pieces(flat: Sequence[Tensor | None]) -> list[Moments]:
    """Return the moments that ``_flat`` made a list of."""
    pieces = []
    for start in range(0, len(flat), _PARTS):
        m, v, slow = (_stored(*flat[start + part : start + _PARTS : 3]) for part in range(3))
        assert m is not None
        assert v is not None
        pieces.append(Moments(m, v, slow))
    return pieces


def _stored(values: Tensor | None, scale: Tensor | None) -> Stored | None:
    return values if values is None or scale is None else Coded(values, scale)


def _takes_triton(op: str, device: torch.device) -> bool:
    available = ["triton", "torch"] if cuda_backend() == "triton" else ["torch"]
    return chosen_provider(op, available, device) == "triton"


@torch.library.custom_op("hybridkernels::encode_state", mutates_args=(), device_types="cpu")
def _encode_state(
    loss_history_NS: Tensor, grad_norm_history_NS: Tensor, moments_NM: Tensor, scalars_NC: Tensor, phases_NH: Tensor
) -> Tensor:
    return encode_state_reference(loss_history_NS, grad_norm_history_NS, moments_NM, scalars_NC, phases_NH)


@_encode_state.register_kernel("cuda")
def _encode_state_cuda(
    loss_history_NS: Tensor, grad_norm_history_NS: Tensor, moments_NM: Tensor, scalars_NC: Tensor, phases_NH: Tensor
) -> Tensor:
    inputs = (loss_history_NS, grad_norm_history_NS, moments_NM, scalars_NC, phases_NH)
    if not _takes_triton("encode_state", loss_history_NS.device):
        return encode_state_reference(*inputs)
    from hybridkernels.state_encoding.triton_kernel import encode_state_triton  # noqa: PLC0415  Triton is optional

    return encode_state_triton(*inputs)


@_encode_state.register_fake
def _encode_state_fake(
    loss_history_NS: Tensor,
    grad_norm_history_NS: Tensor,  # noqa: ARG001  an op's fake has the op's signature
    moments_NM: Tensor,  # noqa: ARG001
    scalars_NC: Tensor,  # noqa: ARG001
    phases_NH: Tensor,  # noqa: ARG001
) -> Tensor:
    return loss_history_NS.new_empty(loss_history_NS.shape[0], NUM_FEATURES, dtype=torch.float32)


@torch.library.custom_op("hybridkernels::moment_statistics", mutates_args=(), device_types="cpu")
def _moment_statistics(moments: Sequence[Tensor | None]) -> Tensor:
    return moment_statistics_reference(_pieces(moments))


@_moment_statistics.register_kernel("cuda")
def _moment_statistics_cuda(moments: Sequence[Tensor | None]) -> Tensor:
    pieces = _pieces(moments)
    if not _takes_triton("moment_statistics", pieces[0].device):
        return moment_statistics_reference(pieces)
    from hybridkernels.state_encoding.triton_kernel import moment_statistics_triton  # noqa: PLC0415

    return moment_statistics_triton(pieces)


@_moment_statistics.register_fake
def _moment_statistics_fake(moments: Sequence[Tensor | None]) -> Tensor:
    return _pieces(moments)[0].sums_like()


@torch.library.custom_op("hybridkernels::encode_training_state", mutates_args=(), device_types="cpu")
def _encode_training_state(
    moments: Sequence[Tensor | None], loss_history_NS: Tensor, grad_norm_history_NS: Tensor, scalars_NC: Tensor,
    phases_NH: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _both_in_torch(_pieces(moments), loss_history_NS, grad_norm_history_NS, scalars_NC, phases_NH)


@_encode_training_state.register_kernel("cuda")
def _encode_training_state_cuda(
    moments: Sequence[Tensor | None], loss_history_NS: Tensor, grad_norm_history_NS: Tensor, scalars_NC: Tensor,
    phases_NH: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pieces, states = _pieces(moments), (loss_history_NS, grad_norm_history_NS, scalars_NC, phases_NH)
    if not _takes_triton("moment_statistics", pieces[0].device):
        return _both_in_torch(pieces, *states)
    from hybridkernels.state_encoding.triton_kernel import encode_training_state_triton  # noqa: PLC0415

    return encode_training_state_triton(pieces, *states)


@_encode_training_state.register_fake
def _encode_training_state_fake(
    moments: Sequence[Tensor | None], loss_history_NS: Tensor, grad_norm_history_NS: Tensor, scalars_NC: Tensor,  # noqa: ARG001
    phases_NH: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:  # fmt: skip
    features_NF = loss_history_NS.new_empty(loss_history_NS.shape[0], NUM_FEATURES, dtype=torch.float32)
    return features_NF, _pieces(moments)[0].sums_like()


def _both_in_torch(
    moments: Sequence[Moments], loss_history_NS: Tensor, grad_norm_history_NS: Tensor, scalars_NC: Tensor,
    phases_NH: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sums = moment_statistics_reference(moments)
    moments_NM = moments_of_sums(sums).float().expand(loss_history_NS.shape[0], -1)
    features_NF = encode_state_reference(loss_history_NS, grad_norm_history_NS, moments_NM, scalars_NC, phases_NH)
    return features_NF, sums


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
    """Return sums over the optimizer moments of many tensors; every one is read once.

    Args:
        moments: Of at least one tensor; on one device.

    Returns:
        (8,), float64, on their device: number of elements, sum m, sum m^2, sum v, sum v^2, sum slow^2, sum m slow, and
        how many had a slow average.

    Raises:
        ValueError: there are none, or sizes, dtypes, devices or memory layouts do not fit.
    """
    require_moments(list(moments))
    sums: Tensor = _moment_statistics(_flat(moments))
    return sums


def encode_training_state(
    moments: Sequence[Moments], loss_history_NS: Tensor, grad_norm_history_NS: Tensor, scalars_NC: Tensor,
    phases_NH: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the features of N states of one set of moments, and the sums over these: one launch on a card.

    Args:
        moments: See ``moment_statistics``; all states take their statistics from them.
        loss_history_NS: See ``encode_state``, as the rest.
        grad_norm_history_NS: (N, 64).
        scalars_NC: (N, 4).
        phases_NH: (N, 4).

    Returns:
        (N, F), float32, and (8,), float64: see ``encode_state`` and ``moment_statistics``.

    Raises:
        ValueError: as these two.
    """
    require_moments(list(moments))
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
