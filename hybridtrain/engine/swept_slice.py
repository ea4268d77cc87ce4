"""What a pass over weights and state works on, and the second moment of a slice. P elements."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE, dequantize
from hybridtrain.engine.adafactor import factored_second_moment
from hybridtrain.engine.adamw import second_moment
from hybridtrain.memory.history_codec import part_of
from hybridtrain.memory.state_store import ParameterState
from hybridtrain.memory.tier_tensor import Piece
from hybridtrain.plan.placement import Codec


@dataclass(slots=True)
class SweptSlice:
    """A slice of one parameter, for a callback to change."""

    value_P: Tensor
    """Exact weight, float32; changed in place where the pass writes weights."""
    second_P: Tensor | None
    """Second moment, float32, without bias correction; None unless asked for."""
    history: list[list[Tensor]]
    """Stored parts of each history tensor; empty unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """What a pass needs and changes."""

    reads_moments: bool = False
    uses_history: bool = True
    writes_history: bool = False
    writes_weights: bool = True
    rounds_to_nearest: bool = False
    """Weights without a master are otherwise rounded stochastically."""
    seed: int = 0
    """Keys stochastic rounding."""


def second_moment_pieces(state: ParameterState, part: slice, codec: Codec) -> Iterator[Piece]:
    """Yield what a slice of the second moment is read from; factored ones are on the device, whole."""
    if codec is Codec.FACTORED:
        return
    if state.scales:  # put away in 8 bits through this phase: codes and scales of groups
        codes = state.moments[1]
        assert isinstance(codes, Tensor), "compressed moments are on the device"
        yield Piece(codes, part_of(torch.uint8, part, is_grouped=True), writes=False)
        yield Piece(state.scales[1], part_of(torch.float32, part, is_grouped=True), writes=False)
        return
    half = len(state.specs) // 2
    for spec, moment in zip(state.specs[half:], state.moments[half:], strict=True):
        fill = spec.zero if state.is_fresh else None
        yield Piece(moment, part_of(spec.dtype, part, is_grouped=state.is_int8), writes=False, fill=fill)


def swept_second_moment(state: ParameterState, part: slice, stored: Sequence[Tensor], codec: Codec) -> Tensor:
    """Return the (P,) float32 second moment from what ``second_moment_pieces`` asked for."""
    count = part.stop - part.start
    if codec is Codec.FACTORED:
        return factored_second_moment([_tensor(moment) for moment in state.moments], part)
    if len(stored) == 2:
        codes, scales = stored
        return dequantize(codes.view(-1, QUANT_GROUP_SIZE), scales, signed=False).view(-1)[:count]
    return second_moment([stored[0], stored[0]], count)


def _tensor(stored: object) -> Tensor:
    assert isinstance(stored, Tensor), "factored moments stay on the device"
    return stored
