"""Saving and resuming a run: weights, optimizer state, step count, the cycle's state, in one whole file or none.

The file is torch's zip archive, whose entries carry a CRC-32: torch does not look at it, loading here does. The state
before the newest one is kept beside it.
"""

import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtrain.atomic_write import replaced_file
from hybridtrain.config.encode import JsonValue, to_json
from hybridtrain.errors import ConfigError, DiskSpaceError, DivergenceError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.tier import HostBytes
from hybridtrain.memory.tier_tensor import Stored
from hybridtrain.phase import Phase
from hybridtrain.trainer import Trainer
from hybridtrain.units import format_bytes

_SCHEMA = 5
_NORM = "previous_norm"
_NAME_ONLY = "data.name"
"""A setting that is shown beside a difference and makes none: a corpus may be renamed."""


def previous_state(path: Path) -> Path:
    """Return where the state before the newest one is kept."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def save_train_state(
    trainer: Trainer,
    path: Path,
    hybrid: HybridTrainer | None = None,
    data: Mapping[str, JsonValue] | None = None,
) -> None:
    """Write everything the next step depends on; an interrupted write leaves the old file as it was.

    The old file is kept as ``previous_state``. Tensors in host memory are written from where they are; those on disk
    pass through host memory all at once.

    Args:
        trainer: What is saved.
        path: The file.
        hybrid: The cycle around the trainer, if there is one.
        data: What identifies the batches, by dotted name: must be the same when the state is loaded.

    Raises:
        DivergenceError: a value is no finite number; nothing was written.
        DiskSpaceError: the disk is full; the old file is as it was.
    """
    trainer.enter_phase(Phase.FULL)  # state that waits elsewhere through PREDICT comes back
    trainer.transfer.finish()
    named = _named_tensors(trainer, with_moments=trainer.steps_done > 0)
    tensors = {name: _read(stored) for name, stored in named}
    if trainer.previous_norm is not None:
        tensors[_NORM] = trainer.previous_norm
    _require_finite(tensors, trainer, path)
    content = {
        "tensors": tensors,  # first: its entries then have the archive's first numbers
        "schema": _SCHEMA,
        "settings": _settings(trainer, hybrid, data),
        "hybrid": None if hybrid is None else hybrid.state_dict(),
        "history_is_fresh": all(
            slot.is_fresh for _, states in trainer.states.items() for state in states for slot in state.extra
        ),
        "steps_done": trainer.steps_done,
        "born_after": trainer.states.born_after,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(path.parent).free
    if needed > free:
        raise DiskSpaceError(
            f"{path}: the state needs {format_bytes(needed)}, {format_bytes(free)} are free; the state saved before is "
            f"as it was. Make room, or choose an --out on a larger disk."
        )
    with replaced_file(path, keep=previous_state(path)) as partial:
        try:
            torch.save(content, partial)
        except RuntimeError as error:  # how torch tells that a write failed
            raise DiskSpaceError(
                f"{path}: the state could not be written ({str(error).splitlines()[0]}); the one saved before is as it "
                f"was. Make room, or choose an --out on a larger disk."
            ) from error


@torch.no_grad()
def load_train_state(
    trainer: Trainer,
    path: Path,
    hybrid: HybridTrainer | None = None,
    data: Mapping[str, JsonValue] | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Continue from a saved state: the next step is bit-equal to the one the saved run would have done.

    Where the newest state is damaged or missing, the one before it is taken, and ``say`` is told; a damaged file is
    set aside under ``*.damaged``.

    Raises:
        ConfigError: no state is whole, or it is of a run with other settings or data; each difference is a fault.
    """
    content, found = _newest_whole(path, say or (lambda _: None))
    differences = list(_differences(content["settings"], _settings(trainer, hybrid, data)))
    if differences:
        raise ConfigError(str(found), differences)
    try:
        steps_done, born_after, tensors = int(content["steps_done"]), int(content["born_after"]), content["tensors"]
        hybrid_state, history_is_fresh = content["hybrid"], bool(content["history_is_fresh"])
        targets = dict(_named_tensors(trainer, with_moments=steps_done > 0))
        sources = {name: _fitting(name, tensors[name], target) for name, target in targets.items()}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(str(found), [f"a saved state without {error}; use an older one or start anew"]) from error
    trainer.enter_phase(Phase.FULL)
    trainer.transfer.finish()
    for name, target in _named_tensors(trainer, with_moments=steps_done > 0):
        _write(target, sources[name])
    trainer.weights.reload()
    trainer.steps_done = steps_done
    trainer.states.born_after = born_after
    norm = tensors.get(_NORM)
    trainer.previous_norm = None if norm is None else norm.to(trainer.transfer.device)
    trainer.states.loaded(is_fresh=not steps_done, extra_is_fresh=history_is_fresh)
    if hybrid is not None:
        hybrid.load_state_dict(hybrid_state)


def _newest_whole(path: Path, say: Callable[[str], None]) -> tuple[dict[str, Any], Path]:
    """Return the newest state that is whole, and where it is."""
    previous = previous_state(path)
    faults: list[str] = []
    for candidate in (path, previous):
        try:
            content = _read_whole(candidate)
        except FileNotFoundError:
            if candidate == path:
                faults.append(f"{path}: there is none")
        except ValueError as error:
            faults.append(f"{candidate}: not a whole saved state ({error})")
        else:
            if faults:
                say(f"{faults[0]}; going on from {previous.name}, saved after step {content['steps_done']}")
                if path.exists():  # or the next save would make it the previous one
                    path.replace(path.with_name(f"{path.name}.damaged"))
            return content, candidate
    if not path.exists() and not previous.exists():
        raise ConfigError(str(path), ["there is no saved state to resume from; start without --resume"])
    raise ConfigError(str(path), [f"{fault}; use a copy of an older one or start anew" for fault in faults])


def _read_whole(path: Path) -> dict[str, Any]:
    """Return a file's content once every byte of it is known to be the one written.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or no saved state; the message names the tensor.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None and content["schema"] == _SCHEMA and isinstance(content["settings"], dict):
            return dict(content)
        names = list(content["tensors"])
    except FileNotFoundError:
        raise
    except Exception as error:  # torch.load raises whatever its unpickler met
        raise ValueError(str(error).partition("\n")[0] or type(error).__name__) from error
    if damaged is None:
        raise ValueError(f"schema {content['schema']}, this program writes {_SCHEMA}")
    number = damaged.rpartition("/data/")[2]
    name = names[int(number)] if number.isdecimal() and int(number) < len(names) else damaged
    raise ValueError(f"'{name}' is not as it was written")


def _fitting(name: str, source: object, target: Stored) -> Tensor:
    """Return a saved tensor that has its target's shape and type."""
    if not isinstance(source, Tensor) or source.dtype != target.dtype or tuple(source.shape) != tuple(target.shape):
        raise ValueError(f"{name} of {target.dtype} {tuple(target.shape)}")
    return source


def _require_finite(tensors: Mapping[str, Tensor], trainer: Trainer, path: Path) -> None:
    """Raise ``DivergenceError`` for a value that is no finite number: such a state must not replace a good one."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not (math.isfinite(low) and math.isfinite(high)):
                raise DivergenceError(
                    f"step {trainer.steps_done}: {name} holds a value that is no finite number; it must be one. "
                    f"{path} was not written, what was saved before is as it was. Lower optimizer.lr "
                    f"({trainer.config.optimizer.lr}), set optimizer.max_grad_norm, or check data."
                )


def _named_tensors(trainer: Trainer, *, with_moments: bool) -> Iterator[tuple[str, Stored]]:
    """Yield everything the next step depends on; moments that do not exist yet are allocated."""
    for unit in trainer.model.units():
        states = trainer.states.acquire(unit) if with_moments else trainer.states.of(unit.name)
        weights = trainer.weights.stored_tensors(unit.name, unit.tensors)
        for index, (state, weight) in enumerate(zip(states, weights, strict=True)):
            named: dict[str, Stored | None] = {f"weight{part}": stored for part, stored in enumerate(weight)}
            named["companion"] = state.companion
            if with_moments:
                for kind, slots in (("state", state.slots), ("extra", state.extra)):
                    tensors = (tensor for slot in slots for tensor in slot.tensors)
                    named |= {f"{kind}{number}": tensor for number, tensor in enumerate(tensors)}
            yield from ((f"{unit.name}/{index}/{name}", stored) for name, stored in named.items() if stored is not None)


def _read(stored: Stored) -> Tensor:
    """Return a tensor's content: itself on the device, a view of host memory, or a copy of what is on disk."""
    if isinstance(stored, Tensor):
        is_part = stored.untyped_storage().nbytes() != stored.nbytes
        return _alone(stored.cpu()) if is_part else stored
    content = stored.buffer.content
    assert content is not None, "a dry run has nothing to save"
    if isinstance(content, HostBytes):
        return _alone(stored.on_host().view(stored.shape))
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    content.read(stored.offset, tensor)
    return tensor


def _alone(part: Tensor) -> Tensor:
    """Return the same memory as a storage of its own: in a file, codes and their scales cannot share one."""
    return torch.frombuffer(part.view(-1).view(torch.uint8).numpy(), dtype=part.dtype).view(part.shape)


def _write(stored: Stored, source: Tensor) -> None:
    if isinstance(stored, Tensor):
        stored.copy_(source)
        return
    assert stored.buffer.content is not None, "a dry run has nothing to load"
    stored.buffer.content.write(stored.offset, source.cpu().contiguous())


def _settings(
    trainer: Trainer, hybrid: HybridTrainer | None, data: Mapping[str, JsonValue] | None
) -> dict[str, JsonValue]:
    """Return everything that a resumed run must share with the saved one, by dotted name."""
    parts: dict[str, object] = {"": trainer.config, "model": trainer.model.config, "plan": trainer.plan}
    if hybrid is not None and hybrid.config is not None:
        parts["hybrid"] = hybrid.config
        parts |= {
            f"plan in {phase}": trainer.memory_plan.for_phase(phase) for phase in Phase if phase is not Phase.FULL
        }
    flat: dict[str, JsonValue] = {}
    for name, part in parts.items():
        flat |= _flat(name, json.loads(to_json(part)))
    return flat | dict(data or {})


def _flat(name: str, value: JsonValue) -> dict[str, JsonValue]:
    """Return a nested mapping as one with dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        inner: found
        for key, part in value.items()
        for inner, found in _flat(f"{name}.{key}" if name else key, part).items()
    }


def _differences(saved: Mapping[str, JsonValue], given: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield a sentence per setting that is not the saved run's."""
    names = [name for name in {**given, **saved} if given.get(name) != saved.get(name)]
    if names == [_NAME_ONLY]:
        return
    for name in names:
        yield (
            f"{name}: {_shown(saved, name)} in the run that was saved, {_shown(given, name)} now; resume with the "
            f"saved value, or start anew in another folder"
        )


def _shown(settings: Mapping[str, JsonValue], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "absent"
