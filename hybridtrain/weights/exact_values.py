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

    A parameter's slices come in order. Values are those that an update starts from: the master's where there is one.
    They are only valid until the next are asked for. Unlike a pass over parameters this asks for no optimizer state,
    which may not exist yet. The trainer's phase becomes FULL.

    Raises:
        ConfigError: ranks have cut the model's state; none of them has all values.
    """
    if trainer.shards.cuts_state:
        fault = "each holds its range alone; one process must have all: save the state, and hybridtrain export the run"
        raise ConfigError(f"exact values on {trainer.group.world} ranks", [fault])
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
