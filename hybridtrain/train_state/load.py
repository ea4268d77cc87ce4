"""Resuming: a saved state is checked byte by byte and field by field, then written into a trainer of whatever stack."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridkernels.int8_quantize import GROUP_SIZE
from hybridtrain.config.encode import JsonValue
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.block_places import Visit
from hybridtrain.memory.formats import (
    STATE_FORMATS,
    Int8Codes,
    PlainState,
    StateFormat,
    StoredWeight,
    WeightFormat,
    weight_part,
)
from hybridtrain.memory.group import Group
from hybridtrain.memory.shards import overlap
from hybridtrain.memory.state_store import ParameterState, StateSlot
from hybridtrain.memory.tier_tensor import Stored, write_slice
from hybridtrain.models.block_model import Unit
from hybridtrain.phase import Phase
from hybridtrain.tensor_file import FileTensor
from hybridtrain.train_state.generations import Say, newest_generation
from hybridtrain.train_state.identity import differences, settings_of
from hybridtrain.train_state.manifest import Generation, ParameterEntry, names_in, parts_of
from hybridtrain.train_state.saver import TENSOR_KEY
from hybridtrain.trainer import Trainer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CODED = "int8"
Files = Mapping[str, FileTensor]


@torch.no_grad()
def load_train_state(
    trainer: Trainer,
    folder: Path,
    hybrid: HybridTrainer | None = None,
    data: Mapping[str, JsonValue] | None = None,
    say: Say | None = None,
    allowed: Sequence[str] = (),
) -> Generation:
    """Continue from the newest whole state: under the same stack the next step is bit-equal to the saved run's.

    Under another stack values are the same wherever it can hold them; what is rounded is told to ``say``, as is every
    setting that changed, and a damaged state that was passed over.

    Args:
        trainer: Gets the state.
        folder: Of all generations.
        hybrid: The cycle around the trainer, if there is one.
        data: What identifies the batches.
        say: Is told what a user should know.
        allowed: Settings that may be others than the saved run's, by name or what names begin with (``schedule``).

    Returns:
        What was loaded: its settings, and what was saved as ``extra``.

    Raises:
        ConfigError: no state is whole, or it is of a run with other settings or data; each difference is a fault.
    """
    tell: Say = say or (lambda _: None)
    generation = _same_generation(trainer.group, folder, tell)
    found = differences(generation.settings, settings_of(trainer, hybrid, data), allowed)
    if found.refused:
        raise ConfigError(str(generation.folder), found.refused)
    files = generation.tensors()
    try:
        _require_fit(trainer, generation, files)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            str(generation.folder), [f"the saved state does not fit this model and optimizer: {error}; start anew"]
        ) from error
    for line in found.taken:
        tell(f"changed: {line}")
    _fill(trainer, generation, files, tell)
    if hybrid is not None and generation.cycle is not None:
        cycle = _with_tensors(generation.cycle, files)
        assert isinstance(cycle, dict), "checked when it was read"
        hybrid.load_state_dict(cycle)
    return generation


def _same_generation(group: Group, folder: Path, tell: Say) -> Generation:
    """Return the newest whole state; the first rank sets damaged ones aside before the others look."""
    if group.rank:
        group.gather_numbers([0.0])
    generation = newest_generation(folder, tell)
    if not group.rank:
        group.gather_numbers([0.0])
    steps = {int(step) for step in group.gather_numbers([generation.manifest.steps_done])}
    if len(steps) > 1:
        told = " and ".join(map(str, sorted(steps)))
        fault = f"the ranks find states after {told} steps; all must see the same folder: put --out on a shared disk"
        raise ConfigError(str(folder), [fault])
    return generation


def _require_fit(trainer: Trainer, generation: Generation, files: Files) -> None:
    """Raise ``KeyError`` or ``ValueError`` unless everything that will be read is there, and can be read."""
    entries = generation.manifest.parameters
    missing = [name for name in names_in(list(entries.values())) if name not in files]
    if missing:
        raise ValueError(f"'{missing[0]}' is missing")
    for unit in trainer.model.units():
        for (name, parameter), state in zip(unit.parameters, trainer.states.settled(unit.name), strict=True):
            if name not in entries:
                raise ValueError(f"parameter '{name}' is missing")
            entry, shape = entries[name], tuple(parameter.shape)
            if entry.shape != shape:
                raise ValueError(f"'{name}' of shape {entry.shape}, {shape} now")
            _require_shapes(entry.tensors, _weight_shapes(entry), files)
            for slot in (*state.slots, *state.extra):
                saved = entry.states.get(slot.spec.name)
                if saved is None:
                    raise ValueError(f"'{name}' has no {slot.spec.name}")
                storage = STATE_FORMATS[saved.format]
                specs = storage.specs(slot.spec.shape or shape) if saved.tensors else ()
                _require_shapes(saved.tensors, [(spec.shape, spec.dtype) for spec in specs], files)
    if hybrid_tensors := [name for name in _names(generation.cycle) if name not in files]:
        raise ValueError(f"'{hybrid_tensors[0]}' is missing")


def _weight_shapes(entry: ParameterEntry) -> list[tuple[tuple[int, ...], torch.dtype]]:
    values = entry.format.partition("_")[0]
    count = torch.Size(entry.shape).numel()
    shapes = [] if values == _CODED else [(entry.shape, _DTYPES[values])]
    if _CODED in entry.format:
        shapes += [(spec.shape, spec.dtype) for spec in _codes_of(entry.format).specs(count)]
    return shapes


def _codes_of(saved_as: str) -> Int8Codes:
    """Return how codes of a saved format are read; what shares a range only matters to who writes them."""
    return Int8Codes(is_symmetric="affine" not in saved_as.split("_"))


def _require_shapes(names: Sequence[str], wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], files: Files) -> None:
    for name, (shape, dtype) in zip(names, wanted, strict=True):
        held = files[name]
        if held.dtype != dtype or held.shape != shape:
            raise ValueError(f"'{name}' of {held.dtype} {held.shape}, {dtype} {shape} is needed")


# ---- into the trainer


def _fill(trainer: Trainer, generation: Generation, files: Files, tell: Say) -> None:
    manifest = generation.manifest
    trainer.enter_phase(Phase.FULL)
    trainer.transfer.finish()
    rounded = _Rounded()
    weights, states, units = trainer.weights, trainer.states, trainer.model.units()
    weights.plan_visits([Visit(block, reads=False) for block in trainer.model.part.blocks])
    for unit in units:
        stored = weights.acquire_stored(unit.name, unit.tensors, reads=False)
        held = states.settled(unit.name)
        for (name, _), weight, state in zip(unit.parameters, stored, held, strict=True):
            entry = manifest.parameters[name]
            _fill_weight(trainer, states.formats.of(weight), weight, state, entry, files, rounded)
        weights.write_back(unit.name)
        _fill_states(trainer, unit, manifest.parameters, files, rounded)
    trainer.transfer.finish()
    weights.reload()
    trainer.pass_tied()
    trainer.steps_done = manifest.steps_done
    states.born_after = manifest.born_after
    if trainer.loss_scale is not None and manifest.loss_scale is not None:
        trainer.loss_scale = replace(manifest.loss_scale)
    norm = manifest.previous_norm
    trainer.previous_norm = None if norm is None else torch.tensor(norm, device=trainer.transfer.device)
    for line in rounded.lines():
        tell(line)


def _fill_weight(
    trainer: Trainer, storage: WeightFormat, weight: StoredWeight, state: ParameterState, entry: ParameterEntry,
    files: Files, rounded: "_Rounded",
) -> None:  # fmt: skip
    """Write a weight and its companion: codes as they are where the storage is the same, else by the values."""
    tensors = [files[name] for name in entry.tensors]
    is_same = storage.saved_as == entry.format
    count = torch.Size(entry.shape).numel()
    for part in [slice(0, count)] if storage.needs_whole else parts_of(count):
        target = weight_part(weight, part)
        companion_P: Tensor | None
        if is_same and storage.is_coded:
            values, coded = tensors[: -len(target)], tensors[-len(target) :]
            for stored, read in zip(target, _read_codes(coded, part), strict=True):
                stored.copy_(read)
            companion_P = values[0].read(part) if values else None
        else:
            value_P = _weight_values(tensors, entry.format, part).to(trainer.transfer.device)
            companion_P = storage.create(value_P, target)
            if not is_same:
                rounded.compare(storage.load(target, companion_P), value_P)
        if companion_P is not None:
            assert state.companion is not None, "made with the first values"
            found, kept = overlap(part, trainer.shards.own(state.parameter.numel()))
            if kept.stop > kept.start:
                companion_P = companion_P[found].to(trainer.transfer.device)
                write_slice(state.companion, kept, companion_P, trainer.copies)
    rounded.end("weights", entry.format, storage.saved_as)


def _weight_values(tensors: Sequence[FileTensor], saved_as: str, part: slice) -> Tensor:
    """Return a range of a saved weight's values, float32, on the CPU."""
    if not saved_as.startswith(_CODED):
        return tensors[0].read(part).float()
    values_P = torch.empty(part.stop - part.start)
    _codes_of(saved_as).widen(_read_codes(tensors, part), values_P)
    return values_P


def _read_codes(tensors: Sequence[FileTensor], part: slice) -> tuple[Tensor, ...]:
    """Return a range of codes, and what is saved of their groups."""
    groups = slice(part.start // GROUP_SIZE, -(-part.stop // GROUP_SIZE))
    codes, *others = tensors
    return codes.read(part), *(other.read(groups) for other in others)


def _fill_states(
    trainer: Trainer, unit: Unit, entries: Mapping[str, ParameterEntry], files: Files, rounded: "_Rounded"
) -> None:
    """Write optimizer state, making what is not there yet."""
    saved = [entries[name].states for name, _ in unit.parameters]
    if any(entry.tensors for states in saved for entry in states.values()):
        trainer.states.acquire(unit)
    for state, found in zip(trainer.states.settled(unit.name), saved, strict=True):
        for slot in (*state.slots, *state.extra):
            entry = found[slot.spec.name]
            if not entry.tensors:
                slot.reset()
                continue
            slot.is_fresh = False
            tensors = [files[name] for name in entry.tensors]
            first = trainer.shards.own(state.parameter.numel()).start if slot.is_elementwise else 0
            if entry.format == slot.storage.name:
                for number, (stored, source) in enumerate(zip(slot.tensors, tensors, strict=True)):
                    before = slot.storage.part(number, slice(0, first)).stop
                    for part in parts_of(stored.numel()):
                        _write(stored, part, source.read(slice(before + part.start, before + part.stop)))
            else:
                _convert(slot, first, state.count, STATE_FORMATS[entry.format], tensors, rounded)


def _convert(
    slot: StateSlot, first: int, count: int, source: StateFormat, tensors: Sequence[FileTensor], rounded: "_Rounded"
) -> None:
    """Store ``count`` elements of state from ``first`` on in another format, rounded to nearest, on the CPU."""
    target = slot.storage
    for part in parts_of(count):
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
            made[0].copy_(value_P)  # its own way is by chance
        else:
            target.store(value_P, made)
        for stored, where, content in zip(slot.tensors, ranges, made, strict=True):
            _write(stored, where, content)
        rounded.compare(target.load(made, length), value_P)
    rounded.end("optimizer state", source.name, target.name)


def _write(stored: Stored, part: slice, content_P: Tensor) -> None:
    if isinstance(stored, Tensor):
        stored.view(-1)[part].copy_(content_P)
        return
    assert stored.buffer.content is not None, "a dry run has nothing to load"
    stored.buffer.content.write(stored.offset + part.start * stored.dtype.itemsize, content_P)


class _Rounded:
    """What was converted, and how exactly: measured on the values that were stored."""

    def __init__(self) -> None:
        self._tensors: Counter[tuple[str, str, str]] = Counter()
        self._error: dict[tuple[str, str, str], float] = {}
        self._now = [0.0, 0.0]

    def compare(self, held_P: Tensor, value_P: Tensor) -> None:
        """Compare a range as it is held with the saved values."""
        self._now[0] = max(self._now[0], float((held_P - value_P).abs().max()))
        self._now[1] = max(self._now[1], float(value_P.abs().max()))

    def end(self, what: str, source: str, target: str) -> None:
        """Say that a tensor is complete."""
        if source == target:
            return
        (error, largest), self._now = self._now, [0.0, 0.0]
        key = (what, source, target)
        self._tensors[key] += 1
        self._error[key] = max(self._error.get(key, 0.0), error / largest if largest else 0.0)

    def lines(self) -> Iterator[str]:
        """Yield a sentence for each kind of conversion."""
        for key, count in self._tensors.items():
            what, source, target = key
            error = self._error[key]
            how = (
                f"rounded, by at most {100 * error:.2g} % of the largest value of a tensor"
                if error
                else "every value held exactly"
            )
            yield f"converted: {what} of {count} tensors from {source} to {target}, {how}"


# ---- the cycle


def _with_tensors(value: JsonValue, files: Files) -> object:
    """Return a state with the tensors that stand in it by name."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR_KEY}:
            tensor = files[str(value[TENSOR_KEY])]
            with _disable_current_modes():
                return tensor.read(slice(0, torch.Size(tensor.shape).numel())).view(tensor.shape)
        return {key: _with_tensors(item, files) for key, item in value.items()}
    return [_with_tensors(item, files) for item in value] if isinstance(value, list) else value


def _names(value: JsonValue) -> Iterator[str]:
    """Yield the names of tensors that stand in a state."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR_KEY}:
            yield str(value[TENSOR_KEY])
        for item in value.values():
            yield from _names(item)
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)
