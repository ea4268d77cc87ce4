"""Saving and resuming a run: weights, optimizer state, step count, the cycle's state, in one whole file or none."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hybridtrain.atomic_write import replaced_file
from hybridtrain.config.encode import digest
from hybridtrain.errors import ConfigError
from hybridtrain.hybrid.cycle import HybridTrainer
from hybridtrain.memory.tier import HostBytes
from hybridtrain.memory.tier_tensor import Stored
from hybridtrain.phase import Phase
from hybridtrain.trainer import Trainer

_SCHEMA = 4
_NORM = "previous_norm"


def save_train_state(trainer: Trainer, path: Path, hybrid: HybridTrainer | None = None) -> None:
    """Write everything the next step depends on; an interrupted write leaves the old file as it was.

    Tensors in host memory are written from where they are; those on disk pass through host memory all at once.
    """
    trainer.enter_phase(Phase.FULL)  # state that waits elsewhere through PREDICT comes back
    trainer.transfer.finish()
    named = _named_tensors(trainer, with_moments=trainer.steps_done > 0)
    tensors = {name: _read(stored) for name, stored in named}
    if trainer.previous_norm is not None:
        tensors[_NORM] = trainer.previous_norm
    content = {
        "schema": _SCHEMA,
        "run": _run_digest(trainer, hybrid),
        "hybrid": None if hybrid is None else hybrid.state_dict(),
        "history_is_fresh": all(
            slot.is_fresh for _, states in trainer.states.items() for state in states for slot in state.extra
        ),
        "steps_done": trainer.steps_done,
        "born_after": trainer.states.born_after,
        "tensors": tensors,
    }
    with replaced_file(path) as partial:
        torch.save(content, partial)


@torch.no_grad()
def load_train_state(trainer: Trainer, path: Path, hybrid: HybridTrainer | None = None) -> None:
    """Continue from a saved state: the next step is bit-equal to the one the saved run would have done.

    Raises:
        ConfigError: the file is missing, damaged, or of a run with another model, plan, optimizer or seed.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(str(path), ["there is no saved state to resume from; start without --resume"]) from error
    except Exception as error:  # torch.load raises whatever its unpickler met
        raise ConfigError(str(path), [f"not a whole saved state ({error}); use an older one or start anew"]) from error
    if (
        not isinstance(content, dict)
        or content.get("schema") != _SCHEMA
        or content.get("run") != _run_digest(trainer, hybrid)
    ):
        raise ConfigError(
            str(path),
            ["not saved by a run with this model, plan, optimizer, cycle and seed; resume with that configuration"],
        )
    try:
        steps_done, tensors = int(content["steps_done"]), content["tensors"]
        hybrid_state, history_is_fresh = content["hybrid"], bool(content["history_is_fresh"])
        sources = {name: tensors[name] for name, _ in _named_tensors(trainer, with_moments=steps_done > 0)}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(str(path), [f"a saved state without {error}; use an older one or start anew"]) from error
    trainer.enter_phase(Phase.FULL)
    trainer.transfer.finish()
    for name, target in _named_tensors(trainer, with_moments=steps_done > 0):
        _write(target, sources[name])
    trainer.weights.reload()
    trainer.steps_done = steps_done
    trainer.states.born_after = int(content["born_after"])
    norm = tensors.get(_NORM)
    trainer.previous_norm = None if norm is None else norm.to(trainer.transfer.device)
    trainer.states.loaded(is_fresh=not steps_done, extra_is_fresh=history_is_fresh)
    if hybrid is not None:
        hybrid.load_state_dict(hybrid_state)


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


def _run_digest(trainer: Trainer, hybrid: HybridTrainer | None) -> str:
    parts: list[object] = [trainer.model.config, trainer.plan, trainer.config]
    if hybrid is not None and hybrid.config is not None:
        parts += [hybrid.config, *(trainer.memory_plan.for_phase(phase) for phase in Phase)]
    return "-".join(digest(part) for part in parts)
