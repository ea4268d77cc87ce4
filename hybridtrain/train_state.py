"""Saving and resuming a run: weights, master copies, moments, step count, in one file that is whole or absent."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hybridtrain.atomic_write import replaced_file
from hybridtrain.config.encode import digest
from hybridtrain.errors import ConfigError
from hybridtrain.trainer import Trainer

_SCHEMA = 1


def save_train_state(trainer: Trainer, path: Path) -> None:
    """Write everything the next step depends on; an interrupted write leaves the old file as it was."""
    tensors = dict(_named_tensors(trainer, with_moments=trainer.steps_done > 0))
    content = {
        "schema": _SCHEMA,
        "run": _run_digest(trainer),
        "steps_done": trainer.steps_done,
        "tensors": tensors,
    }
    with replaced_file(path) as partial:
        torch.save(content, partial)


@torch.no_grad()
def load_train_state(trainer: Trainer, path: Path) -> None:
    """Continue from a saved state: the next step is bit-equal to the one the saved run would have done.

    Raises:
        ConfigError: the file is missing, damaged, or of a run with another model, plan, optimizer or seed.
    """
    try:
        content = torch.load(path, map_location=trainer.model.head.weight.device, weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(str(path), ["there is no saved state to resume from; start without --resume"]) from error
    except Exception as error:  # torch.load raises whatever its unpickler met
        raise ConfigError(str(path), [f"not a whole saved state ({error}); use an older one or start anew"]) from error
    if not isinstance(content, dict) or content.get("schema") != _SCHEMA or content.get("run") != _run_digest(trainer):
        raise ConfigError(
            str(path), ["not saved by a run with this model, plan, optimizer and seed; resume with that configuration"]
        )
    try:
        steps_done, tensors = int(content["steps_done"]), content["tensors"]
        sources = {name: tensors[name] for name, _ in _named_tensors(trainer, with_moments=steps_done > 0)}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(str(path), [f"a saved state without {error}; use an older one or start anew"]) from error
    for name, target in _named_tensors(trainer, with_moments=steps_done > 0):
        target.copy_(sources[name])
    trainer.steps_done = steps_done
    for state in (state for _, states in trainer.states.items() for state in states if not steps_done):
        state.moments = ()


def _named_tensors(trainer: Trainer, *, with_moments: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield everything the next step depends on; moments that do not exist yet are allocated."""
    for part in trainer.model.units() if with_moments else ():
        trainer.states.acquire(part)
    for unit, states in trainer.states.items():
        for index, state in enumerate(states):
            named = {"weight": state.parameter.data, "companion": state.companion}
            if with_moments:
                named |= {f"moment{number}": moment for number, moment in enumerate(state.moments)}
            yield from ((f"{unit}/{index}/{name}", tensor) for name, tensor in named.items() if tensor is not None)


def _run_digest(trainer: Trainer) -> str:
    parts = (trainer.model.config, trainer.plan, trainer.config)
    return "-".join(digest(part) for part in parts)
