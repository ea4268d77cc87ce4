"""Resuming: a checkpoint is verified completely, then loaded into a trainer of any stack."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.checkpoint.generations import Say, newest_generation
from hybridtrain.checkpoint.identity import differences, settings_of
from hybridtrain.checkpoint.manifest import TENSOR_KEY, Generation, Manifest, ParameterEntry, StateEntry
from hybridtrain.config.encode import JsonValue
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.block_slots import Visit
from hybridtrain.memory.formats import (
    STATE_FORMATS,
    Int8Codes,
    PlainState,
    StateFormat,
    StoredWeight,
    parts,
    weight_part,
)
from hybridtrain.memory.group import Group
from hybridtrain.memory.shards import overlap
from hybridtrain.memory.state_store import ParameterState, StateSlot
from hybridtrain.memory.tier_tensor import Stored, write_slice
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import DynamicRange
from hybridtrain.tensor_file import FileTensor
from hybridtrain.trainer import Trainer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CODED = "int8"
Files = Mapping[str, FileTensor]


@torch.no_grad()
def load_checkpoint(
    trainer: Trainer,
    folder: Path,
    hybrid: HybridTrainer | None = None,
    data: Mapping[str, JsonValue] | None = None,
    say: Say | None = None,
    allowed: Sequence[str] = (),
) -> Generation:
    """Resume from the newest intact checkpoint: under the same stack the next step is bit-equal.

    Under another stack each value is equal where its storage format can hold it exactly.

    Args:
        trainer: The trainer to restore.
        folder: The folder of all checkpoints.
        hybrid: The cycle around the trainer, if there is one.
        data: Settings that identify the batches, by dotted name.
        say: Called with a line for each changed setting, each kind of rounded value and each damaged checkpoint.
        allowed: Settings that may differ from the saved run's, by name or name prefix (``schedule``).

    Returns:
        The loaded checkpoint with its settings and ``extra``.

    Raises:
        ConfigError: no checkpoint is intact, or settings or data differ; each difference is a fault.
    """
    say = say or (lambda _: None)
    generation = _same_generation(trainer.group, folder, say)
    refused, changed = differences(generation.settings, settings_of(trainer, hybrid, data), allowed)
    if refused:
        raise ConfigError(str(generation.folder), refused)
    files = generation.tensors()
    try:
        _require_fit(trainer, generation.manifest, files)
        cycle = _with_tensors(generation.cycle, files)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            str(generation.folder), [f"the checkpoint does not fit this model and optimizer: {error}; start a new run"]
        ) from error
    for line in changed:
        say(f"changed: {line}")
    for line in _Loader(trainer, generation.manifest, files).fill():
        say(line)
    if hybrid is not None and isinstance(cycle, dict):
        hybrid.load_state_dict(cycle)
    return generation


def _same_generation(group: Group, folder: Path, say: Say) -> Generation:
    """Return the newest intact checkpoint; the first rank sets damaged ones aside before the others look."""
    if group.rank:
        group.gather_numbers([0.0])
    generation = newest_generation(folder, say)
    if not group.rank:
        group.gather_numbers([0.0])
    steps = {int(step) for step in group.gather_numbers([generation.manifest.steps_done])}
    if len(steps) > 1:
        told = " and ".join(map(str, sorted(steps)))
        fault = (
            f"ranks find checkpoints after {told} steps; all ranks must read the same folder: put --out on a "
            f"shared disk"
        )
        raise ConfigError(str(folder), [fault])
    return generation


def _require_fit(trainer: Trainer, manifest: Manifest, files: Files) -> None:
    """Raise ``KeyError`` or ``ValueError`` unless all tensors to be read are present and readable."""
    entries = manifest.parameters
    for entry in entries.values():
        for name in (*entry.tensors, *(name for state in entry.states.values() for name in state.tensors)):
            _require(name in files, f"'{name}' is missing")
    for unit in trainer.model.units():
        for (name, parameter), state in zip(unit.parameters, trainer.states.settled(unit.name), strict=True):
            _require(name in entries, f"parameter '{name}' is missing")
            entry, shape = entries[name], tuple(parameter.shape)
            _require(entry.shape == shape, f"'{name}' of shape {entry.shape}, {shape} in this run")
            _require_shapes(entry.tensors, _weight_shapes(entry), files)
            for slot in (*state.slots, *state.extra):
                _require(slot.spec.name in entry.states, f"'{name}' has no {slot.spec.name}")
                saved = entry.states[slot.spec.name]
                specs = STATE_FORMATS[saved.format].specs(slot.spec.shape or shape) if saved.tensors else ()
                _require_shapes(saved.tensors, [(spec.shape, spec.dtype) for spec in specs], files)


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(fault)


def _require_shapes(names: Sequence[str], wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], files: Files) -> None:
    for name, (shape, dtype) in zip(names, wanted, strict=True):
        held = files[name]
        if held.dtype != dtype or held.shape != shape:
            raise ValueError(f"'{name}' of {held.dtype} {held.shape}, {dtype} {shape} is needed")


def _weight_shapes(entry: ParameterEntry) -> list[tuple[tuple[int, ...], torch.dtype]]:
    values = entry.format.partition("_")[0]
    shapes = [] if values == _CODED else [(entry.shape, _DTYPES[values])]
    if _CODED in entry.format:
        specs = _codes_of(entry.format).specs(entry.shape)
        shapes += [(spec.shape, spec.dtype) for spec in specs]
    return shapes


def _codes_of(saved_as: str) -> Int8Codes:
    """Return the reader of a saved format's codes; that a matrix shares a range matters only when writing."""
    words = saved_as.split("_")
    return Int8Codes("affine" not in words, DynamicRange.ROW if "row" in words else DynamicRange.GROUP)


def _with_tensors(value: JsonValue, files: Files) -> object:
    """Return the state of a cycle with its named tensors filled in."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR_KEY}:
            name = str(value[TENSOR_KEY])
            _require(name in files, f"'{name}' is missing")
            shape = files[name].shape
            with _disable_current_modes():
                return files[name].read(slice(0, torch.Size(shape).numel())).view(shape)
        return {key: _with_tensors(item, files) for key, item in value.items()}
    return [_with_tensors(item, files) for item in value] if isinstance(value, list) else value


# ---- into the trainer


class _Loader:
    """Writes a checkpoint's tensors into a trainer."""

    def __init__(self, trainer: Trainer, manifest: Manifest, files: Files) -> None:
        self._trainer = trainer
        self._manifest = manifest
        self._files = files
        self._conversions: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
        """Largest error of each tensor that was converted, as a share of its largest value, by kind and formats."""
        self._error = self._largest = 0.0
        """Errors of the current tensor."""

    def fill(self) -> Iterator[str]:
        """Write everything; yield a sentence for each kind of conversion."""
        trainer, manifest = self._trainer, self._manifest
        trainer.enter_phase(Phase.FULL)
        trainer.transfer.finish()
        weights, states = trainer.weights, trainer.states
        weights.plan_visits([Visit(block, reads=False) for block in trainer.model.part.blocks])
        for unit in trainer.model.units():
            entries = [manifest.parameters[name] for name, _ in unit.parameters]
            stored = weights.acquire_stored(unit.name, unit.tensors, reads=False)
            for entry, weight, state in zip(entries, stored, states.settled(unit.name), strict=True):
                self._fill_weight(weight, state, entry)
            weights.write_back(unit.name)
            if any(saved.tensors for entry in entries for saved in entry.states.values()):
                states.acquire(unit)
            for entry, state in zip(entries, states.settled(unit.name), strict=True):
                for slot in (*state.slots, *state.extra):
                    self._fill_slot(slot, state, entry.states[slot.spec.name])
        trainer.transfer.finish()
        weights.reload()
        trainer.pass_tied()
        trainer.steps_done = manifest.steps_done
        states.born_after = manifest.born_after
        if trainer.loss_scale is not None and manifest.loss_scale is not None:
            trainer.loss_scale = replace(manifest.loss_scale)
        norm = manifest.previous_norm
        trainer.previous_norm = None if norm is None else torch.tensor(norm, device=trainer.transfer.device)
        for (kind, source, target), errors in self._conversions.items():
            loss = f"rounded; the largest error is {100 * max(errors):.2g} % of the tensor's largest value"
            how = loss if max(errors) else "all values exact"
            yield f"converted: {kind} of {len(errors)} tensors from {source} to {target}, {how}"

    def _fill_weight(self, weight: StoredWeight, state: ParameterState, entry: ParameterEntry) -> None:
        """Write a weight and its master: codes as they are where the storage is the same, else by the values."""
        trainer, tensors = self._trainer, [self._files[name] for name in entry.tensors]
        storage, count = trainer.states.formats.of(weight), torch.Size(entry.shape).numel()
        is_same = storage.saved_as == entry.format
        for part in [slice(0, count)] if storage.needs_whole else parts(count):
            target = weight_part(weight, part)
            master_P: Tensor | None
            if is_same and storage.is_coded:
                values, coded = tensors[: -len(target)], tensors[-len(target) :]
                for stored, read in zip(target, _read_codes(coded, part), strict=True):
                    stored.copy_(read.view(stored.shape))
                master_P = values[0].read(part) if values else None
            else:
                value_P = _weight_values(tensors, entry.format, part).to(trainer.transfer.device)
                master_P = storage.create(value_P, target)
                if not is_same:
                    self._compare(storage.load(target, master_P), value_P)
            if master_P is not None:
                assert state.master_weight is not None, "initialized with the first values"
                within, kept = overlap(part, trainer.shards.own(state.parameter.numel()))
                if kept.stop > kept.start:
                    master_P = master_P[within].to(trainer.transfer.device)
                    write_slice(state.master_weight, kept, master_P, trainer.copies)
        self._count("weights", entry.format, storage.saved_as)

    def _fill_slot(self, slot: StateSlot, state: ParameterState, entry: StateEntry) -> None:
        """Write optimizer state, in the format of the slot."""
        if not entry.tensors:
            slot.reset()
            return
        slot.is_fresh = False
        tensors = [self._files[name] for name in entry.tensors]
        first = self._trainer.shards.own(state.parameter.numel()).start if slot.is_elementwise else 0
        if entry.format != slot.storage.name:
            self._convert(slot, first, state.count, STATE_FORMATS[entry.format], tensors)
            return
        for number, (stored, source) in enumerate(zip(slot.tensors, tensors, strict=True)):
            before = slot.storage.part(number, slice(0, first)).stop
            for part in parts(stored.numel()):
                _write(stored, part, source.read(slice(before + part.start, before + part.stop)))

    def _convert(
        self, slot: StateSlot, first: int, count: int, source: StateFormat, tensors: Sequence[FileTensor]
    ) -> None:
        """Store ``count`` elements of state from ``first`` on in another format, rounded to nearest, on the CPU."""
        target = slot.storage
        for part in parts(count):
            length = part.stop - part.start
            saved = slice(first + part.start, first + part.stop)
            held = [tensor.read(source.part(number, saved)) for number, tensor in enumerate(tensors)]
            value_P = source.load(held, length).clone()
            ranges = [target.part(number, part) for number in range(len(slot.specs))]
            made = [
                torch.empty(where.stop - where.start, dtype=spec.dtype)
                for where, spec in zip(ranges, slot.specs, strict=True)
            ]
            if isinstance(target, PlainState):
                made[0].copy_(value_P)  # its own store rounds stochastically
            else:
                target.store(value_P, made)
            for stored, where, content in zip(slot.tensors, ranges, made, strict=True):
                _write(stored, where, content)
            self._compare(target.load(made, length), value_P)
        self._count("optimizer state", source.name, target.name)

    def _compare(self, held_P: Tensor, value_P: Tensor) -> None:
        """Compare a range of the stored values with the saved ones."""
        self._error = max(self._error, float((held_P - value_P).abs().max()))
        self._largest = max(self._largest, float(value_P.abs().max()))

    def _count(self, kind: str, source: str, target: str) -> None:
        """Count a completed tensor."""
        if source != target:
            error = self._error / self._largest if self._largest else 0.0
            self._conversions[kind, source, target].append(error)
            self._error = self._largest = 0.0


def _weight_values(tensors: Sequence[FileTensor], saved_as: str, part: slice) -> Tensor:
    """Return a range of a saved weight's values, float32, on the CPU."""
    if not saved_as.startswith(_CODED):
        return tensors[0].read(part).float()
    values_P = torch.empty(part.stop - part.start)
    _codes_of(saved_as).widen(_read_codes(tensors, part), values_P)
    return values_P


def _read_codes(tensors: Sequence[FileTensor], part: slice) -> tuple[Tensor, ...]:
    """Return a range of codes, with the saved scales of their groups; all scales of rows, which a range may cut."""
    groups = slice(part.start // GROUP_SIZE, -(-part.stop // GROUP_SIZE))
    codes, *others = tensors
    of_rows = slice(0, others[0].shape[0])
    return codes.read(part), *(other.read(of_rows if len(other.shape) > 1 else groups) for other in others)


def _write(stored: Stored, part: slice, content_P: Tensor) -> None:
    if isinstance(stored, Tensor):
        stored.view(-1)[part].copy_(content_P)
        return
    assert stored.buffer.content is not None, "a dry run cannot load a checkpoint"
    stored.buffer.content.write(stored.offset + part.start * stored.dtype.itemsize, content_P)
