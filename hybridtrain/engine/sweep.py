"""A pass over weights and state outside of updates: predicted steps, their undoing, snapshots. P elements of a slice.

Everything is worked on where it lives, slice by slice; nothing of a parameter's size is held on the device beyond what
the stores hold.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrain.engine.host_sweep import HostSweep
from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.swept_slice import SweepSettings, SweptSlice, second_moment_pieces, swept_second_moment
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.history_codec import split_history
from hybridtrain.memory.master_codec import StoredWeight, weight_part
from hybridtrain.memory.rollback_copy import RollbackCopy
from hybridtrain.memory.state_store import ParameterState, StateStore, history_pieces
from hybridtrain.memory.tier_tensor import Piece, SliceStream, piece_bytes
from hybridtrain.memory.weight_store import Visit, WeightStore
from hybridtrain.models.block_model import Unit
from hybridtrain.virtual_gpu.observer import MemoryObserver, Stage

_SLICE_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class _Item:
    unit: Unit
    index: int
    """Of the parameter in its unit."""
    state: ParameterState
    part: slice
    pieces: tuple[Piece, ...]


class Sweep:
    """Runs a callback over every slice of every parameter.

    Args:
        units: All of the model.
        weights: Theirs.
        states: Theirs.
        copies: The way to the other tiers.
        observer: Told what new tensors are for.
        on_host: Whether the processor does the work, on state in host memory.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        weights: WeightStore,
        states: StateStore,
        copies: CopyEngine,
        observer: MemoryObserver,
        *,
        on_host: bool,
    ) -> None:
        self._units = tuple(units)
        self._weights = weights
        self._states = states
        self._copies = copies
        self._observer = observer
        self._host = HostSweep(weights, states, copies) if on_host else None
        self.last: SweepSettings | None = None
        """Of the last pass that changed weights."""

    def new_rollback(self) -> RollbackCopy:
        """Return room for a copy of all weights; raises ``HostMemoryError``."""
        return RollbackCopy(self._units, self._weights, self._states, self._copies)

    @torch.no_grad()
    def run(
        self,
        work: Callable[[SweptSlice], None] | None,
        settings: SweepSettings,
        rollback: RollbackCopy | None = None,
    ) -> None:
        """Call ``work`` on every slice.

        Args:
            work: Changes weight or history in place; None: weights become what ``rollback`` holds.
            settings: What the work needs and changes.
            rollback: Takes a copy of the weights before the work.
        """
        if work is not None and settings.writes_weights:
            self.last = settings
        reads = self._reads_weights(settings, rollback)
        self._weights.plan_visits([Visit(block, reads) for block in range(len(self._units) - 2)])
        with self._copies.transfer.keyed_random():
            if self._host is None:
                self._run(work, settings, rollback)
                return
            for number, unit in enumerate(self._units):
                with self._observer.region(Stage.UPDATE, unit.name):
                    self._host.run(unit, work, settings, rollback, key=random_key(settings.seed, number))

    def _run(
        self, work: Callable[[SweptSlice], None] | None, settings: SweepSettings, rollback: RollbackCopy | None
    ) -> None:
        queue: deque[_Item] = deque()
        current: Unit | None = None
        weights: list[StoredWeight] = []
        stream = SliceStream(self._copies, self._observer)
        for tensors in stream.run(self._pieces(settings, queue), self._slot_bytes(settings)):
            item = queue.popleft()
            with self._observer.region(Stage.UPDATE, item.unit.name):
                if item.unit is not current:
                    self._finish(current, settings)
                    current = item.unit
                    self._copies.transfer.seed(random_key(settings.seed, self._units.index(current)))
                    reads = self._reads_weights(settings, rollback)
                    weights = self._weights.acquire_stored(current.name, current.tensors, reads=reads)
                self._work_on(item, weights[item.index], tensors, work, settings, rollback)
            del item, tensors
        self._finish(current, settings)

    def _reads_weights(self, settings: SweepSettings, rollback: RollbackCopy | None) -> bool:
        """Return whether what is stored is fetched: a slot that is not written anew must hold it afterwards."""
        return self._states.codecs.reads_weight or rollback is not None or not settings.writes_weights

    def _finish(self, unit: Unit | None, settings: SweepSettings) -> None:
        if unit is None:
            return
        if settings.writes_history:
            for state in self._states.of(unit.name):
                state.history_is_fresh = False
        if settings.writes_weights:
            self._weights.write_back(unit.name)

    def _pieces(self, settings: SweepSettings, queue: deque[_Item]) -> Iterator[Sequence[Piece]]:
        """Yield what each slice streams, once the slice is in the queue."""
        for unit in self._units:
            with self._observer.region(Stage.UPDATE, unit.name):
                states = self._states.acquire(unit)
            for index, state in enumerate(states):
                for part in _parts(state.parameter.numel()):
                    pieces = self._pieces_of(state, part, settings)
                    queue.append(_Item(unit, index, state, part, pieces))
                    yield pieces

    def _pieces_of(self, state: ParameterState, part: slice, settings: SweepSettings) -> tuple[Piece, ...]:
        """Return the stored second moment, the history, then the companion, as far as they are needed."""
        pieces: list[Piece] = []
        if settings.reads_moments:
            pieces += second_moment_pieces(state, part, self._states.codec)
        if settings.uses_history:
            pieces += history_pieces(state, part, writes=settings.writes_history)
        if state.companion is not None:
            pieces.append(Piece(state.companion, part, writes=settings.writes_weights))
        return tuple(pieces)

    def _slot_bytes(self, settings: SweepSettings) -> int:
        """Return what the largest item takes in a slot."""
        return max(
            (
                piece_bytes(self._pieces_of(state, next(_parts(state.parameter.numel())), settings))
                for unit in self._units
                for state in self._states.acquire(unit)
            ),
            default=0,
        )

    def _work_on(
        self,
        item: _Item,
        weight: StoredWeight,
        tensors: Sequence[Tensor],
        work: Callable[[SweptSlice], None] | None,
        settings: SweepSettings,
        rollback: RollbackCopy | None,
    ) -> None:
        state, rest = item.state, list(tensors)
        companion_P = rest.pop() if state.companion is not None else None
        piece = weight_part(weight, item.part)
        if rollback is not None:
            kept = [*piece, *([] if companion_P is None else [companion_P])]
            (rollback.give if work is None else rollback.take)(item.unit.name, item.index, item.part, kept)
        if work is None:
            return
        num_history = len(state.history_specs) if settings.uses_history else 0
        count = len(rest) - num_history
        codec = self._states.codecs.of(weight)
        value_P = codec.load(piece, companion_P)
        second_P = None
        if settings.reads_moments:
            second_P = swept_second_moment(state, item.part, rest[:count], self._states.codec)
        history = split_history(rest[count:], state.num_history if num_history else 0)
        work(SweptSlice(value_P, second_P, history))
        if settings.writes_weights:
            codec.store(value_P, piece, companion_P, nearest=settings.rounds_to_nearest)


def _parts(count: int) -> Iterator[slice]:
    yield from (slice(start, min(start + _SLICE_ELEMENTS, count)) for start in range(0, count, _SLICE_ELEMENTS))
