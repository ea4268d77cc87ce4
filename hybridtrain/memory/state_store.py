"""Master weights and optimizer moments, one owner for both, on the device or below it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor, nn

from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.memory.byte_layout import lay_out, padded
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.history_codec import ZERO_CODE, MomentSpec, grouped_specs, part_of
from hybridtrain.memory.master_codec import MasterCodecs, StoredWeight
from hybridtrain.memory.tier import Ticket, TierBuffer
from hybridtrain.memory.tier_tensor import Piece, Stored, TierTensor
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.memory_plan import PhasePlan
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.virtual_gpu.observer import MemoryObserver
from hybridtrain.virtual_gpu.tensor_class import TensorClass

SMALLEST_INT8_TENSOR = 4096
"""Elements below which moments stay fp32, as in bitsandbytes: norms and biases are cheap to keep exact."""
_UNSIGNED_ZERO_CODE = 0
"""Code of the value zero in the unsigned map, which second moments use."""


@dataclass(slots=True)
class ParameterState:
    """What the update needs of one parameter beside its weight and gradient."""

    parameter: nn.Parameter
    companion: Stored | None
    """The master codec's, shape of the parameter."""
    specs: tuple[MomentSpec, ...]
    moments: tuple[Stored, ...] = ()
    """float32 or bfloat16: m, v, shaped like the parameter. int8: m_codes, m_scale, v_codes, v_scale, flat. factored:
    row and column means of a matrix, v of a vector, float32. Empty before step 1."""
    is_fresh: bool = True
    """The moments were never written: below the device they must be set, not fetched."""
    arriving: list[Ticket] = field(default_factory=list)
    """On the way back from another tier; waited for before use."""
    leaving: list[TierBuffer] = field(default_factory=list)
    """Where they come from, given back once they are here."""
    scales: tuple[Tensor, ...] = ()
    """Of moments that wait as 8-bit codes through a phase: one per group of 256, by moment."""
    history_specs: tuple[MomentSpec, ...] = ()
    num_history: int = 0
    """Tensors of the history; int8 ones consist of codes and scales."""
    history: tuple[Stored, ...] = ()
    """What a predictor remembers, flat or shaped like the parameter. Empty before step 1."""
    history_is_fresh: bool = True
    """The history was never written: below the device it must be set, not fetched."""

    @property
    def is_int8(self) -> bool:
        """Whether the moments are 8-bit codes."""
        return len(self.specs) == 4

    @property
    def has_history_codes(self) -> bool:
        """Whether the history is stored as 8-bit codes with scales."""
        return len(self.history_specs) == 2 * self.num_history > 0


def history_pieces(state: ParameterState, part: slice, *, writes: bool = True) -> list[Piece]:
    """Return the pieces of a parameter's history, tensor by tensor."""
    return [
        Piece(
            tensor,
            part_of(spec.dtype, part, is_grouped=state.has_history_codes),
            writes=writes,
            fill=spec.zero if state.history_is_fresh else None,
        )
        for spec, tensor in zip(state.history_specs, state.history, strict=True)
    ]


class StateStore:
    """Owns the state of every parameter; moments are allocated when the first update asks for them.

    Args:
        plan: Codecs and placements of master and moments.
        codecs: How exact weights are kept.
        copies: The way to the other tiers.
        observer: Told what the tensors are for.
    """

    def __init__(self, plan: PhasePlan, codecs: MasterCodecs, copies: CopyEngine, observer: MemoryObserver) -> None:
        allowed = (Codec.FLOAT32, Codec.BFLOAT16, Codec.INT8_BLOCKS, Codec.FACTORED)
        if plan.optim_state.codec not in allowed:
            raise ValueError(
                f"optim_state.codec: {plan.optim_state.codec} cannot hold moments; allowed: {', '.join(allowed)}"
            )
        self.codecs = codecs
        self.codec = plan.optim_state.codec
        self._moment_placement = Placement.DEVICE if self.codec is Codec.FACTORED else plan.optim_state.placement
        self._master_placement = plan.master.placement
        self._copies = copies
        self._observer = observer
        self._history = (plan.history_codec, plan.history_tensors)
        self._history_placement = plan.optim_state.placement
        self._states: dict[str, list[ParameterState]] = {}
        self.born_after = 0
        """Steps done when the moments started from zero: bias correction counts from there."""

    @torch.no_grad()
    def initialize(self, unit: str, parameter: nn.Parameter, initial: Tensor, weight: StoredWeight) -> None:
        """Write the fp32 ``initial`` value of the next parameter of ``unit`` to ``weight`` and keep its companion."""
        companion: Stored | None = self.codecs.of(weight).create(initial, weight)
        if isinstance(companion, Tensor):
            self._observer.label(companion, TensorClass.MASTER, unit)
            if self._master_placement is not Placement.DEVICE:
                companion = self._send_away(companion, unit)
        specs = self._moment_specs(tuple(parameter.shape))
        codec, num_history = self._history
        history_specs = self._history_specs(tuple(parameter.shape), codec) * num_history
        state = ParameterState(parameter, companion, specs, history_specs=history_specs, num_history=num_history)
        self._states.setdefault(unit, []).append(state)

    def acquire(self, unit: Unit) -> list[ParameterState]:
        """Return the states of ``unit`` in the order of its parameters."""
        states = self._states[unit.name]
        if states and not states[0].moments:
            self._allocate(unit.name, states)
        return self.settled(unit.name)

    def settled(self, unit: str) -> list[ParameterState]:
        """Return the states of a unit once nothing of them is on its way; their moments may not exist yet."""
        states = self._states[unit]
        for state in states:
            while state.arriving:
                self._copies.wait(state.arriving.pop(0))
            while state.leaving:
                self._copies.release(state.leaving.pop(0))
        return states

    def of(self, unit: str) -> list[ParameterState]:
        """Return the states of a unit as they are; their moments may not exist yet."""
        return self._states[unit]

    def streamed_bytes(self, state: ParameterState, num_elements: int) -> int:
        """Return what a range of ``num_elements`` of a parameter's state takes in a slot, padding included."""
        share = min(1.0, num_elements / max(state.parameter.numel(), 1))
        total = 0
        if self._moment_placement is not Placement.DEVICE:
            sizes = (torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in state.specs)
            total += sum(padded(ceil(size * share)) for size in sizes)
        if self._history_placement is not Placement.DEVICE:
            sizes = (torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in state.history_specs)
            total += sum(padded(ceil(size * share)) for size in sizes)
        if isinstance(state.companion, TierTensor):
            total += padded(ceil(state.companion.numel() * share) * state.companion.dtype.itemsize)
        return total

    def items(self) -> Iterator[tuple[str, list[ParameterState]]]:
        """Yield unit names and states as they are, for saving and loading."""
        yield from self._states.items()

    def _send_away(self, companion: Tensor, unit: str) -> TierTensor:
        buffer = self._copies.allocate(companion.nbytes, self._master_placement, TensorClass.MASTER, unit)
        self._copies.wait(self._copies.store(companion, buffer))
        return TierTensor(buffer, 0, tuple(companion.shape), companion.dtype)

    def _moment_specs(self, shape: tuple[int, ...]) -> tuple[MomentSpec, ...]:
        size = torch.Size(shape).numel()
        if self.codec is Codec.FACTORED and len(shape) >= 2:
            return (MomentSpec(shape[:1], torch.float32), MomentSpec(shape[1:], torch.float32))
        if self.codec is Codec.FACTORED:
            return (MomentSpec(shape, torch.float32),)
        if self.codec is Codec.INT8_BLOCKS and size >= SMALLEST_INT8_TENSOR:
            return grouped_specs(size, ZERO_CODE) + grouped_specs(size, _UNSIGNED_ZERO_CODE)
        dtype = torch.float32 if self.codec is Codec.INT8_BLOCKS else to_torch_dtype(self.codec)
        return (MomentSpec(shape, dtype), MomentSpec(shape, dtype))

    @staticmethod
    def _history_specs(shape: tuple[int, ...], codec: Codec) -> tuple[MomentSpec, ...]:
        size = torch.Size(shape).numel()
        if codec is Codec.INT8_BLOCKS and size >= SMALLEST_INT8_TENSOR:
            return grouped_specs(size, ZERO_CODE)
        if codec in {Codec.ABSENT, Codec.INT8_BLOCKS}:
            return (MomentSpec(shape, torch.float32),)
        return (MomentSpec(shape, to_torch_dtype(codec)),)

    def _allocate(self, unit: str, states: list[ParameterState]) -> None:
        moments = self._new_tensors(unit, [state.specs for state in states], self._moment_placement)
        for state, tensors in zip(states, moments, strict=True):
            state.moments = tensors
            state.is_fresh = self._moment_placement is not Placement.DEVICE
        if not states[0].num_history or states[0].history:
            return
        history = self._new_tensors(unit, [state.history_specs for state in states], self._history_placement)
        for state, tensors in zip(states, history, strict=True):
            state.history = tensors
            state.history_is_fresh = self._history_placement is not Placement.DEVICE

    def _new_tensors(
        self, unit: str, specs: Sequence[Sequence[MomentSpec]], placement: Placement
    ) -> list[tuple[Stored, ...]]:
        """Return tensors of zeros on the device, or unset ones in one buffer below it, as many as ``specs``."""
        if placement is Placement.DEVICE:
            return [tuple(self._zeros(spec, unit) for spec in group) for group in specs]
        layout = lay_out((spec.shape, spec.dtype) for group in specs for spec in group)
        buffer = self._copies.allocate(layout.num_bytes, placement, TensorClass.OPTIM_STATE, unit)
        fields = iter(layout.fields)
        return [
            tuple(TierTensor(buffer, f.offset, f.shape, f.dtype) for _, f in zip(group, fields, strict=False))
            for group in specs
        ]

    def _zeros(self, spec: MomentSpec, unit: str) -> Tensor:
        tensor = torch.full(spec.shape, spec.zero, dtype=spec.dtype, device=self._copies.transfer.device)
        self._observer.label(tensor, TensorClass.OPTIM_STATE, unit)
        return tensor
