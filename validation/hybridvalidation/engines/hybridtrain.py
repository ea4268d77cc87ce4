"""This project's trainer under the task's stack, named in ``settings``."""

import math
import tempfile
from pathlib import Path

import numpy as np
import torch

from hybridtrain.data.batches import TokenBatch
from hybridtrain.memory.cuda_transfer import open_transfer
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan
from hybridtrain.planning.dry_runs import DryRun, dry_run
from hybridtrain.stacks import Stack
from hybridtrain.trainer import Trainer
from hybridtrain.virtual_gpu.cards.card import Card, Host
from hybridvalidation.engines.task import Task


def run_dry(task: Task, card: Card, host: Host) -> DryRun:
    """Return a dry run of the stack."""
    stack, memory_plan = stack_and_plan(task)
    workload = task.workload.micro_batch(memory_plan)
    config = stack.training()
    return dry_run(task.model, memory_plan, card, workload, host=host, num_steps=task.num_steps, config=config)


def train(task: Task) -> list[float]:
    """Run the steps; return the loss of each."""
    stack, memory_plan = stack_and_plan(task)
    accum_steps = memory_plan.for_phase(Phase.FULL).grad_accum_steps
    size = task.workload.batch_size // accum_steps
    tokens = np.array([task.sample] * size, dtype=np.int64)
    batch = TokenBatch(token_ids_BT=tokens, target_ids_BT=np.roll(tokens, -1, axis=1))
    transfer = open_transfer(torch.device(task.device), disk_folder=Path(tempfile.gettempdir()))
    try:
        trainer = Trainer(task.model, memory_plan, stack.training(lr=1e-3), transfer)
        return [trainer.step([batch] * accum_steps).loss for _ in range(task.num_steps)]
    finally:
        transfer.close()


def stack_and_plan(task: Task) -> tuple[Stack, MemoryPlan]:
    """Return the stack and its plan, with micro-batches that divide the batch, so that tokens per step are equal."""
    assert task.stack is not None, "a task without its stack"
    if task.micro_batches > 1:
        return task.stack, task.stack.plan(task.micro_batches)
    wanted = task.stack.plan().for_phase(Phase.FULL).grad_accum_steps
    fitting = math.gcd(wanted, task.workload.batch_size)
    return task.stack, task.stack.plan(None if fitting == wanted else fitting)
