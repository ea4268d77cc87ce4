"""Moves weights to another plan's storage, between two phases. P elements.

The old memory of a unit is freed before the next unit's is allocated, so that only one unit exists twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrain.engine.random_key import random_key
from hybridtrain.memory.block_slots import Visit
from hybridtrain.memory.formats import StoredWeight, WeightFormat, WeightFormats, parts, weight_part
from hybridtrain.memory.state_store import ParameterState, StateStore
from hybridtrain.memory.tier_tensor import Stored, TierTensor, new_stored, read_slice, write_slice
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.op_record import Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


@dataclass(slots=True)
class WeightMove:
    """Moves weights from the store ``old`` to the empty store ``new``, in the new plan's formats."""

    old: WeightStore
    new: WeightStore
    states: StateStore
    formats: WeightFormats
    master: Placement
    nearest: bool = False
    """Round to nearest where the new storage is inexact; otherwise stochastically."""

    @torch.no_grad()
    def run(self, units: Sequence[Unit], *, seed: int) -> None:
        """Move everything; ``seed`` keys stochastic rounding."""
        self.old.plan_visits([Visit(block) for block in range(len(units) - 2)])
        with self.states.copies.transfer.keyed_random():
            for number, unit in enumerate(units):
                with self.states.copies.observer.region(Stage.UPDATE, unit.name):
                    self.states.copies.transfer.seed(random_key(seed, number))
                    self._move_unit(unit)
        self.old.places.close()
        self.states.formats = self.formats

    def _move_unit(self, unit: Unit) -> None:
        states = self.states.settled(unit.name)
        sources = self.old.acquire_stored(unit.name, unit.tensors, reads=True)
        keeps = not any(store.is_packed(unit.name) for store in (self.old, self.new)) and all(
            parameter.dtype == self.new.compute_dtype for parameter in unit.tensors
        )
        targets = self.new.place(unit, keeps=keeps)
        for state, source, target in zip(states, sources, targets, strict=True):
            old, new = self.states.formats.of(source), self.formats.of(target)
            if _are_alike(old, new, source, target):
                for source_part, target_part in zip(source, () if keeps else target, strict=not keeps):
                    target_part.copy_(source_part)
                self._carry(state, unit.name)
            else:
                self._convert(state, (old, source), (new, target), unit.name)
        del sources, targets
        self.old.give_up(unit.name)
        self.new.initialized(unit.name, unit.tensors)

    def _carry(self, state: ParameterState, unit: str) -> None:
        master = state.master_weight
        if master is None or _place(master) is self.master:
            return
        kept = self._make(master.shape, master.dtype, unit)
        for part in parts(master.numel()):
            write_slice(kept, part, read_slice(master, part, self.states.copies), self.states.copies)
        self._replace(state, kept)

    def _convert(
        self, state: ParameterState, before: tuple[WeightFormat, StoredWeight],
        after: tuple[WeightFormat, StoredWeight], unit: str,
    ) -> None:  # fmt: skip
        """Store the exact values anew, slice by slice."""
        (old, source), (new, target) = before, after
        master, kept, count = state.master_weight, None, state.parameter.numel()
        if master is None:
            self.states.copies.observer.cast(source[0].dtype, torch.float32, count)
        self.states.copies.observer.cast(torch.float32, target[0].dtype, count)
        if new.master_dtype is not None:
            stays = old.master_dtype is new.master_dtype is torch.float32
            stays = stays and master is not None and _place(master) is self.master
            kept = master if stays else self._make(state.parameter.shape, new.master_dtype, unit)
        # Slices as in a pass: weights that come back to 16 bits are rounded by the same random numbers as if they had
        # stayed.
        for part in [slice(0, count)] if new.needs_whole else parts(count):
            master_P = None if master is None else read_slice(master, part, self.states.copies)
            value_P = old.load(weight_part(source, part), master_P)
            created_P = self._store(new, value_P, weight_part(target, part))
            if kept is not None and created_P is not None and kept is not master:
                write_slice(kept, part, created_P, self.states.copies)
            del master_P, value_P, created_P
        self._replace(state, kept)

    def _store(self, codec: WeightFormat, value_P: Tensor, weight: StoredWeight) -> Tensor | None:
        """Write a value for the first time; return its master weight."""
        if codec.master_dtype is not None or codec.in_place:
            return codec.create(value_P, weight)
        codec.store(value_P, weight, None, nearest=self.nearest)
        return None

    def _replace(self, state: ParameterState, kept: Stored | None) -> None:
        if isinstance(state.master_weight, TierTensor) and kept is not state.master_weight:
            self.states.copies.release(state.master_weight.buffer)
        state.master_weight = kept

    def _make(self, shape: Sequence[int], dtype: torch.dtype, unit: str) -> Stored:
        return new_stored(shape, dtype, self.master, TensorClass.MASTER, unit, self.states.copies)


def _are_alike(old: WeightFormat, new: WeightFormat, source: StoredWeight, target: StoredWeight) -> bool:
    return (
        type(old) is type(new)
        and old.saved_as == new.saved_as
        and [part.dtype for part in source] == [part.dtype for part in target]
    )


def _place(stored: Stored) -> Placement:
    return stored.buffer.placement if isinstance(stored, TierTensor) else Placement.DEVICE
