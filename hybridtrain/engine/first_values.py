"""Initial values of all parameters, read from a source or random. P elements of a flat slice.

Values are read slice by slice into their storage, and frozen ones drawn so, so that no whole matrix is in memory twice.
Only codes whose scales depend on each other, and random values that are trained, need whole matrices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridtrain.engine.random_key import random_key
from hybridtrain.memory.formats import StoredWeight, parts
from hybridtrain.memory.state_store import StateStore
from hybridtrain.memory.stored_layout import block_number
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.adapter import fill_adapter, is_adapter
from hybridtrain.models.block_model import BlockModel, Unit
from hybridtrain.models.layers import fill_initial
from hybridtrain.models.linear import Linear
from hybridtrain.models.weight_source import WeightSource
from hybridtrain.models.widening import widened
from hybridtrain.optim.optimizer import Optimizer, Role
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

_SLICE_ELEMENTS = 1 << 21
"""Elements read or drawn at a time, as float32."""


@dataclass(slots=True)
class FirstValues:
    """Writes first values into the stores of a plan.

    Without a ``source`` all are random, keyed by ``seed`` and parameter. Adapters always start at zero output.
    """

    model: BlockModel
    weights: WeightStore
    states: StateStore
    optimizer: Optimizer
    seed: int
    source: WeightSource | None

    @torch.no_grad()
    def write(self, units: Sequence[Unit]) -> None:
        """Write the held units; adapters draw last, so that other values equal those of a model without adapters."""
        everywhere = self.model.units(everywhere=True)
        names = [name for unit in everywhere for name, _ in (*unit.frozen, *unit.parameters)]
        numbers = {name: number for number, name in enumerate(sorted(names, key=is_adapter))}
        for unit in units:
            if unit.frozen:
                with self.states.copies.observer.region(Stage.UPDATE, unit.name):
                    self._write_frozen(unit, numbers)
            with self.states.copies.observer.region(Stage.UPDATE, unit.name):
                weights = self.weights.acquire_stored(unit.name, unit.tensors, reads=False)
            for (name, parameter), weight in zip(unit.parameters, weights, strict=True):
                if not self.weights.is_packed(unit.name):
                    self.states.copies.observer.label(parameter, TensorClass.WEIGHT, unit.name)
                with self.states.copies.observer.region(Stage.UPDATE, unit.name):
                    self._write_trained(unit.name, name, parameter, weight, numbers[name])
            with self.states.copies.observer.region(Stage.UPDATE, unit.name):
                self.weights.initialized(unit.name, unit.tensors)

    def _write_trained(self, unit: str, name: str, parameter: nn.Parameter, weight: StoredWeight, number: int) -> None:
        specs = self.optimizer.state(Role(tuple(parameter.shape), in_block=block_number(unit) >= 0))
        reads = self.source is not None and not is_adapter(name)
        if reads and not self.states.formats.of(weight).needs_whole:
            self.states.initialize_slices(unit, parameter, self._read(name, parameter), weight, specs)
            return
        initial = weight[0]
        if initial.dtype != torch.float32 or len(weight) > 1:
            initial = torch.empty(parameter.shape, dtype=torch.float32, device=self.states.copies.device)
        self._fill(name, parameter, initial, number, reads=reads)
        self.states.initialize(unit, parameter, initial, weight, specs)

    def _write_frozen(self, unit: Unit, numbers: Mapping[str, int]) -> None:
        for (name, parameter), stored in zip(unit.frozen, self.weights.acquire_frozen(unit), strict=True):
            is_coded, target = len(stored) > 1, stored[0]
            if is_coded:
                target = torch.empty(parameter.shape, dtype=torch.float32, device=self.states.copies.device)
            self._fill(name, parameter, target, numbers[name], reads=self.source is not None)
            if is_coded:
                assert self.weights.codes is not None, "several stored tensors without a code format"
                self.weights.codes.encode(target.view(-1), stored)
        self.weights.write_back(unit.name, frozen=True)

    def _fill(self, name: str, parameter: nn.Parameter, values: Tensor, number: int, *, reads: bool) -> None:
        if not reads and values.dtype == torch.float32:
            self._draw(name, values, number)
            return
        for part, value_P in self._read(name, parameter) if reads else self._drawn(name, parameter, number):
            values.view(-1)[part].copy_(value_P)

    def _read(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[slice, Tensor]]:
        assert self.source is not None, "called without a weight source"
        for part in parts(parameter.numel(), _SLICE_ELEMENTS):
            yield part, self.source.read(name, part).to(self.states.copies.device, torch.float32)

    def _drawn(self, name: str, parameter: nn.Parameter, number: int) -> Iterator[tuple[slice, Tensor]]:
        generator = self._generator(number)
        for part in parts(parameter.numel(), _SLICE_ELEMENTS):
            value_P = torch.empty(part.stop - part.start, dtype=torch.float32, device=self.states.copies.device)
            fill_initial(name, value_P, self.model.config, generator)
            yield part, value_P

    def _draw(self, name: str, values: Tensor, number: int) -> None:
        if name.endswith("magnitude"):
            unit, _, path = name.partition(".adapter.")[0].rpartition(".")
            linear = self.weights.acquire(block_number(unit)).get_submodule(path)
            assert isinstance(linear, Linear), "an adapter without a linear layer"
            with widened(linear.weight):
                values.copy_(torch.linalg.vector_norm(linear.weight.float(), dim=1))
            return
        generator = self._generator(number)
        if is_adapter(name):
            fill_adapter(name, values, generator)
        else:
            fill_initial(name, values, self.model.config, generator)

    def _generator(self, number: int) -> torch.Generator | None:
        return self.states.copies.transfer.generator(random_key(self.seed, number))
