"""What of a trainer is saved: every trained parameter under its name in the widest form held, state by its format.

Neither says where anything lives, nor which weights are rounded from a master: another stack reads the same files.
Ranks of which each holds a range, or a stage with some of the parameters, are saved as one process would be: the first
one reads what the others give.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import to_json
from hybridtrain.memory.formats import Int8Weight, Split16Master, WeightFormat
from hybridtrain.memory.group import Group, gather_texts
from hybridtrain.memory.shards import Shards, overlap, ranges_of
from hybridtrain.memory.state_store import ParameterState, StateSlot
from hybridtrain.memory.tier_tensor import Stored
from hybridtrain.train_state.manifest import ParameterEntry, StateEntry, parts_of
from hybridtrain.trainer import Trainer


@dataclass(frozen=True, slots=True)
class RankTensor:
    """A tensor of which every rank holds a range; all of them read it together, in the same order."""

    stored: Stored
    """The range of this rank."""
    shape: tuple[int, ...]
    """Of all of it."""
    ranges: list[slice]
    """Of the ranks, in order."""
    shards: Shards

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.stored.dtype

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def read(self, part: slice) -> Tensor:
        """Return a flat range of its elements on the CPU."""
        cuts = [overlap(part, own) for own in self.ranges]
        rank, group = self.shards.group.rank, self.shards.group
        longest = max(found.stop - found.start for found, _ in cuts)
        own_P = _reader(self.stored)(cuts[rank][1])
        with _disable_current_modes():  # the ledger counts steps, not what is saved between them
            row_P = torch.zeros(longest, dtype=self.dtype, device=self.shards.device)
            row_P[: own_P.numel()].copy_(own_P)
            rows = row_P.new_empty((group.world, longest))
            group.all_gather(rows.view(torch.uint8), row_P.view(torch.uint8))
            values_P = torch.empty(part.stop - part.start, dtype=self.dtype)
            for row, (found, _) in zip(rows, cuts, strict=True):
                values_P[found].copy_(row[: found.stop - found.start])
        return values_P


@dataclass(frozen=True, slots=True)
class StageTensor:
    """A tensor that one rank holds whole; that rank and the first one read it together, in the same order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    """Rank that holds it."""
    own: Callable[[slice], Tensor] | None
    """Reads it, on that rank."""
    group: Group
    device: torch.device
    """On which ranks exchange."""

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def read(self, part: slice) -> Tensor:
        """Return a flat range of its elements on the CPU; nothing on ranks that neither hold nor want it."""
        values_P = torch.empty(0, dtype=self.dtype)
        with _disable_current_modes():  # as above
            if self.own is not None:
                values_P = self.own(part)
                if self.group.rank:
                    self.group.send(values_P.to(self.device), 0)()
            elif not self.group.rank:
                target_P = torch.empty(part.stop - part.start, dtype=self.dtype, device=self.device)
                self.group.receive(target_P, self.owner)
                values_P = target_P.cpu()
        return values_P


_SHARED = (RankTensor, StageTensor)
Readable = Stored | RankTensor | StageTensor
Keep = Callable[[str, Readable], Readable]
"""Returns what is to be read later, under a name: the tensor itself, or a copy of it in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor of a generation."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[slice], Tensor]
    """Returns a flat range of its elements on the CPU."""
    must_be_finite: bool = True

    @property
    def num_bytes(self) -> int:
        """Of the values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    name: str
    shape: tuple[int, ...]
    dtype: str
    must_be_finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What a stage tells the others of its parameters."""

    tensors: tuple[_Head, ...]
    parameters: dict[str, ParameterEntry]


def saved_parameters(trainer: Trainer, keep: Keep) -> tuple[list[SavedTensor], dict[str, ParameterEntry]]:
    """Return all tensors of parameters and their state, and what they mean; nothing may be on its way."""
    return _held_parameters(trainer, keep) if trainer.stages is None else _parameters_of_stages(trainer, keep)


def _parameters_of_stages(trainer: Trainer, keep: Keep) -> tuple[list[SavedTensor], dict[str, ParameterEntry]]:
    """Return those of all stages in the order of the model, on every rank; the first one and the holder read them."""
    own, parameters = _held_parameters(trainer, as_it_is)
    heads = (
        _Head(name=t.name, shape=t.shape, dtype=str(t.dtype).removeprefix("torch."), must_be_finite=t.must_be_finite)
        for t in own
    )
    told = to_json(_Held(tensors=tuple(heads), parameters=parameters))
    readers = {tensor.name: tensor.read for tensor in own}
    group, device = trainer.group, trainer.transfer.device
    tensors: list[SavedTensor] = []
    entries: dict[str, ParameterEntry] = {}
    for owner, text in enumerate(gather_texts(group, device, told)):
        held = decode(_Held, json.loads(text), source=f"rank {owner}")
        entries |= held.parameters
        for head in held.tensors:
            dtype = getattr(torch, head.dtype)
            read = readers[head.name] if owner == group.rank else None
            found = keep(head.name, StageTensor(head.shape, dtype, owner, read, group, device))
            tensors.append(
                SavedTensor(
                    name=head.name, shape=head.shape, dtype=dtype, read=_reader(found),
                    must_be_finite=head.must_be_finite,
                )
            )  # fmt: skip
    return tensors, entries


def _held_parameters(trainer: Trainer, keep: Keep) -> tuple[list[SavedTensor], dict[str, ParameterEntry]]:
    """Return those that this rank holds, or of which it holds a range."""
    tensors: list[SavedTensor] = []
    entries: dict[str, ParameterEntry] = {}
    for unit in trainer.model.units():
        states = trainer.states.settled(unit.name)
        weights = trainer.weights.stored_tensors(unit.name, unit.tensors)
        for (name, parameter), weight, state in zip(unit.parameters, weights, states, strict=True):
            storage, shape = trainer.states.formats.of(weight), tuple(parameter.shape)
            is_cut = trainer.weights.is_cut(unit.name)
            whole = tuple(_whole(part, trainer.shards, shape, i) for i, part in enumerate(weight)) if is_cut else weight
            companion = None if state.companion is None else _whole(state.companion, trainer.shards, shape)
            saved = list(_weight(name, shape, storage, whole, companion, keep))
            held: dict[str, StateEntry] = {}
            for slot in (*state.slots, *state.extra):
                found = list(_state(f"{name}/{slot.spec.name}", slot, shape, trainer.shards, keep))
                held[slot.spec.name] = StateEntry(format=slot.storage.name, tensors=tuple(t.name for t in found))
                tensors += found
            entries[name] = ParameterEntry(
                shape=shape, format=storage.saved_as, tensors=tuple(t.name for t in saved), states=held
            )
            tensors += saved
    return tensors, entries


def state_bytes(trainer: Trainer) -> int:
    """Return the bytes of a saved state by arithmetic, also before there is any optimizer state; all ranks ask."""
    total = 0
    for unit in trainer.model.units():
        weights = trainer.weights.stored_tensors(unit.name, unit.tensors)
        for state, weight in zip(trainer.states.settled(unit.name), weights, strict=True):
            total += _weight_bytes(trainer.states.formats.of(weight), state)
            shape = tuple(state.parameter.shape)
            slots = (*state.slots, *state.extra)
            specs = (
                spec for slot in slots for spec in (slot.storage.specs(shape) if slot.is_elementwise else slot.specs)
            )
            total += sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    return total if trainer.stages is None else int(sum(trainer.group.gather_numbers([total])))


def _weight_bytes(storage: WeightFormat, state: ParameterState) -> int:
    count = state.parameter.numel()
    values = 0 if storage.saved_as.startswith("int8") else count * (2 if storage.saved_as == "bfloat16" else 4)
    if not isinstance(storage, Int8Weight):
        return values
    return values + sum(prod(spec.shape) * spec.dtype.itemsize for spec in storage.codes.specs(count))


def _weight(
    name: str, shape: tuple[int, ...], storage: WeightFormat, weight: tuple[Readable, ...],
    companion: Readable | None, keep: Keep,
) -> Iterator[SavedTensor]:  # fmt: skip
    """Yield the values that an update starts from, then codes and scales where those are stored."""
    if isinstance(storage, Split16Master):
        assert companion is not None, "a split master is always kept"
        upper, lower = (_reader(keep(f"{name}/{part}", held)) for part, held in (("up", weight[0]), ("low", companion)))
        joined = storage

        def read(part: slice) -> Tensor:
            return joined.load((upper(part),), lower(part))

        yield SavedTensor(name=name, shape=shape, dtype=torch.float32, read=read)
        return
    values = companion if companion is not None else None if storage.is_coded else weight[0]
    if values is not None:
        yield SavedTensor(name=name, shape=shape, dtype=values.dtype, read=_reader(keep(name, values)))
    for kind, stored in zip(("codes", "scales", "middles"), weight if storage.is_coded else (), strict=False):
        yield _plain(f"{name}/{kind}", stored, keep)


def _whole(stored: Stored, shards: Shards, shape: tuple[int, ...], number: int = 0) -> Readable:
    """Return a stored tensor as all ranks hold it; ``number``: 1 for scales of groups, which codes go before."""
    if not shards.cuts_state:
        return stored
    ranges = ranges_of(prod(shape), shards.shares)
    if number:
        ranges = [
            slice(own.start // GROUP_SIZE, -(-own.stop // GROUP_SIZE)) if own.stop > own.start else slice(0, 0)
            for own in ranges
        ]
        shape = (-(-prod(shape) // GROUP_SIZE),)
    return RankTensor(stored, shape, ranges, shards)


def _state(name: str, slot: StateSlot, shape: tuple[int, ...], shards: Shards, keep: Keep) -> Iterator[SavedTensor]:
    """Yield what is stored of a slot; nothing before it was ever written."""
    if slot.is_fresh:
        return
    for number, stored in enumerate(slot.tensors):
        found: Readable = stored
        if shards.cuts_state and slot.is_elementwise:
            cuts = [own if own.stop > own.start else slice(0, 0) for own in ranges_of(prod(shape), shards.shares)]
            ranges = [slot.storage.part(number, own) for own in cuts]
            found = RankTensor(stored, slot.storage.specs(shape)[number].shape, ranges, shards)
        yield _plain(name if len(slot.tensors) == 1 else f"{name}/{number}", found, keep)


def _plain(name: str, stored: Readable, keep: Keep) -> SavedTensor:
    return SavedTensor(name=name, shape=tuple(stored.shape), dtype=stored.dtype, read=_reader(keep(name, stored)))


def _reader(stored: Readable) -> Callable[[slice], Tensor]:
    """Return what reads a flat range of a tensor where it lives: what is on disk is never in memory whole."""
    if isinstance(stored, _SHARED):
        return stored.read
    if isinstance(stored, Tensor):
        flat = stored.detach().view(-1)
        return lambda part: flat[part].cpu()
    content = stored.buffer.content
    assert content is not None, "a dry run has nothing to save"

    def read(part: slice) -> Tensor:
        with _disable_current_modes():  # host memory is not the ledger's
            values_P = torch.empty(part.stop - part.start, dtype=stored.dtype)
        content.read(stored.offset + part.start * stored.dtype.itemsize, values_P)
        return values_P

    return read


class HostCopies:
    """Copies of tensors in host memory, made anew at every ``keep`` in the same place."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Held."""
        return sum(tensor.nbytes for tensor in self._copies.values())

    def keep(self, name: str, stored: Readable) -> Readable:
        """Return a copy of what is stored now."""
        with _disable_current_modes():
            held = self._copies.get(name)
            if held is None or held.dtype != stored.dtype or held.numel() != stored.numel():
                held = self._copies[name] = torch.empty(tuple(stored.shape), dtype=stored.dtype, device="cpu")
            if isinstance(stored, _SHARED):
                for part in parts_of(stored.numel()):
                    held.view(-1)[part].copy_(stored.read(part))
            elif isinstance(stored, Tensor):
                held.copy_(stored.detach())
            else:
                assert stored.buffer.content is not None, "a dry run has nothing to save"
                stored.buffer.content.read(stored.offset, held)
        return held


def as_it_is(_name: str, stored: Readable) -> Readable:
    """Return the tensor itself: it must not change until it is read."""
    return stored


def read_for_others(_name: str, stored: Readable) -> Readable:
    """Give what this rank holds to the one that keeps a copy."""
    if isinstance(stored, _SHARED):
        for part in parts_of(stored.numel()):
            stored.read(part)
    return stored
