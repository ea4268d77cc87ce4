"""Master weights and optimizer moments, one owner for both."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridkernels.adamw_int8 import QUANT_GROUP_SIZE
from hybridtrain.memory.master_codec import MasterCodec
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.tensor_class import Codec, TensorClass
from hybridtrain.profiler.observer import MemoryObserver

SMALLEST_INT8_TENSOR = 4096
"""Elements below which moments stay fp32, as in bitsandbytes: norms and biases are cheap to keep exact."""
_ZERO_CODES = {"m": 127, "v": 0}
"""Code of the value zero in the signed and in the unsigned map."""


@dataclass(slots=True)
class ParameterState:
    """What the update needs of one parameter beside its gradient."""

    parameter: nn.Parameter
    companion: Tensor | None
    """The master codec's, shape of the parameter."""
    moments: tuple[Tensor, ...] = ()
    """fp32: m, v, shaped like the parameter. int8: m_codes, m_scale, v_codes, v_scale, flat. Empty before step 1."""

    @property
    def is_int8(self) -> bool:
        """Whether the moments are 8-bit codes."""
        return len(self.moments) == 4


class StateStore:
    """Owns the state of every parameter; moments are allocated when the first update asks for them."""

    def __init__(self, codec: Codec, master: MasterCodec, observer: MemoryObserver) -> None:
        if codec not in {Codec.FLOAT32, Codec.INT8_BLOCKS}:
            raise ValueError(f"optim_state.codec: {codec} cannot hold moments; allowed: float32, int8_blocks")
        self.master = master
        self._codec = codec
        self._observer = observer
        self._states: dict[str, list[ParameterState]] = {}

    def initialize(self, unit: str, parameter: nn.Parameter, initial: Tensor) -> None:
        """Write the fp32 ``initial`` value into the next parameter of ``unit`` and keep its companion."""
        companion = self.master.create(initial, parameter.data)
        if companion is not None:
            self._observer.label(companion, TensorClass.MASTER, unit)
        self._states.setdefault(unit, []).append(ParameterState(parameter, companion))

    def acquire(self, unit: Unit) -> list[ParameterState]:
        """Return the states of ``unit`` in the order of its parameters."""
        states = self._states[unit.name]
        for state in states:
            if not state.moments:
                state.moments = self._allocate(state.parameter)
                for moment in state.moments:
                    self._observer.label(moment, TensorClass.OPTIM_STATE, unit.name)
        return states

    def items(self) -> Iterator[tuple[str, list[ParameterState]]]:
        """Yield unit names and states as they are, for saving and loading."""
        yield from self._states.items()

    def _allocate(self, parameter: nn.Parameter) -> tuple[Tensor, ...]:
        device = parameter.device
        if self._codec is Codec.FLOAT32 or parameter.numel() < SMALLEST_INT8_TENSOR:
            return tuple(torch.zeros(parameter.shape, dtype=torch.float32, device=device) for _ in "mv")
        groups = -(-parameter.numel() // QUANT_GROUP_SIZE)
        moments: list[Tensor] = []
        for name in "mv":
            codes = torch.full((groups * QUANT_GROUP_SIZE,), _ZERO_CODES[name], dtype=torch.uint8, device=device)
            moments += [codes, torch.zeros(groups, dtype=torch.float32, device=device)]
        return tuple(moments)
