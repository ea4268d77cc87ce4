"""Where optimizer state waits through a phase that does not need it, and how it comes back. G groups of 256."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridkernels.adamw_int8.dynamic_map import QUANT_GROUP_SIZE, dequantize, quantize
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.state_store import ParameterState, StateStore
from hybridtrain.memory.tier_tensor import Stored, TierTensor
from hybridtrain.plan.memory_plan import Cell
from hybridtrain.plan.placement import Codec, Placement
from hybridtrain.virtual_gpu.observer import MemoryObserver
from hybridtrain.virtual_gpu.tensor_class import TensorClass

_SLICE_GROUPS = 1 << 14
"""Groups widened or narrowed at a time: 16 MiB of fp32 a temporary."""


class StateShelter:
    """Takes state that lives on the device elsewhere and brings it back.

    Args:
        states: Whose state it is.
        copies: The way to the host.
        observer: Told what new tensors are for.
    """

    def __init__(self, states: StateStore, copies: CopyEngine, observer: MemoryObserver) -> None:
        self._states = states
        self._copies = copies
        self._observer = observer
        self._away: list[tuple[ParameterState, str]] = []
        self._has_master = False

    @torch.no_grad()
    def put_away(self, moments: Cell, master: Cell | None, *, step: int) -> None:
        """Give up the device memory of moments and master as the cells of the new phase say.

        Args:
            moments: Placement HOST or DROPPED, or codec INT8_BLOCKS; anything else leaves them.
            master: Placement HOST, or anything else; None: it moves with the weights.
            step: Steps done so far; dropped moments start anew after it.
        """
        is_factored = self._states.codec is Codec.FACTORED  # rows and columns stay: there is nothing to gain
        self._has_master = master is not None and master.placement is Placement.HOST
        for unit, state in self._resident():
            if self._has_master and isinstance(state.companion, Tensor):
                state.companion = self._send(state.companion, TensorClass.MASTER, unit)
            if moments.placement is Placement.HOST:
                if not is_factored:
                    state.moments = tuple(self._send(moment, TensorClass.OPTIM_STATE, unit) for moment in state.moments)
                state.history = tuple(self._send(tensor, TensorClass.OPTIM_STATE, unit) for tensor in state.history)
            elif moments.placement is Placement.DROPPED:
                state.moments, state.is_fresh = (), True
            elif moments.codec is Codec.INT8_BLOCKS and not (state.is_int8 or is_factored):
                self._compress(state, unit)
            self._away.append((state, unit))
        if moments.placement is Placement.DROPPED:
            self._states.born_after = step

    @torch.no_grad()
    def restore(self) -> None:
        """Start bringing everything back, in the order in which an update asks for it; it waits for what it needs."""
        for state, unit in self._away:
            if state.scales:
                state.moments = tuple(self._widen(state, index, unit) for index in range(len(state.moments)))
                state.scales = ()
            if self._has_master and state.companion is not None:
                state.companion = self._bring(state, state.companion, TensorClass.MASTER, unit)
            state.moments = tuple(self._bring(state, moment, TensorClass.OPTIM_STATE, unit) for moment in state.moments)
            state.history = tuple(self._bring(state, tensor, TensorClass.OPTIM_STATE, unit) for tensor in state.history)
        self._away.clear()
        self._has_master = False

    def leave_master(self) -> None:
        """Leave the master where it is; it moves with the weights."""
        self._has_master = False

    def _resident(self) -> Iterator[tuple[str, ParameterState]]:
        for unit, states in self._states.items():
            for state in states:
                if any(isinstance(moment, Tensor) for moment in state.moments):
                    yield unit, state

    def _send(self, stored: Stored, tensor_class: TensorClass, unit: str) -> Stored:
        if isinstance(stored, TierTensor):
            return stored
        buffer = self._copies.allocate(stored.nbytes, Placement.HOST, tensor_class, unit)
        self._copies.wait(self._copies.store(stored, buffer))
        return TierTensor(buffer, 0, tuple(stored.shape), stored.dtype)

    def _bring(self, state: ParameterState, stored: Stored, tensor_class: TensorClass, unit: str) -> Stored:
        if isinstance(stored, Tensor):
            return stored
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self._copies.transfer.device)
        self._observer.label(tensor, tensor_class, unit)
        state.arriving.append(self._copies.fetch(tensor, stored.buffer, stored.offset, [self._copies.mark()]))
        state.leaving.append(stored.buffer)
        return tensor

    def _compress(self, state: ParameterState, unit: str) -> None:
        moments: list[Stored] = []
        scales: list[Tensor] = []
        for index, moment in enumerate(state.moments):
            assert isinstance(moment, Tensor), "only what is on the device is compressed"
            groups = -(-moment.numel() // QUANT_GROUP_SIZE)
            codes_GS = torch.zeros((groups, QUANT_GROUP_SIZE), dtype=torch.uint8, device=moment.device)
            scales_G = torch.zeros(groups, dtype=torch.float32, device=moment.device)
            for tensor in (codes_GS, scales_G):
                self._observer.label(tensor, TensorClass.OPTIM_STATE, unit)
            for part, flat in _slices(groups, moment.numel()):
                wide_GS = torch.zeros((part.stop - part.start) * QUANT_GROUP_SIZE, device=moment.device)
                wide_GS[: flat.stop - flat.start].copy_(moment.view(-1)[flat])
                codes_GS[part], scales_G[part] = quantize(wide_GS.view(-1, QUANT_GROUP_SIZE), signed=index == 0)
            moments.append(codes_GS)
            scales.append(scales_G)
        state.moments, state.scales = tuple(moments), tuple(scales)

    def _widen(self, state: ParameterState, index: int, unit: str) -> Tensor:
        spec, codes_GS, scales_G = state.specs[index], state.moments[index], state.scales[index]
        assert isinstance(codes_GS, Tensor), "only what is on the device is compressed"
        moment = torch.empty(spec.shape, dtype=spec.dtype, device=codes_GS.device)
        self._observer.label(moment, TensorClass.OPTIM_STATE, unit)
        for part, flat in _slices(len(codes_GS), moment.numel()):
            wide_GS = dequantize(codes_GS[part], scales_G[part], signed=index == 0)
            moment.view(-1)[flat].copy_(wide_GS.view(-1)[: flat.stop - flat.start])
        return moment


def _slices(num_groups: int, num_elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of groups and the elements in them."""
    for start in range(0, num_groups, _SLICE_GROUPS):
        stop = min(start + _SLICE_GROUPS, num_groups)
        yield slice(start, stop), slice(start * QUANT_GROUP_SIZE, min(stop * QUANT_GROUP_SIZE, num_elements))
