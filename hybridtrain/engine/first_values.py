"""The first value of every parameter: read from somewhere, or random by the seed. P elements of a flat slice.

What is read goes to its place slice by slice, so that no matrix needs to be in memory whole beside what stores it;
only codes whose scales depend on each other are made of whole matrices.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hybridtrain.engine.random_key import random_key
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import CodeFormat, StoredWeight
from hybridtrain.memory.state_store import StateStore
from hybridtrain.memory.weight_slots import block_number
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.adapter import fill_adapter, is_adapter
from hybridtrain.models.block_model import BlockModel, Unit
from hybridtrain.models.layers import fill_initial
from hybridtrain.models.linear import Linear
from hybridtrain.models.weight_source import WeightSource
from hybridtrain.models.widening import widened
from hybridtrain.optim.optimizer import Optimizer, Role
from hybridtrain.virtual_gpu.account.observer import MemoryObserver, Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

_READ_ELEMENTS = 1 << 21
"""Of a source at a time: each passes the processor twice, as it is stored and as float32."""


class FirstValues:
    """Writes them into the stores of a plan.

    Args:
        model: Its parameters are bound.
        weights: Where they are stored.
        states: Gets the state of every trained parameter.
        optimizer: Says what state it wants.
        copies: The device.
        observer: Told what tensors are for.
        seed: Keys random values, by parameter.
        source: Values to read; None: all are random. Adapters always begin as the identity.
        codes: Of frozen matrices; None: those are values.
    """

    def __init__(
        self,
        model: BlockModel,
        weights: WeightStore,
        states: StateStore,
        optimizer: Optimizer,
        copies: CopyEngine,
        observer: MemoryObserver,
        *,
        seed: int,
        source: WeightSource | None,
        codes: CodeFormat | None,
    ) -> None:
        self._model = model
        self._weights = weights
        self._states = states
        self._optimizer = optimizer
        self._transfer = copies.transfer
        self._observer = observer
        self._seed = seed
        self._source = source
        self._codes = codes

    @torch.no_grad()
    def write(self, units: Sequence[Unit]) -> None:
        """Write the held units; adapters draw after all else, so that other values are those of a model without."""
        everywhere = self._model.units(everywhere=True)
        names = [name for unit in everywhere for name, _ in (*unit.frozen, *unit.parameters)]
        ordered = sorted(names, key=is_adapter)
        numbers = {name: number for number, name in enumerate(ordered)}
        for unit in units:
            if unit.frozen:
                self._write_frozen(unit, numbers)
            with self._observer.region(Stage.UPDATE, unit.name):
                weights = self._weights.acquire_stored(unit.name, unit.tensors, reads=False)
            for (name, parameter), weight in zip(unit.parameters, weights, strict=True):
                self._write_trained(unit.name, name, parameter, weight, numbers[name])
            with self._observer.region(Stage.UPDATE, unit.name):
                self._weights.initialized(unit.name, unit.tensors)

    def _write_trained(self, unit: str, name: str, parameter: nn.Parameter, weight: StoredWeight, number: int) -> None:
        if not self._weights.is_packed(unit):
            self._observer.label(parameter, TensorClass.WEIGHT, unit)
        with self._observer.region(Stage.UPDATE, unit):
            role = Role(tuple(parameter.shape), in_block=block_number(unit) >= 0)
            specs = self._optimizer.state(role)
            reads = self._source is not None and not is_adapter(name)
            if reads and not self._states.formats.of(weight).needs_whole:
                self._states.initialize_slices(unit, parameter, self._read(name, parameter), weight, specs)
                return
            initial = weight[0]
            if initial.dtype != torch.float32 or len(weight) > 1:
                initial = torch.empty(parameter.shape, dtype=torch.float32, device=self._transfer.device)
            if reads:
                self._read_whole(name, parameter, initial)
            else:
                self._draw(name, initial, number)
            self._states.initialize(unit, parameter, initial, weight, specs)

    def _write_frozen(self, unit: Unit, numbers: Mapping[str, int]) -> None:
        with self._observer.region(Stage.UPDATE, unit.name):
            for (name, parameter), stored in zip(unit.frozen, self._weights.acquire_frozen(unit), strict=True):
                is_coded = len(stored) > 1
                target = stored[0]
                if is_coded or (self._source is None and target.dtype != torch.float32):
                    target = torch.empty(parameter.shape, dtype=torch.float32, device=self._transfer.device)
                if self._source is None:
                    self._draw(name, target, numbers[name])
                else:
                    self._read_whole(name, parameter, target)
                if is_coded:
                    assert self._codes is not None, "only a code format stores several tensors"
                    self._codes.encode(target.view(-1), stored)
                elif target is not stored[0]:
                    stored[0].copy_(target)
            self._weights.write_frozen(unit)

    def _read(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[slice, Tensor]]:
        """Yield float32 values of the device, slice by slice."""
        assert self._source is not None, "asked for only where there is one"
        count = parameter.numel()
        for start in range(0, count, _READ_ELEMENTS):
            part = slice(start, min(start + _READ_ELEMENTS, count))
            yield part, self._source.read(name, part).to(self._transfer.device, torch.float32)

    def _read_whole(self, name: str, parameter: nn.Parameter, target: Tensor) -> None:
        for part, value_P in self._read(name, parameter):
            target.view(-1)[part].copy_(value_P)

    def _draw(self, name: str, values: Tensor, number: int) -> None:
        if name.endswith("magnitude"):
            unit, _, path = name.partition(".adapter.")[0].rpartition(".")
            linear = self._weights.acquire(block_number(unit)).get_submodule(path)
            assert isinstance(linear, Linear), "adapters stand beside linear layers"
            with widened(linear.weight):
                values.copy_(torch.linalg.vector_norm(linear.weight.float(), dim=1))
            return
        generator = self._transfer.generator(random_key(self._seed, number))
        if is_adapter(name):
            fill_adapter(name, values, generator)
        else:
            fill_initial(name, values, self._model.config, generator)
