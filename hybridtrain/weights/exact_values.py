"""Exact values of a trainer's parameters, slice by slice, from any placement and format. P elements of a flat slice."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridtrain.errors import ConfigError
from hybridtrain.memory.block_slots import Visit
from hybridtrain.memory.formats import parts, weight_part
from hybridtrain.memory.tier_tensor import read_slice
from hybridtrain.phase import Phase
from hybridtrain.trainer import Trainer


@torch.no_grad()
def exact_values(trainer: Trainer) -> Iterator[tuple[str, slice, Tensor]]:
    """Yield every trained parameter's name, a range of its elements, and their (P,) float32 values on the device.

    A parameter's slices come in order. Values are the master weight's if there is one, and valid until the next slice.
    Optimizer state is not created. The trainer's phase becomes FULL.

    Raises:
        ConfigError: the state is sharded over ranks.
    """
    if trainer.shards.cuts_state:
        fault = "weights are sharded over ranks; save a checkpoint, then run hybridtrain export"
        raise ConfigError(f"export with {trainer.group.world} ranks", [fault])
    trainer.enter_phase(Phase.FULL)
    trainer.transfer.finish()
    units, weights, states = trainer.model.units(), trainer.weights, trainer.states
    weights.plan_visits([Visit(block) for block in range(len(units) - 2)])
    for unit in units:
        stored = weights.acquire_stored(unit.name, unit.tensors, reads=True)
        for (name, parameter), weight, state in zip(unit.parameters, stored, states.settled(unit.name), strict=True):
            storage, master_weight = states.formats.of(weight), state.master_weight
            for part in parts(parameter.numel()):
                master_P = None if master_weight is None else read_slice(master_weight, part, trainer.copies)
                yield name, part, storage.load(weight_part(weight, part), master_P)
