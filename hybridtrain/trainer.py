"""The reference trainer: one model, one plan, one step after the other, on any device. B batch, T sequence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridtrain.data.batches import TokenBatch
from hybridtrain.dtypes import to_torch_dtype
from hybridtrain.engine.executor import DeviceBatch, Executor
from hybridtrain.engine.random_key import random_key
from hybridtrain.engine.update import Update
from hybridtrain.errors import DivergenceError
from hybridtrain.memory.master_codec import master_codec
from hybridtrain.memory.state_store import StateStore
from hybridtrain.memory.transfer import Transfer, VirtualTransfer
from hybridtrain.models import build_model
from hybridtrain.models.block_model import Unit
from hybridtrain.models.initialize import fill_initial
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan, PhasePlan
from hybridtrain.plan.tensor_class import Placement, TensorClass
from hybridtrain.profiler.observer import MemoryObserver, NullObserver, Stage
from hybridtrain.trainer_config import TrainerConfig

_DROPOUT_STREAM, _UPDATE_STREAM = 0, 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    step: int
    """Counted from 1."""
    loss: float
    """Nats per token, mean over the step's micro-batches; NaN in a dry run."""
    lr: float
    grad_norm: float | None
    """Global L2 norm before clipping; None when clipping is off."""
    num_tokens: int


class Trainer:
    """Trains one model under one memory plan.

    Args:
        model_config: Shape of the model.
        plan: Where everything lives and how it is stored.
        config: Optimizer, schedule, seed.
        transfer: The device, and the way to it.
        observer: Told what each tensor is for.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        plan: MemoryPlan,
        config: TrainerConfig,
        transfer: Transfer,
        observer: MemoryObserver | None = None,
    ) -> None:
        self.config = config
        self.plan = plan.for_phase(Phase.FULL)
        self.steps_done = 0
        _refuse_other_placements(self.plan)
        self._transfer = transfer
        self._observer = observer or NullObserver()
        with self._observer.region(Stage.BUILD, ""):
            self.model = build_model(model_config, to_torch_dtype(self.plan.weight.codec), transfer.device)
        codec = master_codec(self.plan.weight.codec, self.plan.master.codec)
        self.states = StateStore(self.plan.optim_state.codec, codec, self._observer)
        units = self.model.units()
        self._initialize(units)
        self.executor = Executor(self.model, self.plan, transfer, self._observer)
        self._update = Update(units, self.states, config.optimizer, transfer, self._observer)

    @torch.no_grad()
    def _initialize(self, units: Sequence[Unit]) -> None:
        index = 0
        for unit in units:
            for name, parameter in unit.parameters:
                self._observer.label(parameter, TensorClass.WEIGHT, unit.name)
                with self._observer.region(Stage.UPDATE, unit.name):
                    initial = parameter.data
                    if parameter.dtype != torch.float32:
                        initial = torch.empty_like(parameter.data, dtype=torch.float32)
                    generator = self._transfer.generator(random_key(self.config.seed, index))
                    fill_initial(name, initial, self.model.config, generator)
                    self.states.initialize(unit.name, parameter, initial)
                index += 1

    def step(self, batches: Sequence[TokenBatch]) -> StepResult:
        """Run one optimizer step over the micro-batches of one batch.

        Raises:
            DivergenceError: loss or gradient norm is not finite; weights and optimizer state are those before the step.
        """
        assert len(batches) == self.plan.grad_accum_steps, "one batch per accumulation step"
        number = self.steps_done + 1
        lr = self.config.optimizer.lr * self.config.schedule.factor(number)
        with self._observer.region(Stage.LOAD, ""):
            device_batches = [
                DeviceBatch(self._transfer.upload(batch.token_ids_BT), self._transfer.upload(batch.target_ids_BT))
                for batch in batches
            ]
        key = random_key(self.config.seed, number, _DROPOUT_STREAM)
        losses = self.executor.forward_backward(device_batches, seed=key)
        del device_batches
        norm = self._update.clip(self.executor.grads)
        loss = sum(self._transfer.read(value) for value in losses) / len(losses)
        grad_norm = None if norm is None else self._transfer.read(norm)
        self._refuse_divergence(number, loss, grad_norm)
        self._update.apply(
            self.executor.grads, lr=lr, step=number, seed=random_key(self.config.seed, number, _UPDATE_STREAM)
        )
        self.steps_done = number
        num_tokens = sum(batch.token_ids_BT.size for batch in batches)
        return StepResult(number, loss, lr, grad_norm, num_tokens)

    def _refuse_divergence(self, step: int, loss: float, grad_norm: float | None) -> None:
        if isinstance(self._transfer, VirtualTransfer):
            return
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if value is not None and not math.isfinite(value):
                self.executor.drop()
                raise DivergenceError(
                    f"step {step}: {name} is {value}; it must be a finite number. The step was not applied. "
                    f"Lower optimizer.lr ({self.config.optimizer.lr}), lengthen schedule.warmup_steps, or check data."
                )


def _refuse_other_placements(plan: PhasePlan) -> None:
    """Raise for cells that no store serves: a plan must never be realised as something else."""
    cells = {"weight": plan.weight, "master": plan.master, "grad": plan.grad, "optim_state": plan.optim_state}
    for name, cell in (cells | {"boundary": plan.boundary}).items():
        if cell.placement is not Placement.DEVICE:
            raise ValueError(f"{name}.placement: {cell.placement} has no store yet; allowed: {Placement.DEVICE}")
