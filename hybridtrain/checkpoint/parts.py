"""A trainer's saved tensors: each trained parameter by name in its most exact form, and state in its storage format.

Files do not depend on placement or on master weights, so that another stack can read them. Sharded ranks and pipeline
stages are saved as by one process: the first rank gathers the others' parts.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.checkpoint.manifest import ParameterEntry, StateEntry
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import encode
from hybridtrain.memory.formats import Split16Master, parts
from hybridtrain.memory.group import Group, gather_texts
from hybridtrain.memory.shards import Shards, overlap, ranges_of
from hybridtrain.memory.state_store import ParameterState, StateSlot
from hybridtrain.memory.tier_tensor import Stored
from hybridtrain.trainer import Trainer

Read = Callable[[slice, Tensor | None], Tensor]
"""Returns a flat range of a tensor's elements on the CPU, written to the second argument where one is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Read
    is_shared: bool = False
    """Whether all ranks must read it together, range by range in the same order."""
    must_be_finite: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize

    def parts(self) -> Iterator[slice]:
        """Yield the ranges in which the tensor is read and written."""
        return parts(prod(self.shape))


def saved_parameters(trainer: Trainer) -> tuple[list[SavedTensor], dict[str, ParameterEntry]]:
    """Return all tensors of parameters and their state with their descriptions; no copy may be in flight."""
    tensors: list[SavedTensor] = []
    entries: dict[str, ParameterEntry] = {}
    for name, saved_as, weight, state in _parameters(trainer):
        shape, states = tuple(state.parameter.shape), dict[str, StateEntry]()
        for slot in (*state.slots, *state.extra):
            stored = [] if slot.is_fresh else list(_state(f"{name}/{slot.spec.name}", slot, shape, trainer.shards))
            states[slot.spec.name] = StateEntry(format=slot.storage.name, tensors=tuple(t.name for t in stored))
            tensors += stored
        tensors += weight
        names = tuple(tensor.name for tensor in weight)
        entries[name] = ParameterEntry(shape=shape, format=saved_as, tensors=names, states=states)
    return (tensors, entries) if trainer.stages is None else _of_all_stages(trainer, tensors, entries)


def state_bytes(trainer: Trainer) -> int:
    """Return the size of a checkpoint in bytes, by arithmetic; also valid before optimizer state exists.

    All ranks must call it.
    """
    total = 0
    for _, _, weight, state in _parameters(trainer):
        shape = tuple(state.parameter.shape)
        slots = (*state.slots, *state.extra)
        specs = (spec for slot in slots for spec in (slot.storage.specs(shape) if slot.is_elementwise else slot.specs))
        total += sum(tensor.num_bytes for tensor in weight)
        total += sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    return total if trainer.stages is None else int(sum(trainer.group.gather_numbers([total])))


def _parameters(trainer: Trainer) -> Iterator[tuple[str, str, list[SavedTensor], ParameterState]]:
    """Yield name, format, tensors of the weight and state of each parameter that this rank holds, or a range of."""
    for unit in trainer.model.units():
        weights = trainer.weights.stored_tensors(unit.name, unit.tensors)
        is_cut, states = trainer.weights.is_cut(unit.name), trainer.states.settled(unit.name)
        for (name, _), weight, state in zip(unit.parameters, weights, states, strict=True):
            storage = trainer.states.formats.of(weight)
            yield name, storage.saved_as, list(_weight(name, weight, state, trainer, is_cut=is_cut)), state


def _weight(
    name: str, weight: tuple[Stored, ...], state: ParameterState, trainer: Trainer, *, is_cut: bool
) -> Iterator[SavedTensor]:
    """Yield the values that an update starts from, then codes and scales where those are stored."""
    storage, shape, shards = trainer.states.formats.of(weight), tuple(state.parameter.shape), trainer.shards
    cuts = _cuts(shards, prod(shape)) if is_cut else None
    upper = _saved(name, weight[0], shape, cuts, shards)
    master = None
    if state.master_weight is not None:
        master = _saved(name, state.master_weight, shape, _cuts(shards, prod(shape)), shards)
    if isinstance(storage, Split16Master):
        assert master is not None, "a split16 weight without a master"
        read, is_shared = partial(_joined, storage, upper.read, master.read), upper.is_shared or master.is_shared
        yield replace(upper, shape=shape, dtype=torch.float32, read=read, is_shared=is_shared)
        return
    if master is not None or not storage.is_coded:
        yield replace(master or upper, shape=shape)
    if not storage.is_coded:
        return
    yield replace(upper, name=f"{name}/codes")
    if cuts is not None:
        cuts = [slice(cut.start // GROUP_SIZE, -(-cut.stop // GROUP_SIZE)) for cut in cuts]
        shape = (-(-prod(shape) // GROUP_SIZE),)
    for kind, stored in zip(("scales", "middles"), weight[1:], strict=False):
        yield _saved(f"{name}/{kind}", stored, shape, cuts, shards)


def _state(name: str, slot: StateSlot, shape: tuple[int, ...], shards: Shards) -> Iterator[SavedTensor]:
    """Yield the stored tensors of a slot."""
    cuts = _cuts(shards, prod(shape)) if slot.is_elementwise else None
    for number, stored in enumerate(slot.tensors):
        own = name if len(slot.tensors) == 1 else f"{name}/{number}"
        if cuts is None:
            yield _saved(own, stored, shape, None, shards)
        else:
            ranges = [slot.storage.part(number, cut) for cut in cuts]
            yield _saved(own, stored, slot.storage.specs(shape)[number].shape, ranges, shards)


def _cuts(shards: Shards, count: int) -> list[slice] | None:
    """Return the range of each rank; None where every rank holds everything."""
    if not shards.cuts_state:
        return None
    return [cut if cut.stop > cut.start else slice(0, 0) for cut in ranges_of(count, shards.shares)]


def _saved(
    name: str, stored: Stored, shape: tuple[int, ...], ranges: list[slice] | None, shards: Shards
) -> SavedTensor:
    """Return a tensor that this rank holds whole, or with ``ranges`` its own range."""
    read = partial(_of_tensor, stored.detach().view(-1)) if isinstance(stored, Tensor) else partial(_of_tier, stored)
    if ranges is None:
        return SavedTensor(name=name, shape=tuple(stored.shape), dtype=stored.dtype, read=read)
    gathered = partial(_of_ranks, read, stored.dtype, ranges, shards)
    return SavedTensor(name=name, shape=shape, dtype=stored.dtype, read=gathered, is_shared=True)


# ---- reading


def _of_tensor(flat: Tensor, part: slice, out: Tensor | None) -> Tensor:
    return flat[part].cpu() if out is None else out.copy_(flat[part])


def _of_tier(stored: Stored, part: slice, out: Tensor | None) -> Tensor:
    """Read from where it lives; a tensor on disk is never loaded whole."""
    assert not isinstance(stored, Tensor), "of tensors on the device"
    assert stored.buffer.content is not None, "a dry run cannot save a checkpoint"
    with _disable_current_modes():  # host memory is not the ledger's
        values_P = torch.empty(part.stop - part.start, dtype=stored.dtype) if out is None else out
    stored.buffer.content.read(stored.offset + part.start * stored.dtype.itemsize, values_P)
    return values_P


def _joined(storage: Split16Master, upper: Read, lower: Read, part: slice, out: Tensor | None) -> Tensor:
    values_P = storage.load((upper(part, None),), lower(part, None))
    return values_P if out is None else out.copy_(values_P)


def _of_ranks(
    read: Read, dtype: torch.dtype, ranges: list[slice], shards: Shards, part: slice, out: Tensor | None
) -> Tensor:
    """Gather each rank's part of a range."""
    group = shards.group
    cuts = [overlap(part, own) for own in ranges]
    longest = max(within.stop - within.start for within, _ in cuts)
    own_P = read(cuts[group.rank][1], None)
    with _disable_current_modes():  # the ledger counts steps, not what is saved between them
        row_P = torch.zeros(longest, dtype=dtype, device=shards.device)
        row_P[: own_P.numel()].copy_(own_P)
        rows = row_P.new_empty((group.world, longest))
        group.all_gather(rows.view(torch.uint8), row_P.view(torch.uint8))
        values_P = torch.empty(part.stop - part.start, dtype=dtype) if out is None else out
        for row, (within, _) in zip(rows, cuts, strict=True):
            values_P[within].copy_(row[: within.stop - within.start])
    return values_P


def _of_stage(
    read: Read | None, dtype: torch.dtype, owner: int, group: Group, device: torch.device, part: slice,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Send a range from the rank that can ``read`` it to the first one; the others get nothing."""
    values_P = torch.empty(0, dtype=dtype)
    with _disable_current_modes():  # as above
        if read is not None:
            values_P = read(part, out)
            if group.rank:
                group.send(values_P.to(device), 0)()
        elif not group.rank:
            target_P = torch.empty(part.stop - part.start, dtype=dtype, device=device)
            group.receive(target_P, owner)
            values_P = target_P.cpu() if out is None else out.copy_(target_P)
    return values_P


# ---- stages


def _of_all_stages(
    trainer: Trainer, own: list[SavedTensor], parameters: dict[str, ParameterEntry]
) -> tuple[list[SavedTensor], dict[str, ParameterEntry]]:
    """Return the tensors of all stages in the model's order, on every rank; the first rank and the holder read them."""
    heads = [[tensor.name, tensor.shape, str(tensor.dtype).removeprefix("torch.")] for tensor in own]
    text = json.dumps([heads, {name: encode(entry) for name, entry in parameters.items()}])
    readers = {tensor.name: tensor.read for tensor in own}
    group, device = trainer.group, trainer.transfer.device
    tensors: list[SavedTensor] = []
    entries: dict[str, ParameterEntry] = {}
    for owner, held in enumerate(map(json.loads, gather_texts(group, device, text))):
        entries |= {name: decode(ParameterEntry, entry, source=f"rank {owner}") for name, entry in held[1].items()}
        for name, shape, type_name in held[0]:
            dtype, reader = getattr(torch, type_name), readers.get(name) if owner == group.rank else None
            read = partial(_of_stage, reader, dtype, owner, group, device)
            tensors.append(SavedTensor(name=name, shape=tuple(shape), dtype=dtype, read=read, is_shared=True))
    return tensors, entries


class HostCopies:
    """Copies of tensors in host memory; every ``keep`` updates them in place."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(tensor.nbytes for tensor in self._copies.values())

    def keep(self, tensor: SavedTensor) -> SavedTensor:
        """Copy the tensor's present values; return the tensor that reads from the copy."""
        with _disable_current_modes():
            held = self._copies.get(tensor.name)
            if held is None or held.dtype != tensor.dtype or held.numel() != prod(tensor.shape):
                held = self._copies[tensor.name] = torch.empty(prod(tensor.shape), dtype=tensor.dtype, device="cpu")
            for part in tensor.parts():
                tensor.read(part, held[part])
        return replace(tensor, read=partial(_of_tensor, held), is_shared=False)
