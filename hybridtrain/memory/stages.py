"""Exchanges between the stages of a pipeline outside of steps; each stage has its own part of the model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.shards import Shards
from hybridtrain.models.block_model import BlockModel, model_parts


class Stages(Shards):
    """Pipeline stage: each rank has different blocks; nothing is sharded or summed."""

    def __init__(self, copies: CopyEngine, model: BlockModel) -> None:
        super().__init__(copies)
        self.shares, self.sums = 1, False
        self._model = model
        units = model.units(everywhere=True)
        self._names = [name for unit in units for name, _ in unit.parameters]
        self._counts = [
            sum(len(unit.parameters) for number, unit in enumerate(units, start=-1) if part.holds(number))
            for part in model_parts(len(model.blocks), copies.group.world)
        ]
        """Trained parameters of each stage."""

    def agree_on(self, names: Sequence[str], everything: Sequence[str]) -> tuple[str, ...]:  # noqa: ARG002
        """Return the parameters that any rank reports."""
        named = self.group.gather_numbers([float(name in names) for name in self._names])
        count = len(self._names)
        return tuple(name for index, name in enumerate(self._names) if any(named[index::count]))

    def gather_all(self, numbers: Tensor) -> Tensor:
        """Gather a number per trained parameter of the model, in order; each rank has its own parameters'."""
        row = numbers.new_zeros(max(self._counts))
        row[: numbers.numel()].copy_(numbers)
        rows = row.new_empty((self.group.world, row.numel()))
        self.copies.exchange(self.group.all_gather, rows, row)
        return torch.cat([row[:count] for row, count in zip(rows, self._counts, strict=True)])

    @torch.no_grad()
    def pass_tied(self) -> None:
        """Send a tied matrix, which the first stage updates, to the last stage."""
        part, last = self._model.part, self.group.world - 1
        if not self._model.config.tied:
            return
        if part.has_embedding:
            self.copies.send(self._model.head.weight.data, last)
            self.copies.finish_sends()
        elif part.has_head:
            self.copies.receive(self._model.head.weight.data, 0)
