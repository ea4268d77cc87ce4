"""Training of tiny models on ranks, and what to compare of it."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hybridtrain.memory.group import Group
from hybridtrain.memory.transfer import DirectTransfer, Transfer
from hybridtrain.models.weight_source import WeightSource
from hybridtrain.models.widening import widened
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import GradAccumulation
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from ranks import CPU
from stacks import GPT2, LLAMA
from tiny_models import random_steps

NUM_STEPS, MICRO_BATCHES = 3, 4
VERTICAL = GradAccumulation(grad_accum_steps=MICRO_BATCHES, schedule="vertical")
MODELS = {"gpt2": replace(GPT2, num_blocks=2), "llama": replace(LLAMA, num_blocks=2)}
"""GPT-2 with dropout and tied weights; matrices of both have 8-bit moments."""


@dataclass(frozen=True)
class Case:
    """A stack on some ranks."""

    model: str
    world: int
    stack: tuple[Optimization, ...]
    clip: float = 0.25

    @property
    def plan(self) -> list[Optimization]:
        """Micro-batches are taken one by one unless the stack says how."""
        accumulates = any(isinstance(part, GradAccumulation) for part in self.stack)
        return [*self.stack, *([] if accumulates else [GradAccumulation(grad_accum_steps=MICRO_BATCHES)])]


def digest(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def new_trainer(
    case: Case, group: Group | None, disk: Path | None = None, transfer: Transfer | None = None,
    source: WeightSource | None = None,
) -> Trainer:  # fmt: skip
    config = TrainerConfig(optimizer=AdamWConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=case.clip))
    transfer = transfer or DirectTransfer(CPU, disk_folder=disk)
    return Trainer(MODELS[case.model], compose(case.plan), config, transfer, group=group, source=source)


def train(trainer: Trainer, steps: slice = slice(None)) -> list[tuple[float, float | None]]:
    """Return loss and norm of each step."""
    local = MICRO_BATCHES // trainer.data_group.world
    first = trainer.data_group.rank * local
    batches = random_steps(trainer.model.config, NUM_STEPS, MICRO_BATCHES)[steps]
    told = [trainer.step(step[first : first + local]) for step in batches]
    return [(step.loss, step.grad_norm) for step in told]


def weights_of(trainer: Trainer) -> dict[str, str]:
    """Return a digest of every parameter as the forward pass reads it."""
    values: dict[str, str] = {}
    trainer.weights.plan_visits([])
    for unit in trainer.model.units():
        if unit.name.startswith("block"):
            trainer.weights.acquire(int(unit.name.partition(".")[2]))
        for name, parameter in unit.parameters:
            with widened(parameter):
                values[name] = digest(parameter)
    return values


def run(case: Case, group: Group | None, disk: Path) -> tuple[list[tuple[float, float | None]], dict[str, str]]:
    trainer = new_trainer(case, group, disk)
    told = train(trainer)
    found = weights_of(trainer)
    trainer.transfer.close()
    return told, found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
