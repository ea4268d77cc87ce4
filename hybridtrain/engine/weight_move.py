"""Weights pass from the storage of one plan to that of another, at the border between two phases. P elements.

Unit by unit: the old memory goes before the next unit's new memory is made, so there is never a second model, only the
slots of both plans and one unit twice.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hybridtrain.engine.random_key import random_key
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import SLICE_ELEMENTS, StoredWeight, WeightFormat, WeightFormats, weight_part
from hybridtrain.memory.state_store import ParameterState, StateStore
from hybridtrain.memory.tier_tensor import Stored, TierTensor, new_stored, write_slice
from hybridtrain.memory.weight_store import Visit, WeightStore
from hybridtrain.models.block_model import Unit
from hybridtrain.plan.placement import Placement
from hybridtrain.virtual_gpu.account.observer import MemoryObserver, Stage
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass


class WeightMove:
    """One passage.

    Args:
        old: Where weights are.
        new: Where they go, empty.
        states: Of all parameters; companions and formats become those of the new plan.
        formats: Of the new plan.
        master: Where companions wait from now on.
        copies: The way to the other tiers.
        observer: Told what new tensors are for.
    """

    def __init__(
        self,
        old: WeightStore,
        new: WeightStore,
        states: StateStore,
        formats: WeightFormats,
        master: Placement,
        copies: CopyEngine,
        observer: MemoryObserver,
    ) -> None:
        self._old = old
        self._new = new
        self._states = states
        self._formats = formats
        self._master = master
        self._copies = copies
        self._observer = observer
        self._nearest = False

    @torch.no_grad()
    def run(self, units: Sequence[Unit], *, seed: int, nearest: bool = False) -> None:
        """Move everything.

        Args:
            units: All of the model.
            seed: Keys stochastic rounding of values that the new storage does not hold exactly.
            nearest: Round them to nearest instead.
        """
        self._nearest = nearest
        self._old.plan_visits([Visit(block) for block in range(len(units) - 2)])
        with self._copies.transfer.keyed_random():
            for number, unit in enumerate(units):
                with self._observer.region(Stage.UPDATE, unit.name):
                    self._copies.transfer.seed(random_key(seed, number))
                    self._move_unit(unit)
        self._old.close()
        self._states.formats = self._formats

    def _move_unit(self, unit: Unit) -> None:
        states = self._states.settled(unit.name)
        sources = self._old.acquire_stored(unit.name, unit.tensors, reads=True)
        keeps = not any(store.is_packed(unit.name) for store in (self._old, self._new)) and all(
            parameter.dtype == self._new.compute_dtype for parameter in unit.tensors
        )
        targets = self._new.place(unit, keeps=keeps)
        for state, source, target in zip(states, sources, targets, strict=True):
            old, new = self._states.formats.of(source), self._formats.of(target)
            if _are_alike(old, new, source, target):
                for source_part, target_part in zip(source, () if keeps else target, strict=not keeps):
                    target_part.copy_(source_part)
                self._carry(state, unit.name)
            else:
                self._convert(state, old, new, source, target, unit.name)
        del sources, targets
        self._old.give_up(unit.name)
        self._new.initialized(unit.name, unit.tensors)

    def _carry(self, state: ParameterState, unit: str) -> None:
        """Take a companion to its new place as it is."""
        companion = state.companion
        if companion is None or _place(companion) is self._master:
            return
        kept = self._make(companion.shape, companion.dtype, unit)
        for part in _parts(companion.numel()):
            write_slice(kept, part, self._read(companion, part), self._copies)
        self._replace(state, kept)

    def _convert(
        self,
        state: ParameterState,
        old: WeightFormat,
        new: WeightFormat,
        source: StoredWeight,
        target: StoredWeight,
        unit: str,
    ) -> None:
        """Store the exact values anew, slice by slice."""
        companion, kept, count = state.companion, None, state.parameter.numel()
        if companion is None:
            self._observer.cast(source[0].dtype, torch.float32, count)
        self._observer.cast(torch.float32, target[0].dtype, count)
        if new.companion_dtype is not None:
            stays = old.companion_dtype is new.companion_dtype is torch.float32
            stays = stays and companion is not None and _place(companion) is self._master
            kept = companion if stays else self._make(state.parameter.shape, new.companion_dtype, unit)
        for part in [slice(0, count)] if new.needs_whole else _parts(count):
            companion_P = None if companion is None else self._read(companion, part)
            value_P = old.load(weight_part(source, part), companion_P)
            created_P = self._store(new, value_P, weight_part(target, part))
            if kept is not None and created_P is not None and kept is not companion:
                write_slice(kept, part, created_P, self._copies)
            del companion_P, value_P, created_P
        self._replace(state, kept)

    def _store(self, codec: WeightFormat, value_P: Tensor, weight: StoredWeight) -> Tensor | None:
        """Write a value for the first time; return its companion."""
        if codec.companion_dtype is not None or codec.in_place:
            return codec.create(value_P, weight)
        codec.store(value_P, weight, None, nearest=self._nearest)
        return None

    def _replace(self, state: ParameterState, kept: Stored | None) -> None:
        if isinstance(state.companion, TierTensor) and kept is not state.companion:
            self._copies.release(state.companion.buffer)
        state.companion = kept

    def _make(self, shape: Sequence[int], dtype: torch.dtype, unit: str) -> Stored:
        return new_stored(shape, dtype, self._master, TensorClass.MASTER, unit, self._copies, self._observer)

    def _read(self, stored: Stored, part: slice) -> Tensor:
        if isinstance(stored, Tensor):
            return stored.view(-1)[part]
        tensor_P = torch.empty(part.stop - part.start, dtype=stored.dtype, device=self._copies.transfer.device)
        offset = stored.offset + part.start * stored.dtype.itemsize
        self._copies.wait(self._copies.fetch(tensor_P, stored.buffer, offset, [self._copies.mark()]))
        return tensor_P


def _are_alike(old: WeightFormat, new: WeightFormat, source: StoredWeight, target: StoredWeight) -> bool:
    """Return whether what is stored stays the same, bit by bit."""
    return (
        type(old) is type(new)
        and old.saved_as == new.saved_as
        and [part.dtype for part in source] == [part.dtype for part in target]
    )


def _place(stored: Stored) -> Placement:
    return stored.buffer.placement if isinstance(stored, TierTensor) else Placement.DEVICE


def _parts(count: int) -> Iterator[slice]:
    # As in a pass: weights that come back to 16 bits are rounded by the same random numbers as if they had stayed.
    yield from (slice(start, min(start + SLICE_ELEMENTS, count)) for start in range(0, count, SLICE_ELEMENTS))
