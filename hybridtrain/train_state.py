"""Saving and resuming a run: weights, master copies, moments, step count, in one file that is whole or absent."""

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
    tensors: dict[str, Tensor] = {}
    for unit, states in trainer.states.items():
        for index, state in enumerate(states):
            tensors[f"{unit}/{index}/weight"] = state.parameter.data
            if state.companion is not None:
                tensors[f"{unit}/{index}/companion"] = state.companion
            for number, moment in enumerate(state.moments):
                tensors[f"{unit}/{index}/moment{number}"] = moment
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
    if content.get("schema") != _SCHEMA or content.get("run") != _run_digest(trainer):
        raise ConfigError(
            str(path),
            ["saved by a run with another model, plan, optimizer or seed; resume with that configuration"],
        )
    tensors = content["tensors"]
    for unit, states in trainer.states.items():
        for index, state in enumerate(states):
            state.parameter.data.copy_(tensors[f"{unit}/{index}/weight"])
            if state.companion is not None:
                state.companion.copy_(tensors[f"{unit}/{index}/companion"])
            names = [f"{unit}/{index}/moment{number}" for number in range(4)]
            state.moments = tuple(tensors[name] for name in names if name in tensors)
    trainer.steps_done = content["steps_done"]


def _run_digest(trainer: Trainer) -> str:
    parts = (trainer.model.config, trainer.plan, trainer.config)
    return "-".join(digest(part) for part in parts)
